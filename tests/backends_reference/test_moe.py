"""Reference routers, activation and experts against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from halocline.backends_reference.moe import (
    experts_reference,
    prepare_experts_reference,
    route_by_hash_reference,
    route_by_score_reference,
    swiglu_reference,
)
from halocline.hal.errors import ShapeError
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.ops.moe import Routing
from halocline.hal.weight_codecs import quantize_weight

CLAMPED = -99.9955  # silu(10) * -10
ALL_FORMATS = ["float32", "bfloat16", "fp8_block", "mxfp4", "nvfp4"]


def plain(*values: Any) -> Weight:
    data = torch.tensor(values, dtype=torch.float32)
    return Weight(data=data, format=WeightFormat.FLOAT32, shape=tuple(data.shape))


class TestRouter:
    def by_score(self, logits: list[float], bias: list[float], chosen: int, scale: float = 1.0) -> Routing:
        return route_by_score_reference(torch.tensor([logits]), torch.tensor(bias), num_chosen=chosen, scale=scale)

    def by_hash(self, logits: list[float], chosen: list[int], scale: float = 1.0) -> Routing:
        table = torch.tensor([[0] * len(chosen), chosen])
        return route_by_hash_reference(torch.tensor([logits]), torch.tensor([1]), table, scale=scale)

    def both(self, logits: list[float]) -> list[list[float]]:
        """Weights of all experts by either router, in the order of the experts."""
        everyone = list(range(len(logits)))
        scored = self.by_score(logits, [0.0] * len(logits), len(logits))
        in_order = scored.weights_TK[0][scored.ids_TK[0].argsort()]
        return [in_order.tolist(), self.by_hash(logits, everyone).weights_TK[0].tolist()]

    def test_equal_small_logits_give_equal_weights(self) -> None:
        """exp(-20) is lost beside 1 in float32: a softplus by its formula gives 0 / 0."""
        for weights in self.both([-20.0] * 6):
            assert weights == pytest.approx([1 / 6] * 6, rel=1e-6)

    def test_vanishing_logits_give_finite_weights(self) -> None:
        for weights in self.both([-200.0] * 6):
            assert all(math.isfinite(weight) for weight in weights)

    def test_a_large_logit_scores_its_root(self) -> None:
        """sqrt(softplus(100)) = 10 and sqrt(softplus(0)) = sqrt(log 2): the weights are in that proportion."""
        for weights in self.both([100.0, 0.0]):
            assert weights[0] / weights[1] == pytest.approx(10 / math.sqrt(math.log(2)), rel=1e-5)

    def test_the_bias_selects_by_root_softplus_and_not_by_another_score(self) -> None:
        """Logits [4, 1], bias [0, 0.7]: 2.004 against 1.846. By a sigmoid it were 0.982 against 1.431."""
        assert self.by_score([4.0, 1.0], [0.0, 0.7], 1).ids_TK.tolist() == [[0]]
        assert self.by_score([4.0, 1.0], [0.0, 0.9], 1).ids_TK.tolist() == [[1]]

    def test_the_bias_never_weighs(self) -> None:
        """The chosen experts' weights are the unbiased scores over their sum, times the scale."""
        routing = self.by_score([0.0, 1.0, -1.0, 3.0], [5.0, 0.0, 6.0, 0.0], 2, scale=1.5)
        scores = {e: math.sqrt(math.log1p(math.exp(x))) for e, x in enumerate([0.0, 1.0, -1.0, 3.0])}
        assert set(routing.ids_TK[0].tolist()) == {0, 2}
        for expert, weight in zip(routing.ids_TK[0].tolist(), routing.weights_TK[0].tolist(), strict=True):
            assert weight == pytest.approx(1.5 * scores[expert] / (scores[0] + scores[2]), rel=1e-6)

    def test_the_table_selects_and_the_logits_weigh(self) -> None:
        routing = self.by_hash([100.0, 0.0, 1.0], [2, 1], scale=2.5)
        low, high = math.sqrt(math.log(2)), math.sqrt(math.log1p(math.e))
        assert routing.ids_TK.tolist() == [[2, 1]]
        assert routing.weights_TK[0].tolist() == pytest.approx(
            [2.5 * high / (low + high), 2.5 * low / (low + high)], rel=1e-6
        )

    def test_weights_are_float32_and_ids_int32(self) -> None:
        for routing in (self.by_score([1.0, 2.0], [0.0, 0.0], 1), self.by_hash([1.0, 2.0], [0])):
            assert (routing.ids_TK.dtype, routing.weights_TK.dtype) == (torch.int32, torch.float32)

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ShapeError, match=r"top 3 of logits \(1, 2\) with a bias of \(2,\)"):
            self.by_score([1.0, 2.0], [0.0, 0.0], 3)
        with pytest.raises(ShapeError, match=r"with a bias of \(3,\)"):
            self.by_score([1.0, 2.0], [0.0, 0.0, 0.0], 1)
        with pytest.raises(ShapeError, match="2 token ids for 1 rows of logits"):
            route_by_hash_reference(torch.zeros(1, 4), torch.tensor([0, 1]), torch.zeros(2, 2).int(), scale=1.0)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


