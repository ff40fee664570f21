"""Each adapter over a stand-in of its library: names, shapes and types of the call, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from library_fakes import Calls

from halocline.hal.call_outputs import differences
from halocline.hal.formats import WeightFormat
from halocline.hal.ops import find_op
from halocline.hal.ops.moe import Routing
from halocline.hal.weight_codecs import dequantize, quantize_weight

Adapter = Callable[[str], ModuleType]
I32, F32, BF16 = torch.int32, torch.float32, torch.bfloat16
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def agree(case: Any, outputs: tuple[Any, Any]) -> None:
    """What a kernel and the reference gave is within the op's tolerance; what a kernel may leave out is set aside."""
    contract = find_op(case.op)
    assert contract is not None
    rows = differences(contract, *outputs, case.dtype)
    assert rows
    assert [row for row in rows if not row.within] == []


# ---- attention ------------------------------------------------------------------------------------------------------

TOKENSPEED = "launch_gluon_dsv4_prefill_gfx950"
ATTENTION = [
    ("attention.sparse_decode", "attention_aiter", "sparse_decode_aiter", "pa_decode_sparse"),
    ("attention.sparse_prefill", "attention_aiter", "sparse_prefill_aiter", "pa_prefill_sparse"),
    ("attention.sparse_prefill", "attention_tokenspeed", "sparse_prefill_tokenspeed", TOKENSPEED),
]


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
@pytest.mark.parametrize("row", ATTENTION, ids=lambda row: row[2])
def test_attention(
    adapter: Adapter, calls: Calls, run_case: Any, cases_of: Any, row: tuple[str, str, str, str], dialect: str
) -> None:
    """Holes, ragged lengths, both caches and neither: rows of either dialect reach the library as bfloat16."""
    op, module, name, function = row
    kernel = getattr(adapter(module), name)
    for case in cases_of(op, cache_format="fp8_block64", fp8_dialect=dialect):
        agree(case, run_case(case, **{op.replace(".", "__"): kernel}))
    assert {noted for noted, _ in calls.noted} == {function}
    for _, arguments in calls.noted:
        pool = arguments.get("unified_kv", arguments.get("kv"))
        (tokens, heads, width), element = arguments["q"]
        assert (element, pool[0][1:], pool[1]) == (BF16, (width,), BF16)
        assert arguments["attn_sink"] == ((heads,), F32)
        if function == TOKENSPEED:
            assert (arguments["indices"][0][0], arguments["indices"][1]) == (tokens, I32)
            assert arguments["lens"] == ((tokens,), I32)
        else:
            suffix = "" if function == "pa_decode_sparse" else "_prefix"
            places, starts = arguments[f"kv_indices{suffix}"], arguments[f"kv_indptr{suffix}"]
            assert (len(places[0]), places[1], places[0][0] % tokens) == (1, I32, 0)
            assert starts == ((tokens + 1,), I32)
            assert arguments["has_invalid"] is True


