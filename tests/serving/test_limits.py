"""Keys, sizes, counts, origins, and clients that behave badly."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from in_process import InProcessServer, say
from load_client import raw_request
from test_lifecycle import body, get, post, wait_until

from halocline.serving.engine_client import MAX_BACKLOG, TokenDelta, TokenStream
from halocline.serving.errors import ApiError
from halocline.serving.state import ServerConfig

Start = Callable[..., Any]


async def with_server(config: ServerConfig, work: Callable[[InProcessServer], Any]) -> Any:
    async with InProcessServer(config) as server:
        return await work(server)


# ---- keys -------------------------------------------------------------------------------------------------------

KEYS = ServerConfig(name="tiny", api_keys=("right", "other"))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "right"}, 401),
        ({"authorization": "Basic right"}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "rïght"}, 401),
        ({"authorization": "Bearer right"}, 200),
        ({"authorization": "bearer other"}, 200),
        ({"x-api-key": "right"}, 200),
    ],
)
def test_keys(headers: dict[str, str], status: int) -> None:
    answer = asyncio.run(with_server(KEYS, lambda server: server.get("/v1/models", headers)))
    assert answer.status == status
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"
        assert "right" not in answer.body.decode().replace("rïght", "")


def test_what_needs_no_key() -> None:
    async def work(server: InProcessServer) -> list[int]:
        paths = ["/health", "/ready", "/", "/page.js", "/metrics", "/server_info", "/stats", "/openapi.json"]
        return [(await server.get(path)).status for path in paths]

    assert asyncio.run(with_server(KEYS, work)) == [200] * 4 + [401] * 4


def test_anthropic_errors_have_their_form() -> None:
    answer = asyncio.run(with_server(KEYS, lambda server: server.post("/v1/messages", {})))
    assert answer.json()["type"] == "error"


# ---- origins ----------------------------------------------------------------------------------------------------


def test_no_origin_is_allowed_unless_named(inside: Any) -> None:
    answer = inside.get("/v1/models", {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = inside.run(inside.server.call("OPTIONS", "/v1/chat/completions", b"", preflight))
    assert answer.status == 403


def test_a_named_origin_is_allowed() -> None:
    config = ServerConfig(name="tiny", cors_origins=("https://app.example",), api_keys=("k",))

    async def work(server: InProcessServer) -> None:
        preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
        answer = await server.call("OPTIONS", "/v1/chat/completions", b"", preflight)
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        answer = await server.get("/v1/models", {"origin": "https://app.example", "authorization": "Bearer k"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["vary"] == "origin"

    asyncio.run(with_server(config, work))


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_foreign_page_may_send_unasked_is_refused(inside: Any, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    answer = inside.run(inside.server.call("POST", "/v1/chat/completions", b"{}", headers))
    assert answer.status == 415


# ---- bodies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nul",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": "\xff\xfe"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00x"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 1} trailing',
        b"{'a': 1}",
    ],
)
def test_what_is_not_json(inside: Any, data: bytes) -> None:
    answer = inside.post("/v1/chat/completions", data)
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("data", [b"[]", b"1", b"null", b'"text"', b"true"])
def test_json_that_is_no_object(inside: Any, data: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/abort"):
        answer = inside.post(path, data)
        assert answer.status == 400


def test_surrogate_pairs_are_text(inside: Any) -> None:
    data = json.dumps({"prompt": "\U0001f600", "add_special_tokens": False})
    assert "\\ud83d" in data
    tokens = inside.post("/tokenize", data.encode()).json()["tokens"]
    assert inside.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "\U0001f600"


def test_a_body_that_is_too_large(start_server: Start) -> None:
    server = start_server("--max-body", "1000").wait_ready()
    answer = post(server, body("x" * 2000))
    assert answer.status == 413
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    pieces = iter([b"x" * 600] * 10)
    connection.request(
        "POST", "/v1/chat/completions", pieces, {"content-type": "application/json"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413
    assert post(server, body("x")).status == 200


def test_a_large_body_is_taken(inside: Any) -> None:
    answer = inside.post(
        "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "word " * 400_000}]}
    )
    assert answer.status == 400
    assert "context" in answer.json()["error"]["message"]


# ---- counts -----------------------------------------------------------------------------------------------------


def test_too_many_requests() -> None:
    config = ServerConfig(name="tiny", max_requests=2)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": say("word ", repeat=20)}]}

    async def work(server: InProcessServer) -> list[int]:
        answers = await asyncio.gather(*[server.post("/v1/chat/completions", asked) for _ in range(5)])
        later = await server.post("/v1/chat/completions", asked)
        refused = next(answer for answer in answers if answer.status == 429)
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "rate_limit_error"
        return [*sorted(answer.status for answer in answers), later.status]

    assert asyncio.run(with_server(config, work)) == [200, 200, 429, 429, 429, 200]


# ---- slow and strange clients -----------------------------------------------------------------------------------


def test_a_stream_nobody_reads_is_given_up() -> None:
    """What waits for a slow reader is bounded; past the bound the request is aborted and the reader told."""

    async def work() -> None:
        aborted: list[int | None] = []
        stream = TokenStream(1, aborted.append)
        for _ in range(MAX_BACKLOG + 10):
            stream.put(TokenDelta(0, (5,)))
        assert aborted == [None]
        with pytest.raises(ApiError) as caught:
            await stream.read()
        assert caught.value.code == "slow_client"
        assert stream.is_finished

    asyncio.run(work())


def test_a_slow_client_holds_no_memory(start_server: Start) -> None:
    """A client that reads nothing: its request ends and the server's memory stays where it was."""
    server = start_server().wait_ready()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    text = json.dumps(
        {
            "model": "tiny",
            "prompt": say("word ", repeat=8000),
            "stream": True,
            "n": 8,
            "max_tokens": 8000,
            "logprobs": 5,
        }
    )
    sock.sendall(raw_request("/v1/completions", text))
    wait_until(lambda: get(server, "/stats")[1]["engine"]["decode_tokens"] > 0)
    wait_until(lambda: get(server, "/stats")[1]["engine"]["running"] == 0, 20)
    assert get(server, "/stats")[1]["engine"]["decode_tokens"] < 64_000
    assert post(server, body(say("a</think>b"))).status == 200
    sock.close()
    wait_until(lambda: get(server, "/stats")[1]["calls"] == 0)


