"""Reading a checked checkpoint, tensor by tensor, on demand.

Bytes go from the file straight into the tensor that will hold them: plain reads into fresh memory, not a mapping,
so that the resident size is what was handed out and a stack of experts is filled in place. Network modules pull
what they need (`WeightSource`); at the end everything that the plan demands must have been taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halocline.hal.errors import CheckpointError, lines
from halocline.hal.formats import Weight, WeightFormat
from halocline.hal.weight_codecs import FP8_BLOCK_SIZE
from halocline.models.checkpoint_match import PLAIN_FORMATS, Part, Placement, StoredParameter
from halocline.models.checkpoint_part import part_of
from halocline.models.parallel import SINGLE, Parallel
from halocline.models.sharding import RankPart, expert_run
from halocline.models.weight_plan import Role, StoredDtype

if TYPE_CHECKING:
    from pathlib import Path

    from halocline.models.checkpoint import Checkpoint

__all__ = ["CheckpointSource"]

# UE8M0 and packed FP4 are bytes: no arithmetic is meant on them.
_TORCH_TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
    "U8": torch.uint8,
    "I64": torch.int64,
}


class CheckpointSource:
    """A `WeightSource` over a checkpoint. Use it as a context manager: leaving it closes the files.

    Attributes:
        checkpoint: What is read.
        device: Where tensors are wanted.
        parallel: The rank whose part is given.
        nbytes: Bytes of that part, as stored.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "cpu",
        parallel: Parallel = SINGLE,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Opens nothing yet.

        Args:
            checkpoint: From `Checkpoint.open`.
            device: torch device of the tensors.
            parallel: The rank whose part is wanted: slices, and whole experts; nothing else is read.
            progress: Called with bytes taken so far and in all, after each parameter.

        Raises:
            ConfigError: If the checkpoint cannot be split so.
        """
        self.checkpoint = checkpoint
        self.device = device
        self.parallel = parallel
        parameters = checkpoint.parameters
        self._parameters = (
            parameters
            if parallel.sizes.world == 1
            else part_of(parameters, RankPart(plan=checkpoint.plan, parallel=parallel))
        )
        self._progress = progress
        self._taken: set[str] = set()
        self._bytes_read = 0
        self.nbytes = sum(stored.nbytes for stored in self._parameters.values())
        self._files: dict[Path, int] = {}

    def __enter__(self) -> CheckpointSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def tensor(self, name: str) -> Tensor:
        """A plain tensor by its original name, as stored; see `WeightSource.tensor`.

        What is float32 in a release is float32 here, even if the file holds it in bfloat16.
        """
        stored = self._take(name)
        if stored.parameter.role is Role.MATRIX:
            raise CheckpointError(f"{name} is a matrix with a format: read it by matrix()")
        tensor = self._read(stored.parts[Part.DATA])
        self._report(stored)
        return tensor.float() if stored.parameter.dtype is StoredDtype.F32 else tensor

    def matrix(self, name: str) -> Weight:
        """A matrix with its scales, by its original name without `.weight`; see `WeightSource.matrix`.

        Matrices that no release quantises (head, compressors) come as plain ones.
        """
        stored = self._take(f"{name}.weight")
        data, scale, total = (stored.parts.get(part) for part in (Part.DATA, Part.SCALE, Part.GLOBAL_SCALE))
        assert data is not None
        weight = Weight(
            data=self._read(data),
            format=stored.format or PLAIN_FORMATS[data.dtype],
            shape=stored.parameter.shape,
            scale=self._read(scale) if scale else None,
            global_scale=self._read(total).reshape(()) if total else None,
        )
        self._report(stored)
        return weight

    def experts(self, prefix: str, parts: tuple[str, ...], num_experts: int) -> Weight:
        """Matrices of the rank's experts, parts joined by rows, stacked over experts; see `WeightSource.experts`.

        Every matrix is read into its place in the stack. An NVFP4 stack of several parts has one global scale
        for each part: `(experts, parts)`.

        Raises:
            CheckpointError: If the matrices differ in format, or FP8 blocks would straddle two parts.
        """
        held = expert_run(num_experts, self.parallel)
        names = [[f"{prefix}.{expert}.{part}.weight" for part in parts] for expert in held]
        grid = [[self._take(name) for name in row] for row in names]
        stack = _ExpertStack(grid, self.device)
        for expert, row in enumerate(grid):
            for part, stored in enumerate(row):
                stack.fill(self, expert, part, row)
                self._report(stored)
        return stack.weight()

    def everything(self, *, without_prefixes: tuple[str, ...] = ()) -> Iterator[tuple[str, Weight | Tensor]]:
        """Yields every parameter of the rank once, by original name: matrices as `Weight`, others as tensors."""
        for name, stored in self._parameters.items():
            if name.startswith(without_prefixes):
                continue
            if stored.parameter.role is Role.MATRIX:
                yield name, self.matrix(stored.parameter.stem)
            else:
                yield name, self.tensor(name)

    def finish(self, *, without_prefixes: tuple[str, ...] = ()) -> None:
        """Checks that everything was taken: a tensor that no module asked for is an error.

        Args:
            without_prefixes: Parts of the network that were not built on purpose, for example `mtp.`.

        Raises:
            CheckpointError: If a parameter was left behind.
        """
        expected = {name for name in self._parameters if not name.startswith(without_prefixes)}
        left = sorted(expected - self._taken)
        if left:
            raise CheckpointError(
                lines(
                    f"{len(left)} of {len(expected)} parameters of {self.checkpoint.folder} were not loaded",
                    found=", ".join(left[:5]) + (" and more" if len(left) > 5 else ""),
                    try_="this is a fault of the network's code, not of the checkpoint: please report it",
                )
            )

    def _take(self, name: str) -> StoredParameter:
        stored = self._parameters.get(name)
        if stored is None:
            raise CheckpointError(
                lines(
                    f"{self.checkpoint.folder} has no parameter {name}",
                    asked=name,
                    found=f"{len(self.checkpoint.parameters)} parameters",
                    try_="`halocline plan-weights` lists what its config.json demands",
                )
            )
        if name in self._taken:
            raise CheckpointError(f"parameter {name} was asked for twice")
        self._taken.add(name)
        return stored

    def _report(self, stored: StoredParameter) -> None:
        self._bytes_read += stored.nbytes
        if self._progress:
            self._progress(self._bytes_read, self.nbytes)

    def _read(self, placement: Placement) -> Tensor:
        target = torch.empty(placement.shape, dtype=_TORCH_TYPES[placement.dtype], device=self.device)
        self.read_into(placement, target)
        return target

    def read_into(self, placement: Placement, target: Tensor) -> None:
        """Fills a contiguous tensor with what a placement wants; on a device by way of one tensor of memory.

        Raises:
            CheckpointError: If the file ends early or cannot be read.
        """
        lanes = placement.lanes
        if target.device.type == "cpu" and lanes is None:
            self._read_bytes(placement, target)
            return
        shape = placement.shape if lanes is None else (*placement.shape[:-1], lanes.width)
        staging = torch.empty(shape, dtype=target.dtype)
        self._read_bytes(placement, staging)
        target.copy_(staging if lanes is None else staging[..., lanes.first : lanes.last])

    def _read_bytes(self, placement: Placement, target: Tensor) -> None:
        view = target.reshape(-1).view(torch.uint8).numpy().data
        if placement.file not in self._files:
            self._files[placement.file] = os.open(placement.file, os.O_RDONLY)
        done = 0
        while done < placement.nbytes:
            try:
                count = os.preadv(self._files[placement.file], [view[done:]], placement.start + done)
            except OSError as error:
                raise _unreadable(placement, str(error)) from error
            if count == 0:
                raise _unreadable(placement, f"the file ends after {done} of {placement.nbytes} bytes")
            done += count


class _ExpertStack:
    """One tensor for the data of all experts of a layer, one for their scales, filled matrix by matrix."""

    def __init__(self, grid: list[list[StoredParameter]], device: str) -> None:
        """Allocates the stack for rows of experts and columns of parts.

        Raises:
            CheckpointError: If the matrices cannot share a stack.
        """
        first = grid[0][0]
        assert first.format is not None
        _check_stackable(grid, first)
        experts, row = len(grid), grid[0]
        self.format = first.format
        self.shape = (experts, sum(stored.parameter.shape[0] for stored in row), first.parameter.shape[1])
        self.data = _allocate(experts, [stored.parts[Part.DATA] for stored in row], device)
        scaled = Part.SCALE in first.parts
        self.scale = _allocate(experts, [stored.parts[Part.SCALE] for stored in row], device) if scaled else None
        is_nvfp4 = first.format is WeightFormat.NVFP4
        self.global_scale = torch.empty((experts, len(row)), device=device) if is_nvfp4 else None

    def fill(self, source: CheckpointSource, expert: int, part: int, row: list[StoredParameter]) -> None:
        """Reads one matrix into its place."""
        stored = row[part]
        for kind, stack in ((Part.DATA, self.data), (Part.SCALE, self.scale)):
            if stack is not None:
                first = sum(before.parts[kind].shape[0] for before in row[:part])
                last = first + stored.parts[kind].shape[0]
                source.read_into(stored.parts[kind], stack[expert, first:last])
        if self.global_scale is not None:
            source.read_into(stored.parts[Part.GLOBAL_SCALE], self.global_scale[expert, part])

    def weight(self) -> Weight:
        """The filled stack."""
        total = self.global_scale
        if total is not None and total.shape[1] == 1:
            total = total[:, 0]
        return Weight(data=self.data, format=self.format, shape=self.shape, scale=self.scale, global_scale=total)


def _allocate(experts: int, parts: list[Placement], device: str) -> Tensor:
    rows = sum(placement.shape[0] for placement in parts)
    return torch.empty((experts, rows, parts[0].shape[1]), dtype=_TORCH_TYPES[parts[0].dtype], device=device)


def _check_stackable(grid: list[list[StoredParameter]], first: StoredParameter) -> None:
    def kind(stored: StoredParameter) -> tuple[object, ...]:
        return stored.format, *(stored.parts[part].dtype for part in (Part.DATA, Part.SCALE) if part in stored.parts)

    for stored in (stored for row in grid for stored in row):
        if kind(stored) != kind(first):
            raise CheckpointError(
                lines(
                    "the experts of one layer are stored in different formats",
                    found=f"{first.parameter.name} as {kind(first)}, {stored.parameter.name} as {kind(stored)}",
                    try_="convert the checkpoint so that a layer's experts agree",
                )
            )
    rows = first.parameter.shape[0]
    if first.format is WeightFormat.FP8_BLOCK and len(grid[0]) > 1 and rows % FP8_BLOCK_SIZE:
        raise CheckpointError(
            lines(
                f"{first.parameter.name}: {rows} rows of FP8 cannot be joined with the next matrix",
                asked=f"a multiple of {FP8_BLOCK_SIZE} rows, so that no scale block spans two matrices",
                try_="store these experts as packed FP4 or bfloat16",
            )
        )


def _unreadable(placement: Placement, what: str) -> CheckpointError:
    return CheckpointError(
        lines(
            f"cannot read tensor {placement.name} from {placement.file}",
            found=what,
            try_="check the disk, or download this file again",
        )
    )
