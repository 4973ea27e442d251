"""The rules the whole package keeps: imports point one way, both bodies share a signature, docstrings are complete."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dsspark

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dsspark"

# What a part of the package may import of ours; everything may import the shared types.
SHARED = {"_checks", "contracts", "numerics", "randomness", "types", "cost_table", "loss_terms"}
ALLOWED = {
    "reference": SHARED | {"reference"},
    "kernels": SHARED | {"kernels"},
    "models": SHARED | {"reference", "models", "decoding", "_dispatch", ""},
    "serving": SHARED | {"serving", "models", ""},
    "decoding": SHARED | {"serving", "statistics", "reference", "_dispatch", ""},
}
LIBRARY = {
    *SHARED,
    *ALLOWED,
    "_dispatch",
    "ops",
    "statistics",
    "checkpoints",
    "distributed",
    "custom_generate",
    "testing",
    "__init__",
}
# Commands stand on the library, and so does its test kit: the library imports none of them.
ABOVE = {"cli", "demo", "training", "testing", "evaluation", "experiments"}
# A module may know its callers' types without importing them at run time.
TYPE_ONLY = {"reference": {"models"}, "kernels": {"models"}, "serving": {"decoding", "_dispatch"}}

COMPONENT_FUNCTIONS = [
    "draft_block",
    "confidence_logits",
    "survival",
    "fit_sts",
    "expected_calibration_error",
    "schedule",
    "plan_budget",
    "admit",
    "pack",
    "ragged_attention",
    "verify",
]


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """Return the parts of dsspark (and "triton") a module imports at run time, and those it imports for types only."""
    tree = ast.parse(path.read_text())
    type_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    found: tuple[set[str], set[str]] = (set(), set())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "dsspark":
                names = [f"dsspark.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            part = {"dsspark": rest.partition(".")[0], "triton": "triton"}.get(top)
            if part is not None:
                found[id(node) in type_only].add(part)
    return found


@pytest.mark.parametrize("part", list(ALLOWED))
def test_imports_point_one_way(part):
    for path in modules_of(part):
        run_time, for_types = imports_of(path)
        extra = run_time - ALLOWED[part] - ({"triton"} if part == "kernels" else set())
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"
        assert not for_types - ALLOWED[part] - TYPE_ONLY.get(part, set())


def modules_of(part: str) -> list[Path]:
    """Return the files of a part of the package: a module or a folder."""
    single = PACKAGE / f"{part}.py"
    return [single] if single.exists() else sorted((PACKAGE / part).rglob("*.py"))


@pytest.mark.parametrize("part", sorted(SHARED))
def test_shared_modules_import_shared_modules_only(part):
    (path,) = modules_of(part)
    run_time, for_types = imports_of(path)
    assert run_time <= SHARED
    assert for_types <= SHARED | {"models"}


@pytest.mark.parametrize("part", sorted(LIBRARY))
def test_the_library_imports_neither_commands_nor_the_test_kit(part):
    paths = modules_of(part)
    assert paths, f"{part} is gone: strike it from LIBRARY"
    for path in paths:
        if path.name == "command.py":  # of `python -m dsspark <part>`: a command beside what it runs
            continue
        extra = imports_of(path)[0] & ABOVE - ({"testing"} if part == "testing" else set())
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def test_the_import_rule_sees_a_wrong_import(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import triton.language as tl\nfrom dsspark.kernels.markov import f\nfrom dsspark import testing\n"
    )
    assert imports_of(wrong)[0] == {"triton", "kernels", "testing"}


@pytest.mark.parametrize("module", ["dsspark.reference", "dsspark", "dsspark.decoding", "dsspark.models"])
def test_works_with_triton_uninstalled(module):
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name, name="triton")
sys.meta_path.insert(0, Blocker())
import {module}, dsspark, torch
tokens = torch.tensor([[1]])
batch = dsspark.pack(torch.tensor([0]), tokens, torch.tensor([1]), torch.tensor([0]))
dsspark.verify(torch.zeros(2, 4), batch, dsspark.DraftBlock.point(tokens), dsspark.Uniforms.draw(1, 1)).raise_if_invalid()
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", COMPONENT_FUNCTIONS)
def test_every_component_function_takes_a_backend_last(name):
    public = getattr(dsspark, name)
    reference = public.__wrapped__
    *parameters, backend = inspect.signature(public).parameters.values()
    assert parameters == list(inspect.signature(reference).parameters.values())
    assert (backend.name, backend.default, backend.kind) == ("backend", "auto", inspect.Parameter.KEYWORD_ONLY)
    assert name in dsspark.__all__


@pytest.mark.parametrize("name", COMPONENT_FUNCTIONS)
def test_every_component_docstring_is_complete(name):
    text = inspect.getdoc(getattr(dsspark, name))
    for heading in ("Args:", "Returns:", "Raises:", "Numerics:", "Source:", "Example:"):
        assert heading in text, f"{name} says nothing under {heading}"
    assert re.search(r"\[(R|S|N|capacity|\.\.\.)[],]|shape", text), f"{name} gives no shapes"


def test_everything_public_is_exported_and_documented():
    for name in dsspark.__all__:
        assert inspect.getdoc(getattr(dsspark, name)) or name == "CELL"


def test_no_file_is_long():
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("dsspark", "tests", "property_tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long
