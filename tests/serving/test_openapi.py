"""The OpenAPI document is valid, and a live server keeps to it whatever schemathesis thinks up."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from jsonschema import Draft202012Validator

from halocline.serving.endpoints import ENDPOINTS
from halocline.serving.openapi import openapi_document


def test_the_document_names_every_endpoint() -> None:
    document = openapi_document()
    stated = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    assert stated == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}


@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if one.fields is not None], ids=lambda one: one.path)
def test_the_schemas_are_json_schemas(endpoint: Any) -> None:
    schema = openapi_document()["paths"][endpoint.path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    Draft202012Validator.check_schema(schema)


def test_keys_are_in_the_document_when_there_are_any() -> None:
    document = openapi_document(secured=True)
    assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]


def test_the_server_gives_its_document(inside: Any) -> None:
    assert inside.get("/openapi.json").json() == openapi_document()


@pytest.mark.parametrize("path", sorted({endpoint.path for endpoint in ENDPOINTS}))
@pytest.mark.timeout(120)
def test_schemathesis(live: Any, path: str) -> None:
    """No 5xx, no hang, and every answer is one that the document states."""
    document = openapi_document()
    for operations in document["paths"].values():
        body = operations.get("post", {}).get("requestBody")
        if body is not None:  # another model's name is a 404, and nothing behind it would be tried
            body["content"]["application/json"]["schema"]["properties"]["model"] = {"const": "tiny"}
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=live.url)
    for operation in schema.include(path=path).get_all_operations():
        _run(operation.ok(), schemathesis.GenerationMode.POSITIVE, live)
        if "requestBody" in operation.ok().definition.raw:
            _run(operation.ok(), schemathesis.GenerationMode.NEGATIVE, live)


def _run(operation: Any, mode: Any, live: Any) -> None:
    from hypothesis import given

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def probe(case: Any) -> None:
        answer = case.call(timeout=20)
        assert answer.status_code < 500, (answer.status_code, answer.text)
        known = {int(status) for status in operation.definition.raw["responses"]}
        assert answer.status_code in known | {404, 405}, answer.text

    probe()
