"""Division of a batch's attention among the processors of a device, in the form that FlashMLA's decode kernel reads.

T tokens, P parts. A token's blocks of rows are numbered through, window before compressed. A part is a run of blocks
that one processor works off; a token whose blocks lie in several parts is divided, and what the parts found is joined
afterwards. Parts have equal shares of all blocks and of a cost for each token; if a share holds any token whole, no
token is divided. Everything is a count over tokens, so that nothing waits for the part before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["SplitSchedule", "split_schedule"]

_ROWS = 64  # rows of a block
_TOKEN_COST = 5  # blocks that beginning and ending a token is worth
_STEP = 32  # tokens of a step


class SplitSchedule(NamedTuple):
    """Who does what.

    Attributes:
        parts_P8: int32: first and last token of a part, first block of its first token, end of the blocks of its last
            one, number of the first token's division that this part is, and whether the first and the last token are
            divided. The first token of a part without work is T.
        divisions_T1: int32 divisions of all tokens before; of all tokens at the end.
    """

    parts_P8: Tensor
    divisions_T1: Tensor


@triton.jit
def _costs(
    lengths_ptr, other_ptr, tokens, num_tokens, HAS_OTHER: tl.constexpr, ROWS: tl.constexpr, TOKEN_COST: tl.constexpr
):
    """Blocks of each token and what the token itself costs; 0 where there is none."""
    inside = tokens < num_tokens
    length = tl.maximum(tl.load(lengths_ptr + tokens, mask=inside, other=0), 1)
    blocks = (length + (ROWS - 1)) // ROWS
    if HAS_OTHER:
        blocks += (tl.maximum(tl.load(other_ptr + tokens, mask=inside, other=0), 0) + (ROWS - 1)) // ROWS
    return tl.where(inside, blocks + TOKEN_COST, 0)


@triton.jit
def _through(values, SIZE: tl.constexpr):
    """Sums of the values up to and with each, by comparison: there are fewer values than threads."""
    place = tl.arange(0, SIZE)
    return tl.sum(tl.where(place[:, None] <= place[None, :], values[:, None], 0), axis=0)


@triton.jit
def _store_parts(out, stored, first, last, first_block, last_block, number, is_first_divided, is_last_divided):
    tl.store(out, first, mask=stored)
    tl.store(out + 1, last, mask=stored)
    tl.store(out + 2, first_block, mask=stored)
    tl.store(out + 3, last_block, mask=stored)
    tl.store(out + 4, number, mask=stored)
    tl.store(out + 5, is_first_divided.to(tl.int32), mask=stored)
    tl.store(out + 6, is_last_divided.to(tl.int32), mask=stored)
    tl.store(out + 7, number * 0, mask=stored)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["lengths_ptr", "other_ptr"])
def _split_schedule_kernel(
    lengths_ptr, other_ptr, parts_ptr, divisions_ptr, num_tokens, HAS_OTHER: tl.constexpr, PARTS: tl.constexpr,
    PART_BLOCK: tl.constexpr, ROWS: tl.constexpr, TOKEN_COST: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    all_cost = tl.zeros((), tl.int32)
    largest = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, STEP):
        tokens = start + tl.arange(0, STEP)
        cost = _costs(lengths_ptr, other_ptr, tokens, num_tokens, HAS_OTHER, ROWS, TOKEN_COST)
        all_cost += tl.sum(cost, axis=0)
        largest = tl.maximum(largest, tl.max(cost, axis=0))
    share = (all_cost + (PARTS - 1)) // PARTS
    whole = largest <= share + TOKEN_COST
    part = tl.arange(0, PART_BLOCK)
    low, high = part * share, (part + 1) * share
    first = tl.zeros((PART_BLOCK,), tl.int32)
    first_begin = tl.full((PART_BLOCK,), 2147483647, tl.int32)
    first_part = tl.full((PART_BLOCK,), 2147483647, tl.int32)
    last = tl.full((PART_BLOCK,), -1, tl.int32)
    last_begin = tl.zeros((PART_BLOCK,), tl.int32)
    last_end = tl.zeros((PART_BLOCK,), tl.int32)
    before = tl.zeros((), tl.int32)
    divided = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, STEP):
        tokens = start + tl.arange(0, STEP)
        inside = tokens < num_tokens
        cost = _costs(lengths_ptr, other_ptr, tokens, num_tokens, HAS_OTHER, ROWS, TOKEN_COST)
        end = before + _through(cost, STEP)
        begin = end - cost + TOKEN_COST  # of the blocks: the cost of the token itself lies before them
        key_low = tl.where(whole, end - cost + 1, end)  # a token is behind a part's beginning if this is
        key_high = tl.where(whole, end - cost, begin)
        passed = inside[None, :] & (key_low[None, :] <= low[:, None])
        reached = inside[None, :] & (key_high[None, :] < high[:, None])
        ahead = inside[None, :] & (key_low[None, :] > low[:, None])
        its_part = begin // share
        first += tl.sum(passed.to(tl.int32), axis=1)
        first_begin = tl.minimum(first_begin, tl.min(tl.where(ahead, begin[None, :], 2147483647), axis=1))
        first_part = tl.minimum(first_part, tl.min(tl.where(ahead, its_part[None, :], 2147483647), axis=1))
        last += tl.sum(reached.to(tl.int32), axis=1)
        last_begin = tl.maximum(last_begin, tl.max(tl.where(reached, begin[None, :], 0), axis=1))
        last_end = tl.maximum(last_end, tl.max(tl.where(reached, end[None, :], 0), axis=1))
        count = tl.where(whole, 1, (end - 1) // share - its_part + 1)
        count = tl.where(inside, count, 0)
        through = divided + _through(count, STEP)
        tl.store(divisions_ptr + tokens, through - count, mask=inside)
        before += tl.sum(cost, axis=0)
        divided += tl.sum(count, axis=0)
    tl.store(divisions_ptr + num_tokens, divided)
    first_block = tl.where(whole, 0, tl.maximum(low - first_begin, 0))
    last_block = tl.where(whole, last_end, tl.minimum(last_end, high)) - last_begin
    number = tl.where(whole, 0, part - first_part)
    is_first = first_block > 0
    is_last = last_block < last_end - last_begin
    either = (first == last) & (is_first | is_last)
    begin = tl.where(first <= last, first, num_tokens)
    out, stored = parts_ptr + part * 8, part < PARTS
    _store_parts(out, stored, begin, last, first_block, last_block, number, is_first | either, is_last | either)


def split_schedule(lengths_T: Tensor, other_lengths_T: Tensor | None, *, num_parts: int) -> SplitSchedule:
    """Divides a batch.

    Args:
        lengths_T: int32 window rows that each token sees; a token that sees none has one block all the same.
        other_lengths_T: int32 compressed rows that each token sees, or None.
        num_parts: Processors.
    """
    num_tokens, device = lengths_T.shape[0], lengths_T.device
    parts = torch.empty((num_parts, 8), dtype=torch.int32, device=device)
    divisions = torch.empty((num_tokens + 1,), dtype=torch.int32, device=device)
    _split_schedule_kernel[(1,)](
        lengths_T, lengths_T if other_lengths_T is None else other_lengths_T, parts, divisions, num_tokens,
        HAS_OTHER=other_lengths_T is not None, PARTS=num_parts, PART_BLOCK=triton.next_power_of_2(num_parts),
        ROWS=_ROWS, TOKEN_COST=_TOKEN_COST, STEP=_STEP, num_warps=8,
    )  # fmt: skip
    return SplitSchedule(parts, divisions)
