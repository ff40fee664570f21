"""The shipped checkpoint: complete, in the release's formats, and small."""

from __future__ import annotations

from pathlib import Path

from halocline.engine.grading import Exercise
from halocline.models.checkpoint import Checkpoint


def test_the_checkpoint_is_complete_and_low_in_bits(graded: Path) -> None:
    checkpoint = Checkpoint.open(graded)
    assert checkpoint.formats == {"fp8_block": 52, "mxfp4": 144}
    assert checkpoint.config.num_mtp_layers == 1
    assert sorted(checkpoint.config.main_ratios) == [0, 4, 4, 128, 128]


def test_no_file_is_larger_than_14_mb_and_all_together_not_than_20(graded: Path) -> None:
    sizes = [path.stat().st_size for path in graded.rglob("*") if path.is_file()]
    assert max(sizes) <= 14e6
    assert sum(sizes) <= 20e6


def test_the_suite_of_ci_is_small(check_suite: list[Exercise]) -> None:
    assert len(check_suite) <= 60
    assert sum(exercise.prompt_tokens for exercise in check_suite) <= 40_000
