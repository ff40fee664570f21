"""Overrides: one syntax for the flag, the environment and the file.

    attention.sparse_decode=flashmla              strict choice
    attention.sparse_decode?=flashmla             preference: may fall back, and says so
    moe.experts[a2a=none]=triton                  where a trait of the request matches
    attention.*=!aiter                            ban
    attention.sparse_decode@layers=0-3,7=triton   in some layers
    attention.sparse_decode=compare(triton,reference)
    attention.*=compare(auto,triton)              `auto` is what would have been chosen

A full op name is strict about the op, too; a pattern applies to the ops that have such a kernel.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from halocline.hal.device import Device
from halocline.hal.errors import OverrideError, lines
from halocline.hal.request import KernelRequest
from halocline.hal.settings import Settings
from halocline.hal.table import Source

__all__ = ["AUTO", "Action", "Override", "collect_overrides", "parse_override"]

AUTO = "auto"
Action = Literal["strict", "prefer", "ban", "compare"]

_SYNTAX = re.compile(
    r"""^(?P<pattern>[A-Za-z0-9_.*]+)
    (?:\[(?P<traits>[^\]]*)\])?
    (?:@layers=(?P<layers>[0-9,\- ]+))?
    (?P<operator>\?=|=)
    (?P<ban>!)?(?P<kernel>[A-Za-z0-9_]+|compare\(\s*[A-Za-z0-9_]+\s*,\s*[A-Za-z0-9_]+\s*\))$""",
    re.VERBOSE,
)
_MOST_LAYERS = 100_000
_EXAMPLE = "attention.sparse_decode=flashmla, 'attention.*=!aiter', 'moe.experts[a2a=none]?=triton'"

# Higher wins. HALOCLINE_KERNELS wins over HALOCLINE_HIP_BACKEND, which is short for one pattern.
_FLAG, _ENV, _HIP_BACKEND, _FILE, _MODEL = 5, 4, 3, 2, 1


@dataclass(frozen=True, kw_only=True)
class Override:
    """One parsed override.

    Attributes:
        text: As the user wrote it.
        source: Where it was given.
        origin: The same for messages: `--kernel`, `HALOCLINE_KERNELS`, a file's path.
        precedence: Higher wins.
        pattern: Op name or glob.
        traits: Trait values that a request must have.
        layers: Layers that it is limited to, or None.
        action: What it does.
        kernels: One kernel name; two for `compare`.
    """

    text: str
    source: Source
    origin: str
    precedence: int
    pattern: str
    traits: Mapping[str, str] = field(default_factory=dict[str, str])
    layers: tuple[int, ...] | None = None
    action: Action = "strict"
    kernels: tuple[str, ...] = ()

    @property
    def is_pattern(self) -> bool:
        """Whether it may apply to several ops."""
        return "*" in self.pattern

    @property
    def weight(self) -> tuple[int, bool, bool, bool]:
        """Sort key: source first, then how specific it is."""
        return (self.precedence, self.layers is not None, bool(self.traits), not self.is_pattern)

    def matches(self, request: KernelRequest, layer: int | None) -> bool:
        """Whether it speaks about a request in a layer."""
        if not fnmatch.fnmatchcase(request.op, self.pattern):
            return False
        if self.layers is not None and layer not in self.layers:
            return False
        return all(str(request.traits.get(name)) == value for name, value in self.traits.items())


def parse_override(text: str, *, source: Source, origin: str, precedence: int) -> Override:
    """Parses one override.

    Raises:
        OverrideError: If it does not follow the syntax.
    """
    match = _SYNTAX.match(text.strip())
    if match is None:
        raise _malformed(text, origin, "OP=KERNEL, OP?=KERNEL or OP=!KERNEL")
    part = match.groupdict()
    names = tuple(re.findall(r"[A-Za-z0-9_]+", part["kernel"].removeprefix("compare(")))
    compared = part["kernel"].startswith("compare(")
    prefer = part["operator"] == "?="
    if prefer and (compared or part["ban"]):
        raise _malformed(text, origin, "?= takes one kernel name: it prefers, it neither bans nor compares")
    if compared and part["ban"]:
        raise _malformed(text, origin, "a ban takes one kernel name")
    if compared and names[0] == names[1]:
        raise _malformed(text, origin, f"compare({names[0]},{names[1]}) compares a kernel with itself")
    action: Action = "compare" if compared else "ban" if part["ban"] else "prefer" if prefer else "strict"
    return Override(
        text=text.strip(),
        source=source,
        origin=origin,
        precedence=precedence,
        pattern=part["pattern"],
        traits=_parse_traits(part["traits"], text, origin),
        layers=None if part["layers"] is None else _parse_layers(part["layers"], text, origin),
        action=action,
        kernels=names,
    )


def collect_overrides(
    *,
    flags: Sequence[str] = (),
    settings: Settings | None = None,
    model_defaults: Sequence[str] = (),
    device: Device,
) -> tuple[tuple[Override, ...], tuple[str, ...]]:
    """Gathers the overrides of every source.

    Args:
        flags: Values of `--kernel`.
        settings: Settings of the process; gives the environment's and the file's overrides.
        model_defaults: What the model prefers, in the same syntax.
        device: Decides whether `HALOCLINE_HIP_BACKEND` has an effect.

    Returns:
        The overrides, and notes for the user.

    Raises:
        OverrideError: If one does not parse, or the file cannot be read.
    """
    found = [parse_override(text, source="flag", origin="--kernel", precedence=_FLAG) for text in flags]
    notes: list[str] = []
    if settings is not None:
        for text in filter(None, (part.strip() for part in settings.kernels.split(";"))):
            found.append(parse_override(text, source="env", origin="HALOCLINE_KERNELS", precedence=_ENV))
        found.extend(_from_hip_backend(settings.hip_backend, device, notes))
        if settings.config is not None:
            for text in read_override_file(settings.config):
                found.append(parse_override(text, source="file", origin=str(settings.config), precedence=_FILE))
    for text in model_defaults:
        found.append(parse_override(text, source="model", origin="the model's default", precedence=_MODEL))
    return tuple(found), tuple(notes)


def read_override_file(path: Path) -> tuple[str, ...]:
    """Reads the array `kernels` of a TOML file.

    Raises:
        OverrideError: If the file is missing, is not TOML or holds something else.
    """
    try:
        parsed = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OverrideError(
            lines(
                f"cannot read the configuration file {path}", found=error, try_="correct it, or unset HALOCLINE_CONFIG"
            )
        ) from error
    unknown = sorted(set(parsed) - {"kernels"})
    listed = parsed.get("kernels", [])
    texts = [text for text in cast("list[object]", listed) if isinstance(text, str)] if isinstance(listed, list) else []
    if unknown or not isinstance(listed, list) or len(texts) != len(cast("list[object]", listed)):
        raise OverrideError(
            lines(
                f"the configuration file {path} holds something else than overrides",
                found=f"unknown keys: {', '.join(unknown)}" if unknown else f"kernels = {listed!r}",
                expected=f"kernels = [{_EXAMPLE.split(',', 1)[0]!r}]",
            )
        )
    return tuple(texts)


def _from_hip_backend(value: str, device: Device, notes: list[str]) -> Iterable[Override]:
    if value == AUTO:
        return
    variable = "HALOCLINE_HIP_BACKEND"
    if device.vendor != "amd":
        notes.append(f"{variable}={value} has no effect on {device}: it chooses attention kernels on AMD devices")
        return
    choice = "compare(auto,triton)" if value == "comparison" else value
    yield parse_override(f"attention.*={choice}", source="env", origin=f"{variable}={value}", precedence=_HIP_BACKEND)


def _parse_traits(text: str | None, whole: str, origin: str) -> dict[str, str]:
    traits: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in (text or "").split(","))):
        name, equals, value = pair.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise _malformed(whole, origin, f"a trait is NAME=VALUE, found {pair!r}")
        traits[name.strip()] = value.strip()
    return traits


def _parse_layers(text: str, whole: str, origin: str) -> tuple[int, ...]:
    layers: set[int] = set()
    for part in (piece.strip() for piece in text.split(",")):
        first, dash, last = part.partition("-")
        is_range = first.isdigit() and (last.isdigit() if dash else not last)
        if not is_range or not int(first) <= int(last or first) <= _MOST_LAYERS:
            raise _malformed(whole, origin, f"layers are numbers and ranges like 0-3,7; found {part!r}")
        layers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(layers))


def _malformed(text: str, origin: str, expected: str) -> OverrideError:
    return OverrideError(
        lines(f"cannot read the kernel override {text!r}", given=origin, expected=expected, example=_EXAMPLE)
    )
