"""The tasks between drafting and verification, and the fit that calibrates them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import dsspark
from benchmarks import baselines, floors
from benchmarks.cases import (
    COMPETENT,
    COMPILED,
    KERNEL,
    PUBLIC,
    REFERENCE,
    Case,
    Contender,
    backends,
    kernel_of,
    late_compiled,
    moved_to,
    seeded,
)
from benchmarks.sizes import Size
from dsspark.reference.confidence import confidence_survival


def calibration(size: Size, device: str) -> Case:
    """Fit Sequential Temperature Scaling to an over-confident head."""
    generator, shape = seeded(device), (size.samples, size.block_size)
    logits = torch.randn(shape, generator=generator, device=device) * 2 + 1
    truth = torch.rand(shape, generator=generator, device=device) < torch.sigmoid(logits / 2)
    grid = torch.logspace(-1, 1, size.temperatures, base=4.0)
    inputs = moved_to(SimpleNamespace(logits=logits, accepted=truth.cumprod(dim=1), grid=grid), device)

    def fitted(backend: str) -> Contender:
        return Contender(
            run=lambda x: dsspark.fit_sts(x.logits, x.accepted, grid=x.grid, backend=backend).temperatures  # type: ignore[arg-type]
        )

    def agree(got: Tensor, expected: Tensor) -> None:
        # Two neighbours of the grid may calibrate equally well; a float64 search may prefer the other.
        step = 4.0 ** (2 / (size.temperatures - 1)) * 1.0001
        ratio = got.double() / expected.double()
        assert bool(((ratio < step) & (ratio > 1 / step)).all()), f"temperatures: {got.tolist()}, {expected.tolist()}"

    return Case(
        name="calibration",
        size=size,
        inputs=inputs,
        contenders={
            REFERENCE: fitted("reference"),
            KERNEL: fitted("triton"),
            PUBLIC: Contender(run=lambda x: baselines.fit_sts_public(x.logits, x.accepted, x.grid)),
            COMPETENT: Contender(run=lambda x: baselines.fit_sts_competent(x.logits, x.accepted, x.grid)),
        },
        agree=agree,
        floor_bytes=floors.calibration(size, inputs.accepted.element_size()),
    )


def confidence(size: Size, device: str) -> Case:
    """Survival of every drafted prefix."""
    generator = seeded()
    shape = size.num_requests, size.block_size
    inputs = moved_to(
        SimpleNamespace(
            hidden=torch.randn(*shape, size.hidden_size, generator=generator).to(size.dtype),
            previous=torch.randint(size.vocab_size, shape, generator=generator),
            w1=torch.randn(size.vocab_size, size.rank, generator=generator).to(size.dtype),
            weight=torch.randn(1, size.hidden_size + size.rank, generator=generator) / size.hidden_size**0.5,
            bias=torch.ones(1),
            temperatures=torch.linspace(1, 2, size.block_size),
        ),
        device,
    )

    def head(x: SimpleNamespace) -> tuple[Tensor, ...]:
        return x.hidden, x.previous, x.w1, x.weight, x.bias

    def reference(x: SimpleNamespace) -> Tensor:
        return confidence_survival(*head(x), temperatures=x.temperatures)[0]

    def kernel(x: SimpleNamespace) -> Tensor:
        return kernel_of("confidence").confidence_survival(*head(x), temperatures=x.temperatures)[0]

    def agree(got: Tensor, expected: Tensor) -> None:
        # The eager forms round the logits to the model's precision.
        tolerance = 1e-5 if size.dtype == torch.float32 else 2e-2
        assert torch.allclose(got.float(), expected, rtol=0, atol=tolerance)

    return Case(
        name="confidence",
        size=size,
        inputs=inputs,
        contenders={
            REFERENCE: Contender(run=reference),
            COMPILED: Contender(run=late_compiled(reference)),
            KERNEL: Contender(run=kernel),
            PUBLIC: Contender(run=lambda x: baselines.survival_public(*head(x), x.temperatures)),
            COMPETENT: Contender(run=lambda x: baselines.survival_competent(*head(x), x.temperatures)),
        },
        agree=agree,
        floor_bytes=floors.confidence(size),
    )


def scheduler(size: Size, device: str) -> Case:
    """Run Algorithm 1 on survivals of a head that believes in most drafts, with rates that fall as batches grow."""
    survival = dsspark.survival(torch.randn(size.num_requests, size.block_size, generator=seeded()) + 2)
    limit = size.num_requests * (size.block_size + 1)
    table = dsspark.CostTable(1.0 / (1.0 + torch.arange(limit + 1, dtype=torch.float64) / (2 * size.num_requests)))
    inputs = moved_to(SimpleNamespace(survival=survival, table=table), device)

    def agree(got: Tensor, expected: Tensor) -> None:
        assert torch.equal(got.cpu(), expected.cpu()), "lengths"

    lengths = dsspark.schedule(survival, table, backend="reference")
    assert 0 < int(lengths.sum()) < survival.numel(), "the search must neither stop at once nor admit everything"
    return Case(
        name="scheduler",
        size=size,
        inputs=inputs,
        contenders={
            **backends(dsspark.schedule, lambda x: (x.survival, x.table)),
            PUBLIC: Contender(run=lambda x: baselines.schedule_public(x.survival, x.table)),
            COMPETENT: Contender(run=lambda x: baselines.schedule_competent(x.survival, x.table)),
        },
        agree=agree,
        floor_bytes=floors.scheduler(size, admitted=int(lengths.sum())),
        facts={"admitted": int(lengths.sum())},
    )


def packing(size: Size, device: str) -> Case:
    """Pack ragged blocks into a fixed capacity."""
    shape = size.num_requests, size.block_size
    inputs = moved_to(
        SimpleNamespace(
            anchors=torch.randint(size.vocab_size, shape[:1], generator=seeded()),
            tokens=torch.randint(size.vocab_size, shape, generator=seeded()),
            lengths=torch.randint(size.block_size + 1, shape[:1], generator=seeded(), dtype=torch.int32),
            starts=torch.randint(size.context, shape[:1], generator=seeded()),
        ),
        device,
    )

    def arguments(x: SimpleNamespace) -> tuple[Tensor, ...]:
        return x.anchors, x.tokens, x.lengths, x.starts

    def agree(got: Any, expected: dsspark.PackedBatch) -> None:
        count = int(expected.num_tokens)
        if isinstance(got, dsspark.PackedBatch):
            got = got.tokens, got.positions, got.request_ids
        for ours, theirs in zip(got, (expected.tokens, expected.positions, expected.request_ids), strict=True):
            assert torch.equal(ours[:count], theirs[:count]), "packed rows"

    capacity = size.num_requests * (size.block_size + 1)
    return Case(
        name="verification, pack",
        size=size,
        inputs=inputs,
        contenders={
            **backends(dsspark.pack, arguments, capacity=capacity),
            PUBLIC: Contender(run=lambda x: baselines.pack_public(*arguments(x))),
            COMPETENT: Contender(run=lambda x: baselines.pack_competent(*arguments(x))),
        },
        agree=agree,
        floor_bytes=floors.packing(size),
    )


def attention(size: Size, device: str) -> Case:
    """Attend from whole blocks to a paged cache: 32 query heads, 8 key heads of 128, pages of 16."""
    heads, kv_heads, head_dim, page_size, block = 32, 8, 128, 16, size.block_size + 1
    pages = -(-size.context // page_size)
    full = torch.full((size.num_requests,), size.block_size)
    drafts = torch.zeros(size.num_requests, size.block_size, dtype=torch.int64)
    batch = dsspark.pack(full, drafts, full, torch.full_like(full, size.context - block), backend="reference")
    cache = size.num_requests * pages, page_size, kv_heads, head_dim
    table = torch.randperm(cache[0], generator=seeded()).view(size.num_requests, pages).int()
    generator = seeded(device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(size.dtype)

    inputs = moved_to(
        SimpleNamespace(
            query=normal(size.num_requests * block, heads, head_dim),
            keys=normal(*cache),
            values=normal(*cache),
            batch=batch,
            table=table,
            contexts=torch.full((size.num_requests,), size.context, dtype=torch.int32),
        ),
        device,
    )

    def arguments(x: SimpleNamespace) -> tuple[Any, ...]:
        return x.query, x.keys, x.values, x.batch, x.table, x.contexts

    def agree(got: Tensor, expected: Tensor) -> None:
        tolerance = 1e-5 if size.dtype == torch.float32 else 2e-2
        assert torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance), "attention"

    return Case(
        name="verification, attention",
        size=size,
        inputs=inputs,
        contenders={
            **backends(dsspark.ragged_attention, arguments),
            PUBLIC: Contender(run=lambda x: baselines.attention_public(*arguments(x))),
            COMPETENT: Contender(run=lambda x: baselines.attention_competent(*arguments(x))),
        },
        agree=agree,
        floor_bytes=floors.attention(size, heads, kv_heads, head_dim),
    )
