r"""The order of admission, and the search along it: what the kernels of the scheduler are made of (paper 3.2.2 and 5.2).

A candidate (r, k) has the survival $\min_{j \le k} a_{r,j}$, and its rank is how many candidates stand before it: those of larger
survival, then of an earlier position, then of an earlier request. Ranks are found by counting, tile against tile, which needs no
sort however many candidates there are; up to 512 of them are sorted in registers instead, together with the search.

The sums of the search are those of an addition at a time, to the last bit, though computed by a tree: sums of multiples of 2 ** -k
that stay below 2 ** (53 - k) are exact, in any order. A survival in float32 is such a multiple down to about 2 ** -15 for 16,384
candidates. Only from the first that is not are the sums made one after another.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _in_range(a):
    """Return survivals in [0, 1], 0 for NaN."""
    positive = tl.where(a > 0, a, 0.0)  # a comparison, which is false for NaN and turns -0 into 0
    return tl.where(positive < 1, positive, 1.0)


@triton.jit
def _prefix_minima(survival_ptr, stride_ar, stride_ak, request, k, mask, block_size, COMPUTE: tl.constexpr):
    """Return min_{j <= k} a_{r,j} of each lane."""
    minima = tl.full(request.shape, 1.0, COMPUTE)
    offs = request * stride_ar
    for j in range(block_size):
        a = tl.load(survival_ptr + offs, mask=mask & (j <= k), other=1.0)
        minima = tl.minimum(minima, _in_range(a.to(COMPUTE)))
        offs += stride_ak
    return minima


RANK_INTEGERS = ("budget", "num_requests", "block_size", "stride_ar", "stride_ak")


@triton.jit(do_not_specialize=RANK_INTEGERS, do_not_specialize_on_alignment=("survival_ptr", "budget_ptr"))
def rank_kernel(
    survival_ptr,  # [R, gamma]
    sorted_ptr,  # [R gamma] contiguous, or None to admit
    ranks_ptr,  # [gamma, R] contiguous, or None
    budget_ptr,  # scalar, or None where the budget is an integer
    lengths_ptr,  # [R] contiguous, or None
    budget,
    num_requests,
    block_size,
    stride_ar,
    stride_ak,
    COMPUTE: tl.constexpr,
    OWN_R: tl.constexpr,
    OTHER_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rank the candidates of OWN_R requests among all; write each to its place in order, or count those within the budget."""
    offs_row = tl.arange(0, OWN_R * BLOCK_K)
    request = tl.program_id(0).to(tl.int64) * OWN_R + offs_row // BLOCK_K
    k = (offs_row % BLOCK_K).to(tl.int64)
    mask_row = (request < num_requests) & (k < block_size)
    own = _prefix_minima(survival_ptr, stride_ar, stride_ak, request, k, mask_row, block_size, COMPUTE)

    before = tl.zeros((OWN_R * BLOCK_K, OTHER_R), tl.int32)
    for start in range(0, num_requests, OTHER_R):
        offs_o = start + tl.arange(0, OTHER_R).to(tl.int64)
        mask_o = offs_o < num_requests
        earlier = offs_o[None, :] < request[:, None]
        other = tl.where(mask_o, 1.0, -1.0).to(
            COMPUTE
        )  # below every survival: a request that is not there precedes none
        offs = offs_o * stride_ar
        for j in range(block_size):
            a = tl.load(survival_ptr + offs, mask=mask_o, other=0.0)
            offs += stride_ak
            other = tl.minimum(other, _in_range(a.to(COMPUTE)))
            ahead = (j < k)[:, None] | ((j == k)[:, None] & earlier)
            precedes = (other[None, :] > own[:, None]) | ((other[None, :] == own[:, None]) & ahead)
            before += precedes.to(tl.int32)
    rank = tl.sum(before, axis=1).to(tl.int64)

    if sorted_ptr is not None:
        tl.store(sorted_ptr + rank, own, mask=mask_row)
    if ranks_ptr is not None:
        tl.store(ranks_ptr + k * num_requests + request, rank.to(tl.int32), mask=mask_row)
    if lengths_ptr is not None:
        limit = budget
        if budget_ptr is not None:
            limit = tl.load(budget_ptr)
        admitted = (mask_row & (own > 0) & (rank < limit)).to(tl.int32)
        length = tl.sum(tl.reshape(admitted, (OWN_R, BLOCK_K)), axis=1)
        offs_r = tl.program_id(0).to(tl.int64) * OWN_R + tl.arange(0, OWN_R)
        tl.store(lengths_ptr + offs_r, length, mask=offs_r < num_requests)


