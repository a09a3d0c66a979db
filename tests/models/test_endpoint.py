"""HTTP to a model's endpoint: bounds, redirects, and nothing shown that is a secret or a memory's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from memstream_server.adapters.models.endpoint import Endpoint, EndpointClient
from memstream_server.adapters.models.resilience import (
    ForeignReplyError,
    MalformedError,
    RefusedError,
    StatusError,
    TransientError,
    error_code,
)
from memstream_server.ports.models import ModelUnavailable

KEY = "sk-live-0123456789abcdef"
Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def serving(handler: Handler, **settings: Any) -> AsyncIterator[tuple[str, EndpointClient]]:
    """An endpoint with its client; `path` is appended to the address."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    origin = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = EndpointClient(Endpoint(origin + settings.pop("path", "/v1"), **settings))
    try:
        yield origin, client
    finally:
        await client.close()
        await runner.cleanup()


def answering(body: str, status: int = 200, **headers: str) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(status=status, text=body, headers=headers)

    return handle


async def test_sends_key_headers_and_query() -> None:
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({"data": []})

    given = {
        "headers": {"api-key": "a=b", "X-Org": "é".encode().hex()},
        "query": {"api-version": "2024-10-21", "q": "a&b"},
    }
    async with serving(handle, path="/v1?tier=free&q=old", api_key=KEY, **given) as (_, client):
        await client.post_json("/embeddings", {"model": "m"}, "data", 1_000)
    (request,) = seen
    assert (request.headers["Authorization"], request.headers["api-key"]) == (f"Bearer {KEY}", "a=b")
    assert dict(request.query) == {"tier": "free", "api-version": "2024-10-21", "q": "a&b"}
    assert request.path == "/v1/embeddings"


async def test_no_key_sends_no_authorization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-somebody-else")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-somebody-else")
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({"data": []})

    async with serving(handle) as (_, client):
        await client.post_json("/embeddings", {}, "data", 1_000)
    assert "Authorization" not in seen[0].headers
    assert "somebody-else" not in str(seen[0].headers)


async def test_redirect_is_not_followed() -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:9/elsewhere?token=abcdef")

    async with serving(handle, headers={"api-key": KEY}) as (_, client):
        with pytest.raises(StatusError) as raised:
            await client.post_json("/embeddings", {}, "data", 1_000)
    assert asked == ["/v1/embeddings"]
    text = raised.value.format_text(harmless=True)
    assert "HTTP 307" in text
    assert "a redirect to http://127.0.0.1:9/elsewhere" in text
    assert "abcdef" not in text
    assert isinstance(raised.value.translate_error(), ModelUnavailable)


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_body_without_end_is_bounded(status: int) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for _ in range(400):
            await response.write(b" " * (64 << 10))
        return response

    async with serving(handle) as (_, client):
        with pytest.raises((MalformedError, StatusError)) as raised:
            await client.post_json("/embeddings", {}, "data", 1_000)
    assert isinstance(raised.value, MalformedError if status == 200 else StatusError)


ECHO = json.dumps({"detail": [{"input": "the secret of Bob", "headers": f"Authorization: Bearer {KEY}"}]})


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500])
async def test_body_is_shown_of_harmless_requests_alone(status: int) -> None:
    async with serving(answering(ECHO, status), api_key=KEY) as (origin, client):
        with pytest.raises(StatusError) as raised:
            await client.post_json("/embeddings", {}, "data", 1_000)
        error = raised.value
        assert str(error.translate_error()) == f"{origin}/v1/embeddings answered HTTP {status}"
        shown = str(error.translate_error(harmless=True))
        assert "the secret of Bob" in shown
        assert KEY not in shown
        for text in (str(error), error.summary, getattr(error.translate_error(), "summary", "")):
            assert "Bob" not in text
        assert origin not in error.summary


async def test_reply_of_another_program_is_foreign() -> None:
    for body in ("<!doctype html><title>Chat</title>", "", "[]", "7", '{"object": "list"}', '{"data"'):
        async with serving(answering(body)) as (origin, client):
            with pytest.raises(ForeignReplyError) as raised:
                await client.post_json("/embeddings", {}, "data", 1_000)
            assert origin in str(raised.value)
            assert raised.value.summary.startswith("malformed reply: ")
            assert origin not in raised.value.summary


async def test_status_inside_a_successful_reply_counts() -> None:
    body = '{"error": {"message": "Provider returned error", "code": 429}}'
    async with serving(answering(body)) as (_, client):
        with pytest.raises(StatusError) as raised:
            await client.post_json("/chat/completions", {}, "choices", 1_000)
    assert isinstance(raised.value.translate_error(), TransientError)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, RefusedError) for status in (400, 413, 422)),
        *((status, ModelUnavailable) for status in (401, 403, 404)),
        *((status, TransientError) for status in (408, 425, 429, 500, 503)),
    ],
)
async def test_status_says_what_to_do(status: int, kind: type[Exception]) -> None:
    assert type(StatusError(status, "url").translate_error()) is kind


async def test_address_that_answers_is_used_from_then_on() -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path.startswith("/v1"):
            return web.json_response({"data": []})
        return web.json_response({"error": "no"}, status=404)

    async with serving(handle, path="/") as (_, client):
        for _ in range(3):
            await client.post_json("/embeddings", {}, "data", 1_000)
    assert asked == ["/embeddings", "/v1/embeddings", "/v1/embeddings", "/v1/embeddings"]


@pytest.mark.parametrize("status", [400, 401, 429, 500])
async def test_other_errors_do_not_move_the_address(status: int) -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status)

    async with serving(handle, path="/") as (_, client):
        with pytest.raises(StatusError):
            await client.post_json("/embeddings", {}, "data", 1_000)
    assert asked == ["/embeddings"]


async def test_url_is_shown_without_secrets() -> None:
    endpoint = Endpoint("https://joe:hunter22@host:8443/v1?key=AIzaSecret", query={"api-version": "2024-10-21"})
    client = EndpointClient(endpoint)
    try:
        assert client.mask_url("https://joe:hunter22@host:8443/v1/embeddings") == (
            "https://host:8443/v1/embeddings?key=***&api-version=***"
        )
        assert "hunter22" not in client.mask_text("joe:hunter22 and AIzaSecret")
        assert client.mask_text("a\x1b[31m\u202eb\r\nc") == "a?[31m?b c"
        assert client.mask_text("key sk-abcdef123456, Bearer abc.def") == "key ***, ***"
        assert len(client.mask_text("x" * 10_000)) == 301
    finally:
        await client.close()
    assert "hunter22" not in repr(Endpoint("http://host", api_key="hunter22", headers={"a": "hunter22"}))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ('{"error": {"code": "invalid_api_key", "type": "x"}}', "invalid_api_key"),
        ('{"error": {"code": null, "type": "api_error"}}', "api_error"),
        ('[{"error": {"code": 400, "status": "INVALID_ARGUMENT"}}]', "INVALID_ARGUMENT"),
        ('{"object": "error", "type": "BadRequestError", "code": 400}', "BadRequestError"),
        ('{"error": {"code": "the words of Bob"}}', ""),
        ('{"error": "text"}', ""),
        ('{"detail": "Not Found"}', ""),
        ("404 page not found", ""),
        ("[]", ""),
        ("7", ""),
        ("[" * 100_000, ""),
    ],
)
def test_code_of_an_error(body: str, code: str) -> None:
    assert error_code(body.encode()) == code
