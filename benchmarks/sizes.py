"""The sizes that are measured: one small table, and what of it fits a laptop."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Size:
    """One point of the table; a component reads the fields it knows.

    Attributes:
        num_requests: R.
        block_size: gamma.
        vocab_size: V.
        rank: r of W1 and W2.
        dtype: of logits, weights, hidden states and caches.
        samples: S, rounds that Sequential Temperature Scaling is fitted to.
        temperatures: G, of its grid.
        hidden_size: d of the backbone.
        context: positions in the cache of each request.
    """

    num_requests: int
    block_size: int = 7
    vocab_size: int = 32_000
    rank: int = 256
    dtype: torch.dtype = torch.float32
    samples: int = 50_000
    temperatures: int = 41
    hidden_size: int = 1024
    context: int = 256

    @property
    def label(self) -> str:
        """A short name for tables."""
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        return f"R{self.num_requests}-g{self.block_size}-V{self.vocab_size}-{dtype}"


COMPONENTS = ("markov", "confidence", "calibration", "scheduler", "verification", "rejection", "losses")

_BF16 = {"dtype": torch.bfloat16, "hidden_size": 4096, "context": 4096, "samples": 1_000_000, "temperatures": 100}

LAPTOP = {component: (Size(num_requests=1), Size(num_requests=16)) for component in COMPONENTS}
LAPTOP["scheduler"] = (Size(num_requests=32, block_size=16), Size(num_requests=1024, block_size=16))
LAPTOP["round"] = (Size(num_requests=1), Size(num_requests=16))
LAPTOP["calibration"] = (Size(num_requests=1, samples=10_000),)

GPU = {
    component: tuple(
        Size(num_requests=num_requests, block_size=block_size, vocab_size=vocab_size, **_BF16)
        for num_requests, block_size, vocab_size in (
            (1, 7, 151_936),
            (8, 7, 151_936),
            (32, 7, 151_936),
            (128, 7, 151_936),
            (256, 7, 151_936),
            (32, 5, 151_936),
            (32, 15, 151_936),
            (32, 7, 32_000),
        )
    )
    for component in COMPONENTS
}
GPU["markov"] += (Size(num_requests=32), Size(num_requests=32, dtype=torch.float16))
GPU["rejection"] += (Size(num_requests=32), Size(num_requests=32, dtype=torch.float16))
GPU["scheduler"] = tuple(Size(num_requests=r, block_size=16) for r in (1, 8, 32, 128, 256, 1024))
GPU["round"] = tuple(Size(num_requests=r, vocab_size=151_936, **_BF16) for r in (1, 8, 32, 64, 128, 256))
GPU["calibration"] = (Size(num_requests=1, **_BF16), Size(num_requests=1))

TRAFFIC = {component: Size(num_requests=4, vocab_size=32_768, dtype=torch.bfloat16) for component in COMPONENTS}
TRAFFIC["scheduler"] = Size(num_requests=64, block_size=16)
TRAFFIC["calibration"] = Size(num_requests=1, block_size=3, samples=8192)
# Two positions are as good as seven: what a position moves does not depend on which it is, and the interpreter is slow.
TRAFFIC["markov"] = Size(num_requests=4, block_size=2, vocab_size=16_384, dtype=torch.bfloat16)

SMALL_TRAFFIC = {
    component: Size(
        num_requests=3, block_size=3, vocab_size=4096, rank=64, dtype=torch.bfloat16, context=48, hidden_size=64
    )
    for component in COMPONENTS
}
SMALL_TRAFFIC["scheduler"] = Size(num_requests=16, block_size=7)
SMALL_TRAFFIC["calibration"] = Size(num_requests=1, block_size=2, samples=4096, temperatures=5)


def sizes(component: str, device: str) -> tuple[Size, ...]:
    """Return what is timed of a component on a device."""
    return GPU[component] if device == "cuda" else LAPTOP[component]