def test_half_closed_connections(live: Any) -> None:
    """A client that closes its writing side has left: nothing hangs, nothing is kept."""
    socks = []
    for _ in range(20):
        sock = socket.create_connection(("127.0.0.1", live.port), timeout=10)
        text = body(say("word ", repeat=50), stream=True)
        sock.sendall(raw_request("/v1/chat/completions", text))
        sock.shutdown(socket.SHUT_WR)
        socks.append(sock)
    for sock in socks:
        while sock.recv(65536):
            pass
        sock.close()
    wait_until(lambda: get(live, "/stats")[1]["calls"] == 0)


def test_half_a_request(live: Any) -> None:
    socks = []
    for data in (
        b"",
        b"POST /v1",
        raw_request("/v1/chat/completions", "{" + " " * 500)[:-500],
    ):
        sock = socket.create_connection(("127.0.0.1", live.port), timeout=10)
        sock.sendall(data)
        socks.append(sock)
    assert post(live, body(say("a</think>b"))).status == 200
    for sock in socks:
        sock.close()
    wait_until(lambda: get(live, "/stats")[1]["calls"] == 0)


@pytest.mark.parametrize(
    "data", [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]
)
def test_what_is_not_http(live: Any, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    assert get(live, "/health")[0] == 200


def test_a_thousand_idle_connections(live: Any) -> None:
    socks = [socket.create_connection(("127.0.0.1", live.port), timeout=10) for _ in range(1000)]
    assert post(live, body(say("a</think>b"))).status == 200
    for sock in socks:
        sock.close()
    assert get(live, "/health")[0] == 200


# ---- what answers never say -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/nope", "/v1/nope", "/v1/messages/nope", "/../../etc/passwd", "/%2e%2e/x", "/page.py"]
)
def test_unknown_paths(inside: Any, path: str) -> None:
    answer = inside.get(path)
    assert answer.status == 404
    assert "error" in answer.json()
    assert "/work" not in answer.body.decode()


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/chat/completions"), ("DELETE", "/v1/models"), ("PUT", "/abort")]
)
def test_wrong_methods(inside: Any, method: str, path: str) -> None:
    answer = inside.run(inside.server.call(method, path, b"", {}))
    assert answer.status == 405


def test_a_fault_of_ours_says_nothing(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("/secret/path and a key")

    monkeypatch.setattr("halocline.serving.http.chat_job", broken)
    answer = inside.post("/v1/chat/completions", {"model": "tiny", "messages": []})
    assert answer.status == 500
    assert "secret" not in answer.body.decode()
    assert answer.json()["error"]["code"] == "internal_error"
