"""Rows of a GPU session: one JSON object a line, with what is needed to read it later."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from halocline.hal.probe import probe
from halocline.hal.settings import process_settings

__all__ = ["Rows", "commit_here", "read_rows", "versions"]

_PACKAGES = (
    "torch",
    "triton",
    "sglang-kernel",
    "sgl-deep-gemm",
    "flashinfer-python",
    "sgl-flash-mla",
    "tilelang",
    "transformers",
)


def versions() -> dict[str, str]:
    """What is installed of the packages that figures depend on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit_here() -> str:
    """The commit of this checkout, as far as git can tell."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parent
        )
    except FileNotFoundError:
        return "unknown"
    return result.stdout.strip() or "unknown"


class Rows:
    """Appends rows to a file as they come, so that a session that is cut short keeps what it has.

    Several processes may append to one file.
    """

    def __init__(self, path: Path, *, part: str = "", commit: str = "", device: str = "") -> None:
        """Opens the file for more rows.

        Args:
            path: Of the file.
            part: Of the session that writes.
            commit: What is measured; git is asked when left out.
            device: What it is measured on; this machine's when left out.
        """
        self._path, self._part = path, part
        self._facts = {"device": device or _device(), "versions": versions(), "commit": commit or commit_here()}
        self.failures = 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        name: str,
        value: object,
        unit: str,
        *,
        params: Mapping[str, Any] | None = None,
        roof: float | None = None,
        share: float | None = None,
    ) -> None:
        """Writes one row and shows it on the terminal."""
        asked = dict(params or {})
        row = {
            "part": self._part,
            "name": name,
            "params": asked,
            "value": value,
            "unit": unit,
            "roof": roof,
            "share": share,
        }
        line = json.dumps({**row, **self._facts}, default=str) + "\n"
        with self._path.open("ab", buffering=0) as file:  # one write: several processes share the file
            file.write(line.encode())
        shown = " ".join(f"{key}={item}" for key, item in asked.items())
        sys.stdout.write(f"{name} {shown}: {value} {unit}{'' if share is None else f' ({share:.0%} of the roof)'}\n")
        sys.stdout.flush()

    @contextmanager
    def guard(self, name: str, **params: object) -> Iterator[None]:
        """Turns a failure into a row, and notes how long the block took."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:  # one measurement must not end the part
            self.failures += 1
            text = f"{type(error).__name__}: {error}"
            last = "".join(traceback.format_tb(error.__traceback__)[-3:])
            self.add(name, f"{text[:600]} | {last[-900:]}", "error", params=params)
        else:
            self.add(f"{name}.seconds", round(time.perf_counter() - start, 2), "s", params=params)


def _device() -> str:
    """The device's own name, without taking memory of it."""
    device = probe(process_settings())
    return device.name if device.is_gpu else "cpu"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a last line that was cut off is left out."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found
