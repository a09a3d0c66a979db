"""A server with vectors of a local model."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

import memstream
from memstream_server.diagnosis.outside import check_embedding_model
from memstream_server.settings import EmbeddingKind, Settings
from tests.server.conftest import MakeServer, restarted, started, stopped
from tests.support.tiny_bert import write_published
from tests.support.tiny_model import write_cross_encoder, write_model

pytestmark = pytest.mark.without_index

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("tokenizers", reason="the extra onnx is not installed")

from memstream_server.adapters.models.local.install import install_model  # noqa: E402  # needs the extra


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


async def test_a_server_uses_the_installed_model(make_server: MakeServer, tmp_path: Path) -> None:
    """Without one it says how to install it; with two it does not choose."""
    models_dir = tmp_path / "models"
    server = make_server(embedding="onnx", models_dir=str(models_dir))
    with pytest.raises(AssertionError, match="run `memstream models install all-minilm-l6-v2`"):
        await started(server)
    model = write_published(tmp_path / "published")
    await asyncio.to_thread(install_model, model, models_dir, lambda line: None, source=tmp_path / "published")
    await started(server)
    space = f"tiny-bert-int8@{model.weights_sha256[:8]}"
    assert f"embedding  {space}, 16 dimensions" in server.log()
    async with memstream.connect(server.address) as client:
        assert (await client.server_info()).embedding.name == space
        memory = await client.create_memory("onnx/joy")
        await memory.observe_batch(["coffee", "tea"])
        assert (await memory.recall_once("tea", reinforce=False))[0].fragment.content == "tea"
    assert await stopped(server) == 0
    shutil.copytree(models_dir / "tiny-bert", models_dir / "other")
    with pytest.raises(AssertionError, match=r"set embedding_model_dir to one of .*other/int8, .*tiny-bert/int8"):
        await started(server)


def test_doctor_names_the_command_for_a_missing_model(tmp_path: Path) -> None:
    (found,) = check_embedding_model(Settings(embedding=EmbeddingKind.ONNX, models_dir=tmp_path), None)
    assert found.level == "problem"
    assert "memstream models install" in found.text


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
            assert found.explanation.formula == "absolute/4+rerank/1"
            assert found.explanation.parts[-1].name == "rerank"
            assert found.score == pytest.approx(sum(part.contribution for part in found.explanation.parts))
    assert await stopped(server) == 0
    (model / "tokenizer.json").unlink()
    with pytest.raises(AssertionError, match=r"tokenizer\.json cannot be loaded"):
        await started(server)
