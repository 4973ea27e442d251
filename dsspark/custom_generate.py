"""`model.generate(..., custom_generate=Speculator(drafter))`: a transformers user changes one argument.

What `generate` was asked for is kept exactly or refused: greedy or sampling, temperature, top-k, top-p, min-p, the processors that are
functions of the text so far (repetition penalties, forbidden words, forced tokens), stop tokens and lengths. Processors act on the
target's logits before verification, so the emitted text has the very law that the model and its processors define.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from dsspark._dispatch import Backend
from dsspark.decoding import Drafter, Generation, RoundReport, generate
from dsspark.models.huggingface import MAX_SCORED, HuggingFaceCache, HuggingFaceOutput, HuggingFaceTarget
from dsspark.serving.policies import Policy
from dsspark.types import Filters, PackedBatch

TEXT_PROCESSORS = frozenset(
    {
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    }
)
"""Processors that read nothing but the text so far and the scores of one row: each verified row can be processed on its own."""

WARPERS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}
"""What `dsspark.verify` does itself, in the order in which both apply them."""

IGNORED = frozenset({"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"})
"""Arguments of the model that speculation prepares anew."""


class Speculator:
    """The callable for `custom_generate`.

    Args:
        drafter: proposes blocks, such as `dsspark.checkpoints.load_drafter(folder)`; None decodes with the target alone.
        policy: how many drafts are verified each round; None verifies whole blocks.
        seeds: one integer a sequence; drawn from torch's default generator if None, so `torch.manual_seed` reproduces a text.
        on_round: called after every round. transformers passes no `streamer` on to a custom method: stream from here.
        feature_layers: the target layers that the drafter reads; the drafter's own `target_layer_ids` if None.
        keep_logits: see `dsspark.decoding.generate`.
        backend: "auto", "reference" or "triton", for every component.

    Attributes:
        last: the `Generation` of the last call, with its log probabilities and statistics.

    Example:
        model.generate(**inputs, max_new_tokens=64, custom_generate=Speculator(drafter))

    Numerics: exact ties at the top-k threshold go to the lowest ids; transformers keeps all of them.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        *,
        policy: Policy | None = None,
        seeds: Sequence[int] | None = None,
        on_round: Callable[[RoundReport], None] | None = None,
        feature_layers: Sequence[int] | None = None,
        keep_logits: bool = True,
        backend: Backend = "auto",
    ) -> None:
        if feature_layers is None:
            feature_layers = getattr(drafter, "target_layer_ids", () if drafter is None else None)
        if feature_layers is None:
            raise ValueError(
                f"feature_layers: got None with a {type(drafter).__name__}, expected the target layers that it reads"
            )
        self.drafter, self.policy, self.seeds, self.on_round = drafter, policy, seeds, on_round
        self.feature_layers, self.keep_logits, self.backend = tuple(feature_layers), keep_logits, backend
        self.last: Generation | None = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode; `GenerationMixin.generate` calls this with everything prepared.

        Raises:
            ValueError: for anything that was asked for and cannot be kept exactly, by its name.
        """
        _check_request(generation_config, stopping_criteria, model_kwargs)
        processors, sampling = _split_processors(logits_processor, generation_config.do_sample)
        prompts, pads = _unpadded(input_ids, model_kwargs.get("attention_mask"))
        target: Any = HuggingFaceTarget(model, self.feature_layers)
        if processors:
            target = _ProcessedTarget(target, processors, pads)
        stop = generation_config._eos_token_tensor
        self.last = generate(
            target,
            self.drafter,
            prompts,
            generation_config.max_length - input_ids.shape[1],
            sampling.pop("temperature"),
            self.policy,
            self._seeds(len(prompts), generation_config.do_sample),
            filters=Filters(**sampling),
            stop_tokens=() if stop is None else stop.flatten().tolist(),
            keep_logits=self.keep_logits,
            on_round=self.on_round,
            backend=self.backend,
        )
        sequences = _padded(input_ids, self.last.tokens, generation_config._pad_token_tensor)
        return (
            GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences
        )

    def _seeds(self, count: int, do_sample: bool) -> list[int]:
        if self.seeds is not None or not do_sample:
            return list(range(count)) if self.seeds is None else list(self.seeds)
        drawn: list[int] = torch.randint(2**63 - 1, (count,)).tolist()
        return drawn


class _ProcessedCache:
    """A cache that also remembers each request's text, its left padding included, as transformers hands it to a processor."""

    def __init__(self, inner: HuggingFaceCache, pads: Sequence[Tensor], processors: Sequence[Any]) -> None:
        self.inner = inner
        self.pads, self.texts = list(pads), list(pads)
        self.processors = [[_of_row(processor, row) for processor in processors] for row in range(len(pads))]

    def reserve(self, new_lengths: Tensor) -> None:
        """Make room."""
        self.inner.reserve(new_lengths)

    def rollback(self, lengths: Tensor) -> None:
        """Forget positions, and their tokens, from lengths[r] on."""
        self.inner.rollback(lengths)
        ends = [len(pad) + length for pad, length in zip(self.pads, lengths.tolist(), strict=True)]
        self.texts = [text[:end] for text, end in zip(self.texts, ends, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.inner.keep(rows)
        self.pads, self.texts = [self.pads[row] for row in rows], [self.texts[row] for row in rows]
        self.processors = [self.processors[row] for row in rows]


class _ProcessedTarget:
    """The model with its processors: row i of the logits is what they make of it after the text up to packed token i."""

    def __init__(self, target: HuggingFaceTarget, processors: Sequence[Any], pads: Sequence[Tensor]) -> None:
        self.target, self.processors, self.pads = target, processors, pads

    def new_cache(self, num_requests: int) -> _ProcessedCache:
        """Return an empty cache for R requests."""
        return _ProcessedCache(self.target.new_cache(num_requests), self.pads, self.processors)

    def forward_ragged(self, batch: PackedBatch, cache: _ProcessedCache) -> HuggingFaceOutput:
        """Run the model, then the processors on each packed row."""
        logits, features = self.target.forward_ragged(batch, cache.inner)
        bounds = batch.cu_seqlens.tolist()
        pieces = [batch.tokens[start:end] for start, end in pairwise(bounds)]
        cache.texts = [torch.cat(pair) for pair in zip(cache.texts, pieces, strict=True)]
        if max(map(len, pieces), default=0) > MAX_SCORED:
            return HuggingFaceOutput(logits, features)  # a prompt, of which no row was scored
        device = self.target.model.device
        processed = logits.to(torch.float32)  # as transformers does before it calls a processor
        for text, processors, (start, end) in zip(cache.texts, cache.processors, pairwise(bounds), strict=True):
            for row in range(start, end):
                prefix = text[None, : len(text) - (end - 1 - row)].to(device)
                scores = processed[row : row + 1].to(device, copy=True)
                for processor in processors:
                    scores = processor(prefix, scores)
                processed[row] = scores[0].to(processed.device)
        return HuggingFaceOutput(processed, features)


def _of_row(processor: Any, row: int) -> Any:
    """Return the processor as it treats one row of the batch: the repetition penalty knows how much padding each row has."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    processor = copy(processor)
    processor.prompt_ignore_length = ignored[row : row + 1]
    return processor


def _check_request(generation_config: Any, stopping_criteria: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise unless everything that was asked for can be kept."""
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(f"num_beams: got {generation_config.num_beams}, expected 1; speculation decodes no beams")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None):
            raise ValueError(f"{name}: got True, expected False; log probabilities are in Speculator.last.logprobs")
    for criterion in stopping_criteria:
        if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria):
            raise ValueError(
                f"stopping_criteria: got {type(criterion).__name__}, expected a maximal length and stop tokens only"
            )
    for name, value in model_kwargs.items():
        if name not in IGNORED and value is not None:
            raise ValueError(f"{name}: got a {type(value).__name__}, expected text alone: input_ids and attention_mask")
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(f"cache: got {cache.get_seq_length()} cached positions, expected none; pass the whole text")


