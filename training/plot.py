"""Draws the curves of a training: `python -m halocline.training.plot`. Needs matplotlib (extras dev and bench)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "main"]

Row = dict[str, Any]

_RESULTS = Path(__file__).parent / "results"
_SIZE = (9.0, 7.5)  # inches


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _draw_losses(axes: Axes, curve: list[Row]) -> None:
    steps = [row["step"] for row in curve]
    axes.plot(steps, [row["main"] for row in curve], label="next token, and its draft")
    axes.plot(steps, [row["index"] for row in curve], label="indexers, towards dense attention (KL)")
    axes.set_yscale("log")
    axes.set_ylabel("loss")
    axes.legend()


def _draw_errors(axes: Axes, curve: list[Row]) -> None:
    steps = [row["step"] for row in curve]
    for name, label in (("reply_accuracy", "reply tokens"), ("draft_accuracy", "their drafts")):
        axes.plot(steps, [max(1.0 - row[name], 1e-4) for row in curve], label=f"{label} that are wrong")
    axes.set_yscale("log")
    axes.set_ylabel("share")
    axes.legend()


def _draw_scores(axes: Axes, scores: list[Row]) -> None:
    steps = [row["step"] for row in scores]
    for group in (name for name in scores[0] if name not in {"step", "stage"}):
        axes.plot(steps, [row[group] for row in scores], marker=".", label=group)
    axes.set_ylabel("held-out exercises read right")
    axes.set_xlabel("step")
    axes.legend(ncols=2)


def draw(results: Path, out: Path) -> None:
    """Draws losses, errors and held-out scores below each other.

    Args:
        results: Folder with curve.jsonl, scores.jsonl and schedule.json.
        out: File to write; its ending says as what.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # One salt and no date: the same rows give the same file.
    with mpl.rc_context({"svg.hashsalt": "halocline", "svg.fonttype": "none", "font.size": 9.0}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        losses, errors, scores = figure.subplots(3, sharex=True)
        curve = _rows(results / "curve.jsonl")
        _draw_losses(losses, curve)
        _draw_errors(errors, curve)
        _draw_scores(scores, _rows(results / "scores.jsonl"))
        end = 0
        for phase in json.loads((results / "schedule.json").read_text(encoding="utf-8")):
            for axes in (losses, errors, scores):
                axes.axvline(end, color="0.85", linewidth=0.8, zorder=0)
            kind = f"{phase['stage']}{', sparse' * phase['sparse']}{', rounded' * phase['quantized']}"
            losses.annotate(kind, (end, 1.02), xycoords=losses.get_xaxis_transform(), rotation=25, fontsize=7)
            end += phase["steps"]
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder of curve, scores and schedule")
    parser.add_argument("--out", type=Path, default=_RESULTS / "curves.svg")
    chosen = parser.parse_args(arguments)
    draw(chosen.results, chosen.out)


if __name__ == "__main__":
    main()
