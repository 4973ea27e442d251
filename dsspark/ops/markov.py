"""`draft_block` as an operator: the head travels as its tensors, the kept logits or latents come back as one tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsspark._checks import as_temperature
from dsspark.models.heads import MarkovHead
from dsspark.numerics import CELL, compute_dtype
from dsspark.ops.common import eager
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock


def _split_head(head: MarkovHead | None) -> tuple[str, list[Tensor]]:
    """Return the kind and the tensors of a head: W1, W2, then weight and bias of what reads the hidden states."""
    if head is None:
        return "", []
    tensors = [head.markov_w1.weight, head.markov_w2.weight]
    layer = head.gate_proj if head.gate_proj is not None else head.joint_proj
    return head.kind, tensors if layer is None else [*tensors, layer.weight, layer.bias]


def _join_head(kind: str, tensors: list[Tensor], hidden: Tensor | None) -> MarkovHead | None:
    """Return a head over these very tensors. Past its constructor, which would allocate and fill them first: 1 ms instead of 0.1."""
    if not kind:
        return None
    w1, w2 = tensors[:2]
    head = MarkovHead.__new__(MarkovHead)
    nn.Module.__init__(head)
    head.kind, head.rank = kind, w1.shape[1]  # type: ignore[assignment]
    head.hidden_size = None if hidden is None else hidden.shape[-1]
    head.markov_w1 = nn.Embedding.from_pretrained(w1)  # type: ignore[no-untyped-call]
    head.markov_w2 = _linear(w2, None)
    head.gate_proj = _linear(*tensors[2:]) if kind == "gated" else None
    head.joint_proj = _linear(*tensors[2:]) if kind == "rnn" else None
    return head


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return layer


@torch.library.custom_op("dsspark::draft_block", mutates_args=())
def _draft_block_op(
    base_logits: Tensor,
    anchors: Tensor,
    kind: str,
    head: list[Tensor],
    uniforms: list[Tensor],
    temperature: Tensor | None,
    temperature_value: float,
    hidden: Tensor | None,
    draft_to_target: Tensor | None,
    keep_logits: bool,
    cell: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    draft, accept, final = uniforms
    block: DraftBlock = eager("draft_block")(
        base_logits,
        anchors,
        _join_head(kind, head, hidden),
        Uniforms(draft=draft, accept=accept, final=final),
        temperature=temperature_value if temperature is None else temperature,
        hidden=hidden,
        draft_to_target=draft_to_target,
        keep_logits=keep_logits,
        cell=cell,
        backend=backend,
    )
    kept = block.logits if keep_logits else block.latent
    kept = base_logits.new_empty(0) if kept is None else kept
    return block.tokens, block.token_probs, block.row_max, block.row_sum, kept


@_draft_block_op.register_fake
def _(base_logits, anchors, kind, head, uniforms, *settings):  # type: ignore[no-untyped-def]
    keep_logits = settings[4]
    shape, dtype = base_logits.shape[:2], compute_dtype(base_logits)
    if keep_logits:
        kept = base_logits.new_empty(base_logits.shape)
    elif kind:
        kept = head[0].new_empty((*shape, head[0].shape[1]))
    else:
        kept = base_logits.new_empty(0)
    floats = [base_logits.new_empty(shape, dtype=dtype) for _ in range(3)]
    return (base_logits.new_empty(shape, dtype=torch.int64), *floats, kept)


@torch.no_grad()
def draft_block(
    base_logits: Tensor,
    anchors: Tensor,
    head: MarkovHead | None,
    uniforms: Uniforms,
    *,
    temperature: float | Tensor = 1.0,
    hidden: Tensor | None = None,
    draft_to_target: Tensor | None = None,
    keep_logits: bool = True,
    cell: int = CELL,
    backend: str,
) -> DraftBlock:
    """Traceable form of `dsspark.draft_block`."""
    kind, tensors = _split_head(head)
    given = isinstance(temperature, Tensor)
    tokens, token_probs, row_max, row_sum, kept = _draft_block_op(
        base_logits,
        anchors,
        kind,
        tensors,
        [uniforms.draft, uniforms.accept, uniforms.final],
        temperature if given else None,
        0.0 if given else temperature,
        hidden,
        draft_to_target,
        keep_logits,
        cell,
        backend,
    )
    recompute = head is not None and not keep_logits
    return DraftBlock(
        tokens=tokens,
        token_probs=token_probs,
        row_max=row_max,
        row_sum=row_sum,
        temperature=as_temperature(temperature, base_logits.shape[0], base_logits),
        logits=kept if keep_logits else None,
        latent=kept if recompute else None,
        markov_w2=tensors[1] if recompute else None,
        base_logits=None if keep_logits else base_logits,
        draft_to_target=draft_to_target,
    )