class TestSwiglu:
    """The limit is applied before the product: the gate from above only, up on both sides."""

    def one(self, gate: float, up: float, limit: float) -> float:
        return float(swiglu_reference(torch.tensor([[gate, up]], dtype=torch.float32), limit=limit))

    def test_the_numbers_that_tell_the_mistakes_apart(self) -> None:
        assert self.one(14, -25, 10.0) == pytest.approx(CLAMPED, abs=5e-5)  # -10: after the product, -350: not at all
        assert self.one(-30, 10, 10.0) == pytest.approx(-2.8e-11, rel=0.01)  # -0.0045: the gate from below as well
        assert self.one(14, -25, 0.0) == pytest.approx(silu(14) * -25, rel=1e-6)

    def test_gate_lanes_come_first(self) -> None:
        found = swiglu_reference(torch.tensor([[1.0, 2.0, 30.0, 40.0]]), limit=0.0)
        assert found[0].tolist() == pytest.approx([silu(1) * 30, silu(2) * 40], rel=1e-6)

    def test_an_odd_width_is_refused(self) -> None:
        with pytest.raises(ShapeError, match="gate and up lanes together are odd: 3"):
            swiglu_reference(torch.zeros(1, 3), limit=1.0)


class TestExperts:
    @pytest.mark.parametrize("weight_format", ALL_FORMATS)
    @pytest.mark.parametrize("activation", ["none", "fp8_group128"])
    def test_the_limit_on_every_weight_path(self, weight_format: str, activation: Any) -> None:
        """Gates of 14 and ups of -25, each from two lanes in a group of scales of its own."""
        hidden, width = 128, 128
        gate_up, down = torch.zeros(2, 2 * width, hidden), torch.zeros(2, hidden, width)
        gate_up[:, :width, 0], gate_up[:, :width, 32] = 12.0, 2.0
        gate_up[:, width:, 0], gate_up[:, width:, 32] = -24.0, -1.0
        down[:, 0, 0] = 1.0
        kind = WeightFormat(weight_format)
        experts = prepare_experts_reference(
            quantize_weight(gate_up, kind), quantize_weight(down, kind), activation=activation
        )
        x_TD = torch.zeros(1, hidden)
        x_TD[0, 0], x_TD[0, 32] = 1.0, 1.0
        routing = Routing(torch.tensor([[1]], dtype=torch.int32), torch.ones(1, 1))
        found = float(experts_reference(x_TD, routing, experts, limit=10.0)[0, 0])
        without = float(experts_reference(x_TD, routing, experts, limit=0.0)[0, 0])
        if activation == "none" or weight_format in ("float32", "bfloat16"):
            assert found == pytest.approx(CLAMPED, abs=5e-5)
            # NVFP4 has one scale for the whole matrix, so its small group is not exact.
            assert without == pytest.approx(-350, rel=0.02 if weight_format == "nvfp4" else 3e-6)
        else:  # the second input is rounded: -399.98 / 4 to -384 / 4, and -350 to -352
            assert (found, without) == (-96.0, -352.0)

    def identity(self) -> Any:
        """Experts of one lane that give silu(30) * 1/30 = 1 for the input 1."""
        gate_up = plain([[30.0], [1 / 30]], [[30.0], [1 / 30]])
        return prepare_experts_reference(gate_up, plain([[1.0]], [[1.0]]), activation="none")

    def test_weights_and_scale_count_once(self) -> None:
        """Identity experts, weights 0.6 and 0.4, scale 1.5, input 1: 1.5, not 2.25."""
        # softplus(a) = 0.36 and 0.16: their roots are 0.6 and 0.4.
        logits = torch.tensor([[math.log(math.expm1(0.36)), math.log(math.expm1(0.16))]])
        routing = route_by_score_reference(logits, torch.zeros(2), num_chosen=2, scale=1.5)
        assert sorted(routing.weights_TK[0].tolist()) == pytest.approx([0.6, 0.9], rel=1e-5)
        found = experts_reference(torch.ones(1, 1), routing, self.identity(), limit=0.0)
        assert float(found) == pytest.approx(1.5, rel=1e-5)

    def test_the_weight_multiplies_before_the_rounding_of_the_second_input(self) -> None:
        """The inner value 1 is a code of E4M3, 0.7 is not: rounding before weighing would give 0.7 itself."""
        gate_up = quantize_weight(torch.tensor([[[32.0]], [[1 / 32]]]).reshape(1, 2, 1), WeightFormat.FP8_BLOCK)
        down = quantize_weight(torch.ones(1, 1, 1), WeightFormat.FP8_BLOCK)
        experts = prepare_experts_reference(gate_up, down, activation="fp8_group128")
        routing = Routing(torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 0.7))
        found = float(experts_reference(torch.ones(1, 1), routing, experts, limit=0.0))
        assert found == 0.6875  # 358.4 lies between the codes 352 and 384; 352 / 512

    def test_an_expert_of_another_rank_contributes_nothing(self) -> None:
        routing = Routing(torch.tensor([[0, -1], [-1, -1]], dtype=torch.int32), torch.tensor([[0.6, 0.4], [0.5, 0.5]]))
        found = experts_reference(torch.ones(2, 1), routing, self.identity(), limit=0.0)
        assert found.flatten().tolist() == pytest.approx([0.6, 0.0], rel=1e-5)

    def test_no_token_gives_an_empty_result(self) -> None:
        routing = Routing(torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2))
        assert experts_reference(torch.zeros(0, 1), routing, self.identity(), limit=0.0).shape == (0, 1)

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ShapeError, match=r"experts of gate and up \(1, 2, 1\) do not fit down \(1, 2, 1\)"):
            prepare_experts_reference(plain([[1.0], [1.0]]), plain([[1.0], [1.0]]), activation="none")
        routing = Routing(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
        with pytest.raises(ShapeError, match="rows of 2 lanes for experts of 1"):
            experts_reference(torch.ones(1, 2), routing, self.identity(), limit=0.0)
