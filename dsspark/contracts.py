"""The argument contract of each component, shared by its two bodies: what is accepted is the same, and so is every error.

Only what the host knows is checked; see `dsspark._checks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsspark._checks import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_block_size,
    check_cell,
    check_device,
    check_dtype,
    check_shape,
    check_tensor,
)
from dsspark.cost_table import CostTable
from dsspark.randomness import Uniforms
from dsspark.types import DraftBlock, Filters, PackedBatch, check_draft_to_target

if TYPE_CHECKING:
    from dsspark.models.heads import MarkovHead


def check_draft_arguments(
    base_logits: Tensor,
    anchors: Tensor,
    head: MarkovHead | None,
    uniforms: Uniforms,
    hidden: Tensor | None,
    draft_to_target: Tensor | None,
    cell: int,
) -> None:
    """Raise unless the arguments of `draft_block` belong together."""
    check_shape("base_logits", base_logits, ("R", "gamma", "V_draft"))
    check_dtype("base_logits", base_logits, FLOAT_DTYPES)
    num_requests, block_size, vocab_size = base_logits.shape
    check_block_size("base_logits: gamma", block_size)
    if vocab_size < 1:
        raise ValueError("base_logits: got V_draft = 0, expected at least one token in the draft vocabulary")
    check_shape("anchors", anchors, (num_requests,))
    check_dtype("anchors", anchors, INT_DTYPES)
    check_device("anchors", anchors, "base_logits", base_logits)
    check_shape("uniforms.draft", uniforms.draft, (num_requests, block_size, 2))
    check_device("uniforms.draft", uniforms.draft, "base_logits", base_logits)
    check_draft_to_target(draft_to_target, base_logits)
    check_cell(cell)
    if head is None:
        return
    check_shape("head.markov_w2.weight", head.markov_w2.weight, (vocab_size, head.rank))
    check_device("head.markov_w1.weight", head.markov_w1.weight, "base_logits", base_logits)
    if anchors.device.type == "cpu":
        num_ids = head.markov_w1.weight.shape[0]
        largest = vocab_size - 1 if draft_to_target is None else int(draft_to_target[-1])
        if largest >= num_ids:
            raise ValueError(
                f"head: got {num_ids} rows of W1, expected at least {largest + 1}: one for every target id the draft can emit"
            )
        if bool(((anchors < 0) | (anchors >= num_ids)).any()):
            raise ValueError(
                f"anchors: got ids outside 0..{num_ids - 1}, expected target ids that index the rows of W1"
            )
    if head.kind != "vanilla":
        if hidden is None:
            raise ValueError(
                f"hidden: got None, expected the backbone's hidden states [R, gamma, d] for a {head.kind} head"
            )
        check_shape("hidden", hidden, (num_requests, block_size, head.hidden_size or "d"))
        check_device("hidden", hidden, "base_logits", base_logits)


def check_verify_arguments(
    target_logits: Tensor, batch: PackedBatch, draft: DraftBlock, uniforms: Uniforms, filters: Filters | None, cell: int
) -> None:
    """Raise unless the arguments of `verify` belong together."""
    check_shape("target_logits", target_logits, ("N", "V"))
    check_dtype("target_logits", target_logits, FLOAT_DTYPES)
    num_rows, vocab_size = target_logits.shape
    if vocab_size < 1:
        raise ValueError("target_logits: got V = 0, expected at least one token in the vocabulary")
    num_requests, block_size = batch.num_requests, draft.tokens.shape[1]
    check_shape("draft.tokens", draft.tokens, (num_requests, "gamma"))
    check_shape("uniforms.accept", uniforms.accept, (num_requests, block_size))
    for name, tensor in (
        ("batch.cu_seqlens", batch.cu_seqlens),
        ("draft.tokens", draft.tokens),
        ("uniforms.accept", uniforms.accept),
    ):
        check_device(name, tensor, "target_logits", target_logits)
    check_cell(cell)
    check_filters(filters, num_requests, target_logits)
    if target_logits.device.type == "cpu" and int(batch.num_tokens) > num_rows:
        raise ValueError(
            f"target_logits: got {num_rows} rows, expected one for each of the {int(batch.num_tokens)} packed tokens; "
            "raise the capacity of pack(...) or verify fewer drafts"
        )


def check_filters(filters: Filters | None, num_requests: int, like: Tensor) -> None:
    """Raise `ValueError` unless every tensor in `filters` is a scalar or [R], on the device of `like`."""
    for field in () if filters is None else fields(filters):
        value = getattr(filters, field.name)
        if isinstance(value, Tensor):
            if value.dim() > 0:
                check_shape(f"filters.{field.name}", value, (num_requests,))
            check_device(f"filters.{field.name}", value, "target_logits", like)


def check_confidence_arguments(
    hidden: Tensor, previous_tokens: Tensor, markov_w1: Tensor | None, weight: Tensor, bias: Tensor | None
) -> None:
    """Raise unless the arguments of `confidence_logits` belong together and the ids that the host sees are in range."""
    check_shape("hidden", hidden, ("R", "gamma", "d"))
    check_dtype("hidden", hidden, FLOAT_DTYPES)
    check_block_size("hidden: gamma", hidden.shape[1])
    check_shape("previous_tokens", previous_tokens, tuple(hidden.shape[:2]))
    check_dtype("previous_tokens", previous_tokens, INT_DTYPES)
    check_device("previous_tokens", previous_tokens, "hidden", hidden)
    check_tensor("weight", weight)
    for name, tensor in (("markov_w1", markov_w1), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_dtype(name, tensor, FLOAT_DTYPES)
            check_device(name, tensor, "hidden", hidden)
    rank = 0
    if markov_w1 is not None:
        check_shape("markov_w1", markov_w1, ("V", "r"))
        vocab_size, rank = markov_w1.shape
        if hidden.device.type == "cpu" and previous_tokens.numel():
            low, high = (int(bound) for bound in previous_tokens.aminmax())
            if low < 0 or high >= vocab_size:  # -1 would silently read the last row
                raise ValueError(
                    f"previous_tokens: got ids in [{low}, {high}], expected target ids in 0..{vocab_size - 1}; "
                    "pass the anchor and the sampled tokens, not placeholders"
                )
    check_shape("weight", weight[None] if weight.dim() == 1 else weight, (1, hidden.shape[2] + rank))
    if bias is not None and bias.numel() != 1:
        raise ValueError(f"bias: got shape {list(bias.shape)}, expected [1]; a confidence head has one output")


def check_survival_arguments(confidence_logits: Tensor, temperatures: Tensor | None) -> None:
    """Raise unless the arguments of `survival` belong together."""
    check_shape("confidence_logits", confidence_logits, ("R", "gamma"))
    check_dtype("confidence_logits", confidence_logits, FLOAT_DTYPES)
    check_block_size("confidence_logits: gamma", confidence_logits.shape[1])
    check_temperatures(temperatures, confidence_logits)


def check_temperatures(temperatures: Tensor | None, logits: Tensor) -> None:
    """Raise unless there is one positive finite temperature for each position of logits, [R, gamma, ...]."""
    if temperatures is None:
        return
    check_shape("temperatures", temperatures, (logits.shape[1],))
    check_dtype("temperatures", temperatures, FLOAT_DTYPES)
    check_device("temperatures", temperatures, "the logits", logits)
    if temperatures.device.type == "cpu" and not bool(((temperatures > 0) & temperatures.isfinite()).all()):
        raise ValueError(
            f"temperatures: got {temperatures.tolist()}, expected positive finite numbers; "
            "fit them with fit_sts or pass None"
        )


def check_ranking_arguments(survival: Tensor) -> None:
    """Raise unless `survival` holds candidates that can be ranked."""
    check_shape("survival", survival, ("R", "gamma"))
    check_block_size("survival: gamma", survival.shape[1])
    check_dtype("survival", survival, FLOAT_DTYPES)


def check_search_arguments(survival: Tensor, cost_table: CostTable, max_tokens: int | None) -> int:
    """Raise unless the arguments of `schedule` or `plan_budget` belong together; return how many candidates fit the limit."""
    check_ranking_arguments(survival)
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int)):
        raise TypeError(f"max_tokens: got {type(max_tokens).__name__}, expected an int or None")
    check_device("cost_table", cost_table.sps, "survival", survival)
    num_requests, block_size = survival.shape
    limit = cost_table.max_tokens if max_tokens is None else min(max_tokens, cost_table.max_tokens)
    if num_requests > limit:
        name, size = (
            ("cost_table", cost_table.max_tokens) if limit == cost_table.max_tokens else ("max_tokens", max_tokens)
        )
        raise ValueError(
            f"{name}: got {size} batch tokens for R = {num_requests} requests, expected at least one each; "
            "raise it, profile larger sizes, or run fewer requests a step"
        )
    return min(num_requests * block_size, limit - num_requests)


def check_budget_arguments(survival: Tensor, budget: int | Tensor) -> None:
    """Raise unless the arguments of `admit` belong together."""
    check_ranking_arguments(survival)
    if isinstance(budget, Tensor):
        check_shape("budget", budget, ())
        check_dtype("budget", budget, INT_DTYPES)
        check_device("budget", budget, "survival", survival)
    elif isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(
            f"budget: got {type(budget).__name__}, expected an int or an integer scalar tensor; see plan_budget"
        )
    if (not isinstance(budget, Tensor) or budget.device.type == "cpu") and budget < 0:
        raise ValueError(f"budget: got {int(budget)}, expected 0 or more; 0 verifies the anchors alone")


def check_bins(num_bins: int) -> None:
    """Raise `ValueError` unless there is at least one bin."""
    if isinstance(num_bins, bool) or not isinstance(num_bins, int) or num_bins < 1:
        raise ValueError(f"num_bins: got {num_bins!r}, expected a positive int; the paper's figures use 10 to 20")


def check_outcome_arguments(name: str, values: Tensor, outcomes: Tensor) -> None:
    """Raise unless there is one outcome for each of the `values`, and at least one."""
    check_dtype(name, values, FLOAT_DTYPES)
    check_tensor("outcomes", outcomes)
    check_shape("outcomes", outcomes, tuple(values.shape))
    check_dtype("outcomes", outcomes, (torch.bool, torch.uint8, *INT_DTYPES, *FLOAT_DTYPES))
    check_device("outcomes", outcomes, name, values)
    if values.numel() == 0:
        raise ValueError(f"{name}: got no samples, expected at least one; collect rounds before judging them")


def check_outcome_values(outcomes: Tensor) -> None:
    """Raise unless every outcome is 0 or 1. Synchronises."""
    if not bool(((outcomes == 0) | (outcomes == 1)).all()):
        raise ValueError("outcomes: got values other than 0 and 1, expected what happened, not its probability")


def check_probability_values(probabilities: Tensor) -> None:
    """Raise unless every probability is one. Synchronises."""
    if not bool(((probabilities >= 0) & (probabilities <= 1)).all()):
        raise ValueError(
            "probabilities: got a value outside [0, 1] or NaN, expected probabilities; apply survival(...) to logits"
        )


def check_sts_arguments(confidence_logits: Tensor, accepted: Tensor, num_bins: int) -> None:
    """Raise unless the arguments of `fit_sts` belong together; see `as_grid` for its grid."""
    check_bins(num_bins)
    check_shape("confidence_logits", confidence_logits, ("S", "gamma"))
    check_block_size("confidence_logits: gamma", confidence_logits.shape[1])
    check_tensor("accepted", accepted)
    check_shape("accepted", accepted, tuple(confidence_logits.shape))
    check_outcome_arguments("confidence_logits", confidence_logits, accepted)


def check_sts_values(confidence_logits: Tensor, accepted: Tensor) -> None:
    """Raise unless every sample has logits and outcomes that `fit_sts` can use. Synchronises."""
    check_outcome_values(accepted)
    if bool(confidence_logits.isnan().any()):
        raise ValueError("confidence_logits: got NaN, expected a logit for every sample; drop the rounds without one")
    if bool((accepted[:, 1:] > accepted[:, :-1]).any()):
        raise ValueError(
            "accepted: got a row that rises, expected [s, k] = drafts 1..k all accepted, never rising in k; "
            "take the running product of the per-draft outcomes"
        )


def default_grid(device: torch.device | str | None = None) -> Tensor:
    """Return the temperatures that `fit_sts` tries: 97 log-spaced values from 1/8 to 8, 1 among them, [97] float32."""
    return (2.0 ** (torch.arange(-48, 49, dtype=torch.float64, device=device) / 16)).to(torch.float32)


def as_grid(grid: Tensor | Sequence[float] | None, device: torch.device, *, read: bool) -> Tensor:
    """Return the grid of `fit_sts`, [G] float32 on `device`, or raise; a tensor on another device is read only if `read`."""
    if grid is None:
        return default_grid(device)
    temperatures = torch.as_tensor(grid).to(torch.float32)
    check_shape("grid", temperatures, ("G",))
    readable = read or temperatures.device.type == "cpu"
    if temperatures.numel() == 0 or (readable and not bool(((temperatures > 0) & temperatures.isfinite()).all())):
        raise ValueError(
            f"grid: got {temperatures.tolist()}, expected one or more positive finite temperatures; "
            "leave it None for the default"
        )
    return temperatures.to(device)


def check_pack_arguments(
    anchors: Tensor, draft_tokens: Tensor, lengths: Tensor, start_positions: Tensor, capacity: int | None
) -> int:
    """Raise unless the arguments of `pack` belong together; return the capacity. capacity=None synchronises."""
    check_shape("draft_tokens", draft_tokens, ("R", "gamma"))
    num_requests, block_size = draft_tokens.shape
    check_block_size("draft_tokens: gamma", block_size)
    for name, tensor in (("anchors", anchors), ("lengths", lengths), ("start_positions", start_positions)):
        check_shape(name, tensor, (num_requests,))
        check_dtype(name, tensor, INT_DTYPES)
        check_device(name, tensor, "draft_tokens", draft_tokens)
    check_dtype("draft_tokens", draft_tokens, INT_DTYPES)
    if capacity is not None and capacity < num_requests:
        raise ValueError(
            f"capacity: got {capacity}, expected at least R = {num_requests}; every request has an anchor to verify"
        )
    if capacity is not None and lengths.device.type != "cpu":
        return capacity
    low, high = (int(bound) for bound in lengths.aminmax()) if num_requests else (0, 0)
    if low < 0 or high > block_size:
        raise ValueError(
            f"lengths: got values in [{low}, {high}], expected 0..gamma = {block_size}; "
            "admit at most the drafts there are"
        )
    num_tokens = num_requests + int(lengths.sum())
    if capacity is not None and num_tokens > capacity:
        raise ValueError(
            f"capacity: got {capacity}, expected at least N = {num_tokens} = sum(1 + lengths); "
            "raise it or admit fewer drafts"
        )
    return num_tokens if capacity is None else capacity


def check_unpack_arguments(batch: PackedBatch, values: Tensor, block_size: int) -> None:
    """Raise unless the arguments of `unpack` belong together."""
    check_block_size("block_size", block_size)
    _check_rows("values", values, batch)
    if batch.num_requests and batch.cu_seqlens.device.type == "cpu":
        longest = int(batch.cu_seqlens.diff().max()) - 1
        if longest > block_size:
            raise ValueError(
                f"block_size: got {block_size}, expected at least the longest length {longest}; pass gamma"
            )


def _check_rows(name: str, values: Tensor, batch: PackedBatch) -> None:
    """Raise `ValueError` unless `values` has one entry for each packed row."""
    check_tensor(name, values)
    check_device(name, values, "the batch", batch.tokens)
    capacity = batch.tokens.shape[0]
    num_rows = values.shape[0] if values.dim() else -1
    fewest = min(capacity, int(batch.num_tokens)) if batch.tokens.device.type == "cpu" else 0
    if not fewest <= num_rows <= capacity:
        raise ValueError(
            f"{name}: got shape {list(values.shape)}, expected N or capacity = {capacity} rows; "
            "pass one row a packed token"
        )


def check_attention_arguments(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PackedBatch, block_table: Tensor, context_lens: Tensor
) -> None:
    """Raise for shapes, dtypes, devices, and on the CPU contexts and pages, that do not belong together."""
    check_shape("query", query, ("N", "heads", "head_dim"))
    _check_rows("query", query, batch)
    num_requests = batch.num_requests
    check_shape("key_cache", key_cache, ("pages", "page_size", "kv_heads", query.shape[2]))
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    check_shape("block_table", block_table, (num_requests, "max_pages"))
    check_shape("context_lens", context_lens, (num_requests,))
    for name, tensor, allowed in (
        ("query", query, FLOAT_DTYPES),
        ("key_cache", key_cache, FLOAT_DTYPES),
        ("value_cache", value_cache, (key_cache.dtype,)),
        ("block_table", block_table, INT_DTYPES),
        ("context_lens", context_lens, INT_DTYPES),
    ):
        check_dtype(name, tensor, allowed)
        check_device(name, tensor, "the batch", batch.tokens)
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"query: got {heads} heads for {kv_heads} key heads, expected a multiple; check kv_heads")
    if context_lens.device.type == "cpu" and num_requests:
        num_pages, page_size = key_cache.shape[:2]
        longest, room = int(context_lens.max()), block_table.shape[1] * page_size
        if longest > room:
            raise ValueError(f"context_lens: got {longest}, expected at most max_pages * page_size = {room}")
        first = torch.arange(block_table.shape[1]) * page_size
        used = first < context_lens[:, None]
        if bool((used & ((block_table < 0) | (block_table >= num_pages))).any()):
            raise ValueError(
                f"block_table: got a page out of range within a context, expected pages in 0..{num_pages - 1}; "
                "allocate the pages of a context before the step"
            )
