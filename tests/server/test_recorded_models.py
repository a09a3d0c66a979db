"""A server with the models of every recorded endpoint: vectors, importance, and no secret in its log."""

from __future__ import annotations

import asyncio

import pytest

import memstream
from memstream import Memory, ModelState
from tests.server.conftest import MakeServer, started
from tests.server.listing import fragments
from tests.server.test_process import run
from tests.support.recorded_endpoint import DIMENSION, NAMES, RecordedEndpoint
from tests.support.waiting import until


async def all_embedded(memory: Memory) -> bool:
    return {one.model for one in await fragments(memory)} == {"recorded"}


@pytest.mark.parametrize("name", NAMES)
async def test_server_embeds_and_rates_with_recorded_endpoint(make_server: MakeServer, name: str) -> None:
    async with RecordedEndpoint(name) as endpoint:
        server = make_server(embedding="openai", embedding_model="recorded", llm_model="recorded", llm_insights="false")
        server.configure(**endpoint.settings("embedding_"), **endpoint.settings("llm_"))
        if "temperature" in endpoint.recording:
            server.configure(llm_temperature=0.0)
        await started(server)
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("recorded/joy")
            await memory.observe_batch(["Bob likes tea", "Ann likes coffee"])
            await until(lambda: all_embedded(memory))
            assert {round(one.importance, 6) for one in await fragments(memory)} == {0.7}
            assert (await memory.recall_once("tea")).degraded == ""
            info = await client.server_info()
            assert info.embedding.dimension == DIMENSION
            assert {(one.role, one.state) for one in info.models} == {
                ("embedder", ModelState.SERVING),
                ("scorer", ModelState.SERVING),
                ("conflicts", ModelState.SERVING),
            }
        assert "model_check_failed" not in server.log()
        for secret in endpoint.secrets:
            assert secret not in server.log()


@pytest.mark.parametrize("name", ["azure", "lmstudio", "ollama", "vllm"])
async def test_start_with_wrong_settings_says_what_came(make_server: MakeServer, name: str) -> None:
    wrong = "hunter22-0123456789"
    async with RecordedEndpoint(name) as endpoint:
        settings = {
            "azure": {"headers": f"api-key={wrong}"},
            "ollama": {"model": "missing", "api_key": wrong},
            "lmstudio": {"base_url": f"{endpoint.address}/api", "api_key": wrong},
            "vllm": {"base_url": f"{endpoint.address}/api?token={wrong}", "api_key": wrong},
        }[name]
        given = endpoint.settings("embedding_") | {f"embedding_{key}": value for key, value in settings.items()}
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
        data = str(make_server().data_dir)
        ended = await asyncio.to_thread(
            run, "serve", "--data", data, "--listen=127.0.0.1:0", "--embedding=openai", "--embedding-retries=0", *flags
        )
    said = {
        "azure": ["?api-version=*** answered HTTP 401", "invalid subscription key"],
        "ollama": ["HTTP 404 (api_error)", "try pulling it first"],
        "lmstudio": ["/api/embeddings answered with an error", "/api/v1/embeddings", "Unexpected endpoint"],
        "vllm": ["/api/embeddings?token=***", "HTTP 404", "Not Found"],
    }[name]
    assert ended.returncode == 1
    for text in (endpoint.address, *said):
        assert text in ended.stderr
    assert wrong not in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr
