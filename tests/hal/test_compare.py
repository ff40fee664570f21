"""Comparison of two kernels on one op: what it returns, records, refuses and writes down."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halocline.backends_reference.gemm import linear_reference, prepare_linear_reference
from halocline.backends_reference.kv_cache import allocate_reference, read_rows_reference, write_rows_reference
from halocline.backends_reference.norm import rms_norm_reference
from halocline.hal.call_outputs import differences
from halocline.hal.compare import Comparison, Named
from halocline.hal.errors import InputError
from halocline.hal.formats import RowFormat, Weight, WeightFormat, cache_layout
from halocline.hal.ops import find_op
from halocline.hal.ops.attention import AttentionOutput, RowSelection
from halocline.hal.ops.kv_cache import CacheHandle
from halocline.hal.ops.moe import Routing
from halocline.hal.record import dtype_of, replay

Kernel = Callable[..., Any]
NORM = find_op("norm.rms_norm")
assert NORM is not None


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return Comparison(tmp_path / "dumps", capturing=lambda: False)


def pair(comparison: Comparison, op: str, first: Kernel, second: Kernel, *, layer: int | None = 3) -> Kernel:
    contract = find_op(op)
    assert contract is not None
    return comparison.kernel(
        contract, layer, Named(name="first", run=first), Named(name="second", run=second), read_rows_reference
    )


def off_by(amount: float) -> Kernel:
    def kernel(x_TD: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
        result = rms_norm_reference(x_TD, weight_D, eps=eps)
        result[0, 0] += amount
        return result

    return kernel


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_first_kernels_result_is_returned(comparison: Comparison) -> None:
    x, gain = normal(4, 8), normal(8)
    result = pair(comparison, "norm.rms_norm", off_by(0.5), rms_norm_reference)(x, gain, eps=1e-6)
    expected = rms_norm_reference(x, gain, eps=1e-6)
    assert float((result - expected).abs().max()) == pytest.approx(0.5)


def test_errors_are_measured_by_output_layer_and_step(comparison: Comparison) -> None:
    kernel = pair(comparison, "norm.rms_norm", off_by(0.5), rms_norm_reference)
    comparison.step = 7
    x, gain = normal(4, 8), torch.ones(8)
    kernel(x, gain, eps=1e-6)
    (call,) = comparison.diverged
    assert (call.op, call.layer, call.step, call.first, call.second) == ("norm.rms_norm", 3, 7, "first", "second")
    (output,) = call.outputs
    expected = rms_norm_reference(x, gain, eps=1e-6).double()
    given = expected.clone()
    given[0, 0] += 0.5
    assert output.output == "out"
    assert output.max_abs == pytest.approx(0.5, rel=1e-5)
    assert output.max_rel == pytest.approx(0.5 / abs(float(expected[0, 0])), rel=1e-5)
    cosine = torch.nn.functional.cosine_similarity(given.flatten(), expected.flatten(), dim=0)
    assert output.cosine == pytest.approx(float(cosine), abs=1e-7)
    assert output.norm == pytest.approx(0.5 / float(expected.norm()), rel=1e-5)
    assert output.within is False


def test_an_equal_kernel_and_one_within_tolerance_do_not_diverge(comparison: Comparison) -> None:
    for amount in (0.0, 5e-6):
        pair(comparison, "norm.rms_norm", off_by(amount), rms_norm_reference)(normal(64, 64), torch.ones(64), eps=1e-6)
    assert comparison.diverged == []
    assert comparison.num_calls == 2
    assert comparison.worst["norm.rms_norm", 3].largest.max_abs == pytest.approx(5e-6, rel=0.2)


def test_the_inputs_of_the_first_divergence_are_written_and_replayed(
    comparison: Comparison, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = pair(comparison, "norm.rms_norm", off_by(0.5), rms_norm_reference)
    for seed in (1, 2):
        kernel(normal(4, 8, seed=seed), normal(8), eps=1e-6)
    first, second = comparison.diverged
    assert first.dump is not None
    assert second.dump is None
    assert "norm.rms_norm differs in layer 3, step 0" in caplog.text
    call, (good,) = replay(first.dump, rms_norm_reference)
    assert torch.equal(call.arguments["x_TD"], normal(4, 8, seed=1))
    assert (good.within, good.max_abs) == (True, 0.0)
    _, (bad,) = replay(first.dump, off_by(0.5))
    assert bad.within is False
    assert bad.max_abs == pytest.approx(0.5)


def test_not_a_number_on_one_side_is_infinitely_wrong(comparison: Comparison) -> None:
    pair(comparison, "norm.rms_norm", off_by(math.nan), rms_norm_reference)(normal(4, 8), torch.ones(8), eps=1e-6)
    assert comparison.diverged[0].largest.max_abs == math.inf


def test_infinities_at_the_same_places_are_equal_and_of_other_signs_are_not() -> None:
    assert NORM is not None
    a = torch.tensor([1.0, math.inf, -math.inf])
    (same,) = differences(NORM, {"out": a}, {"out": a.clone()}, "float32")
    assert (same.within, same.max_abs) == (True, 0.0)
    (other,) = differences(NORM, {"out": a}, {"out": torch.tensor([1.0, -math.inf, -math.inf])}, "float32")
    assert other.within is False


# ---- ops that write ---------------------------------------------------------------------------------------------


def cache_of(pages: int = 4) -> Any:
    layout = cache_layout("latent", RowFormat.FP8_BLOCK64, width=192, rope_width=64, page_rows=4)
    return allocate_reference(layout, pages, device="cpu")


def halved(cache: Any, slots_N: Tensor, rows_ND: Tensor) -> None:
    """A planted fault: the scales come out half as large."""
    write_rows_reference(cache, slots_N, rows_ND * 0.5)


def test_a_written_cache_is_compared_by_value_and_written_once(comparison: Comparison) -> None:
    cache, rows, slots = cache_of(), normal(3, 192), torch.tensor([1, 6, -1])
    pair(comparison, "kv_cache.write_rows", halved, write_rows_reference)(cache, slots, rows)
    (call,) = comparison.diverged
    (output,) = call.outputs
    assert output.output == "cache.rows"
    assert output.max_abs == pytest.approx(float(rows[:2].abs().max()) / 2, rel=0.2)
    written = read_rows_reference(cache, torch.tensor([1]))
    assert torch.allclose(written, rows[:1] * 0.5, atol=0.1), "the first kernel's bytes must be the ones that stay"


def test_the_second_kernel_does_not_touch_the_cache(comparison: Comparison) -> None:
    cache = cache_of()

    def nothing(cache: Any, slots_N: Tensor, rows_ND: Tensor) -> None:
        """Writes nothing."""

    pair(comparison, "kv_cache.write_rows", nothing, write_rows_reference)(cache, torch.tensor([0]), normal(1, 192))
    assert not cache.pages.any()
    assert comparison.diverged[0].largest.max_abs > 1


def test_a_dump_holds_the_cache_before_the_call(comparison: Comparison) -> None:
    cache, rows = cache_of(), normal(2, 192)
    write_rows_reference(cache, torch.tensor([9]), rows[:1])
    before = cache.pages.clone()
    pair(comparison, "kv_cache.write_rows", halved, write_rows_reference)(cache, torch.tensor([1]), rows[1:])
    dump = comparison.diverged[0].dump
    assert dump is not None
    _, (good,) = replay(dump, write_rows_reference, read_rows=read_rows_reference)
    assert good.within
    _, (bad,) = replay(dump, halved, read_rows=read_rows_reference)
    assert not bad.within
    fresh, _ = replay(dump, lambda cache, slots_N, rows_ND: None, read_rows=read_rows_reference)
    assert torch.equal(fresh.arguments["cache"].pages, before)


# ---- converted weights ------------------------------------------------------------------------------------------


def test_each_kernel_converts_the_weight_for_itself(comparison: Comparison) -> None:
    op = find_op("gemm.linear")
    assert op is not None
    seen: list[Any] = []

    def prepare_other(weight: Weight, *, activation: Any) -> Any:
        return ("other", prepare_linear_reference(weight, activation=activation))

    def linear_other(x_TK: Tensor, weight: Any, *, out_dtype: Any = None) -> Tensor:
        seen.append(weight[0])
        return linear_reference(x_TK, weight[1], out_dtype=out_dtype)

    matrix = normal(6, 8)
    stored = Weight(data=matrix, format=WeightFormat.FLOAT32, shape=(6, 8))
    weight = comparison.prepare(op, prepare_linear_reference, prepare_other)(stored, activation="none")
    assert weight.shape == (6, 8)
    x = normal(3, 8, seed=1)
    result = pair(comparison, "gemm.linear", linear_reference, linear_other)(x, weight)
    assert torch.allclose(result, x @ matrix.T, atol=1e-5)
    assert (seen, comparison.diverged) == (["other"], [])


def test_a_dump_keeps_the_weight_as_loaded(comparison: Comparison) -> None:
    op = find_op("gemm.linear")
    assert op is not None

    def doubled(x_TK: Tensor, weight: Any, *, out_dtype: Any = None) -> Tensor:
        return 2 * linear_reference(x_TK, weight, out_dtype=out_dtype)

    stored = Weight(data=normal(6, 8), format=WeightFormat.FLOAT32, shape=(6, 8))
    weight = comparison.prepare(op, prepare_linear_reference, prepare_linear_reference)(stored, activation="none")
    pair(comparison, "gemm.linear", doubled, linear_reference)(normal(3, 8), weight)
    dump = comparison.diverged[0].dump
    assert dump is not None
    _, (good,) = replay(dump, linear_reference, prepare=prepare_linear_reference)
    assert good.within
    with pytest.raises(InputError, match="takes the kernel's load-time conversion"):
        replay(dump, linear_reference)


# ---- freedoms that kernels have ---------------------------------------------------------------------------------


def test_chosen_experts_may_come_in_any_order(comparison: Comparison) -> None:
    def one(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> Routing:
        return Routing(torch.tensor([[2, 0]]), torch.tensor([[0.25, 0.75]]))

    def other(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> Routing:
        return Routing(torch.tensor([[0, 2]]), torch.tensor([[0.75, 0.25]]))

    def swapped(logits_TE: Tensor, bias_E: Tensor, *, num_chosen: int, scale: float) -> Routing:
        return Routing(torch.tensor([[0, 2]]), torch.tensor([[0.25, 0.75]]))

    arguments = (torch.zeros(1, 4), torch.zeros(4))
    pair(comparison, "moe.route_by_score", one, other)(*arguments, num_chosen=2, scale=1.0)
    assert comparison.diverged == []
    pair(comparison, "moe.route_by_score", one, swapped)(*arguments, num_chosen=2, scale=1.0)
    assert [o.output for o in comparison.diverged[0].outputs if not o.within] == ["weights"]


def selecting(slots: list[int], length: int) -> Kernel:
    def select(plan: Any, logits_TS: Tensor, *, first_token: int, num_kept: int, page_rows: int) -> RowSelection:
        return RowSelection(torch.tensor([slots], dtype=torch.int32), torch.tensor([length], dtype=torch.int32))

    return select


@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [
        (([7, 3, 5], 3), ([3, 5, 7], 3), True),
        (([7, 3, 99], 2), ([3, 7, -1], 2), True),
        (([7, -1, 3], 3), ([3, 7, 1], 2), True),
        (([7, 3, 6], 3), ([3, 5, 7], 3), False),
        (([7, 3, 3], 3), ([3, 7, 7], 3), False),
    ],
)
def test_chosen_rows_are_a_set_and_what_lies_behind_the_length_is_nothing(
    comparison: Comparison, first: Any, second: Any, agree: bool
) -> None:
    kernel = pair(comparison, "indexer.select", selecting(*first), selecting(*second))
    kernel(None, torch.zeros(1, 100), first_token=0, num_kept=3, page_rows=64)
    assert (comparison.diverged == []) is agree


def test_a_log_sum_exp_that_one_kernel_does_not_give_is_left_out(comparison: Comparison) -> None:
    def attend(lse: Tensor | None) -> Kernel:
        def kernel(plan: Any, q_THD: Tensor, *_: Any, **__: Any) -> AttentionOutput:
            return AttentionOutput(q_THD, lse)

        return kernel

    arguments = (None, normal(2, 3, 4), None, None, None, None, torch.zeros(3))
    pair(comparison, "attention.sparse_decode", attend(None), attend(torch.zeros(2, 3)))(*arguments, scale=1.0)
    assert comparison.diverged == []
    pair(comparison, "attention.sparse_decode", attend(torch.ones(2, 3)), attend(torch.zeros(2, 3)))(
        *arguments, scale=1.0
    )
    assert [o.output for o in comparison.diverged[0].outputs if not o.within] == ["out.lse_TH"]


# ---- what is refused --------------------------------------------------------------------------------------------


def test_a_capture_refuses_it(tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, capturing=lambda: True)
    kernel = pair(comparison, "norm.rms_norm", rms_norm_reference, rms_norm_reference)
    with pytest.raises(
        InputError, match=r"compare\(first,second\) of norm\.rms_norm cannot run inside a graph capture"
    ):
        kernel(normal(2, 4), torch.ones(4), eps=1e-6)


def test_a_comparison_cannot_contain_another(comparison: Comparison) -> None:
    inner = pair(comparison, "norm.rms_norm", rms_norm_reference, off_by(0.1))
    with pytest.raises(AssertionError, match="a comparison cannot contain another"):
        pair(comparison, "norm.rms_norm", inner, rms_norm_reference)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("float32", "float32"), ("bfloat16", "float32"), ("fp8_block64", "bfloat16"), ("fp8_row", "bfloat16")],
)
def test_low_bit_rows_of_a_cache_allow_what_flips_a_step(stored: str, wanted: str) -> None:
    is_key = stored == "fp8_row"
    layout = cache_layout(
        "index_key" if is_key else "latent",
        RowFormat(stored),
        width=128 if is_key else 512,
        rope_width=64,
        page_rows=64,
    )
    cache = CacheHandle(layout=layout, num_pages=1, pages=torch.zeros((1, layout.page_stride), dtype=torch.uint8))
    assert dtype_of({"values_TC": torch.zeros(1), "cache": cache}) == wanted
