r"""Radix selection on rows of logits: where a count (top-k) or a mass (top-p) of the tokens in descending order is reached.

A logit is a key, an unsigned integer in its order. A search holds an interval of keys; a pass over the row counts, in 2,048 bins of the
interval, the tokens and their weights; a walk over the bins from the top replaces the interval by the bin where the target falls.
Weights are fixed point, $\lfloor 2^{40} w \rfloor$ in int64, so that the sums are exact and the atomics' order does not matter.

Top-p's target is a share of what top-k leaves, which is known only when top-k's search has ended. Both searches run in the same passes
all the same: top-k's bin bounds the mass from both sides, and top-p keeps the bins between its two bounds.

The last pass has two forms. Where the intervals hold at most 2,048 tokens each, it collects these tokens, by atomic places in what were
the masses, and `dsspark.kernels.narrowing` finds the last one kept among them: whatever they are, the row is not read again. Where more
tokens than that are crowded into one interval, it has at most 1,024 keys by then, and the pass counts them by parts of the vocabulary,
as many as fit the bins: two for 1,024 keys, 64 for 32. The last id that is kept among tied tokens is then found by reading one part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsspark.kernels.sampling import temperature_terms, weight

BIN_BITS = 11
LAST_BITS = 10

BINS = tl.constexpr(1 << BIN_BITS)
_BIN_BITS = tl.constexpr(BIN_BITS)
_LAST_BITS = tl.constexpr(LAST_BITS)
ID_BITS = tl.constexpr(22)
IDS = tl.constexpr((1 << 22) - 1)
"""What the last pass collects is a token's distance from the top of the interval, and below that, in so many bits, its id."""
_KEYS = tl.constexpr(1 << LAST_BITS)
ONE = tl.constexpr(float(1 << 40))
_LEAST = tl.constexpr(-41.0)  # log2 of a weight that is 0 in fixed point
_SIGN = tl.constexpr(1 << 31)
ALL = tl.constexpr((1 << 31) - 1)

# The state of a row: int64 [FIELDS, N]. A search's interval is the keys TOP - LAST .. TOP; LAST is -1 where nothing is sought.
FIELDS = 22
SEARCHED = tl.constexpr(0)  # 1 if the row is read at all
RATE = tl.constexpr(1)  # log2(e) / T, the bits of a float32
LEAST_WEIGHT = tl.constexpr(2)  # the bits of a float32
TOP_P = tl.constexpr(3)  # the bits of a float64
TOTAL = tl.constexpr(4)  # mass of the row
HEAVY = tl.constexpr(5)  # mass of the tokens that min-p keeps
K_TOP = tl.constexpr(6)
K_LAST = tl.constexpr(7)
K_SHIFT = tl.constexpr(8)  # log2 of the width of a bin
K_LEFT = tl.constexpr(9)  # tokens still to be taken, the first of them in the interval
K_ABOVE = tl.constexpr(10)  # mass above the interval
P_TOP = tl.constexpr(11)
P_LAST = tl.constexpr(12)
P_SHIFT = tl.constexpr(13)
P_ABOVE = tl.constexpr(14)
KEY = tl.constexpr(15)  # the result: the least key kept,
TIES = tl.constexpr(16)  # how many tokens of that key are kept, ALL for all,
MASS = tl.constexpr(17)  # and the mass kept; until top-p's search has ended, what top-k left
P_TARGET = tl.constexpr(18)  # top-p's target mass, the bits of a float64; meant once top-k's search has ended
K_TOKENS = tl.constexpr(19)  # tokens in top-k's interval
P_TOKENS = tl.constexpr(20)  # tokens in top-p's interval
TIED = tl.constexpr(21)  # tokens of KEY


@triton.jit
def key_of(x, LOW: tl.constexpr):
    """Return the keys of float32 logits, uint32, in their order; the LOW bits that the stored dtype does not have are dropped."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 ties with 0
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True) >> LOW


@triton.jit
def value_of(key, LOW: tl.constexpr):
    """Return the logit of a key that is given in int64."""
    bits = key << LOW
    bits = tl.where(bits < _SIGN, ~(bits | ((1 << LOW) - 1)), bits - _SIGN)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def fixed(w):
    """Return weights in fixed point."""
    return (w * ONE).to(tl.int64)


@triton.jit
def get(state_ptr, FIELD: tl.constexpr, row, num_rows, mask):
    """Return a field of rows' state; -1 where there is no row."""
    return tl.load(state_ptr + FIELD * num_rows.to(tl.int64) + row, mask=mask, other=-1)


