"""Every function of a component has two bodies with one signature, and a test that calls the readable one."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

import dsspark

HAS_TRITON = importlib.util.find_spec("triton") is not None
ROOT = Path(__file__).parents[1]
COMPONENTS = ("markov", "confidence", "calibration", "scheduler", "verification", "rejection", "losses")

# Steps of a reference that read like the paper, which a kernel fuses, and measures that are taken once, off the hot path.
REFERENCE_ONLY = {
    ("markov", "latent_step"),
    ("markov", "corrected_logits"),
    ("rejection", "accepts"),
    ("rejection", "residual"),
    ("rejection", "draft_law"),
    ("calibration", "reliability_table"),
    ("calibration", "brier_score"),
    ("calibration", "auroc"),
    ("losses", "l1_distance"),
    ("losses", "acceptance_label"),
    ("losses", "position_weights"),
    ("losses", "weighted_mean"),
}


def public_functions(module):
    """Return what a component offers: the functions it defines, and those it re-exports by name."""
    offered = getattr(module, "__all__", None)
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and (name in offered if offered else function.__module__ == module.__name__)
        and not name.startswith("_")
    }


def reference_functions():
    return [
        (component, name)
        for component in COMPONENTS
        for name in public_functions(importlib.import_module(f"dsspark.reference.{component}"))
    ]


@pytest.mark.parametrize(("component", "name"), sorted(set(reference_functions()) - REFERENCE_ONLY))
def test_both_bodies_have_one_signature(component, name):
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    kernels = importlib.import_module(f"dsspark.kernels.{component}")
    assert hasattr(kernels, name), f"dsspark.kernels.{component} lacks {name}"
    expected = inspect.signature(getattr(importlib.import_module(f"dsspark.reference.{component}"), name))
    *parameters, config = inspect.signature(getattr(kernels, name)).parameters.values()
    assert (config.name, config.kind, config.default) == ("config", inspect.Parameter.KEYWORD_ONLY, None)
    assert parameters == list(expected.parameters.values())
    assert inspect.signature(getattr(kernels, name)).return_annotation == expected.return_annotation


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_of_kernels_offers_nothing_else(component):
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    kernels = public_functions(importlib.import_module(f"dsspark.kernels.{component}"))
    own = {"variants", "choose_config"}
    extra = set(kernels) - own - set(public_functions(importlib.import_module(f"dsspark.reference.{component}")))
    assert {name for name in extra if "config" in inspect.signature(kernels[name]).parameters} == set()


def called_names(folder):
    """Return every name and attribute that the tests in a folder call or pass on."""
    names = set()
    for path in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Name):
                names.add(node.id)
    return names


def unused(functions):
    return {name for _, name in functions} - called_names("tests") - called_names("property_tests")


def test_every_reference_function_is_used_by_a_test():
    assert unused(reference_functions()) == set()
    assert unused([("scheduler", "nobody_" + "calls_this")]) == {"nobody_calls_this"}


def test_what_has_no_kernel_is_listed_by_name():
    """The public surface is not among it."""
    assert set(reference_functions()) >= REFERENCE_ONLY
    for component, name in REFERENCE_ONLY:
        assert name not in dsspark.__all__
        if HAS_TRITON:
            assert name not in public_functions(importlib.import_module(f"dsspark.kernels.{component}"))
