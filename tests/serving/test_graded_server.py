"""`halocline serve` with the graded model: the whole path, from official clients to a real network."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from test_lifecycle import get, wait_until
from test_structured import SCHEMAS

from halocline.engine.graded_model import find_graded_model

MODEL = find_graded_model()
pytestmark = pytest.mark.skipif(MODEL is None, reason="needs the graded model")
COUNT = 60
OFF = {"thinking": {"type": "disabled"}}
ADD = {
    "type": "function",
    "function": {
        "name": "get_price",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string", "enum": ["tea", "salt"]}},
            "required": ["item"],
        },
    },
}


class Served:
    """The command, its address and what it said."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "halocline", "serve", "--model", str(MODEL), "--port", "0", "--name", "graded"]
        command += ["--max-context", "8192", "--cache-bytes", str(600 * 2**20), "--max-requests", "16"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(120), self.lines
        assert self.url, "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"ready: (http://\S+)", line)
            self.url = found[1] if found else self.url
            if found:
                self._ready.set()
        self._ready.set()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(30)


@pytest.fixture
def client(served: Served) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: Any, text: str, **more: Any) -> Any:
    extra = {**OFF, **more.pop("extra", {})}
    return client.chat.completions.create(
        model="graded", messages=[{"role": "user", "content": text}], temperature=0, extra_body=extra, **more
    )


def test_start_is_within_the_log_budget(served: Served) -> None:
    assert len(served.lines) <= 20
    assert not [line for line in served.lines if "WARNING" in line or "ERROR" in line]


def test_a_sum_streamed_and_whole(client: Any) -> None:
    whole = ask(client, "What is 17 + 25?", max_tokens=12)
    assert whole.choices[0].message.content.strip() == "42"
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(ask(client, "What is 17 + 25?", max_tokens=12, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert whole.system_fingerprint.startswith("halocline-")


def test_seeds_decide_and_n_differs(client: Any) -> None:
    def draw(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model="graded", messages=[{"role": "user", "content": "x"}], n=3, seed=seed, max_tokens=6, extra_body=OFF
        )
        return [choice.message.content for choice in answer.choices]

    assert draw(5) == draw(5)


def test_logprobs_are_of_the_model(client: Any) -> None:
    answer = ask(client, "What is 2 + 3?", max_tokens=4, logprobs=True, top_logprobs=3)
    for entry in answer.choices[0].logprobs.content:
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token, "at temperature 0 the most likely token is taken"
        assert [one.logprob for one in entry.top_logprobs] == sorted(
            (o.logprob for o in entry.top_logprobs), reverse=True
        )


def test_a_prompt_is_scored_alike_on_a_cache_hit(client: Any) -> None:
    """Known fault 24: the same prompt log-probabilities whether or not the prefix was cached."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    first, second = (
        client.completions.create(model="graded", prompt=prompt, echo=True, logprobs=1, max_tokens=0) for _ in range(2)
    )
    assert first.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        second.choices[0].logprobs.token_logprobs[1:], abs=1e-5
    )


def test_a_forced_call_and_a_form(client: Any) -> None:
    answer = ask(client, "Tea?", tools=[ADD], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    [made] = answer.choices[0].message.tool_calls
    assert json.loads(made.function.arguments)["item"] in ("tea", "salt")
    schema = SCHEMAS[0]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(client, "Give a number.", response_format=form, max_tokens=60)
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)


def test_anthropic_reasoning(served: Served) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120)
    message = client.messages.create(
        model="graded",
        max_tokens=40,
        thinking={"type": "enabled", "budget_tokens": 12},
        messages=[{"role": "user", "content": "Hello! Who are you?"}],
        extra_body={"temperature": 0},
    )
    assert message.content[0].type == "thinking"
    assert len(message.content[0].thinking) > 0


def test_a_client_that_leaves_frees_the_pages(served: Served, client: Any) -> None:
    stream = client.chat.completions.create(
        model="graded",
        messages=[{"role": "user", "content": "Count."}],
        stream=True,
        max_tokens=4000,
        extra_body={**OFF, "ignore_eos": True},
    )
    next(iter(stream))
    wait_until(lambda: get(served, "/stats")[1]["engine"]["running"] == 1, 10)
    stream.close()
    wait_until(lambda: get(served, "/stats")[1]["engine"]["running"] == 0, 10)
    assert get(served, "/stats")[1]["engine"]["pages_used"] == 0


def test_the_facts_of_the_engine(served: Served) -> None:
    info = get(served, "/server_info")[1]
    assert {row["chosen"] for row in info["kernels"]} == {"reference"}
    assert len(info["kernels"]) > 15
    assert info["memory"]["total_bytes"] == get(served, "/stats")[1]["engine"]["cache_bytes"] <= 600 * 2**20
    assert {"setting": "--port", "value": "0", "source": "flag"} in info["settings"]
    assert {"setting": "--host", "value": "127.0.0.1", "source": "default"} in info["settings"]
    assert not [row for row in info["settings"] if "/" in row["value"]], "no path of this machine"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_sixty_structured_answers(served: Served) -> None:
    """Two to each of 30 schemas, streamed or not, thinking on or off, at T = 0 and T = 1: every answer validates.

    The other two hundred and forty are drawn by the grammar alone, in test_structured.py.
    """

    async def one(client: Any, room: asyncio.Semaphore, number: int) -> None:
        schema = SCHEMAS[number % len(SCHEMAS)]
        stream, thinks, cold = bool(number & 1), bool(number & 2), bool(number & 4)
        async with room:
            answer = await client.chat.completions.create(
                model="graded",
                messages=[{"role": "user", "content": "Hello! Who are you?"}],
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
                temperature=0 if cold else 1,
                seed=number,
                stream=stream,
                max_tokens=400,
                extra_body={"thinking": {"type": "enabled" if thinks else "disabled"}},
            )
            if stream:
                chunks = [chunk async for chunk in answer]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                reason = chunks[-1].choices[0].finish_reason
            else:
                text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert reason == "stop", (schema, text[-100:])
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)

    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=3000) as client:
            room = asyncio.Semaphore(16)
            await asyncio.gather(*[one(client, room, number) for number in range(COUNT)])

    asyncio.run(work())
