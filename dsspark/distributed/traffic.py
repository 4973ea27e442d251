"""Bytes that a round puts on the wire, predicted from its sizes, beside those of an all-gather of logits.

`tests/test_distributed.py` counts what the collectives really carry and finds these numbers.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from dsspark.numerics import CELL


@dataclass(frozen=True, kw_only=True)
class RoundSize:
    """What the bytes of a round depend on.

    Attributes:
        num_requests: R.
        block_size: gamma.
        num_tokens: N, packed rows; R (gamma + 1) if every draft is verified.
        vocab_size: V.
        cell_counts: cells of each rank, `VocabularyShard.cell_counts`.
        draft_cell_counts: of the draft vocabulary, where it differs.
        itemsize: bytes of a logit.
        num_filters: of top-k and top-p, how many are in use.
        scheduled: whether survivals and lengths are broadcast.
    """

    num_requests: int
    block_size: int
    num_tokens: int
    vocab_size: int
    cell_counts: tuple[int, ...]
    draft_cell_counts: tuple[int, ...] | None = None
    itemsize: int = 2
    num_filters: int = 0
    scheduled: bool = True


def round_payload(size: RoundSize) -> dict[str, int]:
    """Return the bytes of the results of a round's collectives by label, as `Traffic.by_label` counts them."""
    requests, positions, rows = size.num_requests, size.block_size, size.num_tokens
    ranks = len(size.cell_counts)
    cells = 4 * ranks * max(size.cell_counts)
    payload = {
        "draft: row maxima": 8 * requests * positions,
        "draft: cell masses": 4 * ranks * max(size.draft_cell_counts or size.cell_counts) * requests * positions,
        "draft: drawn tokens": 8 * requests * positions,
    }
    if size.scheduled:
        payload |= {"schedule: survival": 4 * requests * positions, "schedule: lengths": 4 * requests}
    payload["verify: row maxima"] = 8 * rows
    if size.num_filters:
        passes = {2: 2, 4: 4}[size.itemsize]
        payload["verify: filter histograms"] = size.num_filters * passes * 8 * 256 * rows
        payload["verify: filter ties"] = size.num_filters * 16 * ranks * rows
    payload |= {
        "verify: totals and p(x)": 16 * rows,
        "verify: cell masses": cells * requests,
        "verify: emitted tokens": 8 * requests,
    }
    return payload


def round_calls(size: RoundSize) -> int:
    """Return the number of collectives of a round: each is a latency, however few its bytes."""
    filters = size.num_filters * ({2: 2, 4: 4}[size.itemsize] + 1)
    return 3 * size.block_size + (2 if size.scheduled else 0) + 4 + filters


def gathered_payload(size: RoundSize) -> dict[str, int]:
    """Return the bytes of the two all-gathers this replaces: R rows of draft logits a position, and every packed target row."""
    row = size.vocab_size * size.itemsize
    return {
        "draft: logits": row * size.num_requests * size.block_size,
        "verify: logits": row * size.num_tokens,
    }


def comparison(sizes: list[RoundSize]) -> str:
    """Return a Markdown table: bytes each rank receives a round (ring algorithms), beside an all-gather of logits."""
    lines = [
        "| R | gamma | V | cell masses | ranks | filters | collectives | statistics | logits | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size in sizes:
        ranks = len(size.cell_counts)
        ours, theirs = _received(round_payload(size), ranks), _received(gathered_payload(size), ranks)
        lines.append(
            f"| {size.num_requests} | {size.block_size} | {size.vocab_size:,} | {sum(size.cell_counts):,} | {ranks} "
            f"| {size.num_filters} | {round_calls(size)} | {ours / 1e6:.2f} MB | {theirs / 1e6:.1f} MB "
            f"| 1 : {theirs / ours:.0f} |"
        )
    return "\n".join(lines)


def _received(payload: dict[str, int], ranks: int) -> float:
    """Return what a rank receives: (P - 1) / P of an all-gather, 2 (P - 1) / P of an all-reduce, all of a broadcast."""
    share = (ranks - 1) / ranks
    gathers = ("cell masses", "logits", "filter ties")
    return sum(
        count * (1.0 if label.startswith("schedule") else share if label.endswith(gathers) else 2 * share)
        for label, count in payload.items()
    )


def sizes_of(
    num_requests: int,
    block_size: int,
    vocab_size: int,
    cell: int,
    ranks: int,
    *,
    itemsize: int = 2,
    num_filters: int = 0,
) -> RoundSize:
    """Return the size of a round in which every draft is verified and cells are shared as evenly as they go."""
    cells = -(-vocab_size // cell)
    if not 1 <= ranks <= cells:
        raise ValueError(f"ranks: got {ranks}, expected 1..{cells}, a cell each; choose a smaller cell")
    return RoundSize(
        num_requests=num_requests,
        block_size=block_size,
        num_tokens=num_requests * (block_size + 1),
        vocab_size=vocab_size,
        cell_counts=tuple(cells // ranks + (p < cells % ranks) for p in range(ranks)),
        itemsize=itemsize,
        num_filters=num_filters,
    )


def default_sizes() -> list[RoundSize]:
    """Return the rounds of the table in `docs/distributed.md`: Qwen3's vocabulary, gamma 7, bfloat16."""
    plain = [(1, 256, 4), (64, 256, 2), (64, 256, 4), (64, 256, 8), (64, 32, 4), (256, 256, 8)]
    sizes = [sizes_of(requests, 7, 151936, cell, ranks) for requests, cell, ranks in plain]
    return [*sizes, sizes_of(64, 7, 151936, 256, 4, num_filters=2)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m dsspark.distributed`."""
    parser.add_argument("--requests", type=int, help="R; without it, the table of the documentation")
    parser.add_argument("--block-size", type=int, default=7, help="gamma (default: 7)")
    parser.add_argument("--vocab-size", type=int, default=151936, help="V (default: 151936)")
    parser.add_argument("--cell", type=int, default=CELL, help=f"ids in a cell (default: {CELL})")
    parser.add_argument("--ranks", type=int, default=4, help="P (default: 4)")
    parser.add_argument("--itemsize", type=int, choices=(2, 4), default=2, help="bytes of a logit (default: 2)")
    parser.add_argument("--filters", type=int, choices=(0, 1, 2), default=0, help="how many of top-k and top-p")


def run(args: argparse.Namespace) -> int:
    """Print the table for the sizes asked for; return the exit status."""
    if args.requests is None:
        print(comparison(default_sizes()))
        return 0
    size = sizes_of(
        args.requests,
        args.block_size,
        args.vocab_size,
        args.cell,
        args.ranks,
        itemsize=args.itemsize,
        num_filters=args.filters,
    )
    print(comparison([size]))
    for label, count in round_payload(size).items():
        print(f"  {label:28}{count:>14,} bytes")
    for label, count in gathered_payload(size).items():
        print(f"  all-gather of {label:14}{count:>14,} bytes")
    return 0
