"""Any causal language model of transformers as the target of `dsspark.decoding.generate`.

The packed batch becomes one padded forward pass of the model. Its cache is ours: position p of request r lies in column p of row r, in
every layer, so a rejected draft is forgotten by lowering a length and nothing is moved. What each token may see follows from positions
alone, sliding windows included, and reaches the model as a 4-D mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsspark._checks import check_shape
from dsspark.types import PackedBatch

try:
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        "transformers: got no installation with layered caches, expected 5.0 or newer; "
        "install the extra with pip install 'dsspark[hf]'"
    ) from error

MAX_SCORED = 33
"""Tokens of a request that one pass scores: the anchor and at most 32 drafts. A longer piece is a prompt."""

MASKS = ("eager", "sdpa")
"""Attention implementations that honour a 4-D mask."""


class HuggingFaceOutput(NamedTuple):
    """Logits [capacity, V] and features [capacity, m * d] of each packed token."""

    logits: Tensor
    features: Tensor


class _Step(NamedTuple):
    """Where the tokens of one pass go: padded entry (requests[i], queries[i]) to column positions[i]; `length` columns are read."""

    requests: Tensor
    queries: Tensor
    positions: Tensor
    length: int


class _RaggedLayer(DynamicLayer):  # type: ignore[misc]  # mypy does not follow transformers
    """Keys and values of one layer, [R, heads, capacity, head_dim], column = position; capacity grows by doubling."""

    step: _Step | None = None
    is_initialized: bool

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values, padding left out, and return every column that some request needs."""
        step = self.step
        if step is None:
            raise RuntimeError("cache: got a pass of its own, expected one through HuggingFaceTarget.forward_ragged")
        if not self.is_initialized:
            self.keys, self.values = (
                states.new_zeros(*states.shape[:2], 0, states.shape[3]) for states in (key_states, value_states)
            )
            self.device, self.is_initialized = key_states.device, True
        extra = max(step.length, 2 * self.keys.shape[2], 64) - self.keys.shape[2]
        if step.length > self.keys.shape[2]:
            self.keys, self.values = (
                torch.cat((store, store.new_zeros(*store.shape[:2], extra, store.shape[3])), dim=2)
                for store in (self.keys, self.values)
            )
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store[step.requests, :, step.positions] = states[step.requests, :, step.queries]
        return self.keys[:, :, : step.length], self.values[:, :, : step.length]

    def get_seq_length(self) -> int:
        """Return the columns of the present pass."""
        return 0 if self.step is None else self.step.length

    def select(self, rows: Tensor) -> None:
        """Keep the requests `rows`."""
        if self.is_initialized:
            self.keys, self.values = self.keys[rows.to(self.keys.device)], self.values[rows.to(self.values.device)]


