"""One signature, two bodies: choose the reference or the Triton kernel of a component."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch

Backend = Literal["auto", "reference", "triton"]
Result = TypeVar("Result")


def _kernel_module(component: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"dsspark.kernels.{component}")
    except ModuleNotFoundError:  # no Triton here, or no kernel of this component yet
        return None


def _on_gpu(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)


def dispatched(reference: Callable[..., Result]) -> Callable[..., Result]:
    """Return the public form of a reference function: the same signature plus `backend="auto"`.

    "auto" takes the Triton kernel for CUDA or ROCm tensors where there is one, the reference otherwise; "reference" and "triton"
    force one. No environment variable changes what is computed. While `torch.compile` traces, the call goes through a custom operator
    that calls the same function at run time (`dsspark.ops`).
    """
    from dsspark.ops import TRACEABLE  # whose bodies call the public functions

    component = reference.__module__.rpartition(".")[2]
    name = reference.__name__
    traceable = TRACEABLE.get(name)

    @functools.wraps(reference)
    def public(*args: Any, backend: Backend = "auto", **kwargs: Any) -> Result:
        if backend not in ("auto", "reference", "triton"):
            raise ValueError(f"backend: got {backend!r}, expected 'auto', 'reference' or 'triton'")
        if traceable is not None and torch.compiler.is_compiling():
            return traceable(*args, backend=backend, **kwargs)  # type: ignore[no-any-return]
        if backend == "triton" or (backend == "auto" and _on_gpu((*args, *kwargs.values()))):
            kernel: Callable[..., Result] | None = getattr(_kernel_module(component), name, None)
            if kernel is not None:
                return kernel(*args, **kwargs)
            if backend == "triton":
                raise RuntimeError(
                    f"backend: got 'triton', but {name} has no Triton kernel here; use backend='auto' or 'reference', "
                    "or install a version of dsspark and Triton that has it"
                )
        return reference(*args, **kwargs)

    signature = inspect.signature(reference)
    backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation="Backend")
    public.__signature__ = signature.replace(parameters=[*signature.parameters.values(), backend])  # type: ignore[attr-defined]
    return public
