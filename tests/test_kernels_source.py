"""What the source of every kernel keeps to: no program waits for another, and no function is too long to be read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "dsspark" / "kernels"
MOST_LINES = {True: 100, False: 40}
"""Of a function that Triton compiles, and of any other, its docstring left out."""

WAITING = {"atomic_cas", "atomic_xchg", "debug_barrier", "inline_asm_elementwise", "nanosleep"}
"""What a spin or a lock would be made of."""


def functions(source):
    """Yield every function of a module and whether Triton compiles it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield node, any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def calls(node):
    """Yield the calls of `tl.<name>` in a node: name and keywords."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and ast.unparse(inner.func).startswith("tl."):
            yield ast.unparse(inner.func)[3:], {word.arg: ast.unparse(word.value) for word in inner.keywords}


def waits(source):
    """Return what in a module could make a program wait for another: locks, ordered atomics, loops that watch memory."""
    found = []
    for function, compiled in functions(source):
        if not compiled:
            continue
        for name, keywords in calls(function):
            ordered = name.startswith("atomic") and keywords.get("sem") != "'relaxed'"
            if name in WAITING or ordered or "volatile" in keywords:
                found.append(f"{function.name}: tl.{name}")
        for loop in ast.walk(function):
            # A `while` that reads memory must also narrow what it reads: its condition may depend on numbers only.
            if isinstance(loop, ast.While) and any(name in ("load", "atomic_add") for name, _ in calls(loop.test)):
                found.append(f"{function.name}: while {ast.unparse(loop.test)}")
    return found


def long_functions(source):
    """Return the functions of a module that are too long, by name."""
    found = {}
    for function, compiled in functions(source):
        text = ast.get_docstring(function)
        body = function.end_lineno - function.lineno + 1 - (len(text.splitlines()) + 1 if text else 0)
        if body > MOST_LINES[compiled]:
            found[function.name] = body
    return found


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.stem)
def test_no_program_waits_for_another(path):
    assert waits(path.read_text()) == []


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.stem)
def test_no_function_is_long(path):
    assert long_functions(path.read_text()) == {}


PLANTED = '''
@triton.jit
def kernel(x_ptr, flag_ptr):
    """Spin."""
    while tl.load(flag_ptr) == 0:
        pass
    tl.atomic_add(x_ptr, 1)
    tl.atomic_cas(flag_ptr, 0, 1, sem="relaxed")
    x = tl.load(x_ptr, volatile=True)
'''


def test_a_planted_spin_lock_and_length_are_seen():
    expected = [
        "kernel: tl.atomic_add",
        "kernel: tl.atomic_cas",
        "kernel: tl.load",
        "kernel: while tl.load(flag_ptr) == 0",
    ]
    assert sorted(waits(PLANTED)) == expected
    assert long_functions(PLANTED) == {}
    assert long_functions("def f():\n" + "    x = 1\n" * 41) == {"f": 42}
    assert long_functions("@triton.jit\ndef f():\n" + "    x = 1\n" * 100) == {"f": 101}
