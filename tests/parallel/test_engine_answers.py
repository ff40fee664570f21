"""The engine on several ranks gives the answers of one process: same tokens, log-probabilities within 5e-5.

With chunked prefill, prefix hits, an abort in flight, preemption, replayed graphs; greedy and sampled. The ranks enter
the same collectives in the same order and hold equal tokens.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from engine_ranks import run_sessions
from rank_world import RankWorld

from halocline.models.deepseek_v4.make_checkpoint import make_checkpoint
from halocline.models.deepseek_v4.presets import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODES = {
    "TP2": {"tp": 2},
    "TP4": {"tp": 4},
    "EP2": {"ep": 2},
    "DP2+EP2": {"dp": 2, "ep": 2},
    "TP2+EP2": {"tp": 2, "ep": 2},
    "TP2+DP2+EP4": {"tp": 2, "dp": 2, "ep": 4},
}
TOLERANCE = 5e-5
ROOT = Path(__file__).resolve().parents[2]

# Prompts longer than a step (chunks), as long as a page and one more, shorter than a group of 4; the fourth is aborted
# between its chunks, the fifth while it decodes. The second half asks again for what is cached.
PLAIN = [
    {"add": 300, "max_tokens": 6, "logprobs": 3},
    {"add": 3, "max_tokens": 8, "logprobs": 3},
    {"add": 130, "max_tokens": 5, "logprobs": 3, "prompt_logprobs": 0},
    {"add": 257, "max_tokens": 5, "prompt_seed": 1},
    {"add": 1, "max_tokens": 40},
    {"steps": 5},
    {"abort": 3},
    {"steps": 4},
    {"abort": 4},
    {"run": True},
    {"add": 300, "max_tokens": 6, "logprobs": 3},
    {"add": 257, "max_tokens": 4, "logprobs": 3},
]
PREEMPTED = [{"add": 250 + seed, "max_tokens": 12, "logprobs": 2, "prompt_seed": seed} for seed in range(4)]
DECODED = [{"add": 4 + seed, "max_tokens": 3 + 2 * seed, "logprobs": 2, "prompt_seed": seed} for seed in range(4)]
# Nothing names their draws, so that the model's end token may be among them.
SAMPLED = [
    {"add": 5 + seed, "max_tokens": 10, "temperature": 0.8, "ignore_eos": True, "prompt_seed": seed}
    for seed in range(3)
]
SESSIONS = [
    {"script": PLAIN},
    {"script": PREEMPTED, "engine": {"max_token_pages": 3}},
    {"script": DECODED, "graph_sizes": [1, 2, 4]},
    {"script": SAMPLED},
]
ABORTED = (3, 4)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that divides by four: 8 heads, 4 groups, 512 rows of vocabulary, plain weights."""
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, TINY.replace(o_groups=4).unquantized("float32"), seed=7, force=True)
    return folder


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[str, Any]:
    return run_sessions(0, model=str(tiny), sizes={}, port=0, sessions=SESSIONS)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[dict[str, Any]]]:
    return {}


def run_mode(ranks: RankWorld, outcomes: dict[str, list[dict[str, Any]]], model: Path, mode: str) -> Any:
    """What each rank returned; each mode runs once."""
    if mode not in outcomes:
        sizes = MODES[mode]
        world = max(sizes.get("tp", 1) * sizes.get("dp", 1), sizes.get("ep", 1))
        outcomes[mode] = ranks.run(
            world, "engine_ranks:run_sessions", model=str(model), sizes=sizes, port=free_port(), sessions=SESSIONS
        )
    return outcomes[mode]


def assert_same_answers(found: dict[str, Any], expected: dict[str, Any], *, leave_out: tuple[int, ...] = ()) -> None:
    for index, (mine, other) in enumerate(zip(found["outputs"], expected["outputs"], strict=True)):
        if index in leave_out:
            continue
        assert mine["ids"] == other["ids"], index
        assert (mine["reason"], mine["error"]) == (other["reason"], None)
        assert len(mine["top"]) == len(other["top"])
        for step, (one, two) in enumerate(zip(mine["top"], other["top"], strict=True)):
            assert dict(one) == pytest.approx(dict(two), abs=TOLERANCE), (index, step)
        assert mine["prompt"] == pytest.approx(other["prompt"], abs=TOLERANCE)


