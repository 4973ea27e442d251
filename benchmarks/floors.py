"""The fewest bytes of each task: every input read once, every output written once, nothing of size V in between.

These are floors of the plan, not of physics: rows after the first rejection are needed by nobody, yet nobody can know before reading.
"""

from __future__ import annotations

from benchmarks.sizes import Size


def markov(size: Size, *, keep_logits: bool) -> int:
    """W2 once a position for all requests, R rows of U; R rows more where the corrected logits are kept."""
    row = size.vocab_size * size.dtype.itemsize
    rows = size.num_requests * row * (2 if keep_logits else 1)
    return size.block_size * (row * size.rank + rows)


def rejection(size: Size, *, rejected: int) -> int:
    """The drafted rows of p, then the deciding row: p and q once more after a rejection, the bonus row otherwise.

    At full length that is gamma + 2 rows after a rejection and gamma + 1 without one.
    """
    row = size.vocab_size * size.dtype.itemsize
    return row * (size.num_requests * (size.block_size + 1) + rejected)


def losses(size: Size) -> int:
    """Both rows of a slot forward and once more backward, and one row of gradient: nothing of size V is kept in between."""
    return 5 * size.num_requests * size.block_size * size.vocab_size * size.dtype.itemsize


def calibration(size: Size, outcome_bytes: int) -> int:
    """A float32 logit and an outcome a sample and position; the temperatures and errors do not count."""
    return size.samples * size.block_size * (4 + outcome_bytes)


def confidence(size: Size) -> int:
    """h and a row of W1 a position, the previous token, the weight once; a survival a position."""
    features = size.hidden_size + size.rank
    return size.num_requests * size.block_size * (features * size.dtype.itemsize + 8 + 4) + 4 * features


def scheduler(size: Size, *, admitted: int) -> int:
    """The survivals, as many float64 rates as were tried, the lengths."""
    candidates = size.num_requests * size.block_size
    return 4 * candidates + 8 * min(admitted + 2, candidates + 1) + 4 * size.num_requests


def packing(size: Size) -> int:
    """Anchors, drafts, lengths and starts; three entries a packed row of the capacity, and the offsets."""
    rows = size.num_requests * (size.block_size + 1)
    return 8 * rows + (4 + 8) * size.num_requests + (8 + 8 + 4) * rows + 4 * (size.num_requests + 1)


def attention(size: Size, heads: int, kv_heads: int, head_dim: int) -> int:
    """Queries, results, and each request's keys and values once."""
    vectors = 2 * size.num_requests * ((size.block_size + 1) * heads + size.context * kv_heads)
    return vectors * head_dim * size.dtype.itemsize
