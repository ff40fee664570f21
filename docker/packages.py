"""Recorded package metadata of the vendor sets: written by hand on demand, read by tests and by the images.

    python docker/packages.py record SET   asks the package index, writes docker/metadata/SET.json (cuda or rocm)
    python docker/packages.py lock SET     prints what an image installs: every version, with its hash
    python docker/packages.py given NAME   prints NAME==VERSION of what this Python already has, one line a name

`record` resolves for Python 3.12 on Linux x86-64 and reads metadata only: no big wheel is downloaded. Of each wheel it
takes the list of files by reading the end of the archive. The rest uses the standard library alone, so that it runs
in a base image.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METADATA = ROOT / "docker" / "metadata"
SETS = ("cuda", "rocm")  # names of an extra, of a constraints file and of a record
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]


def main() -> int:
    """Parses the command line and runs one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "lock"):
        commands.add_parser(name).add_argument("set", choices=SETS)
    commands.add_parser("given").add_argument("names", nargs="+")
    options = parser.parse_args()
    if options.command == "record":
        record(options.set)
    elif options.command == "lock":
        print("\n".join(lock(json.loads((METADATA / f"{options.set}.json").read_text()))))
    else:
        print("\n".join(f"{name}=={importlib.metadata.version(name)}" for name in options.names))
    return 0


def lock(recorded: dict) -> list[str]:
    """Requirements for `pip install --require-hashes --no-deps`; what the base image gives is left out."""
    return [f"{row['name']}=={row['version']} --hash=sha256:{row['sha256']}" for row in recorded["packages"]]


# ---- record -----------------------------------------------------------------------------------------------------


def canonical(name: str) -> str:
    """The normalised name of a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: Path) -> dict[str, str]:
    """Version by canonical name from a constraints file."""
    rows = re.findall(r"^([A-Za-z0-9][\w.-]*)==(\S+)$", file.read_text(), re.MULTILINE)
    return {canonical(name): version for name, version in rows}


def apart(file: Path) -> list[str]:
    """Names whose accepted conflict keeps them out of the resolver: they are installed with --no-deps."""
    return [canonical(name) for name in re.findall(r"^# conflict: (\S+) requires ", file.read_text(), re.MULTILINE)]


def record(name: str) -> None:
    """Resolves a set, reads the metadata of all of it and writes it down; what is given stays as it stands."""
    constraints, target = ROOT / "constraints" / f"{name}.txt", METADATA / f"{name}.json"
    given = json.loads(target.read_text())["given"] if target.exists() else []
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][name]]
    core = {canonical(re.split(r"[<>=!~\[ ]", row)[0]) for row in project["dependencies"]}
    own = pins(constraints)
    bounds = {pin: version for pin, version in pins(ROOT / "constraints" / "tested.txt").items() if pin in core} | own
    with tempfile.TemporaryDirectory() as folder:
        for row in given:
            stand_in(Path(folder), row["name"], row["version"])
        found = resolve(wanted, bounds, "--find-links", folder)
    for late in apart(constraints):
        found += resolve([f"{late}=={own[late]}"], {}, "--no-deps")
    names = {canonical(row["name"]) for row in given}
    asked = extras(found)
    rows = [package(row, asked) for row in found if canonical(row["metadata"]["name"]) not in names]
    rows.sort(key=lambda row: canonical(row["name"]))
    target.write_text(
        json.dumps({"python": PYTHON, "platform": "linux x86_64", "given": given, "packages": rows}, indent=1) + "\n"
    )
    print(f"{target.relative_to(ROOT)}: {len(rows)} packages, {len(given)} given")


def stand_in(folder: Path, name: str, version: str) -> None:
    """Writes an empty wheel, so that the resolver takes what the base image gives for granted."""
    stem = f"{canonical(name).replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        info = f"{stem}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def resolve(wanted: list[str], bounds: dict[str, str], *options: str) -> list[dict]:
    """What pip would install for the target, with metadata."""
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(bounds.items())))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", *options]
        command += ["--report", str(report), "--only-binary=:all:", "--python-version", PYTHON]
        command += ["--implementation", "cp", *(word for name in PLATFORMS for word in ("--platform", name))]
        command += ["--target", str(Path(folder) / "none"), "-c", str(constraints), *wanted]
        subprocess.run(command, check=True)
        return list(json.loads(report.read_text())["install"])


def extras(found: list[dict]) -> dict[str, set[str]]:
    """Which extras the packages ask of each other, by canonical name."""
    asked: dict[str, set[str]] = {}
    for row in found:
        for text in row["metadata"].get("requires_dist", []):
            if match := re.match(r"([\w.-]+)\s*\[([^\]]+)\]", text):
                asked.setdefault(canonical(match[1]), set()).update(part.strip() for part in match[2].split(","))
    return asked


def package(row: dict, asked: dict[str, set[str]]) -> dict:
    """One line of the record; requirements of extras that nobody asks for are left out."""
    metadata, source = row["metadata"], row["download_info"]
    name = metadata["name"]
    print(f"  {name} {metadata['version']}", file=sys.stderr)
    wanted = asked.get(canonical(name), set())
    return {
        "name": name,
        "version": metadata["version"],
        "requires_python": metadata.get("requires_python", ""),
        "requires": [
            text
            for text in metadata.get("requires_dist", [])
            if not (extra := re.search(r"extra\s*==\s*['\"]([\w.-]+)", text)) or extra[1] in wanted
        ],
        "modules": modules(source["url"]),
        "sha256": source["archive_info"]["hashes"]["sha256"],
    }


class Remote(io.RawIOBase):
    """A file behind HTTP that is read in ranges, so that the end of a big archive costs a few kilobytes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.position = 0
        self.context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
        with self.open(0, 0) as answer:
            self.size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def open(self, first: int, last: int):
        """Asks for the bytes from `first` to `last`, both included."""
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={first}-{last}"})
        return urllib.request.urlopen(request, context=self.context)

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to a position."""
        self.position = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence] + offset
        return self.position

    def tell(self) -> int:
        """The position."""
        return self.position

    def read(self, size: int = -1) -> bytes:
        """Reads from the position on."""
        last = self.size - 1 if size < 0 else min(self.position + size, self.size) - 1
        if last < self.position:
            return b""
        with self.open(self.position, last) as answer:
            data = answer.read()
        self.position += len(data)
        return data


def modules(url: str) -> list[str]:
    """Top-level modules of a wheel, from its list of files."""
    source = urllib.request.url2pathname(url.removeprefix("file://")) if url.startswith("file:") else Remote(url)
    with zipfile.ZipFile(source) as wheel:
        tops = {name.split("/", 1)[0] for name in wheel.namelist()}
    return sorted(
        re.sub(r"(\.(abi3|cpython-\S+))?\.(py|so)$", "", top)
        for top in tops
        if not top.endswith((".dist-info", ".data", ".pth", ".libs"))
    )


if __name__ == "__main__":
    sys.exit(main())