def test_one_process_does_all_that_is_asked(alone: dict[str, Any]) -> None:
    plain, preempted, decoded, sampled = alone["answers"]
    outputs = plain["outputs"]
    assert [one["reason"] for one in outputs] == ["length"] * 3 + ["abort"] * 2 + ["length"] * 2
    assert len(outputs[2]["prompt"]) == 129
    assert (outputs[5]["cached"], plain["hits"]) == (256, 1), "the 300 tokens were asked for twice"
    assert preempted["preemptions"] > 0
    assert [len(one["ids"]) for one in decoded["outputs"]] == [3, 5, 7, 9]
    assert [len(one["ids"]) for one in sampled["outputs"]] == [10] * 3


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_one_process(
    ranks: RankWorld, outcomes: dict[str, Any], tiny: Path, alone: dict[str, Any], mode: str
) -> None:
    plain, preempted, decoded, _ = run_mode(ranks, outcomes, tiny, mode)[0]["answers"]
    expected = alone["answers"]
    assert_same_answers(plain, expected[0], leave_out=ABORTED)
    assert [plain["outputs"][i]["reason"] for i in ABORTED] == ["abort"] * 2
    assert plain["outputs"][5]["cached"] == 256, "the second time it goes to the group that has it"
    assert_same_answers(preempted, expected[1])
    assert preempted["preemptions"] > 0
    assert_same_answers(decoded, expected[2])


def test_requests_are_spread_over_attention_groups(ranks: RankWorld, outcomes: dict[str, Any], tiny: Path) -> None:
    answers = run_mode(ranks, outcomes, tiny, "DP2+EP2")[0]["answers"]
    assert [answer["groups"] for answer in answers] == [[0, 1]] * len(SESSIONS)


@pytest.mark.parametrize("mode", MODES)
def test_every_rank_enters_the_same_collectives_in_the_same_order(
    ranks: RankWorld, outcomes: dict[str, Any], tiny: Path, mode: str
) -> None:
    """Among the steps are those in which a rank has middle chunks only, and those in which it has nothing."""
    found = run_mode(ranks, outcomes, tiny, mode)
    for number in range(len(SESSIONS)):
        orders = [rank["order"][number] for rank in found]
        assert len(orders[0]) > 50
        for rank, order in enumerate(orders):
            assert order == orders[0], f"session {number}, rank {rank}"


@pytest.mark.parametrize("mode", MODES)
def test_ranks_hold_equal_tokens_with_no_seed_given(
    ranks: RankWorld, outcomes: dict[str, Any], tiny: Path, mode: str
) -> None:
    """T = 0.8: all ranks of an attention group have stored the same tokens, step by step."""
    found = run_mode(ranks, outcomes, tiny, mode)
    groups = MODES[mode].get("dp", 1)
    across = len(found) // groups
    for first in range(0, len(found), across):
        assert len({rank["ids"][3] for rank in found[first : first + across]}) == 1
    assert len({rank["ids"][3] for rank in found}) == groups


def test_rows_sent_to_their_experts_give_the_same_answers(ranks: RankWorld, tiny: Path, alone: dict[str, Any]) -> None:
    """A real exchange instead of every rank seeing all tokens; a rank may have nothing to send."""
    found = ranks.run(
        2,
        "engine_ranks:run_sessions",
        model=str(tiny),
        sizes={"dp": 2, "ep": 2},
        port=free_port(),
        sessions=SESSIONS[:2],
        a2a="all_to_all",
    )
    assert_same_answers(found[0]["answers"][0], alone["answers"][0], leave_out=ABORTED)
    assert_same_answers(found[0]["answers"][1], alone["answers"][1])
    names = [[name for name, _ in rank["order"][0]] for rank in found]
    assert names[0] == names[1], "how many rows are sent differs, what is entered does not"
    assert "all_to_all_single" in names[0]


# ---- the graded model -----------------------------------------------------------------------------------------------

GRADED = ROOT / "graded"
EXERCISED = [
    {"add": 70, "max_tokens": 6, "logprobs": 3},
    {"add": 9, "max_tokens": 8, "logprobs": 3},
    {"run": True},
    {"add": 300, "max_tokens": 4, "logprobs": 3},
]


@pytest.fixture(scope="module")
def graded_alone() -> dict[str, Any]:
    return run_sessions(0, model=str(GRADED), sizes={}, port=0, sessions=[{"script": EXERCISED}])


@pytest.mark.parametrize("mode", ["EP2", "DP2+EP2", "TP2+EP2"])
def test_the_graded_model_answers_as_in_one_process(ranks: RankWorld, graded_alone: dict[str, Any], mode: str) -> None:
    """Trained weights in the release's formats, float32 recipe."""
    sizes, session = MODES[mode], {"script": EXERCISED}
    found = ranks.run(
        2, "engine_ranks:run_sessions", model=str(GRADED), sizes=sizes, port=free_port(), sessions=[session]
    )
    assert_same_answers(found[0]["answers"][0], graded_alone["answers"][0])
    assert found[0]["order"] == found[1]["order"]
