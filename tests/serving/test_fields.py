"""The field tables: complete against the official clients, true of the server, and what docs/api.md says."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from in_process import say
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from halocline.serving.api_document import api_document
from halocline.serving.endpoints import ENDPOINTS, Endpoint
from halocline.serving.errors import ApiError
from halocline.serving.schema import check

BY_PATH = {endpoint.path: endpoint for endpoint in ENDPOINTS}
KNOWN = {
    "/v1/chat/completions": chat_params.CompletionCreateParamsNonStreaming,
    "/v1/completions": completion_create_params.CompletionCreateParamsNonStreaming,
    "/v1/responses": response_create_params.ResponseCreateParamsNonStreaming,
    "/v1/messages": message_create_params.MessageCreateParamsNonStreaming,
    "/v1/messages/count_tokens": message_count_tokens_params.MessageCountTokensParams,
}
SMALLEST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"model": "tiny", "prompt": "x"},
    "/v1/responses": {"model": "tiny", "input": "x"},
    "/v1/messages": {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}


def fields(endpoint: Endpoint) -> dict[str, Any]:
    assert endpoint.fields is not None
    return dict(endpoint.fields["properties"])


def refused_fields() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, name, schema)
        for path in SMALLEST
        for name, schema in fields(BY_PATH[path]).items()
        if "x-refused" in schema
    ]


@pytest.mark.parametrize("path", KNOWN)
def test_every_field_of_the_official_client_is_in_the_table(path: str) -> None:
    names = set(typing.get_type_hints(KNOWN[path])) - {"betas"}
    assert names <= set(fields(BY_PATH[path]))


def test_the_beta_fields_of_messages_are_in_the_table() -> None:
    names = set(typing.get_type_hints(beta_params.MessageCreateParamsNonStreaming)) - {"betas"}
    assert names <= set(fields(BY_PATH["/v1/messages"]))


@pytest.mark.parametrize("path", SMALLEST)
def test_the_smallest_body_is_accepted(inside: Any, path: str) -> None:
    assert inside.post(path, SMALLEST[path]).status == 200


@pytest.mark.parametrize(("path", "name", "schema"), refused_fields())
def test_refused_fields_are_refused_by_name(inside: Any, path: str, name: str, schema: dict[str, Any]) -> None:
    for value in ("something", 7, {"a": 1}, ["a"], True):
        if value in schema["enum"]:
            continue
        answer = inside.post(path, {**SMALLEST[path], name: value})
        assert answer.status == 400
        stated = answer.json()["error"]
        assert name in stated["message"]
        assert schema["x-refused"] in stated["message"]
        if "messages" not in path:
            assert (stated["param"], stated["code"]) == (name, "unsupported_parameter")
    for value in schema["enum"]:
        assert inside.post(path, {**SMALLEST[path], name: value}).status == 200


@pytest.mark.parametrize("path", SMALLEST)
def test_null_counts_as_left_out(inside: Any, path: str) -> None:
    endpoint = BY_PATH[path]
    assert endpoint.fields is not None
    nulls = {name: None for name in fields(endpoint) if name not in SMALLEST[path]}
    assert inside.post(path, {**SMALLEST[path], **nulls}).status == 200
    for name in endpoint.fields.get("required", ()):
        answer = inside.post(path, {**SMALLEST[path], name: None})
        assert answer.status == 400
        assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", SMALLEST)
def test_unknown_fields_are_refused_with_the_nearest_name(inside: Any, path: str) -> None:
    answer = inside.post(
        path,
        {**SMALLEST[path], "temperatures": 1, "prompts": 2} if "token" not in path else {**SMALLEST[path], "models": 1},
    )
    assert answer.status == 400
    assert "is not a known field; did you mean" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", SMALLEST)
def test_every_field_says_what_it_does(path: str) -> None:
    for name, schema in fields(BY_PATH[path]).items():
        text = schema.get("x-refused") or schema.get("description")
        assert text, name
        assert text == text.strip()


# ---- honoured means that it does something ----------------------------------------------------------------------


def ask(inside: Any, **more: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": say("one two three four")}], **more}
    return inside.post("/v1/chat/completions", {"thinking": {"type": "disabled"}, **body})


@pytest.mark.parametrize(
    ("name", "value", "parameter"),
    [
        ("temperature", 0.25, 0.25),
        ("top_p", 0.5, 0.5),
        ("top_k", 7, 7),
        ("top_k", -1, 0),
        ("min_p", 0.125, 0.125),
        ("presence_penalty", 0.5, 0.5),
        ("frequency_penalty", -0.5, -0.5),
        ("repetition_penalty", 1.25, 1.25),
        ("logit_bias", {"5": -100}, {5: -100.0}),
        ("seed", 11, 11),
        ("n", 2, 2),
        ("min_tokens", 3, 3),
        ("ignore_eos", True, True),
        ("stop_token_ids", [9], (9,)),
        ("max_tokens", 6, 6),
        ("max_completion_tokens", 6, 6),
    ],
)
@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_sampling_fields_reach_the_engine(
    inside: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, parameter: Any, thinking: str
) -> None:
    """With thinking on and off: the vendor's library would drop or overrule most of them."""
    seen: list[Any] = []
    submit = inside.server.engine.submit
    monkeypatch.setattr(
        inside.server.engine, "submit", lambda request: (seen.append(request.params), submit(request))[1]
    )
    more = {"max_tokens": 6} if name not in ("max_tokens", "max_completion_tokens") else {}
    assert ask(inside, **more, **{name: value}, thinking={"type": thinking}).status == 200
    attribute = "max_tokens" if name == "max_completion_tokens" else name
    assert getattr(seen[0], attribute) == parameter


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/responses", {"input": "x", "temperature": 0.25, "top_k": 7, "seed": 3, "max_output_tokens": 6}),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "x"}],
                "temperature": 0.25,
                "top_k": 7,
                "seed": 3,
                "max_tokens": 6,
            },
        ),
        ("/v1/completions", {"prompt": "x", "temperature": 0.25, "top_k": 7, "seed": 3, "max_tokens": 6}),
    ],
)
def test_other_protocols_reach_the_engine(
    inside: Any, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any]
) -> None:
    seen: list[Any] = []
    submit = inside.server.engine.submit
    monkeypatch.setattr(
        inside.server.engine, "submit", lambda request: (seen.append(request.params), submit(request))[1]
    )
    assert inside.post(path, {"model": "tiny", **more}).status == 200
    params = seen[0]
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.25, 7, 3, 6)


# ---- documents --------------------------------------------------------------------------------------------------


def test_api_md_is_what_the_tables_say(root: Path) -> None:
    assert (root / "docs" / "api.md").read_text(encoding="utf-8") == api_document()


def test_api_md_lists_every_field() -> None:
    text = api_document()
    for endpoint in ENDPOINTS:
        assert f"`{endpoint.method} {endpoint.path}`" in text
        if endpoint.fields is not None:
            section = text.split(f"## `{endpoint.method} {endpoint.path}`")[1].split("\n## ")[0]
            for name, schema in fields(endpoint).items():
                row = next(line for line in section.splitlines() if line.startswith(f"| `{name}` "))
                assert ("refused" if "x-refused" in schema else "honoured") in row


@pytest.mark.parametrize("path", SMALLEST)
def test_the_tables_check_what_they_state(path: str) -> None:
    endpoint = BY_PATH[path]
    assert endpoint.fields is not None
    check(endpoint.fields, SMALLEST[path])
    with pytest.raises(ApiError):
        check(endpoint.fields, {**SMALLEST[path], "model": 5})
