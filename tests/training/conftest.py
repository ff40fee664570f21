"""What the tests of the training data share: the released tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from halocline.training.data import Encoder

GRADED = Path(__file__).parents[2] / "graded"


@pytest.fixture(scope="session")
def graded() -> Path:
    """Return the folder of the graded model."""
    return GRADED


@pytest.fixture(scope="session")
def encoder(graded: Path) -> Encoder:
    """Return the released tokenizer, as the recipe uses it and as plain text needs it."""
    return Encoder(graded)
