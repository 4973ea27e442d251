"""Docstrings are the contract: shapes, errors and source of every public function, one line of everything else that has a public name."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import dsspark

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dsspark"
SHAPES = re.compile(r"\[[^\]`]*\b(R|S|N|V|M|B|d|r|gamma|capacity|num_bins|max_tokens|\.\.\.)\b[^\]]*\]|shape|scalar")


def functions(path: Path) -> list[tuple[str, ast.FunctionDef]]:
    """Return the public functions of a module's top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(node.name, node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]


def raises(node: ast.FunctionDef) -> bool:
    """Return whether a function raises, itself or through a check of its arguments."""
    called = {ast.unparse(call.func).split(".")[-1] for call in ast.walk(node) if isinstance(call, ast.Call)}
    return any(isinstance(part, ast.Raise) for part in ast.walk(node)) or any(n.startswith("check_") for n in called)


def parameters(node: ast.FunctionDef) -> list[str]:
    """Return the names of a function's arguments."""
    return [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]


def section(text: str, heading: str) -> str:
    """Return what stands under a heading of a docstring; empty if there is none."""
    found = re.search(rf"^{heading}:(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    return "" if found is None else found.group(1)


def missing_of_reference(node: ast.FunctionDef) -> list[str]:
    """Return what the docstring of a public reference function lacks."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    arguments = section(text, "Args")
    # "Args, Raises and bins as ..." and "hidden, weight: as ..." refer to another function's.
    untold = [
        name for name in parameters(node) if not re.search(rf"^ *[\w, ]*\b{name}\b[\w, ]*:", arguments, re.MULTILINE)
    ]
    found = [f"the argument {name}" for name in untold]
    found += [] if SHAPES.search(text) else ["shapes"]
    found += ["Returns"] if "Returns:" not in text and not re.match(r"Return", text) else []
    found += ["Raises"] if raises(node) and not re.search(r"^Raises(, \w+)?:", text, re.MULTILINE) else []
    return found + ([] if "Source:" in text else ["Source"])


REFERENCES = [
    pytest.param(node, id=f"{path.stem}.{name}")
    for path in sorted((PACKAGE / "reference").glob("*.py"))
    for name, node in functions(path)
]


@pytest.mark.parametrize("node", REFERENCES)
def test_every_reference_function_tells_arguments_shapes_errors_and_source(node):
    assert missing_of_reference(node) == []


def test_an_incomplete_docstring_is_seen():
    node = ast.parse('def f(a, b):\n    """Return it.\n\n    Args:\n        a: x.\n    """\n    check_shape(a)').body[0]
    assert missing_of_reference(node) == ["the argument b", "shapes", "Raises", "Source"]


def test_every_twin_names_its_reference():
    twins = 0
    for path in sorted((PACKAGE / "kernels").glob("*.py")):
        reference = PACKAGE / "reference" / path.name
        for name, node in functions(path):
            text = ast.get_docstring(node) or ""
            if "Fused twin of" in text:
                target = re.search(r"Fused twin of `dsspark\.reference\.(\w+)\.(\w+)`; same contract", text)
                assert target, f"{path.stem}.{name}: {text.splitlines()[0]}"
                assert target.group(2) == name
                assert name in dict(functions(PACKAGE / "reference" / f"{target.group(1)}.py"))
                twins += 1
            elif (
                reference.exists() and not node.decorator_list
            ):  # a jitted helper may share a name: it is no function of ours to call
                assert name not in dict(functions(reference)), f"{path.stem}.{name} does not say whose twin it is"
    assert twins >= 11


@pytest.mark.parametrize("name", [name for name in dsspark.__all__ if name != "CELL"])
def test_everything_exported_tells_arguments_and_errors(name):
    value = getattr(dsspark, name)
    text = inspect.getdoc(value)
    if not inspect.isclass(value):
        assert SHAPES.search(text), f"{name} gives no shapes"
        assert re.search(r"^Raises:", text, re.MULTILINE)
        return
    assert re.search(r"^(Args|Attributes):", text, re.MULTILINE), f"{name} has no Args or Attributes"
    untold = [part for part in inspect.signature(value).parameters if not re.search(rf"\b{part}\b", text)]
    assert not untold, f"{name} says nothing of {untold}"
    own = {
        method: inspect.getdoc(function)
        for method, function in inspect.getmembers(value, inspect.isroutine)
        if method[0] != "_" and getattr(function, "__qualname__", "").startswith(f"{name}.")
    }
    assert all(own.values()), f"{name} has methods without a docstring: {own}"
    assert any(SHAPES.search(part) for part in (text, *own.values())), f"{name} gives no shapes"


@pytest.mark.parametrize("folder", ["dsspark", "benchmarks", "docs"])
def test_every_public_name_has_a_docstring(folder):
    bare = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{path.relative_to(ROOT)} does not say what it is for"
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
            if public and not ast.get_docstring(node) and not node.name.startswith("test_"):
                bare.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert bare == []
