"""House rules that no linter knows: where the environment is read, where a vendor may be named, how long things get.

Each rule is a function from a parsed file to its faults, so that a planted fault can be shown to be found.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
BACKENDS = ("backends_cuda", "backends_hip", "backends_triton")
ABOVE_HAL = ("models", "engine", "serving")
MOST_LINES = 400
MOST_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Source:
    """One parsed file; `place` is its path from the repository's root."""

    place: str
    text: str

    @property
    def folder(self) -> str:
        return self.place.split("/")[0]

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(_parse(self.text))


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _sources() -> list[Source]:
    paths = sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return [Source(str(path.relative_to(ROOT)), path.read_text()) for path in paths]


def _dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute chain on a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _docstrings(source: Source) -> set[int]:
    """The ids of the nodes that are docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in source.nodes() if isinstance(node, owners) and node.body]
    return {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}


def _strings(source: Source) -> Iterator[tuple[int, str]]:
    """Line and value of each string that is not a docstring."""
    skip = _docstrings(source)
    for node in source.nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
            yield node.lineno, node.value


# ---- the rules ----------------------------------------------------------------------------------------------------


def environment_reads(source: Source) -> Iterator[str]:
    """Only hal/settings.py reads the environment."""
    if source.place == "hal/settings.py":
        return
    for node in source.nodes():
        from_os = isinstance(node, ast.ImportFrom) and node.module == "os"
        imported = {alias.name for alias in node.names} if from_os else set()
        if _dotted(node) in {"os.environ", "os.getenv"} or {"environ", "getenv"} & imported:
            yield f"{source.place}:{node.lineno}: reads the environment; add a setting to hal/settings.py"


# Facts about devices live here and nowhere else.
DEVICE_FACTS = ("hal/device.py", "hal/gpu_libraries.py", "hal/profiles.py", "backends_cuda", "backends_hip")
ARCH = re.compile(r"(?<![a-z0-9])(sm_?\d{2,3}a?|gfx\d{3,4}[a-z]?|MI\d{3}X?|H[12]00|B[12]00)(?![a-z0-9])", re.IGNORECASE)
VENDOR_TESTS = {"is_hip", "is_cuda", "is_rocm"}
VENDOR_VERSIONS = {"torch.version.hip", "torch.version.cuda"}
TOOLS = ("benchmarks", "training")  # run on a machine that the person who starts them names


def device_questions(source: Source) -> Iterator[str]:
    """Nothing asks which vendor or architecture it runs on, but the places that hold facts about devices."""
    if source.place.startswith(DEVICE_FACTS) or source.folder in TOOLS:
        return
    for node in source.nodes():
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in VENDOR_TESTS or _dotted(node) in VENDOR_VERSIONS:
            yield f"{source.place}:{getattr(node, 'lineno', 0)}: asks for the vendor; ask the HAL for what is needed"
    for line, text in _strings(source):
        if text in {"cuda", "hip"} or text.startswith(("cuda:", "hip:")):
            yield f"{source.place}:{line}: names the device {text!r}; take the device from the HAL"
        elif ARCH.fullmatch(text):
            yield f"{source.place}:{line}: names the architecture {text!r}"


VENDOR_WORDS = re.compile(
    r"(?<![a-z])(nvidia|rocm|hopper|blackwell|flash[_ ]?mla|flashinfer|deep[_ ]?gemm|aiter|tilelang|sgl[_ ]kernel"
    r"|humming)|\b(triton|amd|hip|cuda)\b|\b(gfx|sm_)\d",
    re.IGNORECASE,
)


def vendor_words(source: Source) -> Iterator[str]:
    """Above the HAL no name and no string holds a vendor's or a kernel library's name."""
    if source.folder not in ABOVE_HAL:
        return
    for line, text in _strings(source):
        if VENDOR_WORDS.search(text):
            yield f"{source.place}:{line}: vendor word in {text!r}"
    for node in source.nodes():
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
        if isinstance(name, str) and VENDOR_WORDS.search(name.replace("_", " ")):
            yield f"{source.place}:{getattr(node, 'lineno', 0)}: vendor word in the name {name}"


# Single big kernels and generated tables may be longer. They say so: a comment `# size: REASON` in the first lines of
# the file, or on the line of the function's `def`.
MAY_BE_LONG = ("kernels_portable", "backends_reference", *BACKENDS)
SIZE_REASON = re.compile(r"# size: \S+ \S+")


def long_files(source: Source) -> Iterator[str]:
    """A file stays within 400 lines."""
    excused = source.folder in MAY_BE_LONG and any(SIZE_REASON.match(line) for line in source.lines[:40])
    if len(source.lines) > MOST_LINES and not excused:
        yield f"{source.place}: {len(source.lines)} lines, at most {MOST_LINES}"


def long_functions(source: Source) -> Iterator[str]:
    """A function stays within 60 lines, its docstring not counted."""
    for node in source.nodes():
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        doc = node.body[0] if ast.get_docstring(node) is not None else None
        counted = (node.end_lineno or 0) - node.lineno + 1
        counted -= (doc.end_lineno or 0) - doc.lineno + 1 if doc else 0
        head = source.lines[node.lineno - 1 : node.body[0].lineno]
        excused = source.folder in MAY_BE_LONG and any(SIZE_REASON.search(line) for line in head)
        if counted > MOST_FUNCTION_LINES and not excused:
            yield f"{source.place}:{node.lineno}: {node.name} has {counted} lines, at most {MOST_FUNCTION_LINES}"


def swallowed_errors(source: Source) -> Iterator[str]:
    """No handler catches everything and does nothing."""
    for node in source.nodes():
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or _dotted(node.type) in {"Exception", "BaseException"}
        if broad and all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body):
            yield f"{source.place}:{node.lineno}: swallows every error"


def unfinished(source: Source) -> Iterator[str]:
    """No stub and no note to self; the contracts in hal/ops have no body by design."""
    is_contract = source.place.startswith("hal/ops/")
    for number, line in enumerate(source.lines, 1):
        is_stub = "raise NotImplementedError" in line and not is_contract
        if is_stub or re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line):
            yield f"{source.place}:{number}: unfinished: {line.strip()}"


def names_that_say_nothing(source: Source) -> Iterator[str]:
    """A file is named after what it holds."""
    if Path(source.place).stem in {"utils", "util", "common", "helpers", "misc"}:
        yield f"{source.place}: name the file after what it holds"


def not_ascii(source: Source) -> Iterator[str]:
    """Names, comments and docstrings are ASCII; other strings are data and may hold what they must."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        is_string = token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING")
        if not is_string and not token.string.isascii():
            yield f"{source.place}:{token.start[0]}: not ASCII: {token.string}"
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in source.nodes():
        if isinstance(node, documented) and not (ast.get_docstring(node) or "").isascii():
            yield f"{source.place}:{node.body[0].lineno}: docstring is not ASCII"


