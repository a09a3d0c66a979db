"""A server with vectors of a local model."""

from __future__ import annotations

from pathlib import Path

import pytest

import memstream
from tests.server.conftest import MakeServer, restarted, started, stopped
from tests.support.tiny_model import write_cross_encoder, write_model

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("tokenizers", reason="the extra onnx is not installed")


async def test_a_server_embeds_by_itself(make_server: MakeServer, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    server = await started(make_server(embedding="onnx", embedding_model_dir=str(model)))
    async with memstream.connect(server.address) as client:
        info = await client.server_info()
        assert info.embedding.name.startswith("tiny@")
        assert info.embedding.dimension == 3
        memory = await client.create_memory("onnx/joy")
        await memory.observe_batch(["coffee", "tea"])
        answer = await memory.recall_once("tea", explain=True, reinforce=False)
        assert answer[0].fragment.content == "tea"
        assert {found.fragment.model for found in answer} == {info.embedding.name}
        await restarted(server)
    async with memstream.connect(server.address) as client:
        assert len(await client.memory("onnx/joy").recall_once("tea")) == 2
    assert await stopped(server) == 0
    (model / "tokenizer.json").unlink()
    with pytest.raises(AssertionError, match=r"tokenizer\.json cannot be loaded"):
        await started(server)


async def test_a_local_model_needs_its_directory(make_server: MakeServer) -> None:
    with pytest.raises(AssertionError, match="embedding = onnx needs embedding_model_dir"):
        await started(make_server(embedding="onnx"))


async def test_a_server_reranks_by_itself(make_server: MakeServer, tmp_path: Path) -> None:
    model = write_cross_encoder(tmp_path / "tiny")
    server = await started(make_server(reranker_model_dir=str(model), reranker_timeout_s="30"))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("onnx/joy")
        await memory.observe_batch(["rain tea tea tea", "coffee rain rain", "memory of who"])
        answer = await memory.recall_once("coffee", explain=True, reinforce=False, limit=2)
        assert not answer.degraded
        for found in answer:
            assert found.explanation is not None
            assert found.explanation.formula == "absolute/3+rerank/1"
            assert found.explanation.parts[-1].name == "rerank"
            assert found.score == pytest.approx(sum(part.contribution for part in found.explanation.parts))
    assert await stopped(server) == 0
    (model / "tokenizer.json").unlink()
    with pytest.raises(AssertionError, match=r"tokenizer\.json cannot be loaded"):
        await started(server)
