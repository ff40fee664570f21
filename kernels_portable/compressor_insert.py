"""Compressor: keeps projected rows, pools closed blocks into entries, and stores those in a cache.

T tokens, C projected lanes, D lanes of an entry, B rows of a request's ring, R requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from halocline.kernels_portable.hadamard import transform_row
from halocline.kernels_portable.page_rows import PageLayout, row_constants, store_rows
from halocline.kernels_portable.rotary import pair_turns, turn_pairs

__all__ = ["StepRequests", "insert_entries", "most_tokens_of_a_request"]

_CHUNK = 32  # rows that are pooled at a time


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
    """

    positions_T: Tensor
    requests_T: Tensor
    query_starts_R1: Tensor
    seqlens_R: Tensor
    state_slots_R: Tensor
    token_pages_RP: Tensor
    most_tokens: int


@triton.jit
def _pooled_entry(
    values_ptr, scores_ptr, values_stride, scores_stride, bias_ptr, state_ptr, token, position, first_token, state_slot,
    SLOT_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, SCORES: tl.constexpr, RATIO: tl.constexpr, SPAN: tl.constexpr,
    CHUNK: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, LANES_IN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Lane-wise softmax over the SPAN rows that end at `position`, times their values: float32 (LANES,).

    A row lies in this step's tensors or in the state; its address is chosen, so that it is loaded once.
    """
    lanes = tl.arange(0, LANES)[None, :]
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    weighted = tl.zeros((LANES,), tl.float32)
    for start in range(0, SPAN, CHUNK):
        place = start + tl.arange(0, CHUNK)
        back = (SPAN - 1) - place
        at = position - back
        # Where blocks overlap, the older block gives its first lanes and the younger one its second half.
        lane = lanes + tl.where(place >= RATIO, SPAN // RATIO * WIDTH - WIDTH, 0)[:, None]
        exists = (at >= 0)[:, None] & (lanes < WIDTH)
        is_new = (token - back >= first_token)[:, None]
        row = (token - back).to(tl.int64)
        kept = state_ptr + (state_slot * SLOT_STRIDE + at % RING * ROW_STRIDE)
        value_row = tl.where(is_new, (values_ptr + row * values_stride)[:, None], kept[:, None])
        score_row = tl.where(is_new, (scores_ptr + row * scores_stride)[:, None], (kept + SCORES)[:, None])
        values = tl.load(value_row + lane, mask=exists, other=0.0)
        scores = tl.load(score_row + lane, mask=exists, other=float("-inf"))
        scores += tl.load(bias_ptr + (at % RATIO)[:, None] * LANES_IN + lane, mask=exists & is_new, other=0.0)
        new_largest = tl.maximum(largest, tl.max(scores, axis=0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp(largest - base)
        shares = tl.exp(scores - base[None, :])
        total = total * shrink + tl.sum(shares, axis=0)
        weighted = weighted * shrink + tl.sum(shares * values, axis=0)
        largest = new_largest
    return weighted / tl.where(total > 0, total, 1.0)


@triton.jit
def _insert_entries_kernel(  # size: pooling and remembering share the step's bookkeeping
    values_ptr, scores_ptr, values_stride, scores_stride, bias_ptr, weight_ptr, table_ptr, positions_ptr, requests_ptr,
    starts_ptr, seqlens_ptr, state_slots_ptr, token_pages_ptr, token_pages_stride, state_ptr, pages_ptr, eps,
    POOL: tl.constexpr, REMEMBER: tl.constexpr, SLOT_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    SCORES: tl.constexpr, RATIO: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr, RING: tl.constexpr,
    LANES_IN: tl.constexpr, BLOCK_IN: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, TRANSFORM: tl.constexpr,
    FORMAT: tl.constexpr, PAGE_ROWS: tl.constexpr, PAGE_STRIDE: tl.constexpr, FNUZ: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    position = tl.load(positions_ptr + token)
    request = tl.load(requests_ptr + token)
    if (position < 0) | (request < 0):
        return
    state_slot = tl.load(state_slots_ptr + request).to(tl.int64)
    if POOL:  # noqa: SIM102 (decided at compile time)
        if (position + 1) % RATIO == 0:
            # What the end needs is asked for first, so that it is there when the rows are pooled.
            number = position // RATIO
            page = tl.load(token_pages_ptr + request.to(tl.int64) * token_pages_stride + number // PAGE_ROWS)
            lanes = tl.arange(0, LANES)[None, :]
            gain = tl.load(weight_ptr + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
            cos, sin = pair_turns(number * RATIO + tl.arange(0, 1), table_ptr, WIDTH - ROPE, ROPE, LANES)
            first_token = tl.load(starts_ptr + request)
            entry = _pooled_entry(
                values_ptr, scores_ptr, values_stride, scores_stride, bias_ptr, state_ptr, token, position,
                first_token, state_slot, SLOT_STRIDE, ROW_STRIDE, SCORES, RATIO, SPAN, CHUNK, RING, WIDTH, LANES_IN,
                LANES,
            )  # fmt: skip
            COMPUTE: tl.constexpr = tl.float32 if FORMAT == "float32" else tl.bfloat16
            row = tl.reshape(entry, (1, LANES)).to(COMPUTE).to(tl.float32)
            row = row * tl.rsqrt(tl.sum(row * row, axis=1) / WIDTH + eps)[:, None] * gain
            row = turn_pairs(row, cos, sin, False, 1, LANES).to(COMPUTE).to(tl.float32)
            if TRANSFORM:
                row = transform_row(row, LANES).to(COMPUTE).to(tl.float32)
            slot = page.to(tl.int64) * PAGE_ROWS + number % PAGE_ROWS + tl.arange(0, 1)
            store_rows(pages_ptr, slot, slot >= 0, row, WIDTH, ROPE, FORMAT, PAGE_ROWS, PAGE_STRIDE, FNUZ, 1, LANES)
    if REMEMBER:  # noqa: SIM102 (decided at compile time)
        if position >= tl.load(seqlens_ptr + request) - RING:
            lanes_in = tl.arange(0, BLOCK_IN)
            inside = lanes_in < LANES_IN
            bias = tl.load(bias_ptr + (position % RATIO) * LANES_IN + lanes_in, mask=inside, other=0.0)
            values = tl.load(values_ptr + token.to(tl.int64) * values_stride + lanes_in, mask=inside)
            scores = tl.load(scores_ptr + token.to(tl.int64) * scores_stride + lanes_in, mask=inside)
            stored = state_ptr + (state_slot * SLOT_STRIDE + position % RING * ROW_STRIDE) + lanes_in
            tl.store(stored, values, mask=inside)
            tl.store(stored + SCORES, scores + bias, mask=inside)


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
    num_warps = 4 if span * lanes <= 1024 else 8 if span <= _CHUNK else 16
    # One launch does both where no row that is still to be pooled can be overwritten by a row of this step.
    together = step.most_tokens <= ring - span + 1
    for pool, remember in [(True, True)] if together else [(True, False), (False, True)]:
        _insert_entries_kernel[(num_tokens,)](
            values_TC, scores_TC, values_TC.stride(0), scores_TC.stride(0), position_bias_RC, norm_weight_D,
            cos_sin_PR, step.positions_T, step.requests_T, step.query_starts_R1, step.seqlens_R, step.state_slots_R,
            step.token_pages_RP, step.token_pages_RP.stride(0), state_SB2C, pages, eps, POOL=pool, REMEMBER=remember,
            SLOT_STRIDE=slot_stride, ROW_STRIDE=row_stride, SCORES=scores, RATIO=ratio, SPAN=span,
            CHUNK=min(span, _CHUNK), RING=ring, LANES_IN=lanes_in, BLOCK_IN=triton.next_power_of_2(lanes_in),
            WIDTH=layout.width, ROPE=cos_sin_PR.shape[1], TRANSFORM=transform, LANES=lanes, **row_constants(layout),
            num_warps=num_warps if pool else 4,
        )  # fmt: skip


def most_tokens_of_a_request(num_tokens: int, num_decode_tokens: int, num_decode_requests: int) -> int:
    """A bound on the tokens of one request, from what the host knows of a step."""
    if num_tokens > num_decode_tokens or num_decode_requests == 0:
        return num_tokens
    return num_decode_tokens - num_decode_requests + 1
