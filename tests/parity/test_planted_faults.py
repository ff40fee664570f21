"""A kernel with one fault is caught, by the parity runner and on the inputs that ship."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from halocline.cli import parity as command
from halocline.hal.backend import Manifest
from halocline.hal.errors import NoKernelError, OverrideError
from halocline.hal.offline import Workbench
from halocline.hal.parity import check_parity, inputs_for, judge, survey, takes

# Op, planted fault, part of the name of an input that must show it.
FAULTS = [
    ("attention.sparse_decode", "one_sink_dropped", "window"),
    ("attention.sparse_decode", "scale_halved", "window"),
    ("attention.sparse_decode", "length_ignored", "dirty"),
    ("attention.sparse_decode", "zero_times_nan", "dirty"),
    ("attention.sparse_decode", "last_rows_unwritten", "window"),
    ("indexer.select", "topk_shifted", "distinct_decode"),
    ("indexer.logits", "negative_heads_counted", "decode"),
    ("moe.route_by_score", "sigmoid_scores", "ragged"),
    ("moe.swiglu", "gate_clamped_below", "tight_limit"),
    ("moe.experts", "weight_after_down", "token_counts"),
    ("moe.experts", "last_token_of_seventeen_lost", "token_counts"),
    ("kv_cache.insert_window", "padding_stored", "padded"),
    ("compressor.insert", "rotated_by_index", "one_prefill"),
    ("norm.rms_norm", "gain_forgotten", "small"),
    ("gemm.linear", "input_rounded", "float32_17_rows"),
]
PREPARES = {"gemm.linear": "planted:prepare_linear", "moe.experts": "planted:prepare_experts"}


@pytest.mark.parametrize(("op", "fault", "shown_by"), FAULTS, ids=str)
def test_a_planted_fault_is_caught(
    op: str, fault: str, shown_by: str, bench_with: Callable[..., Workbench], spec_of: Any
) -> None:
    bench = bench_with(op, f"planted:{fault}", PREPARES.get(op, ""))
    cases = [case for case in inputs_for(bench, op) if shown_by in case.name]
    results = [judge(bench, spec_of(bench, op), case) for case in cases]
    assert results
    assert not all(result.within for result in results)
    assert all(not result.error for result in results)


def test_an_unwritten_output_has_an_infinite_difference(bench_with: Callable[..., Workbench], spec_of: Any) -> None:
    bench = bench_with("attention.sparse_decode", "planted:last_rows_unwritten")
    case = next(case for case in inputs_for(bench, "attention.sparse_decode") if case.name == "float32_window")
    result = judge(bench, spec_of(bench, "attention.sparse_decode"), case)
    by_name = {output.output: output for output in result.outputs}
    assert math.isinf(by_name["out.out_THD"].max_abs)
    assert by_name["out.lse_TH"].within


def test_a_kernel_that_raises_is_a_failure_with_its_words(bench_with: Callable[..., Workbench], spec_of: Any) -> None:
    bench = bench_with("attention.sparse_decode", "planted:raises")
    case = inputs_for(bench, "attention.sparse_decode")[0]
    result = judge(bench, spec_of(bench, "attention.sparse_decode"), case)
    assert (result.within, result.error) == (False, "RuntimeError: Unsupported h_q")


def test_a_shape_that_a_kernel_refuses_is_counted_and_no_failure(
    bench_with: Callable[..., Workbench], spec_of: Any
) -> None:
    bench = bench_with("attention.sparse_decode", "planted:refuses_many")
    spec = spec_of(bench, "attention.sparse_decode")
    cases = inputs_for(bench, "attention.sparse_decode")
    results = [judge(bench, spec, case) for case in cases]
    refused = [result for result in results if result.refused]
    assert {result.within for result in refused} == {False}
    assert {result.error for result in refused} == {""}
    assert all("tokens: one is needed" in result.refused for result in refused)
    (row,) = check_parity(bench, [spec])
    assert row.within
    assert len(row.refused) == len(refused)
    assert 0 < len(row.results) == len(cases) - len(refused)


def test_a_kernel_that_refuses_everything_is_not_within(bench_with: Callable[..., Workbench], spec_of: Any) -> None:
    bench = bench_with("norm.rms_norm", "planted:refuses_everything")
    (row,) = check_parity(bench, [spec_of(bench, "norm.rms_norm")])
    assert (row.within, row.results, row.num_not_taken) == (False, (), 0)
    assert len(row.refused) == len(inputs_for(bench, "norm.rms_norm"))


def test_a_missing_output_is_a_failure_but_the_optional_one(bench_with: Callable[..., Workbench], spec_of: Any) -> None:
    bench = bench_with("attention.sparse_decode", "float64_attention:sparse_float64")
    case = inputs_for(bench, "attention.sparse_decode")[0]
    spec = spec_of(bench, "attention.sparse_decode")
    expected = dict(case.run(bench.ops(bench.bind(case.op, "reference")), "cpu"))
    assert judge(bench, spec, case, expected).within
    assert judge(bench, spec, case, {**expected, "out.more": expected["out.out_THD"]}).error == "gave no out.more"
    assert judge(bench, spec, case, {**expected, "out.other.lse_TH": expected["out.lse_TH"]}).within


class TestWhatIsAsked:
    """Kernels see only inputs whose formats, meanings and traits they state; nothing to check is no success."""

    def test_each_kind_of_restriction(self, bench_with: Callable[..., Workbench], spec_of: Any) -> None:
        from dataclasses import replace

        op = "attention.sparse_decode"
        bench = bench_with(op, "float64_attention:sparse_float64")
        spec, cases = spec_of(bench, op), inputs_for(bench, op)
        assert all(takes(spec, case) for case in cases)
        meaning = replace(spec, semantics={**spec.semantics, "cache_format": ("fp8_block64",)})
        assert {case.semantics["cache_format"] for case in cases if takes(meaning, case)} == {"fp8_block64"}
        silent = replace(spec, semantics={})
        assert not any(takes(silent, case) for case in cases)
        narrow = replace(spec, formats={"compute": ("bfloat16",)})
        assert {case.dtype for case in cases if takes(narrow, case)} == {"bfloat16"}
        wide = replace(spec, traits={"head_dim": (512,), "a2a": ("none",)})
        assert {case.traits["head_dim"] for case in cases if takes(wide, case)} == {512}

    def test_a_kernel_that_no_input_suits_is_not_within(
        self, bench_with: Callable[..., Workbench], spec_of: Any
    ) -> None:
        from dataclasses import replace

        bench = bench_with("norm.rms_norm", "float64_dense:rms_norm_float64")
        spec = replace(spec_of(bench, "norm.rms_norm"), formats={"compute": ("float16",)})
        (row,) = check_parity(bench, [spec])
        assert (row.within, row.results, row.num_not_taken) == (False, (), len(inputs_for(bench, "norm.rms_norm")))

    def test_nothing_but_the_reference_is_an_error(self, bench_with: Callable[..., Workbench]) -> None:
        bench = bench_with("norm.rms_norm", "float64_dense:rms_norm_float64")
        able, refused = survey(bench)
        assert [(spec.op, spec.name) for spec in able] == [("norm.rms_norm", "float64_dense")]
        assert refused == []
        with pytest.raises(NoKernelError, match=r"nothing to check on cpu: moe\.swiglu=any kernel") as caught:
            survey(bench, op="moe.swiglu")
        assert caught.value.exit_code == 2
        with pytest.raises(OverrideError, match=r"unknown op 'norm.rms'"):
            survey(bench, op="norm.rms")


class TestCommand:
    def run(self, monkeypatch: pytest.MonkeyPatch, bench: Workbench, **options: Any) -> int:
        monkeypatch.setattr(command, "workbench", lambda: bench)
        return command.parity(**{"op": None, "kernel": None, "as_json": False, **options})

    def test_success(self, monkeypatch: Any, capsys: Any, bench_with: Callable[..., Workbench]) -> None:
        bench = bench_with("norm.rms_norm", "float64_dense:rms_norm_float64")
        assert self.run(monkeypatch, bench) == 0
        printed = capsys.readouterr().out
        assert "1 kernels on cpu" in printed
        assert "norm.rms_norm" in printed
        assert "FAILED" not in printed

    def test_a_kernel_of_several_ranks_is_named(
        self, monkeypatch: Any, capsys: Any, bench_with: Callable[..., Workbench], spec_of: Any
    ) -> None:
        from dataclasses import replace

        bench = bench_with("norm.rms_norm", "float64_dense:rms_norm_float64")
        apart = replace(spec_of(bench, "norm.rms_norm"), name="shared", traits={"world_size": (2, 4)})
        bench = replace(bench, manifests=(*bench.manifests, Manifest(name="apart", vendor="cpu", specs=(apart,))))
        assert self.run(monkeypatch, bench) == 0
        printed = capsys.readouterr().out
        assert "1 kernels on cpu" in printed
        assert "left out, needs several ranks: norm.rms_norm=shared" in printed

    def test_failure_names_input_and_output(
        self, monkeypatch: Any, capsys: Any, bench_with: Callable[..., Workbench]
    ) -> None:
        bench = bench_with("norm.rms_norm", "planted:gain_forgotten")
        assert self.run(monkeypatch, bench, op="norm.rms_norm") == 1
        printed = " ".join(capsys.readouterr().out.split())
        assert "norm.rms_norm planted 14 0" in printed
        assert "FAILED" in printed
        assert "norm.rms_norm=planted small float32: out max abs" in printed

    def test_json_is_json_also_where_nothing_can_be_compared(
        self, monkeypatch: Any, capsys: Any, bench_with: Callable[..., Workbench]
    ) -> None:
        bench = bench_with("attention.sparse_decode", "planted:last_rows_unwritten")
        assert self.run(monkeypatch, bench, kernel="planted", as_json=True) == 1
        answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        (row,) = answer["kernels"]
        assert (row["op"], row["kernel"], row["within"], row["not_taken"]) == (
            "attention.sparse_decode", "planted", False, 0,
        )  # fmt: skip
        (case,) = (case for case in row["cases"] if case["case"] == "float32_window")
        assert [output["max_abs"] for output in case["outputs"] if output["output"] == "out.out_THD"] == [None]
