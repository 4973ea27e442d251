"""What follows each pass of `dsspark.kernels.selection`: the searches narrowed by what was counted, and the cutoffs in the end."""

from __future__ import annotations

import triton
import triton.language as tl

from dsspark.kernels.sampling import weight
from dsspark.kernels.selection import (
    ALL,
    BINS,
    HEAVY,
    ID_BITS,
    IDS,
    K_ABOVE,
    K_LAST,
    K_LEFT,
    K_SHIFT,
    K_TOKENS,
    K_TOP,
    KEY,
    MASS,
    ONE,
    P_ABOVE,
    P_LAST,
    P_SHIFT,
    P_TARGET,
    P_TOKENS,
    P_TOP,
    RATE,
    SEARCHED,
    TIED,
    TIES,
    TOP_P,
    TOTAL,
    bin_shift,
    few_tokens,
    fixed,
    from_bits,
    get,
    last_interval,
    open_searches,
    parts,
    put,
    value_of,
)

_SLACK = tl.constexpr(2.0**-20)  # weights at the ends of a bin are rounded


@triton.jit
def at(values, index, SIZE: tl.constexpr):
    """Return values[row, index[row]]."""
    return tl.sum(tl.where(tl.arange(0, SIZE)[None, :] == index[:, None], values, 0), axis=1)


@triton.jit
def first_hit(hit, present, SIZE: tl.constexpr):
    """Return the first index that is hit, else the last that is present, else 0."""
    offs = tl.arange(0, SIZE)[None, :]
    first = tl.min(tl.where(hit, offs, SIZE), axis=1)
    return tl.where(first < SIZE, first, tl.max(tl.where(present, offs, 0), axis=1))


@triton.jit
def _tied(target, before, each, count):
    """Return how many of `count` tokens of one weight it takes from mass `before` on to reach the target mass: at least one."""
    safe = tl.where(each > 0, each, 1).to(tl.float64)
    number = tl.ceil((target - before.to(tl.float64)) / safe).to(tl.int64)
    # The quotient may be a rounding off; what decides is the mass before the last of them, as in the reference.
    enough = (before + (number - 1) * each).to(tl.float64) >= target
    short = (before + number * each).to(tl.float64) < target
    number += tl.where(enough, -1, tl.where(short, 1, 0))
    return tl.maximum(tl.minimum(number, count), 1)


@triton.jit
def _drain(counts_ptr, masses_ptr, offs, rows):
    """Return the bins of some rows and leave zeros for the next pass."""
    mask = rows[:, None] & (offs >= 0)
    counts = tl.load(counts_ptr + offs, mask=mask, other=0)
    masses = tl.load(masses_ptr + offs, mask=mask, other=0)
    tl.store(counts_ptr + offs, tl.zeros_like(counts), mask=mask)
    tl.store(masses_ptr + offs, tl.zeros_like(masses), mask=mask)
    return counts, masses


@triton.jit
def _bin(top, last, shift, index):
    """Return the interval of the bin `index`, counted from the top of an interval."""
    bin_top = top - (index << shift)
    width = tl.full(shift.shape, 1, tl.int64) << shift
    return bin_top, tl.minimum(width - 1, bin_top - (top - last))


