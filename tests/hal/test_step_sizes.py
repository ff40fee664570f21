"""Runs of rows: they cover a product, are of few sizes, and a warm-up meets each that a smaller step can bring."""

from __future__ import annotations

import pytest

from halocline.engine.warm_up import warm_up_tokens
from halocline.hal.step_sizes import row_runs


def test_runs_cover_all_rows_and_pad_little() -> None:
    for rows in [*range(2100), 4095, 4097, 5000, 8191, 8192, 8193, 20_000]:
        runs = row_runs(rows)
        assert [run.start for run in runs] == [sum(run.num_rows for run in runs[:place]) for place in range(len(runs))]
        assert sum(run.num_rows for run in runs) == rows
        assert all(run.num_rows == run.padded for run in runs[:-1]), "only the last one is padded"
        padding = sum(run.padded for run in runs) - rows
        assert 0 <= padding <= max(rows // 8, 128)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_a_captured_batch_is_one_run(rows: int) -> None:
    assert row_runs(rows) == ((0, rows, max(rows, 16)),)


@pytest.mark.parametrize("most", [1, 2, 20, 100, 129, 260, 300, 1000, 2048, 2500, 8192])
def test_a_warm_up_meets_the_sizes_of_every_smaller_step(most: int) -> None:
    met = {run.padded for size in warm_up_tokens(most, compiles=True) for run in row_runs(size)}
    assert {run.padded for rows in range(1, most + 1) for run in row_runs(rows)} <= met