@triton.jit
def put(state_ptr, FIELD: tl.constexpr, row, num_rows, mask, value):
    """Set a field of rows' state."""
    tl.store(state_ptr + FIELD * num_rows.to(tl.int64) + row, value.to(tl.int64), mask=mask)


@triton.jit
def from_bits(bits):
    """Return the float32 whose bits a field holds."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def bin_shift(last):
    """Return log2 of the bin width that cuts last + 1 keys into at most BINS bins."""
    shift = tl.zeros_like(last)
    for bit in tl.static_range(_BIN_BITS, 32):
        shift += (last >> bit > 0).to(tl.int64)
    return shift


@triton.jit(do_not_specialize=["num_rows", "num_requests", "vocab_size"])
def begin_kernel(
    temperature_ptr,  # [R]
    entries_ptr,  # [3, R]: top-k, top-p, min-p
    row_max_ptr,  # [N]
    row_sum_ptr,  # [N]
    ids_ptr,  # [N]
    skip_ptr,  # [N] or None
    state_ptr,  # [FIELDS, N]
    threshold_ptr,  # [N]
    last_id_ptr,  # [N]
    min_weight_ptr,  # [N]
    kept_sum_ptr,  # [N]
    in_range_ptr,  # [N]
    stride_t,
    stride_id,
    stride_s,
    num_rows,
    num_requests,
    vocab_size,
    LOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Read the filters of BLOCK_N rows; settle the rows that need no search, set the others' first intervals."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row < num_rows
    request = tl.load(ids_ptr + row * stride_id, mask=mask, other=-1).to(tl.int64)
    live = mask & (request >= 0) & (request < num_requests)
    if skip_ptr is not None:
        live = live & (tl.load(skip_ptr + row * stride_s, mask=mask, other=0) == 0)
    rate, greedy, usable = temperature_terms(
        tl.load(temperature_ptr + request * stride_t, mask=live, other=1.0).to(tl.float32)
    )
    top_k = tl.load(entries_ptr + request, mask=live, other=0.0)
    top_p = tl.load(entries_ptr + (num_requests + request), mask=live, other=1.0)
    min_p = tl.load(entries_ptr + (num_requests.to(tl.int64) * 2 + request), mask=live, other=0.0)
    in_range = live & (top_k >= 0) & (top_p > 0) & (top_p <= 1) & (min_p >= 0) & (min_p <= 1)

    top = tl.load(row_max_ptr + row, mask=live, other=0.0)
    total = tl.load(row_sum_ptr + row, mask=live, other=float("nan"))
    lawful = in_range & usable & (total == total)
    # Weights are float32, so the least float32 that is at least min_p decides as min_p itself.
    least = min_p.to(tl.float32)
    least = tl.where(
        least.to(tl.float64) < min_p, (least.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True), least
    )
    least = tl.where(lawful & (greedy == 0), least, 0.0)
    has_k = (top_k >= 1) & (top_k < vocab_size)
    has_p = top_p < 1
    searched = lawful & (greedy == 0) & (has_k | has_p | (least > 0))

    tl.store(threshold_ptr + row, tl.where(lawful & greedy, top, float("-inf")), mask=mask)
    tl.store(last_id_ptr + row, tl.full((BLOCK_N,), ALL, tl.int32), mask=mask)
    tl.store(min_weight_ptr + row, least, mask=mask)
    tl.store(kept_sum_ptr + row, tl.where(lawful, tl.where(greedy, 1.0, total), float("nan")), mask=mask)
    tl.store(in_range_ptr + row, in_range, mask=mask)

    highest = key_of(tl.where(searched, top, 0.0), LOW).to(tl.int64)
    lowest = key_of(tl.full((BLOCK_N,), float("-inf"), tl.float32), LOW).to(tl.int64)
    # Tokens lighter than a quarter of (1 - top_p) / V weigh too little in all for the target to fall among them.
    share = tl.log2((0.25 * (1.0 - tl.where(has_p & searched, top_p, 0.0))).to(tl.float32) / vocab_size)
    floor = top + tl.maximum(share, _LEAST) / tl.where(searched, rate, 1.0)
    floor = tl.maximum(key_of(floor, LOW).to(tl.int64) - 1, lowest)
    # Masked tokens, of -inf, weigh nothing whether they are kept or not: top-k's search leaves them out, should it come to them.
    last = tl.where(has_k, highest - lowest - 1, tl.maximum(highest - floor, 0))
    last = tl.where(searched, last, -1)
    k_last = tl.where(has_k, last, -1)
    p_last = tl.where(has_p, last, -1)
    zero = tl.zeros_like(row)
    put(state_ptr, SEARCHED, row, num_rows, mask, searched)
    put(state_ptr, RATE, row, num_rows, mask, rate.to(tl.int32, bitcast=True))
    put(state_ptr, LEAST_WEIGHT, row, num_rows, mask, least.to(tl.int32, bitcast=True))
    put(state_ptr, TOP_P, row, num_rows, mask, top_p.to(tl.int64, bitcast=True))
    put(state_ptr, TOTAL, row, num_rows, mask, zero)
    put(state_ptr, HEAVY, row, num_rows, mask, zero)
    put(state_ptr, K_TOP, row, num_rows, mask, highest)
    put(state_ptr, K_LAST, row, num_rows, mask, k_last)
    put(state_ptr, K_SHIFT, row, num_rows, mask, bin_shift(k_last))
    put(state_ptr, K_LEFT, row, num_rows, mask, tl.where(has_k, top_k, 0.0))
    put(state_ptr, K_ABOVE, row, num_rows, mask, zero)
    put(state_ptr, P_TOP, row, num_rows, mask, highest)
    put(state_ptr, P_LAST, row, num_rows, mask, p_last)
    put(state_ptr, P_SHIFT, row, num_rows, mask, bin_shift(p_last))
    put(state_ptr, P_ABOVE, row, num_rows, mask, zero)
    put(state_ptr, KEY, row, num_rows, mask, lowest)
    put(state_ptr, TIES, row, num_rows, mask, zero + ALL)
    put(state_ptr, MASS, row, num_rows, mask, zero)
    put(state_ptr, P_TARGET, row, num_rows, mask, zero)
    put(state_ptr, TIED, row, num_rows, mask, zero)


@triton.jit
def few_tokens(state_ptr, row, num_rows, k_last, p_last):
    """Return whether the last pass can collect all tokens of the intervals that are left, or of the one key whose ties are kept in part."""
    k_few = get(state_ptr, K_TOKENS, row, num_rows, k_last >= 0) <= BINS
    p_few = get(state_ptr, P_TOKENS, row, num_rows, p_last >= 0) <= BINS
    tied = (k_last < 0) & (p_last < 0)
    return k_few & p_few & ((tied == 0) | (get(state_ptr, TIED, row, num_rows, tied & (row < num_rows)) <= BINS))


@triton.jit
def open_searches(state_ptr, row, num_rows, k_last, p_last):
    """Return which searches need another pass.

    Few tokens, or few keys, can wait for the last one, keys only if top-p need not know how top-k's search ends.
    """
    crowded = few_tokens(state_ptr, row, num_rows, k_last, p_last) == 0
    k_open = crowded & ((k_last >= _KEYS) | ((k_last >= 0) & (p_last >= 0)))
    return k_open, crowded & ((p_last >= _KEYS) | ((p_last >= 0) & k_open))


@triton.jit
def _add(counts_ptr, masses_ptr, base, key, mass, valid, top, last, shift):
    """Count the tokens of a tile in the bins of an interval; base is where each row's bins begin."""
    distance = top.to(tl.uint32)[:, None] - key
    inside = valid & (last >= 0)[:, None] & (distance <= tl.maximum(last, 0).to(tl.uint32)[:, None])
    offs = base[:, None] + (distance >> shift.to(tl.uint32)[:, None]).to(tl.int64)
    tl.atomic_add(counts_ptr + offs, tl.full(offs.shape, 1, tl.int32), mask=inside, sem="relaxed")
    tl.atomic_add(masses_ptr + offs, mass, mask=inside, sem="relaxed")


