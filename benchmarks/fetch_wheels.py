"""Fetches the CUDA kernel packages for a GPU machine without a network, trimmed, one archive for each.

A machine that runs them needs Python 3.12, torch 2.11 for CUDA 13 and glibc 2.28 or newer. What is fetched is never
committed. `unpack` puts the archives on the other machine's path.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["PACKAGES", "Package", "fetch", "main", "unpack"]

_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34, 35, 39)),
    "manylinux2014_x86_64",
    "linux_x86_64",
)


@dataclass(frozen=True, kw_only=True)
class Package:
    """A distribution, and what of its wheel stays behind: files that DeepSeek-V4 on sm_90 never loads."""

    name: str
    version: str
    without: tuple[str, ...] = ()

    def keeps(self, path: str) -> bool:
        """Whether a file of the wheel is brought along."""
        return not any(part in path for part in self.without)


# The set that was run together: torch 2.11, CUDA 13, one owner of each top-level module.
PACKAGES = (
    Package(name="sglang-kernel", version="0.4.5", without=("flash_ops", "infllm_ops", "/sm100/")),
    Package(name="sgl-deep-gemm", version="0.1.4.post1"),
    Package(name="apache-tvm-ffi", version="0.1.11"),
    Package(name="flashinfer-python", version="0.6.15.post1"),
    Package(name="sgl-flash-mla", version="1.0.0"),
)


def _download(package: Package, folder: Path) -> Path:
    """The wheel, without its dependencies: their declared torch is newer than the one their binaries fit."""
    known = sorted(folder.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl"))
    if known:
        return known[0]
    platforms = [part for platform in _PLATFORMS for part in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", *platforms, "-d", str(folder)]
    subprocess.run([*command, f"{package.name}=={package.version}"], check=True)
    return sorted(folder.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl"))[0]


def _pack(package: Package, wheel: Path, archive: Path) -> int:
    """Writes the kept files of a wheel; returns the bytes of the archive."""
    with TemporaryDirectory() as temporary, zipfile.ZipFile(wheel) as source:
        kept = [name for name in source.namelist() if package.keeps(name)]
        source.extractall(temporary, kept)
        with tarfile.open(archive, "w:xz", preset=3) as target:
            for top in sorted({name.split("/", 1)[0] for name in kept}):
                target.add(Path(temporary) / top, arcname=top)
    return archive.stat().st_size


def fetch(folder: Path, downloads: Path, names: Sequence[str]) -> dict[str, int]:
    """Fetches and packs packages.

    Args:
        folder: Where archives go.
        downloads: Where wheels are kept.
        names: Distributions; all when empty.

    Returns:
        Bytes of each archive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    downloads.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for package in PACKAGES:
        if not names or package.name in names:
            archive = folder / f"{package.name}-{package.version}.tar.xz"
            sizes[package.name] = _pack(package, _download(package, downloads), archive)
    return sizes


def unpack(folder: Path, target: Path) -> list[Path]:
    """Unpacks every archive into a folder of its own; returns the folders, to be put on the path."""
    folders = []
    for archive in sorted(folder.glob("*.tar.xz")):
        place = target / archive.name.removesuffix(".tar.xz")
        place.mkdir(parents=True, exist_ok=True)
        # tar is many times faster than Python's module; archives are our own.
        subprocess.run(["tar", "-xJf", str(archive), "-C", str(place)], check=True)
        folders.append(place)
    return folders


def main(arguments: Sequence[str]) -> int:
    """Fetches packages and prints what they weigh."""
    parser = argparse.ArgumentParser(prog="./dev bench fetch_wheels", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".cache/gpu-wheels"), help="folder of the archives")
    parser.add_argument("--downloads", type=Path, default=Path(".cache/downloads"), help="folder of the wheels")
    parser.add_argument("names", nargs="*", metavar="NAME", help="distributions; all when left out")
    options = parser.parse_args(list(arguments))
    sizes = fetch(options.out, options.downloads, options.names)
    sys.stdout.writelines(f"{name:20s} {size:>12,} bytes\n" for name, size in sizes.items())
    sys.stdout.write(f"{'in all':20s} {sum(sizes.values()):>12,} bytes in {options.out}\n")
    return 0
