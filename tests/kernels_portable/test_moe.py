"""Routing, alignment, experts in every format, activation and sum, against loops over tokens in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.hal.formats import WeightFormat
from halocline.hal.weight_codecs import dequantize, quantize_weight
from halocline.kernels_portable.expert_alignment import align_experts
from halocline.kernels_portable.expert_layer import ExpertMatrices, run_experts
from halocline.kernels_portable.expert_order import BLOCK_SIZES, order_pairs
from halocline.kernels_portable.expert_sum import sum_experts
from halocline.kernels_portable.gemm_tiles import expert_tiles
from halocline.kernels_portable.route_by_hash import route_by_hash
from halocline.kernels_portable.route_by_score import route_by_score
from halocline.kernels_portable.swiglu import swiglu
from halocline.kernels_portable.target import Target

H200 = Target(shared_memory=232448, wave_size=32, num_processors=132)
MI300X = Target(shared_memory=65536, wave_size=64, num_processors=304)


def _score(logit: float) -> float:
    return math.sqrt(math.log1p(math.exp(-abs(logit))) + max(logit, 0.0))


# ---- routers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 8, 3), (5, 256, 6), (4, 384, 6), (3, 10, 1), (0, 8, 2)])
def test_routing_by_score(tokens: int, experts: int, chosen: int) -> None:
    gen = torch.Generator().manual_seed(experts)
    wide = torch.randn(tokens, experts + 3, generator=gen) * 4
    logits, bias = wide[:, :experts], torch.randn(experts, generator=gen)
    ids, weights = route_by_score(logits, bias, num_chosen=chosen, scale=1.5)
    assert ids.shape == weights.shape == (tokens, chosen)
    for t in range(tokens):
        scores = torch.tensor([_score(float(x)) for x in logits[t]], dtype=torch.float64)
        best = (scores + bias).topk(chosen).indices
        assert ids[t].tolist() == best.tolist()
        torch.testing.assert_close(weights[t].double(), scores[best] / scores[best].sum() * 1.5, rtol=1e-5, atol=1e-7)


def test_the_score_is_neither_a_sigmoid_nor_biased_in_the_weights() -> None:
    """Logits [4, 1], bias [0, 0.7], top-1: expert 0; a sigmoid would choose expert 1."""
    ids, weights = route_by_score(torch.tensor([[4.0, 1.0]]), torch.tensor([0.0, 0.7]), num_chosen=1, scale=2.5)
    assert ids.tolist() == [[0]]
    assert weights.tolist() == [[2.5]]


@pytest.mark.parametrize("router", ["score", "hash"])
def test_extreme_logits_stay_finite_and_exact(router: str) -> None:
    for logit, scores in ((-20.0, [_score(-20.0)] * 6), (-200.0, None), (100.0, [10.0] * 6)):
        logits = torch.full((1, 6), logit)
        if router == "score":
            _, weights = route_by_score(logits, torch.zeros(6), num_chosen=6, scale=6.0)
        else:
            _, weights = route_by_hash(logits, torch.zeros(1, dtype=torch.int32), torch.arange(6)[None], scale=6.0)
        expected = torch.ones(1, 6) if scores else torch.zeros(1, 6)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    _, weights = route_by_hash(
        torch.tensor([[100.0, -20.0]]), torch.zeros(1, dtype=torch.int64), torch.arange(2)[None], scale=1.0
    )
    assert float(weights[0, 1]) == pytest.approx(_score(-20.0) / (10 + _score(-20.0)), rel=1e-5)


def test_ties_choose_distinct_experts() -> None:
    ids, weights = route_by_score(torch.zeros(2, 16), torch.zeros(16), num_chosen=6, scale=1.0)
    assert all(len(set(row)) == 6 for row in ids.tolist())
    torch.testing.assert_close(weights, torch.full((2, 6), 1 / 6))


@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 19])
def test_routing_by_hash(tokens: int, table_dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(tokens)
    table = torch.stack([torch.randperm(8, generator=gen)[:3] for _ in range(50)]).to(table_dtype)
    token_ids = torch.randint(0, 50, (tokens,), generator=gen, dtype=torch.int32)
    logits = torch.randn(tokens, 8, generator=gen) * 3
    ids, weights = route_by_hash(logits, token_ids, table, scale=2.5)
    assert torch.equal(ids, table[token_ids.long()].int())
    for t in range(tokens):
        scores = torch.tensor([_score(float(logits[t, e])) for e in ids[t]])
        torch.testing.assert_close(weights[t], scores / scores.sum() * 2.5, rtol=1e-5, atol=1e-7)


def test_hash_routing_of_padding_touches_nothing_else() -> None:
    table = torch.tensor([[1, 0], [0, 1]])
    ids, _ = route_by_hash(torch.zeros(2, 2), torch.tensor([-1, 1], dtype=torch.int32), table, scale=1.0)
    assert ids.tolist() == [[1, 0], [0, 1]]


# ---- alignment ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (37, 8), (300, 12)])
def test_alignment_is_stable_and_padded(tokens: int, experts: int, rows: int) -> None:
    ids = torch.randint(
        -1, experts - 1, (tokens, 3), generator=torch.Generator().manual_seed(tokens), dtype=torch.int32
    )
    blocks = align_experts(ids, num_experts=experts, rows=rows)
    flat, expected_pairs, expected_experts = ids.flatten().tolist(), [], []
    for e in range(experts):
        mine = [p for p, owner in enumerate(flat) if owner == e]
        mine += [-1] * (-len(mine) % rows)
        expected_pairs += mine
        expected_experts += [e] * (len(mine) // rows)
    used = len(expected_experts)
    assert blocks.experts_B.tolist() == expected_experts + [-1] * (len(blocks.experts_B) - used)
    assert blocks.pairs_N[: used * rows].tolist() == expected_pairs


@pytest.mark.parametrize(
    ("tokens", "experts"),
    [(1, 1), (5, 2), (1, 3), (2, 4), (1, 8), (21, 8), (22, 8), (37, 8), (300, 12), (600, 5), (2, 256), (40, 256)],
)
def test_order_of_pairs_is_the_stable_one(tokens: int, experts: int) -> None:
    """Pairs of other ranks have no place; the tables of blocks are those of a loop over experts."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts, (tokens, 3), generator=generator, dtype=torch.int32)
    weights = torch.rand(tokens, 3, generator=generator)
    found = order_pairs(ids, weights, num_experts=experts)
    flat = ids.flatten().tolist()
    order = [pair for expert in range(experts) for pair, owner in enumerate(flat) if owner == expert]
    missing = 3 * tokens - len(order)
    assert found.order_P.tolist() == order + [-1] * missing
    assert found.places_P.tolist() == [order.index(p) if flat[p] >= 0 else -1 for p in range(3 * tokens)]
    expected = torch.cat([weights.flatten()[order], torch.zeros(missing)])
    torch.testing.assert_close(found.weights_P, expected, atol=0, rtol=0)
    counts = [flat.count(expert) for expert in range(experts)]
    assert found.counts_E.tolist() == counts
    assert found.starts_SE[0].tolist() == [sum(counts[:e]) for e in range(experts + 1)]
    for size, rows in enumerate(BLOCK_SIZES):
        blocks = [(n << 16) + e for e in range(experts) for n in range(-(-counts[e] // rows))]
        firsts = [sum(-(-count // rows) for count in counts[:e]) for e in range(experts + 1)]
        assert found.starts_SE[size + 1].tolist() == firsts
        assert found.blocks_SB[size].tolist() == blocks + [-1] * (found.blocks_SB.shape[1] - len(blocks))
    tables = (found.starts_SE, found.blocks_SB)
    assert [table.stride(0) % 4 for table in tables] == [0, 0]


@pytest.mark.parametrize("experts", [1, 2, 3, 4])
def test_alignment_of_few_experts(experts: int) -> None:
    ids = torch.arange(21, dtype=torch.int32).view(7, 3) % (experts + 1) - 1
    blocks = align_experts(ids, num_experts=experts, rows=16)
    flat = ids.flatten().tolist()
    mine = [[pair for pair, owner in enumerate(flat) if owner == expert] for expert in range(experts)]
    used = sum(-(-len(pairs) // 16) for pairs in mine)
    assert blocks.experts_B[:used].tolist() == [e for e in range(experts) for _ in range(-(-len(mine[e]) // 16))]
    assert blocks.pairs_N[: 16 * used].tolist() == [p for m in mine for p in m + [-1] * (-len(m) % 16)]


def test_the_number_of_blocks_holds_the_worst_case() -> None:
    for tokens in range(1, 40):
        ids = torch.arange(tokens, dtype=torch.int32)[:, None] % 7
        blocks = align_experts(ids, num_experts=7, rows=16)
        needed = sum(-(-ids.flatten().tolist().count(e) // 16) for e in range(7))
        assert len(blocks.experts_B) >= needed


# ---- activation and sum -------------------------------------------------------------------------------------------


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-gate)) * up


def _fp8(x: Tensor) -> Tensor:
    groups = x.double().unflatten(-1, (-1, 128))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=float(torch.tensor(1e-4)))
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "limit"), [(1, 8, 10.0), (3, 2048, 0.6), (5, 200, 0.0), (0, 8, 1.0)])
def test_swiglu(rows: int, width: int, limit: float, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(width)) * 6).to(dtype)
    found = swiglu(x, limit=limit)
    assert found.rows_PI.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(found.rows_PI.double(), _swiglu(x, limit), rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize(("gate", "up", "expected"), [(14.0, -25.0, -99.9955), (-30.0, 10.0, -2.8e-11)])
def test_the_clamp_is_before_the_product_and_one_sided(gate: float, up: float, expected: float) -> None:
    found = swiglu(torch.tensor([[gate, up]]), limit=10.0)
    assert float(found.rows_PI[0, 0]) == pytest.approx(expected, rel=1e-2 if gate < 0 else 1e-6)


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_swiglu_weighs_skips_and_rounds(dialect: Any) -> None:
    gen = torch.Generator().manual_seed(0)
    x, weights = torch.randn(4, 512, generator=gen), torch.rand(4, generator=gen)
    ids = torch.tensor([3, -1, 0, 5], dtype=torch.int32)
    weighted = (_swiglu(x, 2.0) * weights.double()[:, None]).float()
    values = swiglu(x, limit=2.0, weights_P=weights, ids_P=ids, rounding="values").rows_PI
    codes, scales = swiglu(x, limit=2.0, weights_P=weights, ids_P=ids, rounding="codes", fp8_dialect=dialect)
    assert scales is not None
    decoded = codes.double() * scales.double().repeat_interleave(128, 1)
    kept = ids >= 0
    for found in (values.double(), decoded):
        assert (found[kept] == _fp8(weighted)[kept]).double().mean() > 0.99
        torch.testing.assert_close(found[kept], _fp8(weighted)[kept], rtol=0.13, atol=1e-6)


def test_sum_of_experts_leaves_out_other_ranks() -> None:
    y = torch.arange(24.0).view(6, 4)
    ids = torch.tensor([[0, -1], [2, 1], [-1, -1]], dtype=torch.int32)
    y[1] = torch.nan
    y[4:] = torch.nan
    found = sum_experts(y, ids, out_dtype=torch.float32)
    assert torch.equal(found, torch.stack([y[0], y[2] + y[3], torch.zeros(4)]))


def test_rows_that_lie_elsewhere_are_summed_too() -> None:
    """Rows in the order of experts; a pair without a row adds nothing, whatever lies behind the last row."""
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(6, 600, generator=generator)
    y[5] = torch.nan
    places = torch.tensor([4, 0, -1, 2, 1, 3], dtype=torch.int32)
    ids = torch.tensor([[3, 0], [-1, 1], [0, 2]], dtype=torch.int32)
    found = sum_experts(y, ids, out_dtype=torch.float32, places_P=places)
    torch.testing.assert_close(found, torch.stack([y[4] + y[0], y[2], y[1] + y[3]]), rtol=0, atol=0)


# ---- experts ------------------------------------------------------------------------------------------------------


def _matrices(
    shape: tuple[int, int, int], weight_format: WeightFormat, seed: int, dialect: str = "ocp"
) -> tuple[ExpertMatrices, Tensor]:
    """Stored experts and their float64 values, by the codecs of the weight files."""
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[2] ** 0.5
    weight = quantize_weight(plain, weight_format)
    values = dequantize(weight).double()
    if weight_format in (WeightFormat.FLOAT32, WeightFormat.BFLOAT16):
        return ExpertMatrices(format="plain", data=weight.data), values
    assert weight.scale is not None
    if weight_format is WeightFormat.FP8_BLOCK:
        scale = torch.exp2(weight.scale.float() - 127)
        if dialect == "fnuz":  # the same byte means half as much
            byte = weight.data.view(torch.uint8)
            data = torch.where(byte == 0x80, 0, byte).to(torch.uint8).view(torch.float8_e4m3fnuz)
            return ExpertMatrices(format="fp8", data=data, scale=2 * scale, fp8_dialect="fnuz"), values
        return ExpertMatrices(format="fp8", data=weight.data, scale=scale), values
    return ExpertMatrices(
        format="fp4", data=weight.data, scale=weight.scale, global_scale=weight.global_scale
    ), values  # fmt: skip


def _expected(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float, rounds: bool
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        row = _fp8(x[t : t + 1]) if rounds else x[t : t + 1].double()
        for e, w in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            if e >= 0:
                u = _swiglu(row @ gate_up[e].T, limit) * w
                u = _fp8(u.to(x.dtype)) if rounds else u
                out[t] += (u @ down[e].T)[0]
    return out


FORMATS = [WeightFormat.MXFP4, WeightFormat.NVFP4, WeightFormat.FP8_BLOCK, WeightFormat.BFLOAT16, WeightFormat.FLOAT32]


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_experts_in_every_format(weight_format: WeightFormat, dtype: torch.dtype, rounds: bool) -> None:
    if rounds and weight_format in (WeightFormat.BFLOAT16, WeightFormat.FLOAT32):
        rounds = False
    _check_experts(weight_format, dtype, rounds, tokens=9, target=H200)


@pytest.mark.parametrize("tokens", [1, 2, 15, 33])
@pytest.mark.parametrize("target", [H200, MI300X], ids=["large", "small"])
def test_every_token_count(tokens: int, target: Target) -> None:
    _check_experts(WeightFormat.MXFP4, torch.bfloat16, True, tokens=tokens, target=target)


def test_fnuz_experts_are_the_same_numbers() -> None:
    _check_experts(WeightFormat.FP8_BLOCK, torch.bfloat16, True, tokens=5, target=MI300X, dialect="fnuz")


def test_large_tiles() -> None:
    assert expert_tiles(H200, mean_rows=100, element_bytes=2, batch_invariant=False).rows == 128
    _check_experts(WeightFormat.MXFP4, torch.bfloat16, False, tokens=140, target=H200, experts=2, chosen=2)


def _check_experts(
    weight_format: WeightFormat,
    dtype: torch.dtype,
    rounds: bool,
    *,
    tokens: int,
    target: Target,
    dialect: str = "ocp",
    experts: int = 5,
    chosen: int = 3,
) -> None:
    hidden, width = 128, 128
    gate_up, gate_up_values = _matrices((experts, 2 * width, hidden), weight_format, 1, dialect)
    down, down_values = _matrices((experts, hidden, width), weight_format, 2, dialect)
    gen = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=gen).to(dtype)
    ids = torch.stack([torch.randperm(experts, generator=gen)[:chosen] for _ in range(tokens)]).int()
    ids[0, 0] = -1
    weights = torch.rand(tokens, chosen, generator=gen)
    found = run_experts(
        x, ids, weights, gate_up, down, limit=1.5, rounds_input=rounds, target=target, batch_invariant=False
    )
    expected = _expected(x, ids, weights, gate_up_values, down_values, 1.5, rounds)
    assert found.dtype == dtype
    error = (found.double() - expected).norm() / expected.norm()
    # With rounded activations a last bit may move a value to the next E4M3 step.
    assert error < (
        {torch.float32: 2e-3, torch.bfloat16: 6e-3}[dtype]
        if rounds
        else {torch.float32: 2e-6, torch.bfloat16: 6e-3}[dtype]
    )


def test_no_tokens_give_nothing() -> None:
    gate_up, _ = _matrices((2, 256, 128), WeightFormat.MXFP4, 1)
    down, _ = _matrices((2, 128, 128), WeightFormat.MXFP4, 2)
    found = run_experts(
        torch.empty(0, 128), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2), gate_up, down, limit=1.0,
        rounds_input=True, target=H200, batch_invariant=False,
    )  # fmt: skip
    assert found.shape == (0, 128)


def test_experts_without_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="lack scales"):
        ExpertMatrices(format="fp8", data=torch.empty(1, 1, 1))
