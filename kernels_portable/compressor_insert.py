"""Compressor: keeps projected rows, pools closed blocks into entries, and stores those in a cache.

T tokens, C projected lanes, D lanes of an entry, B rows of a request's ring, R requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.hadamard import transform_row
from halocline.kernels_portable.page_rows import PageLayout, row_constants, store_rows
from halocline.kernels_portable.rotary import pair_turns, turn_pairs

__all__ = ["MOST_ARRIVALS", "StepRequests", "insert_entries", "most_tokens_of_a_request", "shares_blocks"]

MOST_ARRIVALS = 256  # tokens of a step whose blocks several programs may share
_CHUNK = 32  # rows that one program pools at a time where it pools all lanes
_OF_STEP = [
    "positions_ptr", "requests_ptr", "starts_ptr", "seqlens_ptr", "state_slots_ptr", "token_pages_ptr", "arrivals_ptr",
]  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class StepRequests:
    """What the kernel must know of a step; tensors of the batch.

    Attributes:
        positions_T: int32 positions; -1 on padding.
        requests_T: int32 request of each token; -1 on padding.
        query_starts_R1: int32 first token of each request.
        seqlens_R: int32 tokens of each request after this step.
        state_slots_R: int32 row of each request in the state.
        token_pages_RP: int32 pages; -1 where there is none.
        most_tokens: A bound on the tokens that one request brings in this step.
        arrivals_T: int32 zeros for `shares_blocks`, MOST_ARRIVALS of them, which are zeros again afterwards. None
            where the arrival of one thread does not vouch for the stores of its whole program: blocks are not shared.
    """

    positions_T: Tensor
    requests_T: Tensor
    query_starts_R1: Tensor
    seqlens_R: Tensor
    state_slots_R: Tensor
    token_pages_RP: Tensor
    most_tokens: int
    arrivals_T: Tensor | None = None


class _Tile(NamedTuple):
    """What a program pools: `block` lanes, `chunk` rows at a time."""

    block: int
    chunk: int
    num_warps: int


def shares_blocks(num_tokens: int, span: int) -> bool:
    """Whether a step has so few tokens that programs should share the lanes of a block: one reads too slowly."""
    return span > _CHUNK and num_tokens <= MOST_ARRIVALS


def _tile(num_tokens: int, lanes: int, span: int, is_shared: bool) -> _Tile:
    """A tile that registers can hold; the fewer tokens, the more programs share a block."""
    if not is_shared:
        return _Tile(lanes, min(span, _CHUNK), 4 if span * lanes <= 1024 else 8 if span <= _CHUNK else 16)
    block = min(lanes, 32 if num_tokens <= 32 else 128)
    return _Tile(block, min(span, 4096 // block), 8)


def _are_aligned(*tensors: Tensor) -> bool:
    """Whether every row of float32 lanes begins at a multiple of 16 bytes."""
    return all(t.data_ptr() % 16 == 0 and all(stride % 4 == 0 for stride in t.stride()[:-1]) for t in tensors)


@triton.jit
def _pooled_lanes(
    values_ptr, scores_ptr, values_stride, scores_stride, bias_ptr, state_ptr, token, position, first_token, state_slot,
    first_lane, SLOT_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, SCORES: tl.constexpr, RATIO: tl.constexpr,
    SPAN: tl.constexpr, CHUNK: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, LANES_IN: tl.constexpr,
    ALIGNED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Lane-wise softmax over the SPAN rows that end at `position`, times their values: float32 (LANES,).

    A row lies in this step's tensors or in the state; its address is chosen, so that it is loaded once.
    """
    lanes = first_lane + tl.arange(0, LANES)[None, :]
    inside = lanes < WIDTH
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    for start in range(0, SPAN, CHUNK):
        place = start + tl.arange(0, CHUNK)
        back = (SPAN - 1) - place
        at = position - back
        # Where blocks overlap, the older block gives its first lanes and the younger one its second half.
        half = tl.where(place >= RATIO, SPAN // RATIO * WIDTH - WIDTH, 0)
        exists = (at >= 0)[:, None] & inside
        is_new = token - back >= first_token
        row = (token - back).to(tl.int64)
        kept = state_ptr + (state_slot * SLOT_STRIDE + at % RING * ROW_STRIDE)
        value_row = (tl.where(is_new, values_ptr + row * values_stride, kept) + half)[:, None]
        score_row = (tl.where(is_new, scores_ptr + row * scores_stride, kept + SCORES) + half)[:, None]
        bias_row = (at % RATIO * LANES_IN + half)[:, None]
        if ALIGNED:  # of two that are aligned, the compiler does not see that the chosen one is
            value_row = tl.multiple_of(value_row, (1, 16))
            score_row = tl.multiple_of(score_row, (1, 16))
            bias_row = tl.multiple_of(bias_row, (1, 4))
        values = tl.load(value_row + lanes, mask=exists, other=0.0)
        scores = tl.load(score_row + lanes, mask=exists, other=float("-inf"))
        scores += tl.load(bias_ptr + (bias_row + lanes), mask=exists & is_new[:, None], other=0.0)
        new_largest = tl.maximum(largest, tl.max(scores, axis=0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp(largest - base)
        shares = tl.exp(scores - base[None, :])
        total = total * shrink + tl.sum(shares, axis=0)
        weighted = weighted * shrink + tl.sum(shares * values, axis=0)
        largest = new_largest
    return weighted / tl.where(total > 0, total, 1.0)


@triton.jit
def _is_last(arrivals_ptr, NUM: tl.constexpr):
    """Whether NUM - 1 programs came here before this one, which then sees what they stored; leaves the count at 0."""
    tl.debug_barrier()  # the stores of all threads of this program come before its arrival
    is_last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == NUM - 1
    if is_last:
        tl.store(arrivals_ptr, 0)
    return is_last


@triton.jit
def _store_entry(
    pooled, gain, cos, sin, page, number, pages_ptr, eps, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    TRANSFORM: tl.constexpr, FORMAT: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    FNUZ: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Norms, rotates and transforms a pooled float32 row (1, LANES), and stores it as entry `number` of a request."""
    COMPUTE: tl.constexpr = tl.float32 if FORMAT == "float32" else tl.bfloat16
    row = pooled.to(COMPUTE).to(tl.float32)
    row = row * tl.rsqrt(tl.sum(row * row, axis=1) / WIDTH + eps)[:, None] * gain
    row = turn_pairs(row, cos, sin, False, 1, LANES).to(COMPUTE).to(tl.float32)
    if TRANSFORM:
        row = transform_row(row, LANES).to(COMPUTE).to(tl.float32)
    slot = page.to(tl.int64) * PAGE_ROWS + number % PAGE_ROWS + tl.arange(0, 1)
    store_rows(pages_ptr, slot, slot >= 0, row, WIDTH, ROPE, FORMAT, PAGE_ROWS, PAGE_STRIDE, FNUZ, 1, LANES)


@triton.jit(do_not_specialize=["remember"], do_not_specialize_on_alignment=_OF_STEP)
def _insert_entries_kernel(  # size: pooling and remembering share the step's bookkeeping
    values_ptr, scores_ptr, values_stride, scores_stride, bias_ptr, weight_ptr, table_ptr, positions_ptr, requests_ptr,
    starts_ptr, seqlens_ptr, state_slots_ptr, token_pages_ptr, token_pages_stride, state_ptr, pages_ptr, pooled_ptr,
    arrivals_ptr, eps, remember, POOL: tl.constexpr, SLOT_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    SCORES: tl.constexpr, RATIO: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr, RING: tl.constexpr,
    LANES_IN: tl.constexpr, BLOCK_IN: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, TRANSFORM: tl.constexpr,
    FORMAT: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    part = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    request = tl.load(requests_ptr + token)
    if (position < 0) | (request < 0):
        return
    state_slot = tl.load(state_slots_ptr + request).to(tl.int64)
    is_late = position >= tl.load(seqlens_ptr + request) - RING
    closes = (position + 1) % RATIO == 0
    if POOL:
        # What the end needs is asked for first, so that it is there when the rows are pooled.
        number = position // RATIO
        page = tl.load(token_pages_ptr + request.to(tl.int64) * token_pages_stride + number // PAGE_ROWS)
        lanes = tl.arange(0, LANES)[None, :]
        gain = tl.load(weight_ptr + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
        cos, sin = pair_turns(number * RATIO + tl.arange(0, 1), table_ptr, WIDTH - ROPE, ROPE, LANES)
        pooled = tl.zeros((BLOCK,), tl.float32)
        if closes:
            pooled = _pooled_lanes(
                values_ptr, scores_ptr, values_stride, scores_stride, bias_ptr, state_ptr, token, position,
                tl.load(starts_ptr + request), state_slot, part * BLOCK, SLOT_STRIDE, ROW_STRIDE, SCORES, RATIO, SPAN,
                CHUNK, RING, WIDTH, LANES_IN, ALIGNED, BLOCK,
            )  # fmt: skip
    lanes_in = part * BLOCK_IN + tl.arange(0, BLOCK_IN)
    is_kept = lanes_in < tl.where(is_late & (remember != 0), LANES_IN, 0)
    bias = tl.load(bias_ptr + (position % RATIO) * LANES_IN + lanes_in, mask=is_kept, other=0.0)
    own_values = tl.load(values_ptr + token.to(tl.int64) * values_stride + lanes_in, mask=is_kept)
    own_scores = tl.load(scores_ptr + token.to(tl.int64) * scores_stride + lanes_in, mask=is_kept)
    if POOL:  # noqa: SIM102 (decided at compile time)
        if closes:
            if PARTS == 1:
                _store_entry(
                    tl.reshape(pooled, (1, LANES)), gain, cos, sin, page, number, pages_ptr, eps, WIDTH, ROPE,
                    TRANSFORM, FORMAT, PAGE_ROWS, PAGE_STRIDE, FNUZ, LANES,
                )  # fmt: skip
            else:
                own = part * BLOCK + tl.arange(0, BLOCK)
                tl.store(pooled_ptr + token * WIDTH + own, pooled, mask=own < WIDTH)
                if _is_last(arrivals_ptr + token, PARTS):
                    whole = tl.load(pooled_ptr + token * WIDTH + lanes, mask=lanes < WIDTH, cache_modifier=".cg")
                    _store_entry(
                        whole, gain, cos, sin, page, number, pages_ptr, eps, WIDTH, ROPE, TRANSFORM, FORMAT,
                        PAGE_ROWS, PAGE_STRIDE, FNUZ, LANES,
                    )  # fmt: skip
    stored = state_ptr + (state_slot * SLOT_STRIDE + position % RING * ROW_STRIDE) + lanes_in
    tl.store(stored, own_values, mask=is_kept)
    tl.store(stored + SCORES, own_scores + bias, mask=is_kept)


def insert_entries(
    step: StepRequests,
    values_TC: Tensor,
    scores_TC: Tensor,
    position_bias_RC: Tensor,
    norm_weight_D: Tensor,
    cos_sin_PR: Tensor,
    state_SB2C: Tensor,
    pages: Tensor,
    layout: PageLayout,
    *,
    ratio: int,
    transform: bool,
    eps: float,
) -> None:
    """Feeds the tokens of a step and stores every entry whose block they close.

    Args:
        step: Positions, requests and pages.
        values_TC: (tokens, lanes) float32, lanes contiguous.
        scores_TC: (tokens, lanes) float32 without the position bias, lanes contiguous.
        position_bias_RC: (ratio, lanes) float32.
        norm_weight_D: (width,) gain.
        cos_sin_PR: (positions, rotary lanes) float32 table.
        state_SB2C: float32 (slots, ring rows, 2, lanes), refreshed in place: values, then scores with the bias.
            Its lanes may be some of a wider buffer's.
        pages: uint8 pages, written in place.
        layout: Of the pages.
        ratio: Tokens of a block; blocks overlap where the projected lanes are twice the width.
        transform: Whether entries are index keys, stored as their Walsh-Hadamard transform.
        eps: Added to the mean square.
    """
    num_tokens, lanes_in = values_TC.shape
    if not num_tokens:
        return
    span = ratio * (lanes_in // layout.width)
    ring = state_SB2C.shape[1]
    lanes = max(64, triton.next_power_of_2(layout.width))
    if transform and lanes != layout.width:
        raise ValueError(f"a Walsh-Hadamard transform of {layout.width} lanes: a power of two from 64 is needed")
    slot_stride, row_stride, scores, lane_stride = state_SB2C.stride()
    if lane_stride != 1:
        raise ValueError(f"state of strides {state_SB2C.stride()}: lanes must be contiguous")
    arrivals_T = step.arrivals_T if shares_blocks(num_tokens, span) else None
    pooled = None
    if arrivals_T is not None:
        pooled = torch.empty((num_tokens, layout.width), dtype=torch.float32, device=values_TC.device)
    # One launch does both where no row that is still to be pooled can be overwritten by a row of this step.
    together = step.most_tokens <= ring - span + 1
    for pool, remember in [(True, True)] if together else [(True, False), (False, True)]:
        tile = _tile(num_tokens, lanes, span, pool and pooled is not None)
        parts = triton.cdiv(layout.width, tile.block)
        _insert_entries_kernel[(num_tokens, parts)](
            values_TC, scores_TC, values_TC.stride(0), scores_TC.stride(0), position_bias_RC, norm_weight_D,
            cos_sin_PR, step.positions_T, step.requests_T, step.query_starts_R1, step.seqlens_R, step.state_slots_R,
            step.token_pages_RP, step.token_pages_RP.stride(0), state_SB2C, pages, pooled, arrivals_T, eps,
            int(remember), POOL=pool, SLOT_STRIDE=slot_stride, ROW_STRIDE=row_stride, SCORES=scores, RATIO=ratio,
            SPAN=span, CHUNK=tile.chunk, RING=ring, LANES_IN=lanes_in,
            BLOCK_IN=triton.next_power_of_2(triton.cdiv(lanes_in, parts)), WIDTH=layout.width,
            ROPE=cos_sin_PR.shape[1], TRANSFORM=transform, LANES=lanes, BLOCK=tile.block, PARTS=parts,
            ALIGNED=_are_aligned(values_TC, scores_TC, position_bias_RC, state_SB2C), **row_constants(layout),
            num_warps=tile.num_warps if pool else 4,
        )  # fmt: skip


def most_tokens_of_a_request(num_tokens: int, num_decode_tokens: int, num_decode_requests: int) -> int:
    """A bound on the tokens of one request, from what the host knows of a step."""
    if num_tokens > num_decode_tokens or num_decode_requests == 0:
        return num_tokens
    return num_decode_tokens - num_decode_requests + 1
