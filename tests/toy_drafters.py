"""Drafters for tests of targets: they look at positions only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsspark.types import DraftBlock, Proposal


class OracleDrafter:
    """Proposes the next tokens of texts it knows, at q = 1.

    Args:
        texts: prompt and continuation of each request.
        block_size: gamma.
    """

    sts_temperatures = None

    def __init__(self, texts: Sequence[Sequence[int]], block_size: int) -> None:
        self.texts, self.block_size = texts, block_size

    def new_context(self, num_requests: int) -> OracleContext:
        """Return a context that counts tokens."""
        return OracleContext(list(range(num_requests)))

    def extend(self, context: OracleContext, features: Tensor, request_ids: Tensor) -> None:
        """Count each request's verified tokens."""
        for request in request_ids.tolist():
            context.seen[request] += request >= 0

    def propose(self, anchors, context, uniforms, *, temperature, keep_logits=True, backend="auto") -> Proposal:
        """Draft what stands behind each anchor, and 0 beyond the known text."""
        blocks = []
        for row, seen in zip(context.rows, context.seen, strict=True):
            block = list(self.texts[row][seen + 1 : seen + 1 + self.block_size])
            blocks.append(block + [0] * (self.block_size - len(block)))
        return Proposal(DraftBlock.point(torch.tensor(blocks)), None)


class OracleContext:
    """Which text each row belongs to and how many of its tokens were verified."""

    def __init__(self, rows: list[int]) -> None:
        self.rows, self.seen = rows, [0] * len(rows)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.rows, self.seen = [self.rows[row] for row in rows], [self.seen[row] for row in rows]
