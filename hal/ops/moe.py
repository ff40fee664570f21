"""Contracts of the mixture of experts.

Shapes: T tokens, E experts, K experts chosen for a token, D hidden lanes, I expert width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from halocline.hal.op import Tolerance, op

if TYPE_CHECKING:
    from torch import Tensor

    from halocline.hal.formats import Weight

__all__ = ["PreparedExperts", "Routing", "experts", "prepare_experts", "route_by_hash", "route_by_score", "swiglu"]

_ROUTE = {
    "float32": Tolerance(atol=1e-6, rtol=1e-5, norm=1e-6, reason="float32 softplus, square root and sum"),
    "bfloat16": Tolerance(atol=1e-6, rtol=1e-5, norm=1e-6, reason="logits are float32 on every path"),
}


class Routing(NamedTuple):
    """Which experts serve a token, and how much each counts.

    Attributes:
        ids_TK: (tokens, chosen) int32 expert numbers, without repetition in a row, in any order.
        weights_TK: (tokens, chosen) float32, normalised and scaled; applied once, before the down projection.
    """

    ids_TK: Tensor
    weights_TK: Tensor


class PreparedExperts(Protocol):
    """Expert matrices in the form that the bound kernel takes; opaque to models."""

    @property
    def num_experts(self) -> int:
        """Experts held by this process."""
        ...


@op("moe", tolerances=_ROUTE, semantics=("scoring",))
def route_by_score(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> Routing:
    """Chooses the experts with the highest biased score; the bias selects and never weighs.

    Args:
        logits_TE: (tokens, experts) float32 router logits.
        bias_E: (experts,) float32 selection bias.
        num_chosen: Experts for each token.
        scale: Multiplies the normalised weights.

    Returns:
        Experts by top-k of sqrt(softplus(logits)) + bias; weights are the unbiased scores over their sum, scaled.

    Raises:
        ShapeError: If the bias has another width or there are fewer experts than `num_chosen`.
    Numerics: float32, overflow-safe softplus, the sum floored at 1e-20. No expert groups.
    Source: DeepSeek-V4 report; auxiliary-loss-free balance after DeepSeek-V3, section 2.1.2.
    """
    raise NotImplementedError


@op("moe", tolerances=_ROUTE, semantics=("scoring",))
def route_by_hash(logits_TE: Tensor, token_ids_T: Tensor, table_VK: Tensor, *, scale: float) -> Routing:
    """Chooses the experts that a table names for each token id.

    Args:
        logits_TE: (tokens, experts) float32 router logits; they weigh and never select.
        token_ids_T: (tokens,) int32 or int64 ids, each below the table's length.
        table_VK: (vocabulary, chosen) int32 or int64 expert numbers.
        scale: Multiplies the normalised weights.

    Returns:
        The table's experts; weights are sqrt(softplus(logits)) of those, over their sum, scaled.

    Raises:
        ShapeError: If token ids and logits differ in length.
    Numerics: as `route_by_score`.
    Source: DeepSeek-V4 report, hash-routed layers.
    """
    raise NotImplementedError


@op(
    "moe",
    tolerances={
        "float32": Tolerance(atol=1e-5, rtol=1e-5, norm=1e-6, reason="float32 exponential"),
        "bfloat16": Tolerance(atol=2e-2, rtol=1e-2, norm=4e-3, reason="bfloat16 input and result"),
    },
    semantics=("swiglu_clamp",),
)
def swiglu(gate_up_TI2: Tensor, *, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), for the shared expert.

    Args:
        gate_up_TI2: (tokens, 2 * width): gate lanes, then up lanes.
        limit: Clamp before the product; 0 means none.

    Returns:
        (tokens, width), element type of the input.

    Raises:
        ShapeError: If the width is odd.
    Numerics: float32, cast once. The gate is clamped from above only.
    Source: DeepSeek-V4 report.
    """
    raise NotImplementedError


@op("moe")
def prepare_experts(gate_up: Weight, down: Weight, *, activation: Literal["none", "fp8_group128"]) -> PreparedExperts:
    """Converts the experts of a layer once, at load, for `experts`.

    Args:
        gate_up: (experts, 2 * width, hidden): gate rows (w1), then up rows (w3), of each expert.
        down: (experts, hidden, width) (w2).
        activation: How inputs of both products are rounded, as for `prepare_linear`.

    Returns:
        The converted experts.

    Raises:
        ShapeError: If the two stacks do not fit each other.
    Numerics: the matrices stand for the same values before and after, up to what `experts` tolerates.
    """
    raise NotImplementedError


@op(
    "moe",
    tolerances={
        "float32": Tolerance(atol=1e-4, rtol=1e-4, norm=1e-5, reason="float32 sums in another order"),
        "bfloat16": Tolerance(atol=5e-2, rtol=3e-2, norm=8e-3, reason="bfloat16 between the two products"),
    },
    semantics=("fp8_dialect", "activation", "swiglu_clamp", "weight_before_down"),
    batch_invariant=False,
    prepare=prepare_experts,
)
def experts(x_TD: Tensor, routing: Routing, weights: PreparedExperts, *, limit: float) -> Tensor:
    """Runs the routed experts and sums what they give.

    Args:
        x_TD: (tokens, hidden) bfloat16 or float32.
        routing: From one of the two routers. An id of -1 contributes nothing (an expert of another rank).
        weights: From `prepare_experts` of the same kernel.
        limit: SwiGLU clamp; 0 means none.

    Returns:
        (tokens, hidden), element type of `x_TD`: sum over chosen experts of down(weight * swiglu(gate, up)).

    Raises:
        ShapeError: If the widths differ.
    Numerics: float32 accumulation, activation and sum over experts; the routing weight multiplies before the
        down projection and before its input is rounded. Zero tokens give an empty result.
    Source: DeepSeek-V4 report.
    """
    raise NotImplementedError