@triton.jit
def _collect(counts_ptr, entries_ptr, base, top, last, key, token, valid):
    """Append the tokens of a tile that lie in an interval to the entries of their row; base is where a row's counter and entries begin."""
    distance = (top.to(tl.uint32)[:, None] - key).to(tl.int64)
    inside = valid & (distance <= last[:, None])
    number = tl.sum(inside.to(tl.int32), axis=1)
    first = tl.atomic_add(counts_ptr + base, number, mask=number > 0, sem="relaxed")
    place = first[:, None] + tl.cumsum(inside.to(tl.int32), axis=1) - 1
    entry = (distance << ID_BITS) | token[None, :].to(tl.int64)
    tl.store(entries_ptr + base[:, None] + place.to(tl.int64), entry, mask=inside & (place < BINS))


@triton.jit
def last_interval(state_ptr, row, num_rows, mask):
    """Return what the last pass is about: the interval that a search left, top-p's if both did, or the key whose ties are kept in part."""
    k_last = get(state_ptr, K_LAST, row, num_rows, mask)
    p_last = get(state_ptr, P_LAST, row, num_rows, mask)
    tied = tl.where(get(state_ptr, TIES, row, num_rows, mask) < ALL, 0, -1)
    key = get(state_ptr, KEY, row, num_rows, mask)
    top = tl.where(k_last >= 0, get(state_ptr, K_TOP, row, num_rows, mask), key)
    top = tl.where(p_last >= 0, get(state_ptr, P_TOP, row, num_rows, mask), top)
    last = tl.where(p_last >= 0, p_last, tl.where(k_last >= 0, k_last, tied))
    searched = get(state_ptr, SEARCHED, row, num_rows, mask) == 1
    return top, tl.where(searched, last, -1), k_last, p_last


