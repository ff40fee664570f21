"""Ranks of `test_collective_symm_mem`: `python symm_mem_ranks.py FOLDER TASK`.

Two processes that interpret the kernel, in a group over gloo. A file that both have mapped stands in for memory of
torch's symmetric allocator, behind the names by which it is called.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

RANKS = 2
TASKS = ("sums", "gloo", "hosts", "apart")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("task", choices=TASKS)
    options = parser.parse_args()
    os.environ |= {"TRITON_INTERPRET": "1", "GLOO_SOCKET_IFNAME": "lo"}
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_work, args=(rank, options)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(process.exitcode or 0 for process in processes))


class Allocator:
    """What the adapter calls of torch.distributed._symmetric_memory: each rank's part of a file."""

    def __init__(self, folder: Path, rank: int, *, is_apart: bool) -> None:
        self._file, self._rank, self._is_apart = str(folder / "memory"), rank, is_apart
        self.calls: list[str] = []

    def empty(self, size: int, *, dtype: Any, device: Any) -> Any:
        """Allocates; what comes back lies within a larger block, as from a pool."""
        import torch

        assert (dtype, device.type) == (torch.uint8, "cpu")
        self.calls.append("empty")
        self.parts = torch.from_file(self._file, shared=True, size=RANKS * (size + 64), dtype=torch.uint8)
        self.parts = self.parts.view(RANKS, -1)
        return self.parts[self._rank, 64:]

    def rendezvous(self, tensor: Any, name: str) -> Any:
        """Finds the blocks of all ranks."""
        assert name
        self.calls.append("rendezvous")
        tensor.fill_(77)  # memory is not cleared
        found = [self.parts[self._rank] if self._is_apart else part for part in self.parts]
        return SimpleNamespace(buffer_ptrs=[part.data_ptr() for part in found])


def _work(rank: int, options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from halocline.backends_cuda import collective_symm_mem as adapter
    from halocline.hal.process_group import open_group

    store = f"file://{options.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    group = open_group([[0, 1]], rank=rank, device="cpu")
    allocator, said = Allocator(options.folder, rank, is_apart=options.task == "apart"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("halocline").addHandler(handler)
    symmetric = ModuleType("torch.distributed._symmetric_memory")
    symmetric.__dict__.update(empty=allocator.empty, rendezvous=allocator.rendezvous)
    with mock.patch.dict(sys.modules, {symmetric.__name__: symmetric}):
        dist._symmetric_memory = symmetric  # type: ignore[attr-defined]
        if options.task != "gloo":
            adapter._refusal = lambda *_: ""
            adapter._host = lambda: f"host {rank}" if options.task == "hosts" else "host"
            adapter._obstacle = _without_devices(adapter._obstacle)
        if options.task == "apart":
            adapter._TRIALS, adapter._POLLS_OF_A_TRIAL = 1, 10
        sums = _sums(adapter, group, rank)
    found = {"sums": sums, "said": said, "calls": allocator.calls, "most": adapter.most_bytes(RANKS)}
    (options.folder / f"found-{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    dist.destroy_process_group()


def _without_devices(obstacle: Any) -> Any:
    """A CPU has no number; the question whether devices see each other is left out by giving both one and a yes."""
    import torch

    torch.cuda.device_count = lambda: RANKS
    torch.cuda.can_device_access_peer = lambda own, other: own != other
    return lambda places, rank: obstacle([place._replace(device=i) for i, place in enumerate(places)], rank)


def _sums(adapter: Any, group: Any, rank: int) -> list[Any]:
    """Type, size and bits of sums of many sizes, too large ones and integers among them."""
    import torch

    most, found = adapter.most_bytes(RANKS), []
    for kind, sizes in ((torch.bfloat16, (4096, 3, 0, most // 2)), (torch.float32, (129, most // 4, most // 4 + 1))):
        for size in (*sizes, *sizes[:2]):
            numbers = torch.arange(size).mul(rank + 1).fmod(101).to(kind).view(1, -1)
            total = adapter.all_reduce_symm_mem(numbers.clone(), group)
            expected = torch.arange(size).fmod(101) + torch.arange(size).mul(2).fmod(101)
            found.append([str(kind), size, bool((total.view(-1) == expected.to(kind)).all()), list(total.shape)])
    strided = torch.full((6, 4), float(rank + 1)).T
    found.append(["strided", 24, bool((adapter.all_reduce_symm_mem(strided, group) == 3).all()), [4, 6]])
    whole = adapter.all_reduce_symm_mem(torch.full((2, 3), rank + 1, dtype=torch.int32), group)
    found.append(["int32", 6, bool((whole == 3).all()), list(whole.shape)])
    return found


if __name__ == "__main__":
    main()