def missing_annotations_import(source: Source) -> Iterator[str]:
    """Every file with code starts with ``from __future__ import annotations``."""
    body = [node for node in _parse(source.text).body if not isinstance(node, ast.Expr)]
    if body and not (isinstance(body[0], ast.ImportFrom) and body[0].module == "__future__"):
        yield f"{source.place}: lacks from __future__ import annotations"


def untyped_launchers(source: Source) -> Iterator[str]:
    """In kernels_portable mypy lets untyped functions pass, for kernels; launchers and all else are typed in full."""
    if source.folder != "kernels_portable":
        return
    for node in source.nodes():
        if not isinstance(node, ast.FunctionDef) or any("jit" in ast.dump(mark) for mark in node.decorator_list):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        missing = [a.arg for a in arguments if a.annotation is None and a.arg not in {"self", "cls"}]
        missing += [] if node.returns is not None else ["return"]
        if missing:
            yield f"{source.place}:{node.lineno}: {node.name} lacks types: {', '.join(missing)}"


HEAVY_FOR_HAL = {"torch", "numpy", "triton", "rich", "typer", "safetensors", "tokenizers"}


def heavy_imports_of_hal(source: Source) -> Iterator[str]:
    """hal imports torch inside functions or for type checking only."""
    if source.folder != "hal":
        return
    for node in _parse(source.text).body:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            if module.split(".")[0] in HEAVY_FOR_HAL:
                yield f"{source.place}:{node.lineno}: imports {module} at import time"


