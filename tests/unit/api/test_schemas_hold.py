"""Requests made from the OpenAPI documents themselves, and mutilated: never a 5xx, always a Problem."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import Workbench, served
from .test_executor_api import HeldExecutor, api

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
RELAXED = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def value(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a JSON schema allows, now and then ones that it does not."""
    return st.one_of(_valid(schema, document), _valid(schema, document), _valid(schema, document), JSON)


def _valid(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return _valid(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]], document)
    if "anyOf" in schema:
        return st.one_of([_valid(one, document) for one in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "object":
        fields = schema.get("properties", {})
        required = set(schema.get("required", ()))
        return st.fixed_dictionaries(
            {name: value(one, document) for name, one in fields.items() if name in required},
            optional={name: value(one, document) for name, one in fields.items() if name not in required},
        )
    if kind == "array":
        return st.lists(value(schema.get("items", {}), document), min_size=schema.get("minItems", 0), max_size=4)
    if kind == "string":
        return st.sampled_from(["note", "hang2", "t1", "c1", "fail"]) | st.text(max_size=20)
    if kind in {"number", "integer"}:
        return st.floats(0.001, 100) | st.integers(0, 100)
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    return JSON


def requests(document: dict[str, Any]) -> st.SearchStrategy[tuple[str, str, Any]]:
    """Method, path and body of requests that the document describes."""
    made: list[st.SearchStrategy[tuple[str, str, Any]]] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body: st.SearchStrategy[Any] = st.none()
            content = operation.get("requestBody", {}).get("content", {})
            if content:
                body = value(content["application/json"]["schema"], document)
            made.append(st.tuples(st.just(method.upper()), st.just(path), body))
    return st.one_of(made)


async def send(client: httpx.AsyncClient, request: tuple[str, str, Any], name: str) -> None:
    method, path, body = request
    for field in ("trajectory_id", "call_id"):
        path = path.replace("{" + field + "}", name).replace("{" + field + ":path}", name)
    content = b"" if body is None else json.dumps(body).encode()
    answer = await client.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code != 500, (method, path, body, answer.text)
    if answer.status_code >= 400:
        assert set(answer.json()) >= {"code", "message"}, answer.text


async def test_the_tool_server_survives_requests_made_from_its_own_description(bench: Workbench):
    async with served(bench) as client:
        document = (await client.get("/openapi.json")).json()
        drawn: list[tuple[str, str, Any]] = []

        @RELAXED
        @given(st.lists(requests(document), min_size=8, max_size=8))
        def draw(some: list[tuple[str, str, Any]]) -> None:
            drawn.extend(some)

        draw()
        for number, request in enumerate(drawn):
            await send(client, request, f"t{number % 3}")
        assert len(drawn) >= 100


async def test_the_executor_api_survives_requests_made_from_its_own_description():
    executor = HeldExecutor(slots=1000)
    executor.hold.set()
    async with api(executor, acquire_s=0.5, ttl_s=0.5) as client:
        document = (await client.get("/openapi.json")).json()
        drawn: list[tuple[str, str, Any]] = []

        @RELAXED
        @given(st.lists(requests(document), min_size=8, max_size=8))
        def draw(some: list[tuple[str, str, Any]]) -> None:
            drawn.extend(some)

        draw()
        for number, request in enumerate(drawn):
            await send(client, request, f"t{number % 3}")
        assert len(drawn) >= 100