@triton.jit
def _is_multiple(x, scale):
    """Return whether x is a multiple of 1 / scale, a power of two."""
    return (x * scale).to(tl.int64).to(tl.float64) == x * scale


@triton.jit
def _running_sums(a, total, scale, count, sorted_ptr, BLOCK: tl.constexpr):
    """Return the sums before and after each of `count` terms, [BLOCK] float64, and the last; see the module.

    Terms are read again from sorted_ptr, if it is given, where they are added one at a time.
    """
    offs = tl.arange(0, BLOCK)
    inexact = (offs < count) & (_is_multiple(a, scale) == 0)
    first = tl.min(tl.where(inexact, offs, BLOCK), axis=0)
    first = tl.minimum(tl.where(_is_multiple(total, scale), first, 0), count)
    exact = tl.where(offs < first, a, 0.0)
    after = total + tl.cumsum(exact, axis=0)
    before = after - exact
    running = total + tl.sum(exact, axis=0)
    for i in range(first, count):
        here = offs == i
        before = tl.where(here, running, before)
        if sorted_ptr is not None:
            running += tl.load(sorted_ptr + i).to(tl.float64)
        else:
            running += tl.sum(tl.where(here, a, 0.0), axis=0)
        after = tl.where(here, running, after)
    return before, after, running


@triton.jit
def _throughput(tau, num_requests, sps_ptr, offs, mask):
    """Return Theta = (R + tau) SPS(R + offs) in float64; tau counts drafts alone."""
    return (num_requests + tau) * tl.load(sps_ptr + num_requests + offs, mask=mask, other=0.0)


