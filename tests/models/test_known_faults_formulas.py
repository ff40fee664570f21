"""Formulas that other engines got wrong on one path of several: the SwiGLU limit, the routers, the shared choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.kernels import reference_kernels
from halocline.hal.formats import recipe
from halocline.hal.ops import Ops
from halocline.models.deepseek_v4.config import DeepseekV4Config
from halocline.models.deepseek_v4.make_checkpoint import RandomWeights
from halocline.models.deepseek_v4.model import DeepseekV4Model
from halocline.models.deepseek_v4.moe import MixtureOfExperts
from halocline.models.deepseek_v4.presets import PRESETS, TINY
from halocline.models.layers.routed_experts import ExpertTokens
from halocline.models.weight_source import MappingSource, Scope

CLAMPED = -99.9955  # silu(10) * -10: gate 14 and up -25 under a limit of 10
PLAIN = TINY.unquantized("float32")


def watched(names: tuple[str, ...]) -> tuple[Ops, list[tuple[str, tuple[Any, ...], dict[str, Any], Any]]]:
    """Reference kernels, of which some write down name, arguments and result of each call."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
    kernels = reference_kernels()

    def watch(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = kernel(*args, **kwargs)
            calls.append((name, args, kwargs, result))
            return result

        return run

    return Ops({n: watch(n, k) if n in names else k for n, k in kernels.items()}), calls


def build(config: DeepseekV4Config, numeric: str, ops: Ops, *, with_draft: bool = True) -> DeepseekV4Model:
    weights = MappingSource(tensors=dict(RandomWeights(config, seed=1)))
    return DeepseekV4Model(
        config, recipe(numeric), lambda layer: ops, weights, max_positions=256, with_draft=with_draft
    )


def forward(model: DeepseekV4Model, make_sequences: Any, count: int) -> Tensor:
    """Logits of one prefill, after the draft layer has run on its streams."""
    sequences = make_sequences(window_page_rows=16, page_tokens=128, capacity=256)
    plan = model.cache_plan(window_page_rows=16, page_tokens=128)
    cache = model.allocate_cache(plan, num_window_pages=16, num_token_pages=2, num_state_slots=1)
    batch = sequences.feed([torch.arange(2, 2 + count)])
    step = model.plan_step(batch, plan.geometry, reuse=None)
    with torch.no_grad():
        result = model.forward(batch, step, cache)
        if model.mtp:
            model.draft_logits(result.streams_TND, batch.token_ids_T.roll(-1), step, cache)
        return model.compute_logits(result.hidden_TD)


class TestLimit:
    """The clamp inside the expert MLP, on every path and through every constructor."""

    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_the_release_value_reaches_every_configuration(self, name: str) -> None:
        assert PRESETS[name].swiglu_limit == (0.6 if name == "tiny" else 10.0)
        assert PRESETS[name].clamp_shared_expert

    @pytest.mark.parametrize("numeric", ["float32", "recipe", "served"])
    def test_every_layer_calls_its_kernels_with_the_configured_limit(self, make_sequences: Any, numeric: str) -> None:
        """Six main layers and the draft layer: routed and shared experts, hash-routed ones among them."""
        config = PLAIN.replace(swiglu_limit=0.37)
        ops, calls = watched(("moe.experts", "moe.swiglu"))
        forward(build(config, numeric, ops), make_sequences, 5)
        assert [name for name, *_ in calls] == ["moe.experts", "moe.swiglu"] * 7
        assert {kwargs["limit"] for _, _, kwargs, _ in calls} == {0.37}

    def test_the_switch_of_the_shared_expert_reaches_it_alone(self, make_sequences: Any) -> None:
        ops, calls = watched(("moe.experts", "moe.swiglu"))
        forward(build(PLAIN.replace(clamp_shared_expert=False), "float32", ops), make_sequences, 5)
        assert {(name, kwargs["limit"]) for name, _, kwargs, _ in calls} == {("moe.experts", 0.6), ("moe.swiglu", 0.0)}

    def mixture(self, config: DeepseekV4Config, *, hashed: bool) -> MixtureOfExperts:
        """Every expert turns the first lane into gate 14 and up -25, and hands the product out in lane 0."""
        hidden, width = config.hidden_size, config.moe_intermediate_size
        tensors = {"gate.weight": torch.zeros(config.n_routed_experts, hidden)}
        if hashed:
            tensors["gate.tid2eid"] = torch.tensor([[0, 1, 2], [5, 6, 7]])
        else:
            tensors["gate.bias"] = torch.arange(config.n_routed_experts).float()
        for expert in ("shared_experts", *(f"experts.{e}" for e in range(config.n_routed_experts))):
            w1, w3, w2 = torch.zeros(width, hidden), torch.zeros(width, hidden), torch.zeros(hidden, width)
            w1[0, 0], w3[0, 0], w2[0, 0] = 14.0, -25.0, 1.0
            tensors |= {f"{expert}.w1.weight": w1, f"{expert}.w3.weight": w3, f"{expert}.w2.weight": w2}
        return MixtureOfExperts(
            config, recipe("float32"), hashed, Ops(reference_kernels()), Scope(source=MappingSource(tensors=tensors))
        )

    @pytest.mark.parametrize("hashed", [True, False])
    def test_gate_14_and_up_minus_25_on_both_paths(self, hashed: bool) -> None:
        """Three routed experts whose weights sum to 1.5, and the shared one: each gives -99.9955."""
        x_TD = torch.zeros(1, PLAIN.hidden_size)
        x_TD[0, 0] = 1.0

        def lane(**changes: Any) -> float:
            mixture = self.mixture(PLAIN.replace(**{"swiglu_limit": 10.0, **changes}), hashed=hashed)
            return float(mixture.forward(x_TD, ExpertTokens(torch.tensor([1])))[0, 0])

        assert lane() == pytest.approx(2.5 * CLAMPED, abs=2e-4)
        assert lane(clamp_shared_expert=False) == pytest.approx(1.5 * CLAMPED - 350, abs=2e-3)
        assert lane(swiglu_limit=0.0) == pytest.approx(2.5 * -350, abs=2e-3)
        assert lane(routed_scaling_factor=2.5) == pytest.approx(3.5 * CLAMPED, abs=2e-4)


class TestRouters:
    """Both kinds of layer, from hidden states to weights."""

    def route(self, logits: list[float], *, hashed: bool, bias: list[float] | None = None, chosen: int = 6) -> Any:
        """The routing of a token whose router gives these logits, by the module of the network."""
        hidden, experts = 64, len(logits)
        config = SimpleNamespace(
            num_experts_per_tok=chosen, routed_scaling_factor=1.0, swiglu_limit=10.0, clamp_shared_expert=True,
            n_routed_experts=experts, moe_intermediate_size=hidden,
        )  # fmt: skip
        gate = torch.zeros(experts, hidden)
        gate[:, 0] = torch.tensor(logits)
        tensors = {"gate.weight": gate, "gate.bias": torch.tensor(bias or [0.0] * experts)}
        tensors["gate.tid2eid"] = torch.tensor([list(range(chosen))])
        for name in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
            tensors |= {f"{name}.{part}.weight": torch.zeros(hidden, hidden) for part in ("w1", "w2", "w3")}
        module = MixtureOfExperts(
            config, recipe("recipe"), hashed, Ops(reference_kernels()), Scope(source=MappingSource(tensors=tensors))  # type: ignore[arg-type]
        )  # fmt: skip
        x_TD = torch.zeros(1, hidden, dtype=torch.bfloat16)
        x_TD[0, 0] = 1.0
        return module.route(x_TD, torch.tensor([0]))

    @pytest.mark.parametrize("hashed", [True, False])
    def test_extreme_logits(self, hashed: bool) -> None:
        equal = self.route([-20.0] * 6, hashed=hashed)
        assert equal.weights_TK[0].tolist() == pytest.approx([1 / 6] * 6, rel=1e-6)
        assert self.route([-200.0] * 6, hashed=hashed).weights_TK.isfinite().all()
        loud = self.route([100.0, 0.0, 0.0, 0.0, 0.0, 0.0], hashed=hashed)
        share = 10 / (10 + 5 * math.sqrt(math.log(2)))
        assert float(loud.weights_TK[0][loud.ids_TK[0] == 0]) == pytest.approx(share, rel=1e-5)

    def test_the_selection_is_by_root_softplus(self) -> None:
        assert self.route([4.0, 1.0], hashed=False, bias=[0.0, 0.7], chosen=1).ids_TK.tolist() == [[0]]

    def test_weights_stay_float32_until_the_combine(self, make_sequences: Any) -> None:
        """With bfloat16 activations, hash-routed layers included: float32, and no bfloat16 in disguise."""
        ops, calls = watched(("moe.experts",))
        forward(build(PLAIN, "recipe", ops), make_sequences, 9)
        assert len(calls) == 7
        for _, (_, routing, _), _, _ in calls:
            assert routing.weights_TK.dtype == torch.float32
            assert not torch.equal(routing.weights_TK, routing.weights_TK.bfloat16().float())
            torch.testing.assert_close(routing.weights_TK.sum(1), torch.full((9,), 1.5), rtol=0, atol=1e-5)

    def test_hash_layers_route_by_the_token_alone(self, make_sequences: Any) -> None:
        ops, calls = watched(("moe.route_by_hash", "moe.route_by_score"))
        model = build(PLAIN, "float32", ops)
        forward(model, make_sequences, 9)
        assert [name for name, *_ in calls] == ["moe.route_by_hash"] * 2 + ["moe.route_by_score"] * 5
        for layer in range(2):
            table_VK = model.blocks[layer].moe.table_VK
            assert table_VK is not None
            assert torch.equal(calls[layer][3].ids_TK.long(), table_VK[2:11])


class TestIndexer:
    def test_one_choice_is_shared_by_all_heads(self, make_sequences: Any) -> None:
        """Attention of a ratio-4 layer gets the indexer's selection, one list for each token."""
        ops, calls = watched(("indexer.select", "attention.sparse_prefill"))
        forward(build(PLAIN, "float32", ops, with_draft=False), make_sequences, 100)
        chosen = [result for name, _, _, result in calls if name == "indexer.select"]
        used = [args[5] for name, args, _, _ in calls if name == "attention.sparse_prefill"]
        assert len(chosen) == 2
        for selection, rows in zip(chosen, (used[1], used[3]), strict=True):
            assert torch.equal(rows.slots_TK, selection.slots_TK)
            assert rows.lengths_T.tolist() == [min((t + 1) // 4, PLAIN.index_topk) for t in range(100)]
            assert int((rows.lengths_T == PLAIN.index_topk).sum()) > 0
