"""Contracts of sparse attention over window and compressed rows, and the plan that all layers of a step share.

Shapes: T tokens, H query heads, D head width (512; the last lanes are rotary), K rows that a query may see,
G output groups, O lanes of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from halocline.hal.op import Tolerance, op
from halocline.hal.ops.gemm import prepare_linear

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.ops.batch import BatchMetadata, CacheGeometry
    from halocline.hal.ops.gemm import PreparedWeight
    from halocline.hal.ops.kv_cache import CacheHandle
    from halocline.hal.ops.rope import RopeTable

__all__ = [
    "AttentionOutput",
    "AttentionPlan",
    "PrefillLayout",
    "RowSelection",
    "output",
    "plan",
    "prepare_query",
    "sparse_decode",
    "sparse_prefill",
]

PrefillLayout = Literal["paged", "ragged"]

_ATTENTION = {
    "float32": Tolerance(atol=2e-5, rtol=1e-4, norm=1e-5, reason="float32 softmax and sums in another order"),
    "bfloat16": Tolerance(atol=2e-2, rtol=2e-2, norm=8e-3, reason="bfloat16 probabilities and result"),
}


class RowSelection(NamedTuple):
    """The rows of one cache that each query sees.

    Attributes:
        slots_TK: int32 slots in that cache; -1 is a hole and may stand anywhere.
        lengths_T: int32; entries at and behind the length are ignored, whatever they hold.
    """

    slots_TK: Tensor
    lengths_T: Tensor

    def rows(self, start: int, stop: int) -> RowSelection:
        """The same for the tokens of a range; a view."""
        return RowSelection(self.slots_TK[start:stop], self.lengths_T[start:stop])


class AttentionOutput(NamedTuple):
    """Result of attention.

    Attributes:
        out_THD: Element type of the query; still rotated in its last lanes.
        lse_TH: float32 natural log-sum-exp without the sink, or None where the kernel gives none.
    """

    out_THD: Tensor
    lse_TH: Tensor | None


@dataclass(eq=False, kw_only=True)
class AttentionPlan:
    """Everything that the attention of one step shares over layers. Opaque to models but for the counts.

    Buffers keep their address over steps of one capacity, so that eager, capture and replay read the same plan.

    Attributes:
        batch: The step.
        geometry: Sizes.
        prefill_layout: `paged` reads prefill rows through page tables with the decode kernel's arithmetic, `ragged`
            gathers them first. Decided once, by `halocline.hal.prefill_layout`.
        window_slot_mapping_T: int64 slot of each token's own window row; -1 on padding.
        window_rows: Window rows that each token sees, oldest first.
        visible: By ratio, int32 closed blocks that each token sees: (position + 1) // ratio, 0 on padding.
        all_rows: By ratio other than 4, the selection of all closed blocks.
        kernel_state: Scratch of bound kernels (schedules, split counts), by kernel name.
    """

    batch: BatchMetadata
    geometry: CacheGeometry
    prefill_layout: PrefillLayout
    window_slot_mapping_T: Tensor
    window_rows: RowSelection
    visible: dict[int, Tensor]
    all_rows: dict[int, RowSelection]
    kernel_state: dict[str, object] = field(default_factory=dict[str, object])


@op("attention")
def plan(
    batch: BatchMetadata,
    geometry: CacheGeometry,
    prefill_layout: PrefillLayout,
    *,
    reuse: AttentionPlan | None = None,
) -> AttentionPlan:
    """Computes the row selections of a step, outside graph capture.

    Args:
        batch: The step.
        geometry: Sizes.
        prefill_layout: The value decided at start-up.
        reuse: A plan of the same capacity whose buffers are refreshed in place and returned; None allocates.

    Returns:
        The plan.

    Raises:
        ShapeError: If `reuse` has another capacity.
    Numerics: whole numbers, exact.
    """
    raise NotImplementedError


@op(
    "attention",
    tolerances={
        "float32": Tolerance(atol=1e-5, rtol=1e-5, norm=1e-6, reason="float32 norm and rotation"),
        "bfloat16": Tolerance(atol=3e-2, rtol=1e-2, norm=4e-3, reason="one bfloat16 rounding"),
    },
    semantics=("rope_pairing",),
)
def prepare_query(plan: AttentionPlan, q_THD: Tensor, rope: RopeTable, *, eps: float) -> Tensor:
    """Norms each head without a gain, then rotates its last lanes at the token's position.

    Args:
        plan: Of this step; gives positions. Padding rows are left undefined.
        q_THD: (tokens, heads, head width) bfloat16 or float32.
        rope: Table of this layer's kind.
        eps: Added to the mean square.

    Returns:
        Shape and element type of `q_THD`; not scaled.

    Raises:
        ShapeError: If the table's rotary width exceeds the head width.
    Numerics: float32, cast once.
    Source: DeepSeek-V4 report.
    """
    raise NotImplementedError


@op("attention", tolerances=_ATTENTION, semantics=("sink", "cache_format", "fp8_dialect"), batch_invariant=False)
def sparse_decode(
    plan: AttentionPlan,
    q_THD: Tensor,
    window_cache: CacheHandle,
    window_rows: RowSelection,
    compressed_cache: CacheHandle | None,
    compressed_rows: RowSelection | None,
    sink_H: Tensor,
    *,
    scale: float,
) -> AttentionOutput:
    """Attends from each query to its selected cache rows, which are key and value at once, through the page table.

    Args:
        plan: Of this step; gives kernels their schedule.
        q_THD: (tokens, heads, head width), rotated, not scaled. Tokens may be any part of the step.
        window_cache: Window rows of this layer.
        window_rows: Rows seen by these tokens.
        compressed_cache: Compressed rows of this layer, or None in a ratio-0 layer.
        compressed_rows: Rows seen by these tokens, or None in a ratio-0 layer.
        sink_H: (heads,) float32 logits, natural units, unscaled; they enlarge the denominator only.
        scale: Multiplies q . row.

    Returns:
        Output and log-sum-exp. A query that sees no row gives zeros, and +inf for its log-sum-exp.

    Raises:
        ShapeError: If head width and row width differ, or only one of cache and rows is given.
    Numerics: softmax and accumulation in float32. Window and compressed rows form one softmax. A sink of -inf takes
        no share, one of +inf takes all. Rows that no query selects may hold NaN.
    Source: DeepSeek-V4 report, sparse attention; rows after FlashMLA's sparse decode.
    """
    raise NotImplementedError


@op("attention", tolerances=_ATTENTION, semantics=("sink", "cache_format", "fp8_dialect"), batch_invariant=False)
def sparse_prefill(
    plan: AttentionPlan,
    q_THD: Tensor,
    window_cache: CacheHandle,
    window_rows: RowSelection,
    compressed_cache: CacheHandle | None,
    compressed_rows: RowSelection | None,
    sink_H: Tensor,
    *,
    scale: float,
) -> AttentionOutput:
    """The same attention for many tokens of few requests; a kernel may gather rows into a workspace first.

    Args:
        plan: Of this step.
        q_THD: (tokens, heads, head width), rotated, not scaled.
        window_cache: Window rows of this layer; the rows of this step are stored already.
        window_rows: Rows seen by these tokens.
        compressed_cache: Compressed rows of this layer, or None in a ratio-0 layer.
        compressed_rows: Rows seen by these tokens, or None in a ratio-0 layer.
        sink_H: (heads,) float32 logits, natural units, unscaled.
        scale: Multiplies q . row.

    Returns:
        As `sparse_decode`.

    Raises:
        ShapeError: As `sparse_decode`.
    Numerics: As `sparse_decode`; a gathered workspace holds the rows after the round trip of the cache.
    Source: DeepSeek-V4 report; FlashMLA's sparse prefill.
    """
    raise NotImplementedError


@op(
    "attention",
    tolerances={
        "float32": Tolerance(atol=1e-4, rtol=1e-4, norm=1e-5, reason="float32 rotation and sums"),
        "bfloat16": Tolerance(
            atol=0.3, rtol=3e-2, norm=4e-2, reason="an E4M3 input rounding where the kernel has one: 0.26 on an H200"
        ),
    },
    semantics=("rope_pairing", "fp8_dialect"),
    batch_invariant=False,
    prepare=prepare_linear,
)
def output(plan: AttentionPlan, out_THD: Tensor, rope: RopeTable, wo_a: PreparedWeight, *, num_groups: int) -> Tensor:
    """Rotates the last lanes back at the query's position, then projects each group of heads.

    Args:
        plan: Of this step; gives positions.
        out_THD: (tokens, heads, head width) from attention.
        rope: Table of this layer's kind.
        wo_a: Logical shape (groups * group rank, heads / groups * head width), from this kernel's `prepare_output`.
        num_groups: Consecutive groups of heads.

    Returns:
        (tokens, groups * group rank), element type of `out_THD`.

    Raises:
        ShapeError: If heads do not divide into groups or the weight does not fit.
    Numerics: float32 rotation and accumulation. The reference keeps its input in the compute type; a kernel that
        rounds it to E4M3 per 128 lanes says so in its semantics.
    Source: DeepSeek-V4 report, grouped output projection.
    """
    raise NotImplementedError
