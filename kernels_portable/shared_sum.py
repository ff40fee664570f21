"""Sum over ranks that read each other's memory: one launch, one meeting. R ranks, B blocks, S numbers.

Each rank puts its numbers into memory that all ranks see, tells the others, waits until they have told it, and adds up
what all have put there. It needs no copy before and no launch of its own for waiting, which is what a small sum costs.

The shared memory of a rank holds two copies of `capacity` bytes, then a flag for each block and rank. Blocks meet by
number: block b of a rank waits for block b of the others, which holds the same chunk of the numbers. Per block and rank
a call has a number, counted on the device so that graphs may be replayed as often as one likes:

- Call n uses copy n % 2 of its chunk, so that a rank may go on to call n + 1 while another still reads call n.
- Call n + 2 writes over call n. Its rank has ended the launch of call n + 1, in which every other rank told it n + 1; a
  rank says that in a launch that begins after its launch of call n has ended, and so after it has read. This rests on
  launches of one stream that do not overlap.
- A flag holds the latest number that a rank has told. Numbers run on past 2^31: what counts is their difference.
- A flag is set by a release and read by an acquire, both over the whole system, with a barrier of the block's threads
  before and after: so all numbers of the chunk are there once the flag is.

A rank that waits in vain gives up after `most_polls` looks, and its sum is NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["CHUNK_BYTES", "MOST_RANKS", "POLLS", "shared_bytes", "shared_sum_"]

CHUNK_BYTES = 8192  # of a block: a row of 4096 in bfloat16
MOST_RANKS = 8
POLLS = 1 << 30  # about a quarter of an hour
_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _shared_sum_kernel(
    x_ptr, addresses_ptr, calls_ptr, num_elements, most_polls, CAPACITY: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, MOST: tl.constexpr, FLAGS: tl.constexpr, LANES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lanes = block * LANES + tl.arange(0, LANES)
    inside = lanes < num_elements
    x = tl.load(x_ptr + lanes, mask=inside, other=0.0)
    call = tl.load(calls_ptr + block) + 1
    copy = (call & 1) * CAPACITY + lanes
    own = tl.load(addresses_ptr + RANK)
    tl.store(tl.multiple_of(own.to(tl.pointer_type(KIND)), 16) + copy, x, mask=inside)
    tl.debug_barrier()  # the stores of all threads come before the flag
    flags = FLAGS + block * MOST
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32)) + flags
            tl.atomic_xchg(there + RANK, call, sem="release", scope="sys")
    has_met = True
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            here = own.to(tl.pointer_type(tl.int32)) + flags + rank
            behind = tl.atomic_add(here, 0, sem="acquire", scope="sys") - call
            polls = 0
            while (behind < 0) & (polls < most_polls):
                behind = tl.atomic_add(here, 0, sem="acquire", scope="sys") - call
                polls += 1
            has_met = has_met & (behind >= 0)
    tl.debug_barrier()  # no thread reads before all flags were seen
    total = tl.zeros((LANES,), tl.float32)
    for rank in tl.static_range(RANKS):  # in the same order on every rank: the same bits
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            there = tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(KIND)), 16)
            total += tl.load(there + copy, mask=inside, other=0.0, volatile=True).to(tl.float32)
    total = tl.where(has_met, total, float("nan"))
    tl.store(x_ptr + lanes, total.to(KIND), mask=inside)
    tl.store(calls_ptr + block, call)


def shared_bytes(capacity: int) -> int:
    """Bytes of shared memory of a rank, for tensors of up to `capacity` bytes, a multiple of `CHUNK_BYTES`."""
    return 2 * capacity + capacity // CHUNK_BYTES * MOST_RANKS * 4


def shared_sum_(
    x_S: Tensor, addresses_R: Tensor, calls_B: Tensor, *, rank: int, capacity: int, most_polls: int = POLLS
) -> None:
    """Replaces the numbers of each rank by their sum over all ranks; every rank launches it in the same order.

    Args:
        x_S: Contiguous, float32 or bfloat16, of at most `capacity` bytes; alike on all ranks.
        addresses_R: int64; where the shared memory of each rank is, as seen from here. Its flags begin as zeros.
        calls_B: int32 (capacity / CHUNK_BYTES) counts of this rank; zeros before the first call.
        rank: This one.
        capacity: See `shared_bytes`.
        most_polls: Looks at a flag after which the sum becomes NaN.
    """
    size = x_S.numel() * x_S.element_size()
    assert size <= capacity and capacity % CHUNK_BYTES == 0, (size, capacity)
    if size == 0:
        return
    _shared_sum_kernel[(triton.cdiv(size, CHUNK_BYTES),)](
        x_S,
        addresses_R,
        calls_B,
        x_S.numel(),
        most_polls,
        CAPACITY=capacity // x_S.element_size(),
        RANK=rank,
        RANKS=addresses_R.shape[0],
        MOST=MOST_RANKS,
        FLAGS=2 * capacity // 4,  # numbers of four bytes before the first
        LANES=CHUNK_BYTES // x_S.element_size(),
        KIND=_KINDS[x_S.dtype],
        num_warps=16,
    )