@triton.jit
def parts(last, vocab_size):
    """Return log2 of the number of parts that last + 1 keys leave room for in the bins, and how many tokens a part has, int32."""
    shift = tl.zeros_like(last) + _BIN_BITS
    for bit in tl.static_range(0, _LAST_BITS):
        shift -= (last >> bit > 0).to(tl.int64)
    size = tl.cdiv(vocab_size, (tl.full(shift.shape, 1, tl.int64) << shift).to(tl.int32))
    return shift, (size + 15) // 16 * 16  # wide loads


@triton.jit
def _count_parts(counts_ptr, base, top, last, key, token, valid, vocab_size):
    """Count the tokens of a tile by key and, within a key, by part of the vocabulary."""
    shift, size = parts(last, vocab_size)
    distance = (top.to(tl.uint32)[:, None] - key).to(tl.int64)
    index = (distance << shift[:, None]) + token[None, :] // size[:, None]
    inside = valid & (distance <= last[:, None])
    tl.atomic_add(counts_ptr + base[:, None] + index, 1, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def count_kernel(
    logits_ptr,  # [N, V]
    row_max_ptr,  # [N]
    state_ptr,  # [FIELDS, N]
    counts_ptr,  # [N, SLOTS, BINS], zeros
    masses_ptr,  # [N, SLOTS, BINS], zeros; in the last pass, the entries that are collected, and counts the number of them
    stride_ln,
    stride_lv,
    num_rows,
    vocab_size,
    STAGE: tl.constexpr,  # 0: the first pass, both searches share slot 0; 1: top-k in slot 0, top-p in the last; 2: the last pass
    SLOTS: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Count one tile of the rows whose search is open; others are not read."""
    tiles = tl.cdiv(vocab_size, BLOCK_V)
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = row < num_rows
    top, last, k_last, p_last = last_interval(state_ptr, row, num_rows, mask)
    if STAGE == 0:
        reads = get(state_ptr, SEARCHED, row, num_rows, mask) == 1
    elif STAGE == 1:
        k_open, p_open = open_searches(state_ptr, row, num_rows, k_last, p_last)
        reads = k_open | p_open
    else:
        reads = last >= 0
    if tl.max(reads.to(tl.int32), axis=0) > 0:
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        valid = reads[:, None] & (offs_v < vocab_size)[None, :]
        offs = row[:, None] * stride_ln + offs_v.to(tl.int64)[None, :] * stride_lv
        x = tl.load(logits_ptr + offs, mask=valid, other=float("-inf")).to(tl.float32)
        key = key_of(x, LOW)
        base = row * (SLOTS * BINS)
        if STAGE == 2:
            few = few_tokens(state_ptr, row, num_rows, k_last, p_last)
            _count_parts(counts_ptr, base, top, last, key, offs_v, valid & (few == 0)[:, None], vocab_size)
            valid = valid & few[:, None]
            _collect(counts_ptr, masses_ptr, base, top, last, key, offs_v, valid)
            if SLOTS == 2:
                both = (k_last >= 0) & (p_last >= 0)
                k_top = get(state_ptr, K_TOP, row, num_rows, mask)
                _collect(counts_ptr, masses_ptr, base + BINS, k_top, tl.where(both, k_last, -1), key, offs_v, valid)
        else:
            highest = tl.load(row_max_ptr + row, mask=reads, other=0.0)
            rate = from_bits(get(state_ptr, RATE, row, num_rows, mask))
            w = weight(x, highest[:, None], rate[:, None])
            mass = tl.where(valid, fixed(w), 0)
            shift_k = get(state_ptr, K_SHIFT, row, num_rows, mask)
            shift_p = get(state_ptr, P_SHIFT, row, num_rows, mask)
            if STAGE == 0:
                least = from_bits(get(state_ptr, LEAST_WEIGHT, row, num_rows, mask))
                heavy = tl.sum(tl.where(w >= least[:, None], mass, 0), axis=1)
                sums_ptr = state_ptr + row
                tl.atomic_add(sums_ptr + TOTAL * num_rows.to(tl.int64), tl.sum(mass, axis=1), mask=reads, sem="relaxed")
                tl.atomic_add(sums_ptr + HEAVY * num_rows.to(tl.int64), heavy, mask=reads, sem="relaxed")
                top = get(state_ptr, K_TOP, row, num_rows, mask)
                last = tl.maximum(k_last, p_last)
                if SLOTS > 0:
                    _add(counts_ptr, masses_ptr, base, key, mass, valid, top, last, tl.maximum(shift_k, shift_p))
            else:
                k_top = get(state_ptr, K_TOP, row, num_rows, mask)
                p_top = get(state_ptr, P_TOP, row, num_rows, mask)
                if SLOTS == 2:
                    k_last = tl.where(k_open, k_last, -1)
                    p_last = tl.where(p_open, p_last, -1)
                    _add(counts_ptr, masses_ptr, base, key, mass, valid, k_top, k_last, shift_k)
                    _add(counts_ptr, masses_ptr, base + BINS, key, mass, valid, p_top, p_last, shift_p)
                else:  # the launch has one filter
                    is_k = k_last >= 0
                    top, shift = tl.where(is_k, k_top, p_top), tl.where(is_k, shift_k, shift_p)
                    _add(counts_ptr, masses_ptr, base, key, mass, valid, top, tl.maximum(k_last, p_last), shift)


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def floor_kernel(
    group_max_ptr,  # [N, G]
    state_ptr,  # [FIELDS, N]
    stride_gn,
    stride_gg,
    num_rows,
    num_groups,
    LOW: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Raise the lower end of top-k's first interval to the k-th largest maximum of a group: at least k tokens are as large."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = row < num_rows
    k_last = get(state_ptr, K_LAST, row, num_rows, mask)
    top_k = get(state_ptr, K_LEFT, row, num_rows, mask)
    raised = (k_last >= 0) & (top_k <= tl.minimum(num_groups, GROUPS))  # some of the groups will do
    if tl.max(raised.to(tl.int32), axis=0) > 0:
        offs_g = tl.arange(0, GROUPS).to(tl.int64)
        valid = raised[:, None] & (offs_g < num_groups)[None, :]
        offs = row[:, None] * stride_gn + offs_g[None, :] * stride_gg
        maxima = tl.load(group_max_ptr + offs, mask=valid, other=0.0)
        key = tl.where(valid, key_of(maxima, LOW).to(tl.int64), -1)
        top = get(state_ptr, K_TOP, row, num_rows, mask)
        low, high = top - k_last, top
        for _ in range(32 - LOW):
            middle = low + (high - low + 1) // 2
            enough = tl.sum((key >= middle[:, None]).to(tl.int32), axis=1) >= top_k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        last = top - low
        p_last = get(state_ptr, P_LAST, row, num_rows, mask)
        put(state_ptr, K_LAST, row, num_rows, raised, last)
        put(state_ptr, K_SHIFT, row, num_rows, raised, bin_shift(last))
        put(state_ptr, P_LAST, row, num_rows, raised & (p_last >= 0), last)
        put(state_ptr, P_SHIFT, row, num_rows, raised & (p_last >= 0), bin_shift(last))
