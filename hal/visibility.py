"""Which devices a process may see: the visibility variables, read as the drivers read them.

A list ends at its first entry that names no device; `-1` and the empty string hide everything; spaces do not matter.
Entries are numbers, full or short identifiers (`GPU-...`) and partitions (`MIG-...`). AMD's runtime looks at
`ROCR_VISIBLE_DEVICES` first, then counts `HIP_VISIBLE_DEVICES` (or, where that is unset, `CUDA_VISIBLE_DEVICES`)
within what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halocline.hal.device import Gpu
from halocline.hal.errors import SettingsError, lines

__all__ = ["VisibleList", "check_visibility", "visible_gpus"]

_ROCR, _HIP, _CUDA, _ORDINAL = (
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
)


@dataclass(frozen=True, kw_only=True)
class VisibleList:
    """One visibility variable.

    Attributes:
        variable: Its name.
        entries: What it names, in order, up to a `-1`.
    """

    variable: str
    entries: tuple[str, ...]

    @classmethod
    def parse(cls, variable: str, text: str) -> VisibleList:
        """Reads a list; the empty text hides every device.

        Raises:
            SettingsError: If an entry is named twice.
        """
        entries: list[str] = []
        for entry in (part.strip() for part in text.split(",")):
            if not entry or entry.startswith("-"):
                break
            if entry in entries:
                raise SettingsError(
                    lines(f"{variable} names device {entry} twice", found=text, try_=f"{variable}={','.join(entries)}")
                )
            entries.append(entry)
        return cls(variable=variable, entries=tuple(entries))

    def choose(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """The devices that the list names among those there are, in its order; it ends at the first that names none."""
        chosen: list[Gpu] = []
        for entry in self.entries:
            found = _named(entry, gpus)
            if found is None:
                break
            chosen.append(found)
        return tuple(chosen)


def visible_gpus(gpus: Sequence[Gpu], vendor: str, environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The devices of a vendor that the process may see.

    Args:
        gpus: All devices of that vendor, in the order of the management library.
        vendor: Decides which variables count.
        environment: `Settings.foreign`.

    Raises:
        SettingsError: If variables contradict each other.
    """
    check_visibility(vendor, environment)
    visible = tuple(gpus)
    for variable in _that_count(vendor, environment):
        visible = VisibleList.parse(variable, environment[variable]).choose(visible)
    return visible


def check_visibility(vendor: str, environment: Mapping[str, str]) -> None:
    """Refuses variables that contradict each other.

    Raises:
        SettingsError: If two variables of one meaning differ, or one counts beyond what another leaves.
    """
    if vendor != "amd":
        return
    if _HIP in environment and _CUDA in environment:
        first = VisibleList.parse(_HIP, environment[_HIP])
        second = VisibleList.parse(_CUDA, environment[_CUDA])
        if first.entries != second.entries:
            raise SettingsError(
                lines(
                    f"{_HIP} and {_CUDA} differ, and an AMD device listens to both",
                    found=f"{_HIP}={environment[_HIP]!r}, {_CUDA}={environment[_CUDA]!r}",
                    try_=f"unset {_CUDA}, or make them equal",
                )
            )
    if _ROCR in environment:
        left = len(VisibleList.parse(_ROCR, environment[_ROCR]).entries)
        for variable in (_HIP, _CUDA, _ORDINAL):
            if variable not in environment:
                continue
            beyond = [
                entry
                for entry in VisibleList.parse(variable, environment[variable]).entries
                if entry.isdigit() and int(entry) >= left
            ]
            if beyond:
                raise SettingsError(
                    lines(
                        f"{variable} counts within what {_ROCR} leaves, and asks for device {beyond[0]} of {left}",
                        found=f"{_ROCR}={environment[_ROCR]!r}, {variable}={environment[variable]!r}",
                        try_=f"unset one of the two, or number {variable} from 0",
                    )
                )


def _that_count(vendor: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that a vendor's runtime reads, in its order."""
    if vendor == "nvidia":
        order: tuple[str, ...] = (_CUDA,)
    else:
        order = (_ROCR, _ORDINAL, _HIP if _HIP in environment else _CUDA)
    return tuple(variable for variable in order if variable in environment)


def _named(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """The device or partition of an entry: a number, or an identifier of which the beginning is enough."""
    if entry.isdigit():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    known = [*gpus, *(part for gpu in gpus for part in gpu.parts)]
    found = [gpu for gpu in known if gpu.uuid.lower().startswith(entry.lower())]
    return found[0] if len(found) == 1 else None
