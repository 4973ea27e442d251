"""Building modules whose weights a file will provide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _NoInitialisation(TorchFunctionMode):
    """Leave every tensor that torch.nn.init is asked to fill as it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def unset_weights() -> Iterator[None]:
    """Build modules on the meta device: no memory, and no weight drawn that a file replaces.

    Drawing on the meta device would import torch's compiler, which takes seconds, for nothing.
    """
    with torch.device("meta"), _NoInitialisation():
        yield