def _split_processors(processors: Any, do_sample: bool) -> tuple[list[Any], dict[str, Any]]:
    """Return the processors of the text, and what `generate` of ours calls temperature, top_k, top_p and min_p."""
    of_text: list[Any] = []
    sampling: dict[str, Any] = {}
    for processor in processors:
        name = type(processor).__name__
        if name in WARPERS:
            order = list(WARPERS.values())
            if any(order.index(WARPERS[name]) <= order.index(seen) for seen in sampling):
                raise ValueError(f"logits_processor: got {name} after {list(sampling)}, expected the order {order}")
            sampling[WARPERS[name]] = getattr(processor, WARPERS[name])
        elif name in TEXT_PROCESSORS and not sampling:
            of_text.append(processor)
        elif name != "LogitNormalization":  # a constant of the row: no law depends on it
            raise ValueError(
                f"logits_processor: got {name}, expected one of {sorted(TEXT_PROCESSORS)}, then of {list(WARPERS)}; "
                "no other can be kept exactly"
            )
    sampling.setdefault("temperature", 1.0)
    return of_text, sampling if do_sample else {"temperature": 0.0}


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return each row's text and its left padding, on the CPU."""
    rows = list(input_ids.to("cpu", torch.int64))
    if attention_mask is None:
        return rows, [row[:0] for row in rows]
    mask = attention_mask.cpu().bool()
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError(
            "attention_mask: got padding behind text, expected padding on the left; set padding_side='left'"
        )
    starts = (~mask).sum(dim=1).tolist()
    return [row[start:] for row, start in zip(rows, starts, strict=True)], [
        row[:start] for row, start in zip(rows, starts, strict=True)
    ]


def _padded(input_ids: Tensor, texts: Sequence[Sequence[int]], pad: Tensor | None) -> Tensor:
    """Return the prompts as they came, followed by the new tokens, padded on the right as transformers does."""
    longest = max((len(text) for text in texts), default=0)
    filler = 0 if pad is None else int(pad)
    new = [[*text, *[filler] * (longest - len(text))] for text in texts]
    return torch.cat((input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)), dim=1)