# ---- products and experts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fnuz", [False, True])
def test_fp8_product(
    adapter: Adapter, calls: Calls, run_case: Any, cases_of: Any, fnuz: bool, request: pytest.FixtureRequest
) -> None:
    if fnuz:
        request.getfixturevalue("on_fnuz")
    module = adapter("gemm_aiter")
    cases = cases_of("gemm.linear", weight="fp8_block", activation="fp8_group128")
    for case in cases:
        kernels = {"gemm__linear": module.linear_aiter, "gemm__prepare_linear": module.prepare_linear_aiter}
        agree(case, run_case(case, **kernels))
    assert len(calls.noted) == len(cases)
    for function, arguments in calls.noted:
        assert function == "gemm_a8w8_blockscale"
        ((rows, lanes), element), ((out, _), stored) = arguments["XQ"], arguments["WQ"]
        assert {element, stored} == {FNUZ if fnuz else FN}
        assert arguments["x_scale"] == ((rows, -(-lanes // 128)), F32)
        assert arguments["w_scale"] == ((-(-out // 128), -(-lanes // 128)), F32)
        assert arguments["dtype"] == BF16


@pytest.mark.parametrize("fnuz", [False, True])
def test_experts(adapter: Adapter, calls: Calls, fnuz: bool, request: pytest.FixtureRequest) -> None:
    if fnuz:
        request.getfixturevalue("on_fnuz")
    module = adapter("moe_aiter")
    gen = torch.Generator().manual_seed(1)
    gate_up = quantize_weight(torch.randn(4, 512, 256, generator=gen) / 16, WeightFormat.FP8_BLOCK)
    down = quantize_weight(torch.randn(4, 256, 256, generator=gen) / 16, WeightFormat.FP8_BLOCK)
    x = torch.randn(3, 256, generator=gen).bfloat16() * 4
    routing = Routing(
        torch.tensor([[0, 3], [2, 1], [3, 0]], dtype=I32), torch.tensor([[0.9, 0.6], [0.7, 0.8], [0.2, 1.3]])
    )
    weights = module.prepare_experts_aiter(gate_up, down, activation="fp8_group128")
    found = module.experts_aiter(x, routing, weights, limit=1.5)
    inner, outer = dequantize(gate_up), dequantize(down)
    expected = torch.zeros(3, 256)
    for token, (ids, shares) in enumerate(zip(*routing, strict=True)):
        for expert, share in zip(ids.tolist(), shares.tolist(), strict=True):
            gate, up = (inner[expert] @ x[token].float()).chunk(2)
            gate, up = gate.clamp_max(1.5), up.clamp(-1.5, 1.5)
            expected[token] += share * (outer[expert] @ (gate * torch.sigmoid(gate) * up))
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-2)
    ((function, arguments),) = calls.noted
    kind = FNUZ if fnuz else FN
    assert function == "fused_moe"
    assert (arguments["w1"], arguments["w2"]) == (((4, 512, 256), kind), ((4, 256, 256), kind))
    assert (arguments["w1_scale"], arguments["w2_scale"]) == (((4, 4, 2), F32), ((4, 2, 2), F32))
    assert (arguments["topk_weight"], arguments["topk_ids"]) == (((3, 2), F32), ((3, 2), I32))
    assert (arguments["activation"], arguments["quant_type"]) == ("silu", "1x128")
    assert (arguments["swiglu_limit"], arguments["doweight_stage1"]) == (1.5, False)


def test_router(adapter: Adapter, calls: Calls, run_case: Any, cases_of: Any) -> None:
    kernel = adapter("moe_aiter").route_by_score_aiter
    for case in cases_of("moe.route_by_score"):
        agree(case, run_case(case, moe__route_by_score=kernel))
    for function, arguments in calls.noted:
        (tokens, experts), element = arguments["gating_output"]
        chosen = arguments["topk_indices"][0][1]
        assert (function, element) == ("topk_gating", F32)
        assert arguments["topk_indices"] == ((tokens, chosen), I32)
        assert arguments["topk_weights"] == ((tokens, chosen), F32)
        assert arguments["correction_bias"] == ((experts,), F32)
        assert (arguments["need_renorm"], arguments["score_func"]) == (True, "sqrtsoftplus")


# ---- indexer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["ocp", "fnuz"])
def test_index_logits(adapter: Adapter, calls: Calls, run_case: Any, cases_of: Any, dialect: str) -> None:
    kernel = adapter("indexer_aiter").logits_aiter
    for case in cases_of("indexer.logits", cache_format="fp8_row", fp8_dialect=dialect):
        agree(case, run_case(case, indexer__logits=kernel))
    assert calls.noted
    for function, arguments in calls.noted:
        (tokens, one, heads, width), element = arguments["q_fp8"]
        assert (function, one, element) == ("deepgemm_fp8_paged_mqa_logits", 1, FNUZ if dialect == "fnuz" else FN)
        assert (arguments["kv_cache"][0][1:], arguments["kv_cache"][1]) == ((1, 1, width + 4), torch.uint8)
        assert arguments["weights"] == ((tokens, heads), F32)
        assert arguments["context_lens"] == ((tokens,), I32)
        entries = arguments["max_model_len"]
        assert (arguments["kv_indices"], arguments["out_logits"]) == (
            ((tokens, entries), I32),
            ((tokens, entries), F32),
        )


def test_index_selection(adapter: Adapter, calls: Calls, run_case: Any, cases_of: Any) -> None:
    kernel = adapter("indexer_aiter").select_aiter
    for case in cases_of("indexer.select"):
        agree(case, run_case(case, indexer__select=kernel))
    assert {function for function, _ in calls.noted} == {"top_k_per_row_prefill"}
    for _, arguments in calls.noted:
        rows = arguments["numRows"]
        assert arguments["rowStarts"] == arguments["rowEnds"] == ((rows,), I32)
        assert arguments["indices"] == ((rows, arguments["k"]), I32)
        assert arguments["values"] is None


# ---- streams --------------------------------------------------------------------------------------------------------


def test_streams(adapter: Adapter, calls: Calls, run_case: Any, cases_of: Any) -> None:
    module = adapter("hyper_connection_aiter")
    for op, kernel in (("read", module.read_aiter), ("write", module.write_aiter)):
        for case in cases_of(f"hyper_connection.{op}"):
            agree(case, run_case(case, **{f"hyper_connection__{op}": kernel}))
    seen = {function for function, _ in calls.noted}
    assert seen == {"mhc_pre", "mhc_post"}
    for function, arguments in calls.noted:
        (tokens, n, hidden), element = arguments["residual"]
        if function == "mhc_pre":
            assert arguments["hc_post_mult_value"] == 2.0, "post lies in (0, 2); the library's default is 1"
            assert arguments["fn"] == (((2 + n) * n, n * hidden), F32)
            assert (arguments["hc_scale"], arguments["hc_base"]) == (((3,), F32), (((2 + n) * n,), F32))
        else:
            assert (arguments["x"], arguments["out"]) == (((tokens, hidden), element), ((tokens, n, hidden), element))
            assert arguments["post_layer_mix"] == ((tokens, n, 1), F32)
            assert arguments["comb_res_mix"] == ((tokens, n, n), F32)
