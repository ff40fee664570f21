"""The only reader of the environment: typed settings, read once, frozen.

Each public variable is one field of `Settings`; its metadata holds name, parser and help. An unknown `HALOCLINE_*`
variable or a bad value stops start-up and names the nearest valid one. An empty value means unset; `0` means false.
Variables that belong to drivers and libraries are kept as they were found in `Settings.foreign`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from halocline.hal.errors import SettingsError, lines
from halocline.hal.place import RankPlace, read_place

__all__ = [
    "FOREIGN",
    "PREFIX",
    "SettingRow",
    "Settings",
    "child_environment",
    "nearest",
    "process_settings",
    "set_cache_variables",
    "set_library_variable",
    "set_variables_of_ranks",
]

PREFIX = "HALOCLINE_"

# Variables of drivers, launchers and libraries that some part of Halocline looks at.
FOREIGN = (
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "DG_JIT_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "GLOO_SOCKET_IFNAME",
    "GPU_DEVICE_ORDINAL",
    "HIP_VISIBLE_DEVICES",
    "HOME",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "RANK",
    "ROCM_PATH",
    "ROCR_VISIBLE_DEVICES",
    "TILELANG_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "WORLD_SIZE",
)

# Where libraries keep what they compile, and the folder of each below `HALOCLINE_CACHE_DIR`.
_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
}
_HIP_BACKENDS = ("auto", "tilelang", "aiter", "triton", "reference", "comparison")
_PREFILL_LAYOUTS = ("auto", "paged", "ragged")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_MOST_SECONDS = 86_400.0
# When a rank is lost, our own line is to be read and not a stack of the library's store. Multicast over the links
# between GPUs stays off: a program that uses it can put GPUs out of service for others on the same host. Buffers of
# captured collectives are not registered: that gains nothing for rows of a step, and cannot be done with torch's
# expandable segments.
_OF_RANKS = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_GRAPH_REGISTER": "0",
}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is closest to a mistyped one, or None when nothing is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}", nearest(text, allowed))
        return text

    return parse


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("1 or 0 (true/false, yes/no, on/off)", nearest(text.lower(), _TRUE + _FALSE))


def _verbosity(text: str) -> int:
    if text not in ("0", "1", "2"):
        raise ValueError("0, 1 or 2", None)
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 1.0 <= found <= _MOST_SECONDS:
        raise ValueError(f"seconds, from 1 to {_MOST_SECONDS:.0f}", None)
    return found


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _variable(parse: Callable[[str], Any], text: str) -> dict[str, Any]:
    """Metadata of a field that a `HALOCLINE_*` variable sets."""
    return {"parse": parse, "help": text}


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One line of `halocline env`.

    Attributes:
        variable: Name in the environment.
        value: Value in force, as text; empty when unset.
        source: `environment` or `default`.
        help: What it does, in one line.
    """

    variable: str
    value: str
    source: str
    help: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of the process. A command-line flag wins over the variable of the same meaning.

    Attributes:
        kernels: Kernel overrides in the syntax of `--kernel`, joined by semicolons.
        hip_backend: Short for `attention.*=X` on AMD devices; without effect elsewhere.
        prefill_layout: `paged` or `ragged` forces the layout of prefill; `auto` takes the device's default.
        device: `auto`, or `cpu` to leave the accelerators alone.
        config: A TOML file whose array `kernels` holds overrides.
        deterministic: Demands kernels that give a row the same bits whatever else is in the batch.
        verbosity: What `-v` (1) and `-vv` (2) say.
        cache_dir: Where libraries keep compiled kernels, a folder each; one whose own variable is set keeps to that,
            and all keep to theirs where this is left out.
        dump_dir: Where comparison, record and crash dumps go.
        record: Ops whose calls are written to `dump_dir`, as patterns joined by commas.
        collective_timeout: Seconds after which an exchange that another rank never enters fails.
        rank_timeout: Seconds without a sign of life after which a rank counts as lost. One that has ended or was
            stopped is noticed at once by the ranks on its machine.
        foreign: Variables of drivers and libraries, as found.
        given: Names of the fields that the environment set.
    """

    kernels: str = field(default="", metadata=_variable(str, "kernel overrides: 'op=kernel;op=!kernel', as --kernel"))
    hip_backend: str = field(
        default="auto", metadata=_variable(_choice(*_HIP_BACKENDS), f"attention on AMD: {', '.join(_HIP_BACKENDS)}")
    )
    prefill_layout: str = field(
        default="auto", metadata=_variable(_choice(*_PREFILL_LAYOUTS), "layout of prefill: auto, paged or ragged")
    )
    device: str = field(
        default="auto", metadata=_variable(_choice("auto", "cpu"), "auto, or cpu to leave accelerators alone")
    )
    config: Path | None = field(
        default=None, metadata=_variable(_path, "TOML file whose array kernels holds overrides")
    )
    deterministic: bool = field(
        default=False, metadata=_variable(_boolean, "same bits for a request whatever else is in the batch")
    )
    verbosity: int = field(default=0, metadata=_variable(_verbosity, "0 quiet, 1 as -v, 2 as -vv"))
    cache_dir: Path | None = field(
        default=None, metadata=_variable(_path, "folder of compiled kernels; default: where each library keeps its own")
    )
    dump_dir: Path | None = field(
        default=None, metadata=_variable(_path, "folder of comparison and record dumps; default ./halocline-dumps")
    )
    record: str = field(
        default="", metadata=_variable(str, "ops to record into the dump folder: 'attention.*,moe.experts'")
    )
    collective_timeout: float = field(
        default=300.0, metadata=_variable(_seconds, "seconds until an exchange that a rank never enters fails")
    )
    rank_timeout: float = field(
        default=30.0, metadata=_variable(_seconds, "seconds without a sign of life until a rank counts as lost")
    )
    foreign: Mapping[str, str] = field(default_factory=dict[str, str])
    given: frozenset[str] = frozenset()

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Reads and checks the settings of an environment.

        Args:
            environ: Variables; those of the process when left out.

        Raises:
            SettingsError: On an unknown `HALOCLINE_*` variable or a value that cannot be read.
        """
        environ = os.environ if environ is None else environ
        fields = {PREFIX + f.name.upper(): f for f in dataclasses.fields(cls) if "parse" in f.metadata}
        values: dict[str, Any] = {}
        for variable in sorted(name for name in environ if name.startswith(PREFIX)):
            if variable not in fields:
                raise _unknown(variable, fields)
            text = environ[variable].strip()
            if text:
                values[fields[variable].name] = _parse(variable, text, fields[variable].metadata["parse"])
        foreign = {name: environ[name] for name in FOREIGN if name in environ}
        return cls(**values, foreign=MappingProxyType(foreign), given=frozenset(values))

    def rows(self) -> tuple[SettingRow, ...]:
        """Every public variable with its value and where that comes from."""
        return tuple(
            SettingRow(
                variable=PREFIX + f.name.upper(),
                value="" if getattr(self, f.name) is None else str(getattr(self, f.name)),
                source="environment" if f.name in self.given else "default",
                help=f.metadata["help"],
            )
            for f in dataclasses.fields(self)
            if "parse" in f.metadata
        )

    def library_caches(self) -> dict[str, Path]:
        """Folders of compiled kernels that were decided, by the variable of the library; others are the library's."""
        found = {name: Path(self.foreign[name]) for name in _CACHES if self.foreign.get(name)}
        if self.cache_dir is not None:
            found |= {name: self.cache_dir / own for name, own in _CACHES.items() if name not in self.foreign}
        return found

    def place(self) -> RankPlace | None:
        """The place that a launcher has given to this process; None if it is alone.

        Raises:
            SettingsError: If what the launcher has set makes no sense.
        """
        return read_place(self.foreign)

    def dump_folder(self) -> Path:
        """Folder of comparison and record dumps: as set, else `halocline-dumps` in the current folder."""
        return self.dump_dir if self.dump_dir is not None else Path("halocline-dumps")


