"""A server with vectors of a local model."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

import memstream
from memstream_server.adapters.models.local import store
from memstream_server.core.ranking import FORMULA
from memstream_server.diagnosis import check_embedding_model
from memstream_server.settings import EmbeddingKind, Settings
from tests.server.conftest import MakeServer, restarted, started, stopped
from tests.support.tiny_bert import write_published
from tests.support.tiny_model import write_cross_encoder, write_model

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("tokenizers", reason="the extra onnx is not installed")

from memstream_server.adapters.models.local.install import install_model  # needs the extra


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
    """Without one it says how to install it; of two it uses the first installed, or the named one."""
    models_dir = tmp_path / "models"
    server = make_server(embedding="onnx", models_dir=str(models_dir))
    with pytest.raises(AssertionError, match="run `memstream models install NAME`"):
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
    add_second(models_dir)
    await started(server)
    assert f"{space}, 16 dimensions; installed first of other, tiny-bert" in server.log()
    assert await stopped(server) == 0


def add_second(models_dir: Path) -> None:
    """A model "other" that was installed later, and whose name comes first."""
    shutil.copytree(models_dir / "tiny-bert", models_dir / "other")
    manifest = json.loads((models_dir / "other" / "model.json").read_text())
    (models_dir / "other" / "model.json").write_text(json.dumps(manifest | {"installed": "2999-01-01T00:00:00+00:00"}))


def test_a_name_chooses_among_the_installed_models(tmp_path: Path) -> None:
    model = write_published(tmp_path / "published")
    install_model(model, tmp_path, lambda line: None, source=tmp_path / "published")
    add_second(tmp_path)
    chosen = {name: store.choose_installed(tmp_path, name) for name in ("", "other", "other/float32", "tiny-bert/int8")}
    assert {name: directory.relative_to(tmp_path).as_posix() for name, directory in chosen.items()} == {
        "": "tiny-bert/int8",
        "other": "other/int8",
        "other/float32": "other/float32",
        "tiny-bert/int8": "tiny-bert/int8",
    }
    for name in ("none", "other/int4"):
        with pytest.raises(store.ModelNotInstalled, match=rf"names {name}, but .* has other, tiny-bert"):
            store.choose_installed(tmp_path, name)


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
            assert found.explanation.formula == f"{FORMULA}+rerank/1"
            assert found.explanation.parts[-1].name == "rerank"
            assert found.score == pytest.approx(sum(part.contribution for part in found.explanation.parts))
    assert await stopped(server) == 0
    (model / "tokenizer.json").unlink()
    with pytest.raises(AssertionError, match=r"tokenizer\.json cannot be loaded"):
        await started(server)
