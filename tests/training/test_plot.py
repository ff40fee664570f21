"""The plot of a training shows what its files hold, and is the same each time."""

from __future__ import annotations

import json
from pathlib import Path

from halocline.training.plot import main

RESULTS = Path(__file__).parents[2] / "training" / "results"


def _draw(out: Path) -> bytes:
    main(["--results", str(RESULTS), "--out", str(out)])
    return out.read_bytes()


def test_the_plot_names_every_group_and_phase(tmp_path: Path) -> None:
    drawn = _draw(tmp_path / "curves.svg").decode()
    scores = json.loads((RESULTS / "scores.jsonl").read_text().splitlines()[0])
    shown = [name for name in scores if name not in {"step", "stage"}]
    assert len(shown) == 10
    for words in (*shown, "far, sparse, rounded", "reply tokens that are wrong"):
        assert words in drawn


def test_the_same_files_give_the_same_plot(tmp_path: Path) -> None:
    assert _draw(tmp_path / "one.svg") == _draw(tmp_path / "two.svg")