def process_settings() -> Settings:
    """The settings of this process: read on the first call, the same object ever after.

    A forked worker reads for itself: it does not inherit what its parent decided.
    """
    return _settings_of(os.getpid())


@functools.lru_cache(maxsize=1)
def _settings_of(process: int) -> Settings:
    return Settings.read()


def set_library_variable(name: str, value: str) -> None:
    """Sets a variable that a kernel library reads at import, unless the user has set it.

    This is the only place that writes to the environment; it must run before the library is imported.
    """
    if name.startswith(PREFIX):
        raise AssertionError(f"{name} is ours: settings are read, never written")
    os.environ.setdefault(name, value)


def set_cache_variables(settings: Settings) -> None:
    """Sets where libraries keep what they compile, if the user has named a folder for all; before they are loaded."""
    for name, folder in settings.library_caches().items():
        set_library_variable(name, str(folder))


def set_variables_of_ranks() -> None:
    """Sets what libraries read in a process that is one of several, unless the user has; before torch is loaded.

    See `_OF_RANKS`.
    """
    for name, value in _OF_RANKS.items():
        set_library_variable(name, value)


def child_environment(place: RankPlace, defaults: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is started as one of several.

    Args:
        place: Its place among them.
        defaults: Variables of libraries, for what the user has not set.
    """
    return {**_OF_RANKS, **defaults, **os.environ, **place.variables()}


def _unknown(variable: str, known: Iterable[str]) -> SettingsError:
    close = nearest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in known])
    close = None if close is None else PREFIX + close
    return SettingsError(
        lines(
            f"unknown setting {variable}",
            nearest=close,
            known=", ".join(sorted(known)),
            try_=f"rename it to {close}, or unset it" if close else f"unset {variable}; `halocline env` lists them all",
        )
    )


def _parse(variable: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        expected, close = (*error.args, None)[:2]
        raise SettingsError(
            lines(
                f"bad value for {variable}",
                found=repr(text),
                expected=expected,
                nearest=close,
                try_=f"{variable}={close}" if close else f"correct or unset {variable}",
            )
        ) from None
