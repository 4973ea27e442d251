"""Decoding one prompt for show: which emitted token was accepted, corrected or a bonus."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dsspark.decoding import Drafter, RoundReport, Target, generate
from dsspark.demo.prompts import Prompt
from dsspark.demo.text import Kind, Piece


@dataclass
class Transcript:
    """A prompt, its continuation with the drafter and by the target alone.

    Attributes:
        prompt: what was continued.
        drafted: tokens decoded with the drafter, and what each of them was.
        alone: tokens decoded by the target alone.
        drafted_rounds: target passes that `drafted` took.
        drafted_seconds, alone_seconds: wall-clock of the two.
    """

    prompt: Prompt
    drafted: list[Piece] = field(default_factory=list)
    alone: list[Piece] = field(default_factory=list)
    drafted_rounds: int = 0
    drafted_seconds: float = 0.0
    alone_seconds: float = 0.0

    def count(self, kind: Kind) -> int:
        """Return how many of the drafted tokens are of a kind."""
        return sum(piece_kind == kind for _, piece_kind in self.drafted)


def kinds_of_round(num_accepted: int, length: int, count: int) -> list[Kind]:
    """Return what each of the `count` tokens of a round is: accepted drafts, then a correction, or a bonus if none was rejected."""
    last: Kind = "bonus" if num_accepted == length else "corrected"
    kinds: list[Kind] = ["accepted"] * num_accepted
    return [*kinds, last][:count]


def transcribe(
    target: Target,
    drafter: Drafter,
    prompt: Prompt,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stop_tokens: Sequence[int] = (),
    on_update: Callable[[Transcript], None] | None = None,
) -> Transcript:
    """Decode a prompt with the drafter, then by the target alone, and tell `on_update` after every round."""
    transcript = Transcript(prompt)

    def follow(pieces: list[Piece], drafted: bool) -> Callable[[RoundReport], None]:
        def on_round(report: RoundReport) -> None:
            new = report.emitted[0]
            accepted, length = int(report.verification.num_accepted[0]), int(report.lengths[0])
            kinds: list[Kind] = kinds_of_round(accepted, length, len(new)) if drafted else ["target"] * len(new)
            pieces.extend(zip(new, kinds, strict=True))
            transcript.drafted_rounds += drafted
            if on_update is not None:
                on_update(transcript)

        return on_round

    def decode(with_drafter: Drafter | None, pieces: list[Piece]) -> float:
        start = time.perf_counter()
        generate(
            target,
            with_drafter,
            [prompt.tokens],
            max_new_tokens,
            temperature,
            seeds=[seed],
            stop_tokens=stop_tokens,
            on_round=follow(pieces, with_drafter is not None),
        )
        return time.perf_counter() - start

    transcript.drafted_seconds = decode(drafter, transcript.drafted)
    transcript.alone_seconds = decode(None, transcript.alone)
    return transcript
