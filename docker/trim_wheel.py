"""Rewrites a wheel without the files that a pattern names: `python trim_wheel.py WHEEL FOLDER --drop PATTERN ...`.

The wheel keeps its name and version, and its list of files is brought up to date, so that pip installs and checks it
like any other. A pattern that matches nothing is an error: the library was laid out anew and the patterns are stale.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import io
import sys
import zipfile
from pathlib import Path


def main() -> int:
    """Parses the command line and trims one wheel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--drop", action="append", required=True, metavar="PATTERN", help="of files inside the wheel")
    options = parser.parse_args()
    before, after = trim(options.wheel, options.folder, options.drop)
    print(f"{options.wheel.name}: {before / 1e6:.0f} MB unpacked, {after / 1e6:.0f} MB kept")
    return 0


def trim(wheel: Path, folder: Path, patterns: list[str]) -> tuple[int, int]:
    """Writes the trimmed wheel; gives the unpacked bytes before and after."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as source:
        infos = source.infolist()
        dropped = {info.filename for info in infos if any(fnmatch.fnmatch(info.filename, p) for p in patterns)}
        stale = [p for p in patterns if not fnmatch.filter([info.filename for info in infos], p)]
        if stale:
            sys.exit(f"trim_wheel: no file in {wheel.name} matches {', '.join(stale)}")
        with zipfile.ZipFile(folder / wheel.name, "w", zipfile.ZIP_DEFLATED) as target:
            for info in infos:
                if info.filename in dropped:
                    continue
                data = source.read(info)
                if info.filename.endswith(".dist-info/RECORD"):
                    data = without(data.decode(), dropped).encode()
                target.writestr(info, data, compress_type=zipfile.ZIP_DEFLATED)
    kept = [info.file_size for info in infos if info.filename not in dropped]
    return sum(info.file_size for info in infos), sum(kept)


def without(record: str, dropped: set[str]) -> str:
    """The list of files without those that were dropped."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        row for row in csv.reader(record.splitlines()) if row[0] not in dropped
    )
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
