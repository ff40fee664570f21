"""``./dev bench [NAME [ARGUMENTS]]``: lists the benchmarks, or runs one.

A benchmark is a file in this folder with a function ``main(arguments: Sequence[str]) -> int`` that returns an exit
status. Its module docstring's first line is what the list shows. Files without ``main`` are parts of others.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

__all__ = ["benchmarks", "main"]


def benchmarks(folder: Path) -> dict[str, str]:
    """Names and first docstring lines of the benchmarks in a folder, found without importing them."""
    found = {}
    for path in sorted(folder.glob("[a-z]*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """Lists the benchmarks, or runs the one that is named first."""
    known = benchmarks(Path(__file__).parent)
    if arguments and arguments[0] in known:
        status: int = import_module(f"halocline.benchmarks.{arguments[0]}").main(arguments[1:])
        return status
    unknown = bool(arguments) and arguments[0] not in {"-h", "--help"}
    stream = sys.stderr if unknown else sys.stdout
    if unknown:
        stream.write(f"bench: there is no benchmark {arguments[0]!r}\n")
    stream.write("usage: ./dev bench NAME [ARGUMENTS]\n\n")
    width = max(map(len, known), default=0)
    stream.writelines(f"  {name.ljust(width)}  {line}\n" for name, line in known.items())
    return 2 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
