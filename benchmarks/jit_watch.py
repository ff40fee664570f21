"""Notices what must not happen once an engine is ready: a kernel is compiled, a module imported, a program started."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halocline.hal.settings import Settings

__all__ = ["JitWatch", "cache_folders"]

_COMPILER = re.compile(
    r"(nvcc|cicc|ptxas|fatbinary|nvlink|cudafe\+\+|hipcc|amdclang\S*|ld(\.\S+)?|lld|as|collect2|cc1\S*|ninja"
    r"|(\S+-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+)(-[\d.]+)?)"
)


def _program(arguments: tuple[Any, ...]) -> str:
    """Name of the program that an audit event is about: its first word, without its folder."""
    started = arguments[0]
    if started is None:  # `subprocess.Popen` names the program in its arguments alone
        started = arguments[1]
    if isinstance(started, (list, tuple)):
        started = started[0]
    words = os.fsdecode(started).split()
    return Path(words[0]).name if words else ""


def cache_folders(settings: Settings) -> tuple[Path, ...]:
    """The folders of compiled kernels that were decided, for all libraries or by a library's own variable."""
    return tuple(settings.library_caches().values())


class JitWatch:
    """What happened since it was made.

    A compiler leaves files in its cache folder, also one that runs inside of a library's native code; starting it shows
    as a program. Python's audit hooks cannot be taken back, so that a watch is made once in a process.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = tuple(folders)
        self._files = self._listing()
        self._modules = set(sys.modules)
        self._programs: list[str] = []
        self._active = True
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._active and event in ("subprocess.Popen", "os.system", "os.posix_spawn"):
            self._programs.append(_program(arguments))

    def _listing(self) -> set[str]:
        return {
            f"{folder.name}/{path.relative_to(folder)}"
            for folder in self._folders
            if folder.is_dir()
            for path in folder.rglob("*")
            if path.is_file()
        }

    def modules(self) -> list[str]:
        """Modules that were imported."""
        return sorted(set(sys.modules) - self._modules)

    def files(self) -> list[str]:
        """Files that compilers left: each kernel gives several."""
        return sorted(self._listing() - self._files)

    def kernels(self) -> list[str]:
        """Names of kernels that were compiled, as far as their files tell; one for each compilation."""
        ends = (".cubin", ".hsaco", ".so", ".cu")
        found = [Path(name) for name in self.files() if name.endswith(ends)]
        return [path.parent.name if path.stem == "kernel" else path.stem for path in found]

    def programs(self) -> list[str]:
        """Names of programs that were started."""
        return list(self._programs)

    def compilers(self) -> list[str]:
        """Those of them that compile, assemble or link."""
        return [name for name in self._programs if _COMPILER.fullmatch(name)]

    def close(self) -> None:
        """Stops noting programs."""
        self._active = False
