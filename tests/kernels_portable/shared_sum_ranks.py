"""Ranks of `test_shared_sum`: `python shared_sum_ranks.py FOLDER RANKS (calls | alone) [--first NUMBER]`.

Each is a process that interprets the kernel; their shared memory is a file that all have mapped, each at an address of
its own, as GPUs have each other's memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

CAPACITY = 32768
SIZES = (1, 5, 2048, 4096, 4097, 6000, 8192)
NUM_CALLS = 40


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("task", choices=["calls", "alone"])
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_work, args=(rank, options)) for rank in range(options.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(process.exitcode or 0 for process in processes))


def _work(rank: int, options: argparse.Namespace) -> None:
    import numpy as np
    import torch

    from halocline.kernels_portable.shared_sum import CHUNK_BYTES, shared_bytes, shared_sum_

    size, first = shared_bytes(CAPACITY), np.int32(options.first)
    memory = torch.from_file(str(options.folder / "memory"), shared=True, size=size * options.ranks, dtype=torch.uint8)
    memory = memory.view(options.ranks, size)
    flags = memory[:, 2 * CAPACITY :].view(torch.int32)
    flags[rank] = int(first)
    (options.folder / f"here-{rank}").touch()
    while not all((options.folder / f"here-{other}").exists() for other in range(options.ranks)):
        time.sleep(0.001)  # between processes there is nothing else to wait on
    addresses = torch.tensor([row.data_ptr() for row in memory])
    calls = torch.full((CAPACITY // CHUNK_BYTES,), int(first), dtype=torch.int32)
    found: dict[str, Any] = {}
    if options.task == "alone":
        x = torch.ones(3)
        if rank == 0:
            shared_sum_(x, addresses, calls, rank=0, capacity=CAPACITY, most_polls=5)
        found["sum"] = x.numpy()
    late, random_numbers = random.Random(1), np.random.default_rng(rank)
    for number in range(NUM_CALLS if options.task == "calls" else 0):
        kind = late.choice([torch.float32, torch.bfloat16])
        part = torch.from_numpy(random_numbers.standard_normal(late.choice(SIZES))).to(kind)
        found[f"part {number} {kind}"] = part.float().numpy().copy()
        if late.randrange(options.ranks) == rank:
            time.sleep(0.003)
        shared_sum_(part, addresses, calls, rank=rank, capacity=CAPACITY)
        found[f"sum {number} {kind}"] = part.float().numpy()
    np.savez(options.folder / f"found-{rank}.npz", **found)


if __name__ == "__main__":
    main()