@triton.jit
def _search(
    a,
    start,
    taken,
    best,
    total,
    num_requests,
    fitting,
    sps_ptr,
    sorted_ptr,
    scale,
    PLAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Go on through BLOCK survivals in order, float64: return how many to take, the best Theta and the sum so far.

    The plan takes the number with the largest Theta, the smallest on ties. Algorithm 1 takes all up to the first that does not raise
    Theta; it must not be asked to go on after that.
    """
    offs = tl.arange(0, BLOCK)
    candidate = (a > 0) & (start + offs < fitting)
    count = tl.sum(candidate.to(tl.int32), axis=0)
    if sorted_ptr is not None:
        sorted_ptr += start
    before, after, total = _running_sums(a, total, scale, count, sorted_ptr, BLOCK)
    theta = _throughput(after, num_requests, sps_ptr, start + offs + 1, candidate)
    if PLAN:
        theta = tl.where(candidate, theta, float("-inf"))
        largest = tl.max(theta, axis=0)
        at = tl.min(tl.where(theta == largest, offs, BLOCK), axis=0)
        better = largest > best
        taken = tl.where(better, start + at + 1, taken)
        best = tl.where(better, largest, best)
    else:
        rises = candidate & (theta > _throughput(before, num_requests, sps_ptr, start + offs, candidate))
        taken = start + tl.min(tl.where(rises, BLOCK, offs), axis=0)
    return taken, best, total


SEARCH_INTEGERS = ("num_requests", "block_size", "fitting")


@triton.jit(do_not_specialize=SEARCH_INTEGERS, do_not_specialize_on_alignment=("sps_ptr",))
def search_kernel(
    sorted_ptr,  # [R gamma] contiguous
    ranks_ptr,  # [gamma, R] contiguous, or None
    sps_ptr,  # [max_tokens + 1] float64
    lengths_ptr,  # [R] contiguous, or None to plan
    budget_ptr,  # scalar, or None
    num_requests,
    block_size,
    fitting,
    scale,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Search along the survivals in order; write how many to take, or how many of them each request has. One program."""
    PLAN: tl.constexpr = budget_ptr is not None
    taken = tl.full((), 0, tl.int32)
    total = tl.full((), 0.0, tl.float64)
    best = num_requests * tl.load(sps_ptr + num_requests)
    for start in range(0, fitting, BLOCK_N):
        if PLAN or taken == start:
            offs = start + tl.arange(0, BLOCK_N)
            a = tl.load(sorted_ptr + offs, mask=offs < fitting, other=0.0).to(tl.float64)
            taken, best, total = _search(
                a, start, taken, best, total, num_requests, fitting, sps_ptr, sorted_ptr, scale, PLAN, BLOCK_N
            )
    if PLAN:
        tl.store(budget_ptr, taken)
    else:
        for start in range(0, num_requests, BLOCK_R):
            offs_r = start + tl.arange(0, BLOCK_R).to(tl.int64)
            mask_r = offs_r < num_requests
            length = tl.zeros((BLOCK_R,), tl.int32)
            offs = offs_r
            for _ in range(block_size):
                rank = tl.load(ranks_ptr + offs, mask=mask_r, other=0)
                offs += num_requests
                length += (rank < taken).to(tl.int32)
            tl.store(lengths_ptr + offs_r, length, mask=mask_r)


SORT_INTEGERS = ("num_requests", "block_size", "fitting", "stride_ar", "stride_ak")


@triton.jit(do_not_specialize=SORT_INTEGERS, do_not_specialize_on_alignment=("survival_ptr", "sps_ptr"))
def sort_kernel(
    survival_ptr,  # [R, gamma], no float64
    sps_ptr,  # [max_tokens + 1] float64
    lengths_ptr,  # [R] contiguous, or None to plan
    budget_ptr,  # scalar, or None
    num_requests,
    block_size,
    fitting,
    stride_ar,
    stride_ak,
    scale,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sort all candidates and search along them; writes what `search_kernel` does. One program."""
    PLAN: tl.constexpr = budget_ptr is not None
    BLOCK: tl.constexpr = BLOCK_R * BLOCK_K
    offs = tl.arange(0, BLOCK)
    request = (offs // BLOCK_K).to(tl.int64)
    k = (offs % BLOCK_K).to(tl.int64)
    mask = (request < num_requests) & (k < block_size)
    a = _prefix_minima(survival_ptr, stride_ar, stride_ak, request, k, mask, block_size, tl.float32)
    # The bits of a positive float32 rise with it. No two keys are alike, so the sort need not be stable.
    key = (a.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (0x7FFFFFFF - k * num_requests - request)
    key = tl.where(mask, key, -1)
    ranked = tl.sort(key, descending=True)
    a = tl.where(ranked < 0, 0.0, (ranked >> 32).to(tl.int32).to(tl.float32, bitcast=True)).to(tl.float64)
    best = num_requests * tl.load(sps_ptr + num_requests)
    taken = tl.full((), 0, tl.int32)
    total = tl.full((), 0.0, tl.float64)
    taken, _, _ = _search(a, 0, taken, best, total, num_requests, fitting, sps_ptr, None, scale, PLAN, BLOCK)
    if PLAN:
        tl.store(budget_ptr, taken)
    else:
        last = tl.sum(tl.where(offs == taken - 1, ranked, 0), axis=0)
        admitted = (mask & (taken > 0) & (key >= last)).to(tl.int32)
        offs_r = tl.arange(0, BLOCK_R)
        length = tl.sum(tl.reshape(admitted, (BLOCK_R, BLOCK_K)), axis=1)
        tl.store(lengths_ptr + offs_r, length, mask=offs_r < num_requests)
