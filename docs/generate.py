"""Writes the generated parts of the documentation from the contracts and manifests: `./dev docs [--check]`.

- `docs/ops.md`: every contract with its specification, tolerances and invariants.
- `docs/api.md`: every field of the HTTP protocols, honoured or refused.
- The support matrix in `README.md`, between its two marks.
- The tables of `docs/amd.md` and of `docs/scaling.md`, between their marks.

The HAL, the manifests and the planners are read, which import no kernel library. `--check` compares and writes nothing.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

from amd_tables import amd_tables
from scaling_tables import scaling_tables

from halocline.hal.backend import load_manifests, specs_of
from halocline.hal.op import KernelSpec, Op
from halocline.hal.ops import all_ops
from halocline.hal.profiles import PROFILES
from halocline.hal.stages import REFERENCE, rank_on, status_on
from halocline.serving.api_document import api_document

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = {"cpu": "CPU", "sm_90": "H200 (sm_90)", "gfx942": "MI300X (gfx942)", "gfx950": "MI355X (gfx950)"}
BEGIN, END = "<!-- matrix: begin, written by ./dev docs -->", "<!-- matrix: end -->"
SCALING_BEGIN, SCALING_END = "<!-- scaling: begin, written by ./dev docs -->", "<!-- scaling: end -->"
AMD_BEGIN, AMD_END = "<!-- amd: begin, written by ./dev docs -->", "<!-- amd: end -->"
MARKS = {"run": "", "not_run": " (not run)", "planned": " (planned)"}
GENERATED = "<!-- Written by ./dev docs from the contracts in hal/ops. Edit those. -->"


def main() -> int:
    """Writes or compares; returns 1 when a comparison failed."""
    parser = argparse.ArgumentParser(prog="./dev docs", description="Write the generated parts of the documentation.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when something is out of date")
    check = parser.parse_args().check
    readme, amd, scaling = ROOT / "README.md", ROOT / "docs" / "amd.md", ROOT / "docs" / "scaling.md"
    texts = {
        ROOT / "docs" / "ops.md": ops_document(),
        ROOT / "docs" / "api.md": api_document(),
        readme: between(readme, (BEGIN, END), matrix()),
        amd: between(amd, (AMD_BEGIN, AMD_END), amd_tables()),
        scaling: between(scaling, (SCALING_BEGIN, SCALING_END), scaling_tables()),
    }
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"docs: {path.relative_to(ROOT)} {'is out of date; run ./dev docs' if check else 'written'}")
        if not check:
            path.write_text(texts[path])
    return int(check and bool(stale))


# ---- the support matrix -----------------------------------------------------------------------------------------


def matrix() -> str:
    """One row for each op, one column for each device: the kernel of highest rank that its manifest names there."""
    specs = specs_of(load_manifests())
    lines = [f"| op | {' | '.join(COLUMNS.values())} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for op in sorted(all_ops(), key=lambda op: op.name):
        cells = [_cell([spec for spec in specs if spec.op == op.name], arch) for arch in COLUMNS]
        lines.append(f"| `{op.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(specs: list[KernelSpec], arch: str) -> str:
    vendor = PROFILES[arch].device.vendor
    fitting = [spec for spec in specs if spec.vendor in ("", vendor) and (not spec.archs or arch in spec.archs)]
    if vendor != "cpu":  # the reference is never chosen on a GPU unless named
        fitting = [spec for spec in fitting if spec.name != REFERENCE]
    if not fitting:
        return "-"
    best = max(fitting, key=lambda spec: rank_on(spec, arch))
    return f"{best.name}{MARKS[status_on(best, arch)]}"


def between(document: Path, marks: tuple[str, str], generated: str) -> str:
    """A document with the part between two marks replaced."""
    begin, end = marks
    head, _, rest = document.read_text().partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        sys.exit(f"docs: {document.name} lacks the marks {begin!r} and {end!r}")
    return f"{head}{begin}\n\n{generated}\n\n{end}{tail}"


# ---- the contracts ----------------------------------------------------------------------------------------------


def ops_document() -> str:
    """Every contract, by family."""
    parts = [GENERATED, "", "# Ops", "", "The contracts that models call and kernels implement.", ""]
    family = ""
    for op in sorted(all_ops(), key=lambda op: op.name):
        if op.family != family:
            family = op.family
            parts += [f"## {family}", ""]
        parts += _contract(op)
    return "\n".join(parts).rstrip() + "\n"


def _contract(op: Op[..., Any]) -> list[str]:
    parts = [f"### {op.name}", "", "```python", _signature(op.contract), "```", ""]
    parts += ["```text", inspect.getdoc(op.contract) or "", "```", ""]
    parts += [
        f"- Graph safe: {'yes' if op.graph_safe else 'no'}. Batch invariant: {'yes' if op.batch_invariant else 'no'}. "
        f"Writes: {', '.join(f'`{name}`' for name in op.mutates) or 'nothing'}.",
        f"- Semantics that a kernel must match: {', '.join(f'`{name}`' for name in op.semantics) or 'none'}.",
    ]
    parts += [f"- Prepared at load by `{op.prepare.name}`."] if op.prepare is not None else []
    parts += [
        f"- Tolerance, {dtype}: atol {bound.atol:g}, rtol {bound.rtol:g}, norm {bound.norm:g} ({bound.reason})."
        for dtype, bound in op.tolerances.items()
    ]
    return [*parts, ""]


def _signature(contract: Any) -> str:
    """The definition line as in the source, one parameter a line when it is long."""
    signature = inspect.signature(contract)
    line = f"def {contract.__name__}{signature}".replace("'", "")
    if len(line) <= 100:
        return line
    rows: list[str] = []
    star = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            rows.append("    *,")
            star = True
        rows.append(f"    {parameter},".replace("'", ""))
    result = str(signature.return_annotation).replace("'", "")
    return "\n".join([f"def {contract.__name__}(", *rows, f") -> {result}"])


if __name__ == "__main__":
    sys.exit(main())
