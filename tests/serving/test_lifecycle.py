"""Starting, draining, stopping, and the death of the engine, with real processes and signals."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from in_process import say

Start = Callable[..., Any]


def body(said: str, **more: Any) -> str:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": said}], **more})


def post(server: Any, text: str, path: str = "/v1/chat/completions") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", path, text, {"content-type": "application/json"})
    return connection.getresponse()


def get(server: Any, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for another process; there is nothing here that could tell of it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        threading.Event().wait(0.01)


def engine_pid(server: Any) -> int:
    [child] = [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and _parent(name) == server.process.pid and b"engine_worker" in _command(name)
    ]
    return child


def _parent(name: str) -> int:
    try:
        with open(f"/proc/{name}/stat") as file:
            return int(file.read().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1


def _command(name: str) -> bytes:
    try:
        with open(f"/proc/{name}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


# ---- start ------------------------------------------------------------------------------------------------------


def test_start_is_quiet_and_ready(start_server: Start) -> None:
    server = start_server().wait_ready()
    assert get(server, "/health") == (200, {"status": "ok"})
    assert get(server, "/ready") == (200, {"status": "ready"})
    assert len(server.lines) <= 20
    assert not [line for line in server.lines if "WARNING" in line or "ERROR" in line]
    assert server.url.startswith("http://127.0.0.1:")


def test_an_engine_that_cannot_start_ends_the_server(start_server: Start) -> None:
    server = start_server("--start-error", "no GPU of that kind")
    assert server.wait(30) != 0
    assert any("no GPU of that kind" in line for line in server.lines)


def test_a_fault_of_ours_at_the_start_is_shown_whole(start_server: Start) -> None:
    """The log has the traceback, and the line that ends it all has type and text."""
    server = start_server("--start-fault", "a list where a number belongs")
    assert server.wait(30) != 0
    said = "\n".join(server.lines)
    assert "ERROR: the engine could not start\nTraceback (most recent call last):\n" in said
    assert "in make_engine" in said
    assert any("could not start: TypeError: a list where a number belongs" in line for line in server.lines)


def test_a_taken_port_is_told_at_once(start_server: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = start_server("--port", str(taken.getsockname()[1]))
        assert server.wait(30) != 0
    assert any("cannot listen on 127.0.0.1 port" in line for line in server.lines)


# ---- stop -------------------------------------------------------------------------------------------------------


def test_the_first_signal_drains(start_server: Start) -> None:
    """Streams finish, new requests get a 503, the exit status is 0."""
    server = start_server("--step-seconds", "0.01").wait_ready()
    stream = post(server, body(say("word ", repeat=60), stream=True, max_tokens=100))
    assert stream.status == 200
    server.signal(signal.SIGTERM)
    wait_until(lambda: get(server, "/ready")[0] == 503)
    refused = post(server, body("x"))
    assert refused.status == 503
    assert json.loads(refused.read())["error"]["code"] == "draining"
    assert refused.headers["retry-after"]
    assert get(server, "/health")[0] == 200
    text = stream.read().decode()
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in text
    assert server.wait() == 0


def test_the_second_signal_stops(start_server: Start) -> None:
    server = start_server("--step-seconds", "0.02").wait_ready()
    stream = post(server, body(say("word ", repeat=4000), stream=True, max_tokens=7000))
    server.signal(signal.SIGTERM)
    wait_until(lambda: get(server, "/ready")[0] == 503)
    server.signal(signal.SIGTERM)
    assert server.wait(10) == 0
    assert "[DONE]" not in stream.read().decode()


def test_an_idle_server_stops_at_the_first_signal(start_server: Start) -> None:
    server = start_server().wait_ready()
    child = engine_pid(server)
    server.signal(signal.SIGINT)
    assert server.wait(10) == 0
    wait_until(lambda: not _command(str(child)))


# ---- the engine's death -----------------------------------------------------------------------------------------


def test_kill_9_of_the_engine(start_server: Start) -> None:
    """Everything that waits gets an error within two seconds, health is red, and a new server starts."""
    server = start_server("--step-seconds", "0.02").wait_ready()
    answers: list[tuple[int, bytes, float]] = []

    def ask(stream: bool) -> None:
        answer = post(server, body(say("word ", repeat=4000), stream=stream, max_tokens=7000))
        text = answer.read()
        answers.append((answer.status, text, time.monotonic()))

    threads = [threading.Thread(target=ask, args=(index % 2 == 0,)) for index in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: get(server, "/stats")[1]["engine"].get("running") == 8)
    os.kill(engine_pid(server), signal.SIGKILL)
    killed = time.monotonic()
    for thread in threads:
        thread.join(10)
    assert len(answers) == 8
    assert max(when for _, _, when in answers) - killed < 2.0
    assert sorted(status for status, _, _ in answers) == [200] * 4 + [503] * 4
    assert all(b"engine_dead" in text for _, text, _ in answers)
    assert not any(b"[DONE]" in text for _, text, _ in answers)
    status, health = get(server, "/health")
    assert (status, health["status"]) == (503, "ill")
    assert "SIGKILL" in health["problem"]
    assert get(server, "/ready")[0] == 503
    assert post(server, body("x")).status == 503
    port = server.port
    server.signal(signal.SIGTERM)
    assert server.wait(10) == 1
    again = start_server("--port", str(port)).wait_ready()
    assert post(again, body(say("back</think>again"))).status == 200


def test_a_stuck_engine_turns_health_red(start_server: Start) -> None:
    server = start_server("--stall-seconds", "0.8").wait_ready()
    thread = threading.Thread(target=lambda: post(server, body(say("x", hang=3.0))).read())
    thread.start()
    wait_until(lambda: get(server, "/health")[0] == 503)
    assert "no sign of life" in get(server, "/health")[1]["problem"]
    thread.join()
    wait_until(lambda: get(server, "/health")[0] == 200)


def test_the_engine_does_not_outlive_the_server(start_server: Start) -> None:
    server = start_server().wait_ready()
    child = engine_pid(server)
    server.signal(signal.SIGKILL)
    server.wait()
    wait_until(lambda: not _command(str(child)))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_work(start_server: Start, stream: bool) -> None:
    server = start_server("--step-seconds", "0.01").wait_ready()
    connections = []
    for _ in range(8):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        text = body(say("word ", repeat=4000), stream=stream, max_tokens=7000)
        connection.request("POST", "/v1/chat/completions", text, {"content-type": "application/json"})
        if stream:
            answer = connection.getresponse()
            for _ in range(6):
                answer.readline()
        connections.append(connection)
    wait_until(lambda: get(server, "/stats")[1]["engine"]["running"] == 8)
    for connection in connections:
        sock = connection.sock
        connection.close()
        if sock is not None:
            sock.close()
    left = time.monotonic()
    wait_until(lambda: get(server, "/stats")[1]["engine"]["running"] == 0, 2.0)
    assert time.monotonic() - left < 2.0
    stats = get(server, "/stats")[1]
    assert stats["engine"]["pages_used"] == 0
