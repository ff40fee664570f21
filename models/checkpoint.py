"""A checkpoint on disk, checked both ways against its index and its configuration before memory is taken.

Opening reads JSON and file headers only; torch is not needed. `CheckpointSource` in `checkpoint_source.py` reads
the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halocline.hal.errors import CheckpointError, lines
from halocline.models.checkpoint_match import StoredParameter, match
from halocline.models.config_file import read_json_object
from halocline.models.registry import ModelFamily, load_config
from halocline.models.safetensors_header import FileHeader, read_header

if TYPE_CHECKING:
    from halocline.models.deepseek_v4.config import DeepseekV4Config
    from halocline.models.weight_plan import WeightPlan

__all__ = ["INDEX_NAME", "Checkpoint"]

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: every parameter of its configuration has its place in a file.

    Attributes:
        folder: Where it lies.
        config: Its configuration.
        family: Which network it is.
        plan: The parameters that the configuration demands.
        parameters: What the files hold, by original name, in the order of the plan.
    """

    folder: Path
    config: DeepseekV4Config
    family: ModelFamily
    plan: WeightPlan
    parameters: Mapping[str, StoredParameter]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Reads and checks configuration, index and headers.

        Raises:
            ConfigError: If the configuration is missing, broken, of another model or impossible.
            CheckpointError: If files, index and configuration do not agree, or a file is damaged.
        """
        config, family = load_config(folder)
        root = Path(folder)
        if not root.is_dir():
            raise CheckpointError(
                lines(f"{root} is not a folder", try_="name the folder that holds config.json and *.safetensors")
            )
        plan = family.plan_weights(config)
        tensors = (
            (header.path, name, entry) for header in _read_shards(root) for name, entry in header.entries.items()
        )
        parameters = match(plan, tensors, family.name_resolver(), source=str(root))
        return cls(folder=root, config=config, family=family, plan=plan, parameters=parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters as stored."""
        return sum(stored.nbytes for stored in self.parameters.values())

    def nbytes_without(self, *prefixes: str) -> int:
        """Bytes of the parameters whose names do not begin with one of these, for example without `mtp.`."""
        return sum(stored.nbytes for name, stored in self.parameters.items() if not name.startswith(prefixes))

    @property
    def formats(self) -> dict[str, int]:
        """Number of matrices in each format found."""
        return dict(Counter(stored.format.value for stored in self.parameters.values() if stored.format))


def _read_shards(folder: Path) -> list[FileHeader]:
    """Reads the headers of all shards and compares them with the index, if there is one."""
    on_disk = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    index = folder / INDEX_NAME
    if not index.is_file():
        if not on_disk:
            raise CheckpointError(
                lines(
                    f"no weights in {folder}",
                    asked=f"*.safetensors files, or {INDEX_NAME} and what it lists",
                    found=", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "an empty folder",
                    try_="download the checkpoint's weight files into this folder",
                )
            )
        return [read_header(path) for path in on_disk.values()]
    listed = _read_index(index)
    _compare_files(folder, set(listed.values()), set(on_disk))
    headers = [read_header(path) for path in on_disk.values()]
    _compare_tensors(index, listed, headers)
    return headers


def _read_index(index: Path) -> dict[str, str]:
    listed = read_json_object(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(
            lines(f"{index} has no weight_map of tensor names to file names", try_="download the index again")
        )
    return listed


def _compare_files(folder: Path, listed: set[str], on_disk: set[str]) -> None:
    missing, surplus = sorted(listed - on_disk), sorted(on_disk - listed)
    if missing:
        raise CheckpointError(
            lines(
                f"{len(missing)} of {len(listed)} checkpoint file(s) missing in {folder}",
                asked=_some(missing),
                found=f"{len(on_disk)} *.safetensors file(s)",
                try_="download the missing file(s)",
            )
        )
    if surplus:
        raise CheckpointError(
            lines(
                f"{len(surplus)} file(s) in {folder} that {INDEX_NAME} does not list",
                found=_some(surplus),
                try_="move them away, or download the index that belongs to them",
            )
        )


def _compare_tensors(index: Path, listed: dict[str, str], headers: list[FileHeader]) -> None:
    held = {(name, header.path.name) for header in headers for name in header.entries}
    promised = set(listed.items())
    if held == promised:
        return
    absent = [f"{name} in {file}" for name, file in sorted(promised - held)]
    unlisted = [f"{name} in {file}" for name, file in sorted(held - promised)]
    raise CheckpointError(
        lines(
            f"{index} and the files differ: {len(absent)} tensor(s) listed but absent, {len(unlisted)} unlisted",
            absent=_some(absent) if absent else None,
            unlisted=_some(unlisted) if unlisted else None,
            try_="download index and files of one version",
        )
    )


def _some(names: list[str], *, shown: int = 3) -> str:
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