@triton.jit
def _walk_k(state_ptr, row, num_rows, walks, counts, masses, highest, LOW: tl.constexpr):
    """Narrow top-k's search to the bin of its last token; return the bounds of the mass it leaves, and whether they are one."""
    top = get(state_ptr, K_TOP, row, num_rows, walks)
    last = get(state_ptr, K_LAST, row, num_rows, walks)
    shift = tl.maximum(get(state_ptr, K_SHIFT, row, num_rows, walks), 0)
    left = get(state_ptr, K_LEFT, row, num_rows, walks)
    index = first_hit(tl.cumsum(counts, axis=1).to(tl.int64) >= left[:, None], counts > 0, BINS)
    earlier = tl.arange(0, BINS)[None, :] < index[:, None]
    count = at(counts, index, BINS).to(tl.int64)
    mass = at(masses, index, BINS)
    left -= tl.sum(tl.where(earlier, counts, 0), axis=1)
    above = get(state_ptr, K_ABOVE, row, num_rows, walks) + tl.sum(tl.where(earlier, masses, 0), axis=1)
    top, last = _bin(top, last, shift, index)
    rate = from_bits(get(state_ptr, RATE, row, num_rows, walks))
    lightest = fixed(weight(value_of(top - last, LOW), highest, rate))
    heaviest = fixed(weight(value_of(top, LOW), highest, rate))

    whole = left >= count
    found = walks & (whole | (last == 0))
    put(state_ptr, KEY, row, num_rows, found, top - last)
    put(state_ptr, TIES, row, num_rows, found, tl.where(whole, ALL, left))
    put(state_ptr, TIED, row, num_rows, found, count)
    total = above + tl.where(whole, mass, left * lightest)
    put(state_ptr, MASS, row, num_rows, found, total)
    put(state_ptr, K_TOP, row, num_rows, walks, top)
    put(state_ptr, K_LAST, row, num_rows, walks, tl.where(found, -1, last))
    put(state_ptr, K_SHIFT, row, num_rows, walks, bin_shift(last))
    put(state_ptr, K_LEFT, row, num_rows, walks, left)
    put(state_ptr, K_TOKENS, row, num_rows, walks, count)
    put(state_ptr, K_ABOVE, row, num_rows, walks, above)

    # The heaviest `left` of a bin's tokens weigh at least their share of it; the others at least its lightest weight each.
    share = mass.to(tl.float64) * left.to(tl.float64) / tl.maximum(count, 1).to(tl.float64)
    most = tl.minimum(mass - (count - left) * lightest, left * heaviest).to(tl.float64)
    low = above.to(tl.float64) + share * (1 - _SLACK)
    high = above.to(tl.float64) + tl.minimum(most * (1 + _SLACK), mass.to(tl.float64))
    exact = total.to(tl.float64)
    return tl.where(found, exact, low), tl.where(found, exact, high), found


@triton.jit
def _walk_p(state_ptr, row, num_rows, walks, counts, masses, highest, low, high, known, LOW: tl.constexpr):
    """Narrow top-p's search to the bins where the running mass may reach its share of the mass between low and high."""
    top = get(state_ptr, P_TOP, row, num_rows, walks)
    last = get(state_ptr, P_LAST, row, num_rows, walks)
    shift = tl.maximum(get(state_ptr, P_SHIFT, row, num_rows, walks), 0)
    top_p = get(state_ptr, TOP_P, row, num_rows, walks).to(tl.float64, bitcast=True)
    target = top_p * low
    above = get(state_ptr, P_ABOVE, row, num_rows, walks)
    running = (above[:, None] + tl.cumsum(masses, axis=1)).to(tl.float64)
    first = first_hit(running >= target[:, None], masses > 0, BINS)
    final = tl.where(known, first, first_hit(running >= (top_p * high)[:, None], masses > 0, BINS))
    offs = tl.arange(0, BINS)[None, :]
    above += tl.sum(tl.where(offs < first[:, None], masses, 0), axis=1)
    count = at(counts, first, BINS).to(tl.int64)
    tokens = tl.sum(tl.where((offs >= first[:, None]) & (offs <= final[:, None]), counts, 0), axis=1)
    first_top, _ = _bin(top, last, shift, first)
    final_top, final_last = _bin(top, last, shift, final)
    last = first_top - (final_top - final_last)

    rate = from_bits(get(state_ptr, RATE, row, num_rows, walks))
    each = fixed(weight(value_of(first_top, LOW), highest, rate))
    number = tl.where(count == 1, 1, _tied(target, above, each, count))
    found = walks & known & ((count == 1) | (last == 0))
    put(state_ptr, KEY, row, num_rows, found, first_top - last)
    put(state_ptr, TIES, row, num_rows, found, tl.where(number >= count, ALL, number))
    put(state_ptr, TIED, row, num_rows, found, count)
    kept = above + tl.where(count == 1, at(masses, first, BINS), number * each)
    put(state_ptr, MASS, row, num_rows, found, kept)
    put(state_ptr, P_TOP, row, num_rows, walks, first_top)
    put(state_ptr, P_LAST, row, num_rows, walks, tl.where(found, -1, last))
    put(state_ptr, P_SHIFT, row, num_rows, walks, bin_shift(last))
    put(state_ptr, P_ABOVE, row, num_rows, walks, above)
    put(state_ptr, P_TOKENS, row, num_rows, walks, tokens)
    put(state_ptr, P_TARGET, row, num_rows, walks, target.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["num_rows"])
