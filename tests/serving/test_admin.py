"""Endpoints for operators and tools: models, tokens, abort, metrics, facts."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from in_process import InProcessServer, say
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import FOLDER

from halocline.engine.tokenizer import Tokenizer
from halocline.serving.metrics import History
from halocline.serving.state import ServerConfig


def test_models_have_the_form_of_both_protocols(inside: Any) -> None:
    listed = inside.get("/v1/models").json()
    [model] = listed["data"]
    assert (listed["object"], listed["has_more"], listed["first_id"]) == ("list", False, "tiny")
    assert (model["id"], model["object"], model["type"], model["max_model_len"]) == ("tiny", "model", "model", 8192)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", model["created_at"])


def test_aliases_are_served_and_listed() -> None:
    async def work() -> tuple[list[str], list[int]]:
        async with InProcessServer(ServerConfig(name="tiny", aliases=("gpt-x", "org/model"))) as server:
            names = [one["id"] for one in (await server.get("/v1/models")).json()["data"]]
            asked = {"messages": [{"role": "user", "content": "x"}]}
            statuses = [
                (await server.post("/v1/chat/completions", {**asked, "model": name})).status
                for name in ("tiny", "gpt-x", "org/model", "other")
            ]
            assert (await server.get("/v1/models/org/model")).json()["id"] == "org/model"
            return names, statuses

    assert asyncio.run(work()) == (["tiny", "gpt-x", "org/model"], [200, 200, 200, 404])


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "plain", "안녕 👋", "<｜User｜></think>", " \n\t"])
def test_tokenize_and_back(inside: Any, text: str) -> None:
    bare = inside.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert bare["tokens"] == Tokenizer.from_dir(FOLDER).encode(text)
    assert bare["count"] == len(bare["tokens"])
    assert inside.post("/detokenize", {"tokens": bare["tokens"]}).json()["prompt"] == text
    full = inside.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert full["tokens"] == [0, *bare["tokens"]]
    assert full["token_strs"][0] == "<｜begin▁of▁sentence｜>"
    assert full["max_model_len"] == 8192


def test_tokenize_of_a_conversation_is_what_chat_counts(inside: Any) -> None:
    messages = [{"role": "user", "content": "Hello there"}]
    tokens = inside.post("/tokenize", {"messages": messages}).json()
    answer = inside.post("/v1/chat/completions", {"model": "tiny", "messages": messages}).json()
    assert tokens["count"] == answer["usage"]["prompt_tokens"]
    assert inside.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"].endswith("<｜Assistant｜><think>")


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}])
def test_tokenize_wants_one_of_both(inside: Any, body: dict[str, Any]) -> None:
    answer = inside.post("/tokenize", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "prompt")


# ---- abort ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("everything", [False, True])
def test_abort(inside: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, everything: bool) -> None:
    names: list[str] = []
    submit = inside.server.engine.submit
    monkeypatch.setattr(inside.server.engine, "submit", lambda request: (names.append(request.id), submit(request))[1])
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": say("word ", repeat=4000)}],
        "stream": stream,
        "max_tokens": 7000,
    }

    async def work() -> tuple[Any, Any]:
        task = asyncio.create_task(inside.server.post("/v1/chat/completions", body))
        while not names:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        aborted = await inside.server.post("/abort", {"all": True} if everything else {"request_id": names[0]})
        return await task, aborted

    answer, aborted = inside.run(work())
    assert aborted.json() == {"aborted": 1}
    if answer.status == 200:
        assert answer.events()[-1][1]["error"]["code"] == "aborted"
        assert b"[DONE]" not in answer.body
    else:
        assert (answer.status, answer.json()["error"]["code"]) == (499, "aborted")


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"request_id": "x", "all": True}, 400), ({"request_id": "x"}, 404), ({"all": True}, 200)],
)
def test_abort_of_nothing(inside: Any, body: dict[str, Any], status: int) -> None:
    assert inside.post("/abort", body).status == status


# ---- figures --------------------------------------------------------------------------------------------------------


def samples(inside: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = inside.get("/metrics").body.decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_calls_tokens_and_times(inside: Any) -> None:
    before = samples(inside)
    inside.post("/v1/completions", {"model": "tiny", "prompt": say("a b c")})
    inside.post("/v1/completions", {"model": "tiny", "prompt": ""})
    inside.get("/nowhere")
    after = samples(inside)

    def more(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    assert more("halocline_requests_total", endpoint="/v1/completions", status="200") == 1
    assert more("halocline_requests_total", endpoint="/v1/completions", status="400") == 1
    assert more("halocline_requests_total", endpoint="other", status="404") == 1
    assert more("halocline_first_token_seconds_count", endpoint="completions") == 1
    assert more("halocline_engine_decode_tokens_total") >= 4
    assert after[("halocline_engine_up", ())] == 1
    assert after[("halocline_engine_running", ())] == 0


def test_paths_of_strangers_do_not_become_labels(inside: Any) -> None:
    for index in range(50):
        inside.get(f"/scan/{index}")
    endpoints = {dict(labels).get("endpoint") for name, labels in samples(inside) if name == "halocline_requests_total"}
    assert not any(endpoint and endpoint.startswith("/scan") for endpoint in endpoints)


def test_server_info_and_stats(inside: Any) -> None:
    info = inside.get("/server_info").json()
    assert (info["model"], info["context"], info["fingerprint"], info["effort"]) == ("tiny", 8192, "scripted-1", "low")
    assert info["kernels"][0]["op"] == "norm.rms_norm"
    assert "memory" in info
    assert "settings" in info
    stats = inside.get("/stats").json()
    assert stats["health"] == {"ok": True, "problem": None}
    assert stats["engine"]["running"] == 0
    assert "tokenizer" not in json.dumps(info)


def test_history_is_a_rate() -> None:
    history = History()
    history.sample({"decode_tokens": 0, "prefill_tokens": 0})
    history._last = (history._last[0] - 2.0, 0.0, 0.0) if history._last else None
    history.sample({"decode_tokens": 100, "prefill_tokens": 10, "running": 3})
    [row] = history.rows()
    assert row["decode_per_s"] == pytest.approx(50, rel=0.05)
    assert row["prefill_per_s"] == pytest.approx(5, rel=0.05)
    assert row["running"] == 3


def test_answers_carry_the_name_of_their_request(inside: Any) -> None:
    answer = inside.post("/v1/completions", {"model": "tiny", "prompt": say("x")})
    assert answer.headers["x-request-id"] == answer.headers["request-id"] == answer.json()["id"]
    assert inside.get("/health").headers["x-request-id"].startswith("req_")


def test_times_are_times(inside: Any) -> None:
    import time

    now = time.time()
    chat = inside.post("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}).json()
    response = inside.post("/v1/responses", {"model": "tiny", "input": "x"}).json()
    assert abs(chat["created"] - now) < 60
    assert abs(response["created_at"] - now) < 60
    assert abs(response["completed_at"] - now) < 60
