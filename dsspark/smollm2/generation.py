"""The text a drafter learns from: SmolLM2's own answers, with the hidden states it had while it wrote them.

A decoding step gives the features of its token for nothing, so there is no second pass over the text. Answers of a batch that are
finished leave it every few steps. On the CPU most of a step of 256 chats would be attention and growing the cache, so both are done here.
A shard is a pure function of its prompts, its seed and the machine's arithmetic; a run that was stopped goes on with the next one.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsspark.smollm2.batching import coarse_products, roomy_cache, use_grouped_attention
from dsspark.smollm2.model import FEATURE_LAYERS, SmolLM2, encode_chat
from dsspark.smollm2.prompts import prompts
from dsspark.training.corpus import DOMAINS, Domain
from dsspark.training.loop import write_atomically

PREFILL_WIDTH = 16
"""Prompts are padded to a multiple of this many tokens: oneDNN keeps a buffer for every size that it multiplied coarsely."""
COMPACT_EVERY = 12
"""Steps between two looks for finished answers."""
MAX_PROMPT = 120
"""Longer prompts are left out."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A prompt, what the model answered, and what it thought.

    Attributes:
        tokens: [T] int32, prompt and answer.
        prompt_length: P; the first anchor is the prompt's last token, at P - 1.
        features: [T - 1, m * d] float16, of every token the model has run on.
        final: [T - P, d] float16: what the LM head read at P - 1 .. T - 2. Row k scores token P + k.
        log_norm: [T - P] float32, logsumexp of those logits at temperature 1.
    """

    tokens: Tensor
    prompt_length: int
    features: Tensor
    final: Tensor
    log_norm: Tensor


class _Batch:
    """Chats being answered: what the next pass reads, and what was written so far, chat by chat.

    Attributes:
        rows: which chat each row of the pass belongs to; -1 once its answer is finished.
    """

    def __init__(self, model: Any, chats: Sequence[Sequence[int]], layers: Sequence[int]) -> None:
        self.model, self.chats, self.layers = model, chats, layers
        self.rows = list(range(len(chats)))
        self.answer = [list(chat) for chat in chats]
        self.features: list[list[Tensor]] = [[] for _ in chats]
        self.final: list[list[Tensor]] = [[] for _ in chats]
        self.log_norm: list[list[Tensor]] = [[] for _ in chats]
        self.cache = roomy_cache(model.config.get_text_config(decoder=True))
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.shared = shared = _shared_prefix(chats)
        room = max(len(chat) for chat in chats)
        room += (shared - room) % PREFILL_WIDTH
        padding = [room - len(chat) for chat in chats]
        tokens = [[0] * pad + list(chat[shared:]) for chat, pad in zip(chats, padding, strict=True)]
        seen = [[1] * shared + [0] * pad + [1] * (room - shared - pad) for pad in padding]
        self.tokens, self.seen = (torch.tensor(rows, device=model.device) for rows in (tokens, seen))
        self.positions = (self.seen.cumsum(1) - 1).clamp_min(0)[:, shared:]
        if shared:  # what all chats begin with goes through the model once
            output = self._run(torch.tensor([list(chats[0][:shared])], device=model.device))
            self.cache.batch_repeat_interleave(len(chats))
            for features in self.features:
                features.append(self._chosen_layers(output)[0])

    def _run(self, tokens: Tensor, **named: Tensor) -> Any:
        output = self.model(
            tokens,
            **named,
            **{self._cache_name: self.cache},
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=1,
        )
        self.cache = output.past_key_values
        return output

    def _chosen_layers(self, output: Any) -> Tensor:
        return torch.cat([output.hidden_states[layer + 1] for layer in self.layers], dim=-1).half().cpu()

    def step(self, temperature: float, generator: torch.Generator, stop_tokens: Sequence[int]) -> None:
        """Write one token of every row."""
        output = self._run(self.tokens, attention_mask=self.seen, position_ids=self.positions)
        features, final = self._chosen_layers(output), output.hidden_states[-1][:, -1].half().cpu()
        logits = output.logits[:, -1].float()
        log_norm, chosen = logits.logsumexp(dim=-1).cpu(), logits.argmax(dim=-1).cpu()
        if temperature > 0:
            law = (logits / temperature).softmax(dim=-1).cpu()
            chosen = law.multinomial(1, generator=generator)[:, 0]
        for i, row in enumerate(self.rows):
            if row < 0:
                continue
            new = len(self.answer[row]) - self.shared if not self.final[row] else 1
            self.features[row].append(features[i, -new:].clone())
            self.final[row].append(final[i])
            self.log_norm[row].append(log_norm[i])
            self.answer[row].append(int(chosen[i]))
            if self.answer[row][-1] in stop_tokens:
                self.rows[i] = -1
        self.tokens, self.positions = chosen[:, None].to(self.seen.device), self.positions[:, -1:] + 1
        self.seen = torch.cat((self.seen, self.seen.new_ones(len(self.seen), 1)), dim=1)

    def compact(self) -> None:
        """Let finished answers leave the batch."""
        kept = torch.tensor([i for i, row in enumerate(self.rows) if row >= 0], device=self.seen.device)
        if len(kept) < len(self.rows):
            self.rows = [row for row in self.rows if row >= 0]
            self.tokens, self.positions, self.seen = self.tokens[kept], self.positions[kept], self.seen[kept]
            self.cache.batch_select_indices(kept)

    def answers(self) -> list[Answer]:
        """Return what was written."""
        return [
            Answer(
                tokens=torch.tensor(self.answer[i], dtype=torch.int32),
                prompt_length=len(chat),
                features=torch.cat(self.features[i]),
                final=torch.stack(self.final[i]),
                log_norm=torch.stack(self.log_norm[i]),
            )
            for i, chat in enumerate(self.chats)
        ]


@torch.no_grad()
def answer(
    smollm2: SmolLM2,
    chats: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    layers: Sequence[int] = FEATURE_LAYERS,
) -> list[Answer]:
    """Answer a batch of chats, and keep the hidden states of `layers` (l is the output of layer l).

    Args:
        smollm2: any causal LM of transformers with its stop tokens.
        chats: ids, one or more a chat.
        max_new_tokens: at least 1; an answer also ends with a stop token.
        temperature: 0 is greedy.
        seed: of the draw at other temperatures.
        layers: whose outputs are kept.
    """
    generator = torch.Generator().manual_seed(seed)
    implementation = smollm2.model.config._attn_implementation
    use_grouped_attention(smollm2.model)
    try:
        batch = _Batch(smollm2.model, chats, layers)
        for step in range(max_new_tokens):
            batch.step(temperature, generator, smollm2.stop_tokens)
            if max(batch.rows) < 0:
                break
            if step % COMPACT_EVERY == COMPACT_EVERY - 1:
                batch.compact()
    finally:
        smollm2.model.set_attn_implementation(implementation)
    return batch.answers()


def _shared_prefix(chats: Sequence[Sequence[int]]) -> int:
    """Return how many ids all chats begin with, at least one short of the shortest."""
    longest = min(len(chat) for chat in chats) - 1
    return next((i for i in range(longest) if len({chat[i] for chat in chats}) > 1), longest)


@dataclass(frozen=True)
class Plan:
    """What is generated.

    Attributes:
        shards: how many, each of `batch` chats of one domain.
        batch: chats decoded together; on the CPU measured here, products of 256 rows run twice as fast as of 32.
        max_new_tokens: of each answer.
        cycle: the domain and temperature of shard i is entry i modulo its length. Code takes the most data to learn, chat is endless.
        seed: of the prompts.
    """

    shards: int = 32
    batch: int = 256
    max_new_tokens: int = 112
    cycle: tuple[tuple[Domain, float], ...] = (
        ("math", 0.0),
        ("code", 0.0),
        ("code", 0.0),
        ("chat", 0.0),
        ("code", 0.0),
        ("code", 0.0),
        ("math", 0.0),
        ("code", 0.0),
        ("code", 0.0),
        ("code", 0.0),
        ("code", 0.8),
        ("math", 0.0),
        ("code", 0.0),
        ("code", 0.0),
        ("chat", 0.0),
        ("code", 0.0),
        ("code", 0.0),
        ("math", 0.8),
        ("code", 0.0),
        ("chat", 0.8),
    )
    seed: int = 0


def planned_prompts(plan: Plan, tokenizer: Any) -> Iterator[tuple[Domain, float, list[list[int]]]]:
    """Yield domain, temperature and chats of each shard. No prompt comes twice before its domain is used up."""
    counts = {domain: 0 for domain in DOMAINS}
    wanted = [plan.cycle[i % len(plan.cycle)] for i in range(plan.shards)]
    pools = {}
    for domain in DOMAINS:
        messages = prompts(domain, 2 * plan.batch * sum(d == domain for d, _ in wanted), plan.seed)
        pools[domain] = [chat for chat in encode_chat(tokenizer, messages) if len(chat) <= MAX_PROMPT]
    for domain, temperature in wanted:
        pool, first = pools[domain], counts[domain]
        counts[domain] += plan.batch
        yield domain, temperature, [pool[(first + i) % len(pool)] for i in range(plan.batch)]


def generate_shards(folder: Path, smollm2: SmolLM2, plan: Plan, console: Console | None = None) -> None:
    """Write the shards that `folder` lacks.

    Args:
        folder: made if missing; `shard-0000.safetensors` and so on.
        smollm2: the model.
        plan: what to generate.
        console: where the speed of each shard goes.
    """
    for index, (domain, temperature, chats) in enumerate(planned_prompts(plan, smollm2.tokenizer)):
        path = folder / f"shard-{index:04d}.safetensors"
        if path.exists():
            continue
        begun = time.perf_counter()
        with coarse_products():
            answers = answer(smollm2, chats, plan.max_new_tokens, temperature, seed=plan.seed * 10_000 + index)
        save_answers(path, answers, domain, temperature)
        if console is not None:
            new, seconds = sum(len(a.final) for a in answers), time.perf_counter() - begun
            console.print(
                f"{path.name}: {domain} at temperature {temperature}: {new} tokens in {seconds:.0f} s, {new / seconds:.0f} a second"
            )


def generate_held_out(folder: Path, smollm2: SmolLM2, count: int, max_new_tokens: int, console: Console) -> None:
    """Write greedy answers to held-out prompts of each domain, unless they are there.

    Args:
        folder: made if missing; `math.safetensors` and so on.
        smollm2: the model.
        count: prompts a domain.
        max_new_tokens: of each answer.
        console: where the progress goes.
    """
    paths = {domain: folder / f"{domain}.safetensors" for domain in DOMAINS}
    chats = {
        domain: held_out_chats(domain, count, smollm2.tokenizer) for domain, path in paths.items() if not path.exists()
    }
    if not chats:
        return
    answers = answer(smollm2, [chat for group in chats.values() for chat in group], max_new_tokens)
    for domain, group in chats.items():
        save_answers(paths[domain], answers[: len(group)], domain, 0.0)
        answers = answers[len(group) :]
        console.print(f"held-out {domain}: {len(group)} answers")


def held_out_chats(domain: Domain, count: int, tokenizer: Any) -> list[list[int]]:
    """Return the ids of `count` chats that training never sees; fewer where a domain has no more."""
    chats = encode_chat(tokenizer, prompts(domain, 2 * count, held_out=True))
    return [chat for chat in chats if len(chat) <= MAX_PROMPT][:count]


def save_answers(path: Path, answers: Sequence[Answer], domain: str, temperature: float) -> None:
    """Write a shard: every answer's tensors end to end, with their lengths."""
    state = {
        "lengths": torch.tensor([[len(a.tokens), a.prompt_length] for a in answers], dtype=torch.int32),
        "tokens": torch.cat([a.tokens for a in answers]),
        "features": torch.cat([a.features for a in answers]),
        "final": torch.cat([a.final for a in answers]),
        "log_norm": torch.cat([a.log_norm for a in answers]),
    }
    metadata = {"domain": domain, "temperature": str(temperature)}
    write_atomically(path, lambda file: save_file(state, file, metadata))


def load_answers(path: Path) -> list[Answer]:
    """Read a shard back."""
    state = load_file(path)
    lengths, prompt_lengths = (column.tolist() for column in state["lengths"].T)
    news = [total - prompt for total, prompt in zip(lengths, prompt_lengths, strict=True)]
    columns = zip(
        torch.split(state["tokens"], lengths),
        prompt_lengths,
        torch.split(state["features"], [total - 1 for total in lengths]),
        torch.split(state["final"], news),
        torch.split(state["log_norm"], news),
        strict=True,
    )
    return [
        Answer(tokens=tokens, prompt_length=prompt, features=features, final=final, log_norm=log_norm)
        for tokens, prompt, features, final, log_norm in columns
    ]
