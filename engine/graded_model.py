"""Where the graded model lies: the small trained checkpoint whose answers can be marked, and its suites.

It is found in a checkout, or in `share/halocline/graded` of the Python installation, which is where images put it.
The wheel does not carry it. Free of torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from halocline.hal.errors import CheckpointError, lines

__all__ = ["SUITES", "find_graded_model", "graded_model", "suite_file", "text_file"]

SUITES = ("quick", "check", "graded")


def _places() -> tuple[Path, ...]:
    return (Path(__file__).resolve().parents[1] / "graded", Path(sys.prefix) / "share" / "halocline" / "graded")


def find_graded_model() -> Path | None:
    """Folder of the graded model, or None where only the wheel is installed."""
    return next((place for place in _places() if (place / "config.json").is_file()), None)


def graded_model() -> Path:
    """Folder of the graded model.

    Raises:
        CheckpointError: If it is not here.
    """
    found = find_graded_model()
    if found is None:
        raise CheckpointError(
            lines(
                "the graded model is not installed",
                asked=" or ".join(str(place) for place in _places()),
                found="neither; the wheel does not carry it",
                try_="copy the folder `graded` of the repository to the second place, or name it with --model DIR",
            )
        )
    return found


def suite_file(model: Path, suite: str) -> Path:
    """File of a suite: the one beside a model, or that of the graded model."""
    return _beside(model, f"{suite}.jsonl")


def text_file(model: Path) -> Path:
    """File of held-out texts, found as `suite_file` finds suites."""
    return _beside(model, "text.jsonl")


def _beside(model: Path, name: str) -> Path:
    own = model / "suites" / name
    return own if own.is_file() else graded_model() / "suites" / name
