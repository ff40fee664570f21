"""Roofs against values worked out by hand, and against totals that are known of the released models."""

from __future__ import annotations

import pytest

from halocline.benchmarks import roofline
from halocline.benchmarks.roofline import H200, decode_step, distinct_experts, prefill_rate, totals
from halocline.models.deepseek_v4.presets import FLASH, PRO, TINY, first_layers

EIGHT = first_layers(FLASH, 8)


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 0.73), (8, 1.69), (32, 3.99), (128, 6.76)])
def test_steps_of_eight_layers_have_the_known_roofs(batch: int, milliseconds: float) -> None:
    assert decode_step(EIGHT, batch=batch, context=8192).serial * 1e3 == pytest.approx(milliseconds, abs=0.005)


def test_a_prefill_of_eight_layers_has_the_known_roof() -> None:
    assert prefill_rate(EIGHT, tokens=8192) == pytest.approx(181_600, rel=1e-3)


@pytest.mark.parametrize(("config", "billions", "active"), [(FLASH, 284.3, 13.27), (PRO, 1573.0, 48.85)])
def test_parameters_of_the_released_models(config: object, billions: float, active: float) -> None:
    found = totals(config)  # type: ignore[arg-type]
    assert found.parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert found.active / 1e9 == pytest.approx(active, rel=1e-3)


def test_distinct_experts_of_one_and_two_tokens() -> None:
    """Two tokens share 6 * 6 / 256 of their twelve experts on average."""
    assert distinct_experts(FLASH, 1) == pytest.approx(6.0)
    assert distinct_experts(FLASH, 2) == pytest.approx(12 - 36 / 256)


def test_the_head_of_one_token_is_bound_by_its_bytes() -> None:
    """129,280 rows of 4,096 bfloat16 lanes are 1,059,061,760 bytes: 246.9 us at 4.29 TB/s."""
    step = decode_step(EIGHT, batch=1, context=8192)
    assert step.by_part(H200)["head"] * 1e6 == pytest.approx(246.87, abs=0.01)


def test_attention_of_a_ratio_4_layer_by_hand() -> None:
    """128 window rows and 512 entries of 584 bytes; 64 heads of 512 lanes in and out, two bytes each."""
    step = decode_step(EIGHT, batch=1, context=8192)
    largest = max(kernel.num_bytes for kernel in step.kernels if kernel.part == "attention")
    assert largest == 640 * 584 + 64 * 512 * 2 * 2
    work = max(kernel.operations for kernel in step.kernels if kernel.part == "attention")
    assert work == 4 * 64 * 512 * 640


def test_a_short_context_limits_what_is_read() -> None:
    """After 100 tokens a ratio-4 layer has 100 window rows and 25 entries, a ratio-128 layer no entry."""
    kernels = [k for k in decode_step(EIGHT, batch=1, context=100).kernels if k.part == "attention"]
    rows = [(kernel.num_bytes - 64 * 512 * 4) / 584 for kernel in kernels]
    assert rows == [100, 100, 125, 100, 125, 100, 125, 100]


def test_a_small_kernel_takes_as_long_as_its_nodes() -> None:
    """A step of the tiny model moves next to nothing: its serial roof is one microsecond for each node."""
    step = decode_step(first_layers(TINY, 2), batch=1, context=16)
    assert step.serial == pytest.approx(step.nodes * 1e-6, rel=1e-6)
    assert step.ideal < step.serial


def test_nodes_of_eight_layers() -> None:
    assert decode_step(EIGHT, batch=1, context=8192).nodes == 173


def test_single_kernels_by_hand() -> None:
    """wq_b of one token: 32,768 x 1,024 weights and scales, its lanes and its result, in 4.29 TB/s."""
    moved = 32768 * 1024 * (1 + 4 / 16384) + 1024 + 32768 * 2
    assert roofline.gemm_seconds(rows=1, out_lanes=32768, in_lanes=1024) == pytest.approx(moved / 4.29e12)
    assert roofline.sparse_attention_seconds(FLASH, tokens=128, keys=640) == pytest.approx(
        128 * (640 * 584 + 64 * 512 * 4) / 4.29e12
    )
    assert roofline.index_logits_seconds(FLASH, tokens=1, context=1 << 20) == pytest.approx(262144 * 136 / 4.29e12)


def test_a_cut_model_has_no_draft_layers_and_its_first_layers() -> None:
    assert EIGHT.main_ratios == (0, 0, 4, 128, 4, 128, 4, 128)
    assert EIGHT.num_mtp_layers == 0
    assert first_layers(FLASH, 2).num_hash_layers == 2


def test_the_table_has_a_row_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert roofline.main(["--layers", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[3:7]] == [["1", "0.73"], ["8", "1.69"], ["32", "3.99"], ["128", "6.76"]]