Rule = Callable[[Source], Iterator[str]]
RULES: list[Rule] = [
    environment_reads, device_questions, vendor_words, long_files, long_functions, swallowed_errors, unfinished,
    names_that_say_nothing, not_ascii, missing_annotations_import, untyped_launchers, heavy_imports_of_hal,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_the_whole_repository(rule: Rule) -> None:
    faults = [fault for source in _sources() for fault in rule(source)]
    assert faults == [], "\n".join(faults)


FUTURE = "from __future__ import annotations\n"
PLANTED: list[tuple[Rule, str, str]] = [
    (environment_reads, "models/a.py", "import os\nx = os.environ['HOME']"),
    (environment_reads, "hal/a.py", "from os import getenv"),
    (device_questions, "models/a.py", "import torch\nif torch.version.hip: pass"),
    (device_questions, "engine/a.py", "device = 'cuda'"),
    (device_questions, "hal/a.py", "arch = 'gfx942'"),
    (device_questions, "kernels_portable/a.py", "if is_hip(): pass"),
    (device_questions, "models/a.py", "x = rows().is_cuda"),
    (vendor_words, "models/a.py", "name = 'use flashinfer here'"),
    (vendor_words, "engine/a.py", "use_deep_gemm = True"),
    (long_files, "hal/a.py", "\n" * 401),
    (long_files, "engine/a.py", "# size: a very good reason\n" + "\n" * 400),
    (long_functions, "hal/a.py", "def f():\n" + "    x = 1\n" * 60),
    (swallowed_errors, "hal/a.py", "try:\n    x = 1\nexcept Exception:\n    pass"),
    (unfinished, "hal/a.py", "x = 1  # TO" + "DO later"),
    (unfinished, "hal/a.py", "def f():\n    raise NotImplementedError"),
    (names_that_say_nothing, "models/utils.py", ""),
    (not_ascii, "hal/a.py", "x = 1  # \u00e9"),
    (not_ascii, "hal/a.py", "def f():\n    '''Doc \u00e9.'''"),
    (missing_annotations_import, "hal/a.py", "import os"),
    (untyped_launchers, "kernels_portable/a.py", "def launch(x, y: int) -> None: pass"),
    (untyped_launchers, "kernels_portable/a.py", "def launch(y: int): pass"),
    (heavy_imports_of_hal, "hal/a.py", "import torch"),
]


@pytest.mark.parametrize(("rule", "place", "text"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_rule_finds_a_planted_fault(rule: Rule, place: str, text: str) -> None:
    assert len(list(rule(Source(place, text)))) == 1


ALLOWED: list[tuple[Rule, str, str]] = [
    (environment_reads, "hal/settings.py", "import os\nx = os.environ"),
    (device_questions, "hal/device.py", "arch = 'gfx942'"),
    (device_questions, "backends_hip/a.py", "device = 'cuda'"),
    (vendor_words, "engine/a.py", "self._waiter = waiter"),
    (vendor_words, "models/a.py", "def f():\n    '''Rows as FlashMLA stores them.'''"),
    (long_files, "kernels_portable/a.py", "# size: one kernel\n" + "\n" * 400),
    (long_functions, "hal/a.py", "def f():\n    '''Doc.\n" + "\n" * 80 + "    '''\n    return 1"),
    (not_ascii, "engine/a.py", "x = '<\uff5cUser\uff5c>'"),
    (unfinished, "hal/ops/a.py", "def f():\n    raise NotImplementedError"),
    (missing_annotations_import, "hal/a.py", "'''Doc.'''\n" + FUTURE + "import os"),
    (missing_annotations_import, "hal/__init__.py", "'''Doc.'''"),
    (untyped_launchers, "kernels_portable/a.py", "@triton.jit\ndef kernel(x_ptr, N): pass"),
    (untyped_launchers, "models/a.py", "def f(x): pass"),
    (heavy_imports_of_hal, "hal/a.py", "if TYPE_CHECKING:\n    import torch"),
]


@pytest.mark.parametrize(("rule", "place", "text"), ALLOWED, ids=lambda value: getattr(value, "__name__", ""))
def test_rule_lets_pass_what_is_right(rule: Rule, place: str, text: str) -> None:
    assert list(rule(Source(place, text))) == []
