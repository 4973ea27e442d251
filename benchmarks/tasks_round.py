"""A whole round but for the models: draft, survival, schedule, pack, verify, end to end, as an engine captures it in one CUDA graph.

The target's pass is left out: its logits are drawn beforehand, for the rows of a batch at full capacity. Nothing between the stages
reaches the host with the kernels, so the launches of all of them are one graph, whatever lengths the scheduler chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

import dsspark
from benchmarks import floors
from benchmarks.cases import KERNEL, REFERENCE, Case, Contender, kernel_of, moved_to, rarely, seeded
from benchmarks.sizes import Size
from benchmarks.tasks_sampling import draft_inputs
from dsspark._dispatch import Backend
from dsspark.reference.confidence import confidence_survival


def play(x: SimpleNamespace, backend: Backend) -> tuple[torch.Tensor, dsspark.Verification]:
    """Run the stages of a round; return the lengths that were scheduled and what was emitted."""
    block = dsspark.draft_block(x.base, x.anchors, x.head, x.uniforms, backend=backend)
    previous = torch.cat((x.anchors[:, None], block.tokens[:, :-1]), dim=1)
    survive: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = confidence_survival
    if backend == "triton":
        survive = kernel_of("confidence").confidence_survival
    survival, _ = survive(x.hidden, previous, x.head.markov_w1.weight, x.weight, x.bias, x.temperatures)
    lengths = dsspark.schedule(survival, x.table, backend=backend)
    batch = dsspark.pack(x.anchors, block.tokens, lengths, x.starts, capacity=len(x.target), backend=backend)
    return lengths, dsspark.verify(x.target, batch, block, x.uniforms, backend=backend)


def whole_round(size: Size, device: str) -> Case:
    """Play a round of R requests."""
    x, generator = draft_inputs(size, device), seeded(device)
    limit = size.num_requests * (size.block_size + 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x.hidden = normal(size.num_requests, size.block_size, size.hidden_size).to(size.dtype)
    x.weight = normal(1, size.hidden_size + size.rank) / size.hidden_size**0.5
    x.bias, x.temperatures = torch.full((1,), 2.0), torch.ones(size.block_size)
    x.starts = torch.zeros(size.num_requests, dtype=torch.int64)
    x.table = dsspark.CostTable(1.0 / (1.0 + torch.arange(limit + 1, dtype=torch.float64) / (2 * size.num_requests)))
    x.target = normal(limit, size.vocab_size).to(size.dtype)
    inputs = moved_to(x, device)

    def agree(
        got: tuple[torch.Tensor, dsspark.Verification], expected: tuple[torch.Tensor, dsspark.Verification]
    ) -> None:
        rarely(got[0] != expected[0], "lengths")
        rarely((got[1].tokens != expected[1].tokens).any(dim=1), "tokens")

    lengths, result = play(inputs, "reference")
    rejected = int((result.num_accepted < lengths).sum())
    row = size.vocab_size * size.dtype.itemsize
    verified = row * (int(lengths.sum()) + size.num_requests + rejected)
    return Case(
        name="round",
        size=size,
        inputs=inputs,
        contenders={
            REFERENCE: Contender(run=lambda x: play(x, "reference")),
            KERNEL: Contender(run=lambda x: play(x, "triton")),
        },
        agree=agree,
        floor_bytes=floors.markov(size, keep_logits=True) + floors.confidence(size) + verified,
        facts={
            "mean_length": float(lengths.float().mean()),
            "mean_accepted": float(result.num_accepted.float().mean()),
        },
    )
