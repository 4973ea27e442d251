"""Linear layers for decoding on a CPU: weights in oneDNN's blocked layout, so that a few rows cost what one row costs.

A product of 2 to 16 rows with a weight is bound by reading the weight, as a product of one row is, but the general matrix product that
torch calls by default takes two to three times as long for it on some CPUs. Speculative decoding lives on those few rows.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

EXPECTED_ROWS = 4
"""What oneDNN chooses the layout for; other numbers of rows are right too."""


class PackedLinear(nn.Linear):
    """A float32 linear layer on the CPU that also keeps its weight packed; made by `pack_linears`.

    Equal to `nn.Linear` up to float rounding. Where a gradient is asked for, for other types or devices, under autocast, for a weight made
    in inference mode, and where float32 products may be coarse (`torch.set_float32_matmul_precision`) it is `nn.Linear`: oneDNN's packed
    product keeps a buffer for every number of rows that it was coarse for. A weight that was written to is packed again.
    """

    _packed: Tensor | None = None
    _packed_version: tuple[int, int] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias, [..., out_features]."""
        weight = self.weight
        tensors = [tensor for tensor in (input, weight, self.bias) if tensor is not None]
        if (
            any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in tensors)
            or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
            or torch.is_autocast_enabled("cpu")
            or weight.is_inference()  # has no version to see a change by
            or torch.get_float32_matmul_precision() != "highest"
        ):
            return super().forward(input)
        version = (weight.data_ptr(), weight._version)
        if self._packed is None or version != self._packed_version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), EXPECTED_ROWS)
            self._packed_version = version
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
        return out

    def __getstate__(self) -> dict[str, object]:
        """Leave the packed weight out of copies and pickles: it is made again."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_packed", "_packed_version")}


def pack_linears(model: Model) -> Model:
    """Turn the `nn.Linear` layers of a model into `PackedLinear` ones in place and return it; twice the memory of their weights.

    Args:
        model: anything; layers of a subclass of `nn.Linear` are left alone. Where torch has no oneDNN nothing changes.

    Source: the packed linear layers of torch's own CPU compiler, which are reached without compiling here.
    """
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if available and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = PackedLinear
    return model