def walk_kernel(
    row_max_ptr,  # [N]
    state_ptr,  # [FIELDS, N]
    counts_ptr,  # [N, SLOTS, BINS]; zeros again afterwards
    masses_ptr,  # [N, SLOTS, BINS]; zeros again afterwards
    num_rows,
    STAGE: tl.constexpr,  # as in `count_kernel`
    SLOTS: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Narrow the searches of BLOCK_S rows by what was counted."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = row < num_rows
    k_last = get(state_ptr, K_LAST, row, num_rows, mask)
    p_last = get(state_ptr, P_LAST, row, num_rows, mask)
    if STAGE == 0:
        k_open, p_open = k_last >= 0, p_last >= 0
    else:
        k_open, p_open = open_searches(state_ptr, row, num_rows, k_last, p_last)
    opened = k_open | p_open
    if STAGE == 0:  # what top-k leaves of a row without it
        total = get(state_ptr, TOTAL, row, num_rows, mask)
        put(state_ptr, MASS, row, num_rows, mask & (k_last < 0), total)
    if tl.max(opened.to(tl.int32), axis=0) > 0:
        highest = tl.load(row_max_ptr + row, mask=opened, other=0.0)
        offs = row[:, None] * (SLOTS * BINS) + tl.arange(0, BINS)[None, :]
        counts, masses = _drain(counts_ptr, masses_ptr, offs, opened)
        low, high, found = _walk_k(state_ptr, row, num_rows, k_open, counts, masses, highest, LOW)
        if STAGE == 0:
            mass = total
        else:
            mass = get(state_ptr, MASS, row, num_rows, opened)
            if SLOTS == 2:
                counts, masses = _drain(counts_ptr, masses_ptr, offs + BINS, p_open)
        known = (k_last < 0) | found
        low = tl.where(k_last < 0, mass.to(tl.float64), low)
        high = tl.where(k_last < 0, mass.to(tl.float64), high)
        _walk_p(state_ptr, row, num_rows, p_open, counts, masses, highest, low, high, known, LOW)


@triton.jit
def _last_part(state_ptr, row, num_rows, rows, counts, distance, known, by_mass, top, highest, LOW: tl.constexpr):
    """Return the bin of the last token kept, how many tokens of that bin are, and the mass kept.

    Bins are in the order of keys and, within a key, of parts: the order of the tokens themselves.
    """
    rate = from_bits(get(state_ptr, RATE, row, num_rows, rows))
    each = fixed(weight(value_of(top[:, None] - distance.to(tl.int64), LOW), highest[:, None], rate[:, None]))
    masses = counts.to(tl.int64) * each
    p_above = get(state_ptr, P_ABOVE, row, num_rows, rows)
    above = tl.where(by_mass, p_above, get(state_ptr, K_ABOVE, row, num_rows, rows))
    target = get(state_ptr, P_TARGET, row, num_rows, rows).to(tl.float64, bitcast=True)
    ties = get(state_ptr, TIES, row, num_rows, rows)
    left = tl.where(known, ties, get(state_ptr, K_LEFT, row, num_rows, rows))
    enough_mass = (above[:, None] + tl.cumsum(masses, axis=1)).to(tl.float64) >= target[:, None]
    enough = tl.where(by_mass[:, None], enough_mass, tl.cumsum(counts, axis=1) >= left[:, None])
    index = first_hit(enough, counts > 0, BINS)
    earlier = tl.arange(0, BINS)[None, :] < index[:, None]
    above += tl.sum(tl.where(earlier, masses, 0), axis=1)
    left -= tl.sum(tl.where(earlier, counts, 0), axis=1)
    weighs = at(each, index, BINS)
    number = tl.where(by_mass, _tied(target, above, weighs, at(counts, index, BINS).to(tl.int64)), left)
    return index, number, tl.where(known, get(state_ptr, MASS, row, num_rows, rows), above + number * weighs)


@triton.jit
def _least_enough(entries, there, amounts, before, target):
    """Return the first entry, in order, up to which the amounts reach a target, the last one if none does, and what they come to."""
    low = tl.zeros_like(before)
    high = tl.max(tl.where(there, entries, 0), axis=1)
    while tl.max(high - low, axis=0) > 0:
        middle = low + ((high - low) >> 1)
        sums = before + tl.sum(tl.where(there & (entries <= middle[:, None]), amounts, 0), axis=1)
        enough = sums.to(tl.float64) >= target
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    return high, before + tl.sum(tl.where(there & (entries <= high[:, None]), amounts, 0), axis=1)


@triton.jit
def _entries(entries_ptr, counts_ptr, base, rows, top, rate, highest, LOW: tl.constexpr):
    """Return the entries collected of an interval, [ROWS, BINS], which of them there are, and their masses."""
    offs = tl.arange(0, BINS)[None, :]
    there = rows[:, None] & (offs < tl.load(counts_ptr + base, mask=rows, other=0)[:, None])
    entries = tl.load(entries_ptr + base[:, None] + offs, mask=there, other=0)
    value = value_of(tl.where(there, top[:, None] - (entries >> ID_BITS), 0), LOW)
    masses = fixed(weight(value, highest[:, None], rate[:, None]))
    return entries, there, tl.where(there, masses, 0)


@triton.jit
def _last_collected(
    state_ptr, entries_ptr, counts_ptr, row, num_rows, rows, top, k_last, p_last, highest,
    SLOTS: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Return key and id of the last token kept and the mass kept, where the tokens of the intervals were collected."""
    by_mass, known = p_last >= 0, (p_last < 0) & (k_last < 0)
    rate = from_bits(get(state_ptr, RATE, row, num_rows, rows))
    base = row * (SLOTS * BINS)
    target = get(state_ptr, P_TARGET, row, num_rows, rows).to(tl.float64, bitcast=True)
    k_left = get(state_ptr, K_LEFT, row, num_rows, rows)
    k_above = get(state_ptr, K_ABOVE, row, num_rows, rows)
    if SLOTS == 2:
        both = rows & (k_last >= 0) & by_mass
        if tl.max(both.to(tl.int32), axis=0) > 0:  # what top-k leaves, of which top-p takes its share
            k_top = get(state_ptr, K_TOP, row, num_rows, both)
            entries, there, masses = _entries(entries_ptr, counts_ptr, base + BINS, both, k_top, rate, highest, LOW)
            ones, none = there.to(tl.int64), tl.zeros_like(k_left)
            last, _ = _least_enough(entries, there, ones, none, k_left.to(tl.float64))
            left = k_above + tl.sum(tl.where(entries <= last[:, None], masses, 0), axis=1)
            top_p = get(state_ptr, TOP_P, row, num_rows, both).to(tl.float64, bitcast=True)
            target = tl.where(both, top_p * left.to(tl.float64), target)
    entries, there, masses = _entries(entries_ptr, counts_ptr, base, rows, top, rate, highest, LOW)
    amounts = tl.where(by_mass[:, None], masses, there.to(tl.int64))
    before = tl.where(by_mass, get(state_ptr, P_ABOVE, row, num_rows, rows), 0)
    number = tl.where(known, get(state_ptr, TIES, row, num_rows, rows), k_left)
    target = tl.where(by_mass, target, number.to(tl.float64))
    last, mass = _least_enough(entries, there, amounts, before, target)
    counted = k_above + tl.sum(tl.where(entries <= last[:, None], masses, 0), axis=1)
    mass = tl.where(by_mass, mass, tl.where(known, get(state_ptr, MASS, row, num_rows, rows), counted))
    return top - (last >> ID_BITS), (last & IDS).to(tl.int32), mass


@triton.jit
def _nth_tie(row_ptr, stride_lv, rows, key, number, start, size, vocab_size, LOW: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the id of the `number`-th token of a key among the `size` tokens from `start`, int64, on; size and id int32."""
    value, number = value_of(key, LOW), number.to(tl.int32)
    seen = tl.zeros_like(number)
    found = tl.zeros_like(number)
    size = tl.multiple_of(tl.where(rows, size, 0), 16)
    for step in range(0, tl.max(size, axis=0), BLOCK_V):
        offs = step + tl.arange(0, BLOCK_V)
        token = tl.multiple_of(start, 16)[:, None] + offs[None, :]
        there = (offs[None, :] < size[:, None]) & (token < vocab_size)
        at = row_ptr[:, None] + token * stride_lv
        tied = there & (tl.load(at, mask=there, other=0.0).to(tl.float32) == value[:, None])
        order = seen[:, None] + tl.cumsum(tied.to(tl.int32), axis=1)
        found += tl.sum(tl.where(tied & (order == number[:, None]), token, 0), axis=1).to(tl.int32)
        seen += tl.sum(tied.to(tl.int32), axis=1)
    return found


@triton.jit
def _end_crowded(
    state_ptr, counts_ptr, logits_ptr, last_id_ptr, row, num_rows, rows, top, last, k_last, p_last, highest, key, mass,
    stride_ln, stride_lv, vocab_size, SLOTS: tl.constexpr, LOW: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return key and mass where parts were counted; where tied tokens are kept in part, read the one that holds the last of them."""
    offs = row[:, None] * (SLOTS * BINS) + tl.arange(0, BINS)[None, :]
    counts = tl.load(counts_ptr + offs, mask=rows[:, None], other=0)
    shift, size = parts(last, vocab_size)
    distance = tl.arange(0, BINS)[None, :] >> shift.to(tl.int32)[:, None]
    by_mass, known = p_last >= 0, (p_last < 0) & (k_last < 0)
    index, number, final = _last_part(
        state_ptr, row, num_rows, rows, counts, distance, known, by_mass, top, highest, LOW
    )
    step = index >> shift
    key = tl.where(rows, top - step, key)
    # Tokens of the key that are left out: of the last bin, or of later parts.
    later = (distance == step[:, None]) & (tl.arange(0, BINS)[None, :] >= index[:, None])
    split = rows & (number < tl.sum(tl.where(later, counts, 0), axis=1))
    if tl.max(split.to(tl.int32), axis=0) > 0:
        part = (index - (step << shift)).to(tl.int32)
        row_ptr = logits_ptr + row * stride_ln
        last_id = _nth_tie(
            row_ptr, stride_lv, split, key, number, part * size.to(tl.int64), size, vocab_size, LOW, BLOCK_V
        )
        tl.store(last_id_ptr + row, last_id, mask=split)
    return key, tl.where(rows, final, mass)


@triton.jit(do_not_specialize=["num_rows"])
def end_kernel(
    logits_ptr,  # [N, V]
    row_max_ptr,  # [N]
    state_ptr,  # [FIELDS, N]
    counts_ptr,  # [N, SLOTS, BINS], of the last pass
    masses_ptr,  # [N, SLOTS, BINS], likewise
    threshold_ptr,  # [N]
    last_id_ptr,  # [N]
    kept_sum_ptr,  # [N]
    stride_ln,
    stride_lv,
    num_rows,
    vocab_size,
    SLOTS: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the cutoffs of BLOCK_S rows from what the last pass collected or counted."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = row < num_rows
    searched = mask & (get(state_ptr, SEARCHED, row, num_rows, mask) == 1)
    key = get(state_ptr, KEY, row, num_rows, searched)
    if SLOTS == 0:
        mass = get(state_ptr, TOTAL, row, num_rows, searched)
    else:
        mass = get(state_ptr, MASS, row, num_rows, searched)
        top, last, k_last, p_last = last_interval(state_ptr, row, num_rows, mask)
        few = (last >= 0) & few_tokens(state_ptr, row, num_rows, k_last, p_last)
        crowded = (last >= 0) & (few == 0)
        highest = tl.load(row_max_ptr + row, mask=last >= 0, other=0.0)
        if tl.max(few.to(tl.int32), axis=0) > 0:
            last_key, last_id, final = _last_collected(
                state_ptr, masses_ptr, counts_ptr, row, num_rows, few, top, k_last, p_last, highest, SLOTS, LOW
            )
            key, mass = tl.where(few, last_key, key), tl.where(few, final, mass)
            tl.store(last_id_ptr + row, last_id, mask=few)
        if tl.max(crowded.to(tl.int32), axis=0) > 0:
            key, mass = _end_crowded(
                state_ptr, counts_ptr, logits_ptr, last_id_ptr, row, num_rows, crowded, top, last, k_last, p_last,
                highest, key, mass, stride_ln, stride_lv, vocab_size, SLOTS, LOW, BLOCK_V,
            )  # fmt: skip
    tl.store(threshold_ptr + row, value_of(key, LOW), mask=searched)
    mass = tl.minimum(mass, get(state_ptr, HEAVY, row, num_rows, searched))
    tl.store(kept_sum_ptr + row, (mass.to(tl.float64) / ONE).to(tl.float32), mask=searched)
