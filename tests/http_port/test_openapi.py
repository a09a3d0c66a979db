"""The OpenAPI description: valid, served, and true of what the port takes and answers."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from memstream_server.rpc.rpc_table import RPC_RULES
from scripts.openapi import build_description
from tests.http_port.conftest import http_server
from tests.support.server import ServerProcess

__all__ = ["http_server"]  # fixture
Server = tuple[ServerProcess, str]
MEMORIES, STREAMS = "/memstream.v1.MemoryService", "/memstream.v1.StreamService"
MADE = {"namespace": "openapi", "memory": "joy"}
PLAIN = {"content": "tea", "metadata": {"cups": 3, "topic": "tea"}, "observeTime": "2026-05-08T12:00:00Z"}
CALLS: list[tuple[str, dict[str, Any]]] = [
    (f"{MEMORIES}/CreateMemory", MADE | {"existOk": True, "policy": {"recall": {"limit": 5}}, "labels": {"a": "b"}}),
    (f"{STREAMS}/ObserveBatch", MADE | {"observations": [PLAIN]}),
    (f"{STREAMS}/RecallOnce", MADE | {"query": {"text": "tea", "explain": True, "timeout": "10s", "minRevision": "1"}}),
    (f"{MEMORIES}/ListFragments", MADE | {"filter": {"metadata": [{"key": "cups", "values": [3]}]}}),
    (f"{MEMORIES}/GetMemory", MADE),
    (f"{MEMORIES}/ListNamespaces", {}),
    ("/memstream.v1.ServerService/GetServerInfo", {}),
]


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return build_description()


def test_the_description_is_valid(described: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(described).validate()


def test_every_call_with_one_request_is_described(described: dict[str, Any]) -> None:
    streaming = {f"{STREAMS}/Observe", f"{STREAMS}/Recall", f"{MEMORIES}/ImportMemories"}
    ours = {path for path in RPC_RULES if path.startswith("/memstream.v1.")}
    assert described["paths"].keys() == ours - streaming


def test_the_server_serves_it(described: dict[str, Any], http_server: Server) -> None:
    answer = httpx2.get(f"http://{http_server[1]}/openapi.json", timeout=30)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == described
    strange = httpx2.get(f"http://{http_server[1]}/openapi.json", headers={"host": "evil.example"}, timeout=30)
    assert strange.status_code == 403


def schema_of(described: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    return part["content"]["application/json"]["schema"] | {"components": described["components"]}


def test_requests_and_answers_match_it(described: dict[str, Any], http_server: Server) -> None:
    for path, body in CALLS:
        call = described["paths"][path]["post"]
        jsonschema.validate(body, schema_of(described, call["requestBody"]))
        answer = httpx2.post(f"http://{http_server[1]}{path}", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        jsonschema.validate(answer.json(), schema_of(described, call["responses"]["200"]))
    failed = httpx2.post(f"http://{http_server[1]}{MEMORIES}/GetMemory", json={"namespace": "-"}, timeout=30)
    jsonschema.validate(failed.json(), schema_of(described, call["responses"]["default"]))
    assert failed.json()["details"]


@pytest.mark.parametrize("body", [{"namespac": "a"}, {"namespace": 7}, {"policy": {"recall": {"limit": "x"}}}])
def test_it_refuses_what_the_port_refuses(described: dict[str, Any], body: dict[str, Any], http_server: Server) -> None:
    path = f"{MEMORIES}/CreateMemory"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, schema_of(described, described["paths"][path]["post"]["requestBody"]))
    url = f"http://{http_server[1]}{path}"
    headers = {"content-type": "application/json"}
    assert httpx2.post(url, content=json.dumps(body), headers=headers, timeout=30).status_code == 400