class HuggingFaceCache:
    """The cache of a batch of requests; row r belongs to request r.

    Attributes:
        lengths: [R] int64 on the CPU, positions each request holds.
        cache: what the model gets.

    Args:
        num_layers: layers of the model.
        num_requests: R, each of them empty.
    """

    def __init__(self, num_layers: int, num_requests: int) -> None:
        if num_requests < 0:
            raise ValueError(f"num_requests: got {num_requests}, expected 0 or more")
        self.lengths = torch.zeros(num_requests, dtype=torch.int64)
        self.layers = [_RaggedLayer() for _ in range(num_layers)]
        self.cache = Cache(layers=list(self.layers))

    @property
    def num_requests(self) -> int:
        """R."""
        return int(self.lengths.shape[0])

    def reserve(self, new_lengths: Tensor) -> None:
        """Set `lengths` to the [R] integers new_lengths, none below the present length. Storage grows when it is written.

        Raises:
            ValueError: for another shape or a length that shrinks.
        """
        check_shape("new_lengths", new_lengths, (self.num_requests,))
        if bool((new_lengths.cpu() < self.lengths).any()):
            raise ValueError(
                f"new_lengths: got {new_lengths.tolist()}, expected at least {self.lengths.tolist()}; shrink with rollback"
            )
        self.lengths = new_lengths.to("cpu", torch.int64)

    def rollback(self, lengths: Tensor) -> None:
        """Forget every position from lengths[r] on.

        Raises:
            ValueError: for another shape or a length that grows.
        """
        check_shape("lengths", lengths, (self.num_requests,))
        if bool(((lengths.cpu() > self.lengths) | (lengths.cpu() < 0)).any()):
            raise ValueError(
                f"lengths: got {lengths.tolist()}, expected 0 up to {self.lengths.tolist()}; grow with reserve"
            )
        self.lengths = lengths.to("cpu", torch.int64)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the requests `rows`, in that order.

        Raises:
            ValueError: for a row out of range or named twice.
        """
        rows = [int(row) for row in rows]
        if len(set(rows)) != len(rows) or any(not 0 <= row < self.num_requests for row in rows):
            raise ValueError(f"rows: got {rows}, expected distinct rows from 0 to {self.num_requests - 1}")
        index = torch.tensor(rows, dtype=torch.int64)
        self.lengths = self.lengths[index]
        for layer in self.layers:
            layer.select(index)


class HuggingFaceTarget:
    """A transformers model as target: batched requests of different lengths, hidden states of chosen layers, rollback.

    Args:
        model: an `AutoModelForCausalLM` with `attn_implementation` "eager" or "sdpa", whose layers attend to a key-value cache
            fully or through a sliding window.
        feature_layers: the layers whose outputs the drafter reads, increasing, in DeepSpec's numbering: l is the output of layer l, -1
            the embedding's. Never the last one, which transformers returns normed (paper 3.3). Empty without a drafter.

    Raises:
        TypeError: for something that is no causal LM of transformers.
        ValueError: for a model whose cache cannot be rolled back, an attention implementation that reads no 4-D mask, or layers out of
            range.

    Numerics: equals the model's own forward pass on each text alone, up to float rounding.
    """

    def __init__(self, model: Any, feature_layers: Sequence[int] = ()) -> None:
        if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
            raise TypeError(
                f"model: got {type(model).__name__}, expected a causal LM of transformers; load it with AutoModelForCausalLM"
            )
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.num_layers = int(self.config.num_hidden_layers)
        self.feature_layers = tuple(int(layer) for layer in feature_layers)
        ids = list(self.feature_layers)
        if ids != sorted(set(ids)) or (ids and (ids[0] < -1 or ids[-1] > self.num_layers - 2)):
            raise ValueError(
                f"feature_layers: got {ids}, expected increasing layers from -1 (the embedding) to {self.num_layers - 2}: "
                "never the last one"
            )
        implementation = getattr(model.config, "_attn_implementation", "eager")
        if implementation not in MASKS:
            raise ValueError(
                f"model: got attn_implementation {implementation!r}, expected one of {list(MASKS)}, which read a 4-D mask; "
                "load the model with attn_implementation='sdpa'"
            )
        self.windows = _windows(model, self.config)
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            raise ValueError(
                f"model: got {type(model).__name__}, whose forward takes no position_ids, expected one that does; requests of "
                "different lengths need their own positions"
            )
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters

    def new_cache(self, num_requests: int) -> HuggingFaceCache:
        """Return an empty cache for R requests."""
        return HuggingFaceCache(self.num_layers, num_requests)

    @torch.no_grad()
    def forward_ragged(self, batch: PackedBatch, cache: HuggingFaceCache) -> HuggingFaceOutput:
        """Run the packed tokens of all requests in one padded pass and write their keys and values into the cache.

        Args:
            batch: from `pack`; request r's tokens follow the positions the cache already holds for its row r.
            cache: reserved up to each request's last position in the batch.

        Returns:
            Logits [capacity, V] and features [capacity, m * d] on the batch's device. A pass with more than 33 tokens of a request is
            a prompt: nothing is drawn from it, so it computes no logits and returns rows of NaN, which take no memory.

        Raises:
            ValueError: if the cache has another number of requests than the batch, or was not reserved.

        Cost: R times the longest piece tokens; the whole cache is read once a layer.
        """
        if cache.num_requests != batch.num_requests:
            raise ValueError(f"cache: got {cache.num_requests} requests, expected {batch.num_requests} as in the batch")
        device = self.model.device
        rows = (batch.request_ids >= 0).nonzero()[:, 0]
        requests = batch.request_ids[rows].to(torch.int64)
        positions = batch.positions[rows]
        if bool((positions.cpu() >= cache.lengths[requests.cpu()]).any()):
            raise ValueError("batch: got a position beyond the cache's lengths, expected only reserved ones")
        queries = rows - batch.cu_seqlens[requests]
        if not len(rows):
            vocab_size = self.model.get_output_embeddings().weight.shape[0]
            size = len(self.feature_layers) * self.config.hidden_size
            return HuggingFaceOutput(
                *(torch.zeros(batch.tokens.shape[0], n, device=rows.device) for n in (vocab_size, size))
            )
        width = int(queries.max()) + 1
        length = max(cache.lengths.tolist(), default=0)
        step = _Step(requests.to(device), queries.to(device), positions.to(device), length)
        is_prompt = width > MAX_SCORED
        output = self._forward(step, batch.tokens[rows].to(device), batch.num_requests, width, cache, is_prompt)

        def packed(padded: Tensor) -> Tensor:
            out = padded.new_zeros(batch.tokens.shape[0], padded.shape[-1], device=batch.tokens.device)
            out[rows] = padded[step.requests, step.queries].to(out.device)
            return out

        states = output.hidden_states
        features = [packed(states[layer + 1]) for layer in self.feature_layers]
        logits = output.logits
        if is_prompt:
            logits = logits.new_full((1, 1), torch.nan, device=batch.tokens.device)
            logits = logits.expand(batch.tokens.shape[0], output.logits.shape[-1])
        else:
            logits = packed(logits)
        empty = logits.new_zeros(batch.tokens.shape[0], 0)
        return HuggingFaceOutput(logits, torch.cat(features, dim=-1) if features else empty)

    def _forward(
        self, step: _Step, tokens: Tensor, num_requests: int, width: int, cache: HuggingFaceCache, is_prompt: bool
    ) -> Any:
        """Run the model on the padded batch; padding is token 0 at position 0, writes nothing and is never read."""
        padded = torch.zeros(2, num_requests, width, dtype=torch.int64, device=tokens.device)
        padded[0, step.requests, step.queries] = tokens
        padded[1, step.requests, step.queries] = step.positions
        for layer in cache.layers:
            layer.step = step
        arguments: dict[str, Any] = {
            "input_ids": padded[0],
            "position_ids": padded[1],
            "attention_mask": self._mask(padded[1], step.length),
            "use_cache": True,
            "output_hidden_states": bool(self.feature_layers),
            "return_dict": True,
            self._cache_name: cache.cache,
        }
        if is_prompt and self._keeps_logits:
            arguments["logits_to_keep"] = 1
        return self.model(**arguments)

    def _mask(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """Return what each token sees, additive [R, 1, Q, S]: one mask, or one for each kind of layer where there are several."""
        columns = torch.arange(length, device=positions.device)
        distance = positions[:, None, :, None] - columns
        masks = {}
        for kind, window in self.windows.items():
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=positions.device)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _windows(model: Any, config: Any) -> dict[str, int | None]:
    """Return each kind of attention the model's layers have and its window; None is full attention."""
    windows: dict[str, int | None] = {}
    for index, layer in enumerate(DynamicCache(config=config).layers):
        kind = type(layer)
        if kind is DynamicLayer:
            windows["full_attention"] = None
        elif kind is DynamicSlidingWindowLayer and getattr(config, "attention_chunk_size", None) is None:
            windows["sliding_attention"] = int(layer.sliding_window)
        else:
            raise ValueError(
                f"model: got a {kind.__name__} in layer {index} of {type(model).__name__}, expected full or sliding-window "
                "attention over a key-value cache; a recurrent or compressed state cannot be rolled back"
            )
    return windows
