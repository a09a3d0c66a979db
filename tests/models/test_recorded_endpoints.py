"""Embeddings and chat against the recorded shapes of servers that people use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memstream_server.adapters.models.llm_questions import ChatScorer
from memstream_server.adapters.models.openai_chat import ChatModel, OpenAIChat
from memstream_server.adapters.models.openai_embedder import OpenAIEmbedder, OpenAIEmbedding
from memstream_server.adapters.models.prompts import load_prompts
from memstream_server.adapters.models.resilience import Resilience
from memstream_server.ports.models import ModelRefused, ModelUnavailable
from tests.support.recorded_endpoint import NAMES, RecordedEndpoint, direction_of

QUICK = Resilience(attempts=2, deadline_s=60, backoff_s=0.001, failures_to_open=100)
CHECKS_MAX = 7
"""Maximum negotiation requests: 1 + 2 x 3, each at up to two addresses."""


def embedder_of(endpoint: RecordedEndpoint, **settings: Any) -> OpenAIEmbedder:
    recording = endpoint.recording
    chosen = OpenAIEmbedding(
        model="m",
        base_url=endpoint.base_url,
        api_key=recording.get("api_key", ""),
        headers=recording.get("headers", {}),
        query=recording.get("query", {}),
        resilience=QUICK,
    )
    return OpenAIEmbedder(replace(chosen, **settings))


def chat_of(endpoint: RecordedEndpoint, **settings: Any) -> ChatModel:
    recording = endpoint.recording
    chosen = OpenAIChat(
        model="m",
        base_url=endpoint.base_url,
        api_key=recording.get("api_key", ""),
        headers=recording.get("headers", {}),
        query=recording.get("query", {}),
        temperature=recording.get("temperature"),
        resilience=QUICK,
    )
    return ChatModel(replace(chosen, **settings))


@asynccontextmanager
async def embedding(name: str, **settings: Any) -> AsyncIterator[tuple[RecordedEndpoint, OpenAIEmbedder]]:
    async with RecordedEndpoint(name) as endpoint:
        embedder = embedder_of(endpoint, **settings)
        try:
            yield endpoint, embedder
        finally:
            await embedder.close()


@asynccontextmanager
async def scoring(name: str, **settings: Any) -> AsyncIterator[tuple[RecordedEndpoint, ChatScorer]]:
    async with RecordedEndpoint(name) as endpoint:
        chat = chat_of(endpoint, **settings)
        try:
            yield endpoint, ChatScorer(chat, load_prompts().importance)
        finally:
            await chat.close()


def test_every_server_of_the_list_is_recorded() -> None:
    assert NAMES == ["azure", "gemini", "llamacpp", "lmstudio", "ollama", "openai", "vllm"]


@pytest.mark.parametrize("name", NAMES)
async def test_embeds_with_recorded_server(name: str) -> None:
    async with embedding(name) as (endpoint, embedder):
        texts = ["a", "two", "three words long"]
        vectors = await embedder.embed(texts)
        expected = np.stack([direction_of(text) for text in texts])
        np.testing.assert_allclose(vectors, expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-5)
        found_out = len(endpoint.requests)
        assert found_out <= CHECKS_MAX
        await embedder.embed(["more"])
        await embedder.embed(["still more"])
        assert [status for _, status, _ in endpoint.requests[found_out:]] == [200, 200]
        assert list(endpoint.requests[-1][2]) == endpoint.recording["sent"]["embeddings"]


@pytest.mark.parametrize("name", NAMES)
async def test_scores_with_recorded_server(name: str) -> None:
    async with scoring(name) as (endpoint, scorer):
        assert await scorer.score(["Bob likes tea", "Ann likes coffee"]) == [0.7, 0.7]
        found_out = len(endpoint.requests)
        assert found_out <= CHECKS_MAX + 1
        assert await scorer.score(["Eve likes milk"]) == [0.7]
        assert [status for _, status, _ in endpoint.requests[found_out:]] == [200]
        assert sorted(endpoint.requests[-1][2]) == sorted(endpoint.recording["sent"]["chat"])
        assert endpoint.prompts[-2:] == [["Bob likes tea", "Ann likes coffee"], ["Eve likes milk"]]


@pytest.mark.parametrize(
    ("name", "text"), [("ollama", "this is not a number"), ("llamacpp", "far too large"), ("vllm", "a very long text")]
)
async def test_text_that_fails_alone_is_refused_alone(name: str, text: str) -> None:
    async with embedding(name) as (_, embedder):
        with pytest.raises(ModelRefused) as raised:
            await embedder.embed(["fine", text, "sound"])
        assert raised.value.inputs == (1,)
        with pytest.raises(ModelRefused):
            await embedder.embed([text])
        assert (await embedder.embed(["fine", "sound"])).shape == (2, 8)


async def test_filtered_text_is_refused_alone() -> None:
    async with scoring("azure") as (_, scorer):
        with pytest.raises(ModelRefused) as raised:
            await scorer.score(["fine", "a violent scene", "sound"])
        assert raised.value.inputs == (1,)


@pytest.mark.parametrize("name", ["openai", "azure", "gemini"])
async def test_wrong_key_is_named_and_not_shown(name: str) -> None:
    wrong = "sk-proj-not-the-one-0123456789"
    headers = {"api-key": wrong} if name == "azure" else {}
    async with embedding(name, api_key=wrong, headers=headers) as (endpoint, embedder):
        with pytest.raises(ModelUnavailable) as raised:
            await embedder.model()
        text = str(raised.value)
        assert wrong not in text
        assert endpoint.address in text
        assert f"HTTP {400 if name == 'gemini' else 401}" in text
        assert {"openai": "Incorrect API key", "azure": "invalid subscription", "gemini": "not valid"}[name] in text


async def test_missing_api_version_shows_both_addresses() -> None:
    async with embedding("azure", query={"region": "secret-place"}) as (endpoint, embedder):
        with pytest.raises(ModelUnavailable) as raised:
            await embedder.model()
        text = str(raised.value)
        assert f"{endpoint.address}/openai/deployments/memory/embeddings?region=***" in text
        assert f"{endpoint.address}/openai/deployments/memory/v1/embeddings?region=***" in text
        assert text.count("HTTP 404") == 2
        assert "Resource not found" in text
        assert "secret-place" not in text


@pytest.mark.parametrize("name", ["ollama", "lmstudio", "llamacpp", "vllm", "openai"])
@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v1/", "/v1/embeddings", "/v1?tier=free", "?tier=free", "/?tier=free"]
)
async def test_base_url_of_any_usual_form(name: str, path: str) -> None:
    async with RecordedEndpoint(name) as endpoint:
        embedder = embedder_of(endpoint, base_url=endpoint.address + path)
        try:
            assert (await embedder.embed(["x"])).shape == (1, 8)
            assert endpoint.requests[-1][0] == "/v1/embeddings"
        finally:
            await embedder.close()


async def test_missing_model_is_named() -> None:
    async with embedding("ollama", model="missing") as (_, embedder):
        with pytest.raises(ModelUnavailable, match=r'model .*"missing.*" not found, try pulling it first'):
            await embedder.model()
