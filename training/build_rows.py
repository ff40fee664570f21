"""Builds a file of training rows on all cores: `python -m halocline.training.build_rows --help`."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halocline.training.data import Encoder, make_rows
from halocline.training.rows import write_rows
from halocline.training.split import Split
from halocline.training.stages import STAGES

__all__ = ["build_rows", "main"]

_logger = logging.getLogger(__name__)
_TOKENS_PER_JOB = 200_000


def _job(
    span: tuple[int, int], *, tokenizer: Path, stage_name: str, seed: int, split: Split
) -> tuple[int, NDArray[np.uint16]]:
    start, count = span
    rows = make_rows(Encoder(tokenizer), STAGES[stage_name], seed=seed, start=start, count=count, split=split)
    return start, rows


def _spans(num_rows: int, length: int) -> Iterator[tuple[int, int]]:
    per_job = max(1, _TOKENS_PER_JOB // length)
    for start in range(0, num_rows, per_job):
        yield start, min(per_job, num_rows - start)


def build_rows(
    out: Path, *, tokenizer: Path, stage_name: str, seed: int, num_rows: int, workers: int, split: Split = "train"
) -> None:
    """Write `num_rows` rows of a stage to a .npy or .npy.xz; the number of workers changes nothing."""
    length = STAGES[stage_name].length
    job = partial(_job, tokenizer=tokenizer, stage_name=stage_name, seed=seed, split=split)
    rows = np.empty((num_rows, length + 1), dtype=np.uint16)
    begun = time.perf_counter()
    with get_context("spawn").Pool(workers) as pool:
        for start, part in pool.imap_unordered(job, _spans(num_rows, length)):
            rows[start : start + len(part)] = part
    write_rows(out, rows)
    seconds = time.perf_counter() - begun
    _logger.info("%s: %d rows of %d tokens in %.1f s", out, num_rows, length, seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=sorted(STAGES), required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path("graded"), help="folder of tokenizer.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--split", choices=("train", "held_out"), default="train")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build_rows(
        chosen.out,
        tokenizer=chosen.tokenizer,
        stage_name=chosen.stage,
        seed=chosen.seed,
        num_rows=chosen.rows,
        workers=chosen.workers,
        split=chosen.split,
    )


if __name__ == "__main__":
    main()
