"""``./dev bench`` finds benchmarks by their file and imports only the one that runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from halocline.benchmarks import __main__ as bench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text('"""Times a toy.\n\nMore."""\ndef main(arguments):\n    return len(arguments)\n')
    (tmp_path / "part.py").write_text('"""Part of others."""\nraise RuntimeError("imported")\n')
    (tmp_path / "__main__.py").write_text("def main(): pass\n")
    return tmp_path


def test_files_with_a_main_are_benchmarks_and_none_is_imported(folder: Path) -> None:
    assert bench.benchmarks(folder) == {"toy": "Times a toy."}


def test_the_named_one_runs_with_the_rest_of_the_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import halocline.benchmarks

    monkeypatch.setattr(bench, "__file__", str(folder / "__main__.py"))
    monkeypatch.setattr(halocline.benchmarks, "__path__", [str(folder)])
    monkeypatch.delitem(sys.modules, "halocline.benchmarks.toy", raising=False)
    assert bench.main(["toy", "a", "b", "c"]) == 3


def test_without_a_name_the_list_is_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "__file__", str(folder / "__main__.py"))
    assert bench.main([]) == 0
    assert "  toy  Times a toy." in capsys.readouterr().out.splitlines()


def test_an_unknown_name_exits_2_and_lists_the_known_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "__file__", str(folder / "__main__.py"))
    assert bench.main(["ty"]) == 2
    error = capsys.readouterr().err
    assert "there is no benchmark 'ty'" in error
    assert "toy" in error
