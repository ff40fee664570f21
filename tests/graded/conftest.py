"""The shipped model and the suite that CI marks it with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from halocline.engine.graded_model import graded_model, suite_file
from halocline.engine.grading import Exercise, load_suite

sys.path.insert(0, str(Path(__file__).parent))  # planted_model.py and teacher.py, for the tests beside them


@pytest.fixture(scope="session")
def graded() -> Path:
    return graded_model()


@pytest.fixture(scope="session")
def check_suite(graded: Path) -> list[Exercise]:
    return load_suite(suite_file(graded, "check"))
