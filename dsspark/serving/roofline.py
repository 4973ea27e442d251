r"""How long a step takes: a roofline model of a node that serves a mixture of experts (numbers: `assumptions.py`).

A step over B batch tokens on G cards, L layers:

$$t(B) = L\,t_0 + \max\left(\frac{\text{bytes}(B)}{\text{bandwidth}},\ \frac{2 \cdot \text{active} \cdot B / G}{\text{FLOP/s}},\
\frac{\text{tokens sent}(B)}{\text{link}}\right)$$

Weight bytes grow with B until every expert is touched: a layer of E experts, k a token, reads $E (1 - (1 - k/E)^B)$ of them,
spread evenly over the cards. Perfect overlap of the three, no imbalance between experts or cards, no prefill in the way: an
optimistic machine, as rooflines are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsspark.cost_table import CostTable
from dsspark.serving import assumptions
from dsspark.serving.assumptions import H200_NODE, Hardware, Model

Floats = NDArray[np.float64]


def layer_seconds(
    model: Model, hardware: Hardware, batch_tokens: Floats, layers: float, *, overlap: bool = True
) -> Floats:
    """Return the seconds that `layers` layers of the model take at each number of batch tokens.

    Args:
        model: the sizes.
        hardware: the node.
        batch_tokens: B, of the whole node.
        layers: how many, of the model's own kind; a drafter's stages are such layers.
        overlap: whether reading, computing and sending hide each other; their sum if not.
    """
    gpus = hardware.gpus.value
    expert = 3 * model.hidden_size.value * model.expert_intermediate.value
    per_token = model.experts_per_token.value
    share = layers / model.layers.value
    dense = share * (model.active_parameters.value - model.layers.value * per_token * expert)
    touched = model.experts.value * -np.expm1(batch_tokens * np.log1p(-per_token / model.experts.value))
    read = dense * model.dense_bytes.value + layers * touched * expert * model.expert_bytes.value / gpus
    memory = read / (hardware.memory_bandwidth.value * hardware.memory_efficiency.value)
    flops = 2 * share * model.active_parameters.value * batch_tokens / gpus
    compute = flops / (hardware.fp8_flops.value * hardware.compute_efficiency.value)
    others = (gpus - 1) * (1 - (1 - 1 / gpus) ** per_token)  # cards beside its own that a token is sent to
    numbers_sent = layers * batch_tokens / gpus * others * model.hidden_size.value
    sent = numbers_sent * (
        1 / hardware.dispatch_bandwidth.value + 2 / hardware.combine_bandwidth.value
    )  # FP8 out, bf16 back
    busy = np.maximum(np.maximum(memory, compute), sent) if overlap else memory + compute + sent
    return np.asarray(layers * hardware.layer_floor.value + busy, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of a step in its parts; the engine's time is their sum.

    Attributes:
        verify: [max_tokens + 1], the target pass at B tokens, padded as the engine pads.
        draft: [max_requests + 1], the drafter at R requests.
        cached_token: for each token in the caches of the batch.
        table: what the scheduler knows: whole steps, profiled once at a fixed budget.
    """

    verify: Floats
    draft: Floats
    cached_token: float
    table: CostTable


def captured_sizes(hardware: Hardware, max_tokens: int) -> list[int]:
    """Return the batch tokens of the node that graphs are captured for, up to `max_tokens`; at least one."""
    sizes = [int(hardware.gpus.value) * size for size in assumptions.CAPTURED_PER_GPU]
    return [size for size in sizes if size <= max_tokens] or sizes[:1]


def roofline_costs(
    model: Model,
    hardware: Hardware = H200_NODE,
    *,
    max_requests: int,
    block_size: int,
    stages: float,
    context: float,
    overlap: bool = True,
    sizes: Sequence[int] | None = None,
    draft_scale: float = 1.0,
) -> StepCosts:
    """Return the costs of an engine with a drafter.

    Args:
        model: the target.
        hardware: the node.
        max_requests: the largest R.
        block_size: drafts a round, 0 without a drafter.
        stages: the drafter's layers, 0 without one. It runs over R * block_size tokens and through the LM head.
        context: mean tokens in a request's cache, for the table.
        overlap: as `layer_seconds`.
        sizes: captured sizes; those of the assumptions if None.
        draft_scale: what the drafter's time is multiplied by.
    """
    most = max_requests * (1 + max(block_size, 1))
    captured = np.asarray(captured_sizes(hardware, most) if sizes is None else sizes, dtype=np.int64)
    tokens = np.arange(max(most, int(captured[0])) + 1)
    above = np.searchsorted(captured, tokens)
    padded = np.where(above < len(captured), captured[np.minimum(above, len(captured) - 1)], tokens).astype(np.float64)
    verify = layer_seconds(model, hardware, padded, model.layers.value, overlap=overlap)
    requests = np.arange(max_requests + 1, dtype=np.float64)
    draft = np.zeros(max_requests + 1)
    if stages:
        head = 2 * model.hidden_size.value * model.vocab_size.value / hardware.gpus.value  # bf16, split over the cards
        bandwidth = hardware.memory_bandwidth.value * hardware.memory_efficiency.value
        draft = layer_seconds(model, hardware, requests * block_size, stages, overlap=overlap) + head / bandwidth
        if block_size > 1:
            draft = draft + assumptions.SEQUENTIAL_SHARE.value * verify[: max_requests + 1]
        draft *= draft_scale
    bandwidth = hardware.gpus.value * hardware.memory_bandwidth.value * hardware.memory_efficiency.value
    cached = model.cache_bytes.value / bandwidth
    profiled = np.minimum(np.ceil(tokens / assumptions.PROFILED_BUDGET.value), max_requests).astype(np.int64)
    whole = verify + draft[profiled] + cached * context * profiled
    facts = {"source": "roofline", "model": model.name, "hardware": hardware.name, "drafter stages": f"{stages:g}"}
    return StepCosts(verify=verify, draft=draft, cached_token=cached, table=CostTable((1.0 / whole).tolist(), facts))


def measured_costs(table: CostTable, *, max_requests: int) -> StepCosts:
    """Return the costs of an engine that was profiled: whole steps, so that drafting and reading the cache are in the table.

    Raises:
        ValueError: if the table does not reach that many requests with one token each.
    """
    if table.max_tokens < max_requests:
        raise ValueError(
            f"--cost-table: got {table.max_tokens} batch tokens, expected at least {max_requests}, one a request; profile "
            "larger sizes or simulate fewer users"
        )
    seconds = table.seconds.numpy().copy()
    seconds[0] = seconds[1]
    return StepCosts(verify=seconds, draft=np.zeros(max_requests + 1), cached_token=0.0, table=table)
