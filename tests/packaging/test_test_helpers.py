"""Helper modules beside the tests are imported by their bare name, so one process must never see two of one name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def _shared_names(helpers: Iterable[Path]) -> dict[str, list[str]]:
    """Bare module names that more than one of `helpers` claims, with their places."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for helper in helpers:
        places[helper.stem].append(str(helper))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_helper_modules_share_a_name() -> None:
    helpers = [
        path
        for path in sorted(TESTS.rglob("*.py"))
        if not path.name.startswith("test_") and path.stem not in {"conftest", "__init__"}
    ]
    assert helpers
    assert _shared_names(helpers) == {}


def test_a_planted_namesake_is_found() -> None:
    found = _shared_names(
        [Path("tests/parity/planted.py"), Path("tests/graded/planted.py"), Path("tests/hal/other.py")]
    )
    assert found == {"planted": ["tests/parity/planted.py", "tests/graded/planted.py"]}
