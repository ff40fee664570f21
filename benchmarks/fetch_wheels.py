"""Fetches the CUDA kernel packages for a GPU machine without a network, trimmed, one archive for each.

A machine that runs them needs Python 3.12, torch 2.11 for CUDA 13 and glibc 2.28 or newer. What is fetched is never
committed. `unpack` puts the archives on the other machine's path. Packages come in sets, a folder for each, because a
machine may take few bytes at a time: `libraries` are NVIDIA's kernels, `tilelang` the compiler of the AMD ones,
`commands` what the wheel of Halocline itself needs beside torch, as wheels, so that pip installs them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["PACKAGES", "SETS", "Package", "fetch", "main", "unpack"]

_ENDS = ("*.tar.xz", "*.whl")
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35, 39)),
    "manylinux2014_x86_64",
    "linux_x86_64",
)


@dataclass(frozen=True, kw_only=True)
class Package:
    """A distribution.

    Attributes:
        name: As on the index.
        version: The only one that is fetched.
        without: Parts of paths that stay behind: files that DeepSeek-V4 on sm_90 never loads.
        links: Names that the wheel gives to a second copy of a file, and the first copy's name.
        sets: Of `libraries`, `tilelang` and `commands`.
    """

    name: str
    version: str
    without: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    sets: tuple[str, ...] = ("libraries",)

    @property
    def archive(self) -> str:
        """Name of its file in the folder that travels; wheels of the set `commands` keep their own."""
        return f"{self.name}-{self.version}.tar.xz"

    def keeps(self, path: str) -> bool:
        """Whether a file of the wheel is brought along."""
        return not any(part in path for part in self.without)


# The set that was run together: torch 2.11, CUDA 13, one owner of each top-level module.
PACKAGES = (
    Package(name="sglang-kernel", version="0.4.5", without=("flash_ops", "infllm_ops", "/sm100/")),
    Package(name="sgl-deep-gemm", version="0.1.4.post1"),
    Package(name="apache-tvm-ffi", version="0.1.11", sets=("libraries", "tilelang")),
    Package(name="flashinfer-python", version="0.6.15.post1"),
    Package(name="sgl-flash-mla", version="1.0.0"),
    Package(
        name="tilelang",
        version="0.1.15",
        # Python files stay, those of other devices too: importing the package reads all of them.
        # Its kernels are C++ on the host, so that the headers are needed to keep what was compiled.
        without=(".cc", "src/ascend", "src/metal", "tvm/src", "cutlass/tools"),
        sets=("tilelang",),
    ),
    Package(
        name="z3-solver",
        version="4.15.4.0",
        without=("bin/z3", "libz3.so.", "z3/include"),
        links=(("z3/lib/libz3.so.4.15", "libz3.so"),),
        sets=("tilelang",),
    ),
    Package(name="torch-c-dlpack-ext", version="0.1.5", sets=("tilelang",)),
    Package(name="deepseek-recipe", version="0.2.0", sets=("commands",)),
    Package(name="llguidance", version="1.6.1", sets=("commands",)),
    Package(name="starlette", version="1.10.0", sets=("commands",)),
    Package(name="uvicorn", version="0.54.0", sets=("commands",)),
    Package(name="httptools", version="0.9.0", sets=("commands",)),
)
SETS = tuple(dict.fromkeys(name for package in PACKAGES for name in package.sets))


def _download(package: Package, folder: Path) -> Path:
    """The wheel, without its dependencies: their declared torch is newer than the one their binaries fit."""
    pattern = f"{package.name.replace('-', '_')}-{package.version}-*.whl"
    known = sorted(folder.glob(pattern))
    if known:
        return known[0]
    platforms = [part for platform in _PLATFORMS for part in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", *platforms, "-d", str(folder)]
    subprocess.run([*command, f"{package.name}=={package.version}"], check=True)
    return sorted(folder.glob(pattern))[0]


def _pack(package: Package, wheel: Path, archive: Path) -> None:
    """Writes the kept files of a wheel."""
    with TemporaryDirectory() as temporary, zipfile.ZipFile(wheel) as source:
        kept = [name for name in source.namelist() if package.keeps(name)]
        source.extractall(temporary, kept)
        for name, first in package.links:
            (Path(temporary) / name).symlink_to(first)
        with tarfile.open(archive, "w:xz", preset=6) as target:
            for top in sorted({name.split("/", 1)[0] for name in kept}):
                target.add(Path(temporary) / top, arcname=top)


def fetch(folder: Path, downloads: Path, names: Sequence[str]) -> dict[str, int]:
    """Fetches and packs packages; archives that are there already stay.

    Args:
        folder: Where the folders of the sets go.
        downloads: Where wheels are kept.
        names: Distributions or sets of them; all when empty.

    Returns:
        Bytes of each file, by its path below the folder.
    """
    downloads.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for package in PACKAGES:
        for own in package.sets:
            if not names or package.name in names or own in names:
                (folder / own).mkdir(parents=True, exist_ok=True)
                archive = _bring(package, folder / own, downloads, as_wheel=own == "commands")
                sizes[f"{own}/{archive.name}"] = archive.stat().st_size
    return sizes


def _bring(package: Package, folder: Path, downloads: Path, *, as_wheel: bool) -> Path:
    """The package's file in a folder, made if it is not there."""
    if as_wheel:
        wheel = _download(package, downloads)
        return Path(shutil.copy(wheel, folder))
    archive = folder / package.archive
    if not archive.exists():
        _pack(package, _download(package, downloads), archive)
    return archive


def unpack(folders: Sequence[Path], target: Path) -> list[str]:
    """Unpacks every archive and wheel but Halocline's own into one folder, where libraries find each other.

    What was unpacked there before is left alone.

    Returns:
        The names of all that is there.
    """
    target.mkdir(parents=True, exist_ok=True)
    names = []
    for archive in sorted(path for folder in folders for end in _ENDS for path in folder.glob(end)):
        if archive.name.startswith("halocline-") or archive.name in names:
            continue
        done = target / f".{archive.name}"
        if not done.exists():
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as source:
                    source.extractall(target)
            else:  # tar is many times faster than Python's module; archives are our own
                subprocess.run(["tar", "-xJf", str(archive), "-C", str(target)], check=True)
            done.touch()
        names.append(archive.name)
    return names


def main(arguments: Sequence[str]) -> int:
    """Fetches packages and prints what they weigh."""
    parser = argparse.ArgumentParser(prog="./dev bench fetch_wheels", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".whl"), help="folder of the sets")
    parser.add_argument("--downloads", type=Path, default=Path(".cache/downloads"), help="folder of the wheels")
    parser.add_argument("names", nargs="*", metavar="NAME", help="distributions or sets; all when left out")
    options = parser.parse_args(list(arguments))
    sizes = fetch(options.out, options.downloads, options.names)
    sys.stdout.writelines(f"{name[:60]:60s} {size:>12,} bytes\n" for name, size in sizes.items())
    sys.stdout.write(f"{'in all':60s} {sum(sizes.values()):>12,} bytes in {options.out}\n")
    return 0
