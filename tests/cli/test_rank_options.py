"""Options of ranks: what they refuse before anything is started, and what explain says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from halocline.cli.main import main
from halocline.cli.rank_options import RankOptions
from halocline.engine.ranks import launcher
from halocline.hal.errors import ConfigError
from halocline.models.deepseek_v4.presets import TINY
from halocline.models.registry import FAMILIES

MODEL = (TINY.replace(o_groups=4).unquantized("float32"), FAMILIES["deepseek_v4"])


def asked(**sizes: Any) -> RankOptions:
    given = {"tp": None, "ep": None, "dp_attention": None, "gpus": None, **sizes}
    return RankOptions(arguments=("generate", "--prompt", "two words"), **given)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], int]]:
    """What would have been started."""
    calls: list[tuple[tuple[str, ...], int]] = []

    def launch(arguments: tuple[str, ...], world: int) -> int:
        calls.append((arguments, world))
        return 7

    monkeypatch.setattr(launcher, "launch_ranks", launch)
    return calls


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ({"tp": 2}, 2),
        ({"ep": 8}, 8),
        ({"tp": 2, "dp_attention": 2, "ep": 4}, 4),
        ({"gpus": 4}, 4),
        ({"dp_attention": 2, "ep": 2, "a2a": "all_to_all"}, 2),
    ],
)
def test_ranks_get_the_same_arguments(
    launched: list[tuple[tuple[str, ...], int]], sizes: dict[str, Any], world: int
) -> None:
    with pytest.raises(SystemExit) as caught:
        asked(**sizes).spread(MODEL)
    assert caught.value.code == 7, "the status is that of the ranks"
    assert launched == [(("generate", "--prompt", "two words"), world)]


@pytest.mark.parametrize("sizes", [{}, {"tp": 1}, {"gpus": 1}])
def test_one_rank_starts_nothing(launched: list[tuple[tuple[str, ...], int]], sizes: dict[str, int]) -> None:
    assert asked(**sizes).spread(MODEL).world == 1
    assert launched == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"gpus": 2, "tp": 2}, "--gpus chooses the sizes"),
        ({"tp": 8}, "tp possible sizes: 1, 2, 4"),
        ({"ep": 3}, "8 experts over 3 ranks"),
        ({"tp": 2, "ep": 3}, "do not fit"),
        ({"tp": 2, "ep": 2, "a2a": "all_to_all"}, "the exchange needs tp 1 and dp = ep"),
        ({"gpus": 5}, "no rule spreads this model over 5 ranks"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    launched: list[tuple[tuple[str, ...], int]], sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(**sizes).spread(MODEL)
    assert launched == []


def test_commands_that_load_a_model_take_the_options() -> None:
    for command in ("generate", "chat", "serve", "eval", "demo"):
        done = subprocess.run(
            [sys.executable, "-m", "halocline", command, "--help"], capture_output=True, text=True, check=True
        )
        for option in ("--tp", "--ep", "--dp-attention", "--gpus", "--a2a"):
            assert f"{option} " in done.stdout, command


def explain(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    with pytest.raises(SystemExit) as caught:
        main(["explain", "--json", *words])
    assert not caught.value.code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--device", "h200", "--gpus", "8"), (1, 8, 8)),
        (("--device", "mi300x", "--gpus", "2"), (2, 1, 2)),
        (("--model", "pro", "--device", "h200", "--gpus", "8"), (2, 4, 8)),
        (("--device", "h200", "--tp", "4", "--ep", "8"), (4, 1, 8)),
    ],
)
def test_explain_says_what_a_number_of_gpus_is_used_for(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], expected: tuple[int, int, int]
) -> None:
    found = explain(capsys, *words)["ranks"]
    assert (found["tp"], found["dp"], found["ep"]) == expected
    assert len(found["reason"]) > 5


def test_explain_asks_for_what_one_rank_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """An impossible size is an error here too, and the kernels are those of the sizes."""
    many = {row["op"]: row for row in explain(capsys, "--device", "h200", "--gpus", "8")["ops"]}
    assert many["collective.all_reduce"]["chosen"] is not None
    with pytest.raises(SystemExit) as caught:
        main(["explain", "--device", "h200", "--tp", "3"])
    assert caught.value.code == 2
    assert "possible sizes: 1, 2, 4, 8" in capsys.readouterr().err
