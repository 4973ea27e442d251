"""Test-wide set-up: Triton's interpreter without a GPU, poisoned `torch.empty`, Hypothesis profiles, threads, GPU marker."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core already; said before NumPy and torch start their threads
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import hypothesis
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # before any kernel is decorated
    os.environ["TRITON_INTERPRET"] = "1"


def _patch_the_language_once() -> None:
    """Spare Triton's interpreter what takes most of its time: it patches its language at every call of a device function.

    The patches are the same each time and depend on nothing but the modules that the function sees, so each function's are made once
    and kept. The interpreter's table of dtypes, built anew for each value, is kept too.
    """
    try:
        from triton.runtime import interpreter
    except ModuleNotFoundError:
        return
    needed = ("_patch_lang", "_LangPatchScope", "_get_np_dtype")
    if any(not hasattr(interpreter, name) for name in needed):  # a version of Triton that does it in another way
        return
    patch, numpy_dtype, block, pointer = (
        *(interpreter._patch_lang, interpreter._get_np_dtype),
        *(interpreter.tl.block_type, interpreter.tl.pointer_type),
    )
    patched, dtypes = set(), {}

    def patch_once(function):
        if function not in patched:
            patched.add(function)
            patch(function)
        return interpreter._LangPatchScope()  # nothing to restore

    def remembered(dtype):
        dtype = dtype.element_ty if isinstance(dtype, block) else dtype
        name = "pointer" if isinstance(dtype, pointer) else dtype.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(dtype)
        return dtypes[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, remembered


if not HAS_GPU:
    _patch_the_language_once()


def _poisoned(allocate):
    """Return `allocate` with its result filled by NaN or a sentinel, so that an output nobody wrote shows."""

    def empty(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        if tensor.dtype in (torch.int64, torch.int32):
            return tensor.fill_(-(2**30) - 7)
        return tensor

    return empty


torch.empty = _poisoned(torch.empty)
torch.empty_like = _poisoned(torch.empty_like)

hypothesis.settings.register_profile("default", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.register_profile("exhaustive", deadline=None, max_examples=500, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items):
    """Leave GPU tests out where there is no GPU: they are the same tests on another device."""
    if not HAS_GPU:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm device"))


@pytest.fixture
def generator() -> torch.Generator:
    """Return a seeded CPU generator."""
    return torch.Generator().manual_seed(20260707)
