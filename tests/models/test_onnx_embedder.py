"""The ONNX embedder on a tiny model made here: one vector a word, so that every mean is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from memstream_server.adapters.models.onnx_models import BATCH_TEXTS, OnnxEmbedder, OnnxModelError, unit_vectors
from memstream_server.core.fitted_weights import BGE_SMALL_EN_V1_5, MODEL
from memstream_server.ports.models import ModelRefused
from tests.support.tiny_bert import CONFIGURATION, make_tensors, write_published
from tests.support.tiny_model import TABLE, write_model

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("tokenizers", reason="the extra onnx is not installed")


@pytest.fixture
async def embedder(tmp_path: Path) -> AsyncIterator[OnnxEmbedder]:
    made = OnnxEmbedder(write_model(tmp_path / "tiny"))
    yield made
    await made.close()


async def test_vector_does_not_depend_on_its_batch(embedder: OnnxEmbedder) -> None:
    vectors = await embedder.embed(["tea coffee rain rain", "tea", "coffee tea"])
    half = 0.5**0.5
    np.testing.assert_allclose(vectors, [[-half, half, 0], [1, 0, 0], [half, half, 0]], atol=1e-6)
    assert vectors.dtype == np.float32
    assert (await embedder.embed([])).shape == (0, 3)


async def test_vector_of_an_int8_model_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    import onnx

    from memstream_server.adapters.models.local.bert_graph import build_model

    write_published(tmp_path)
    onnx.save(build_model(make_tensors(), CONFIGURATION, int8=True), str(tmp_path / "model.onnx"))
    made = OnnxEmbedder(tmp_path)
    texts = ["tea", "coffee rain tea", "This is an example sentence", "rain rain coffee tea"]
    together = await made.embed(texts)
    alone = np.concatenate([await made.embed([text]) for text in texts])
    await made.close()
    np.testing.assert_array_equal(together, alone)


async def test_long_texts_are_cut_to_what_the_model_takes(embedder: OnnxEmbedder) -> None:
    cut, whole = await embedder.embed(["tea " * 4 + "coffee " * 400, "tea"])
    np.testing.assert_array_equal(cut, whole)


async def test_more_than_a_batch_stays_in_order(embedder: OnnxEmbedder) -> None:
    texts = [("tea " * (number % 3) + "coffee").strip() for number in range(3 * BATCH_TEXTS + 1)]
    together = await embedder.embed(texts)
    alone = np.concatenate([await embedder.embed([text]) for text in texts[:6]])
    np.testing.assert_allclose(together[:6], alone, atol=1e-6)
    np.testing.assert_allclose(together[-1], together[0], atol=1e-6)


async def test_texts_without_a_direction_are_refused_by_place(embedder: OnnxEmbedder) -> None:
    with pytest.raises(ModelRefused) as raised:
        await embedder.embed(["tea", "", "tea rain"])
    assert raised.value.inputs == (1, 2)
    with pytest.raises(ModelRefused):
        await embedder.embed([""])


async def test_embedding_does_not_block_event_loop(embedder: OnnxEmbedder) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await embedder.embed(["tea coffee"] * (4 * BATCH_TEXTS))
    counting.cancel()
    assert turns > 4


async def test_a_space_is_named_after_its_directory_and_weights(tmp_path: Path) -> None:
    one = OnnxEmbedder(write_model(tmp_path / "a" / "tiny"))
    same = OnnxEmbedder(write_model(tmp_path / "b" / "tiny"))
    other = OnnxEmbedder(write_model(tmp_path / "c" / "tiny", table=TABLE[:, :2] * 2))
    names = [(await each.model()).name for each in (one, same, other)]
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("tiny@") for name in names)
    assert [(await each.model()).dimension for each in (one, other)] == [3, 2]
    for each in (one, same, other):
        await each.close()


async def test_exports_with_token_types_and_in_a_folder(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "tiny", "input_ids", "attention_mask", "token_type_ids")
    (directory / "onnx").mkdir()
    (directory / "model.onnx").rename(directory / "onnx" / "model.onnx")
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 1}')
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    made = OnnxEmbedder(directory)
    np.testing.assert_allclose(await made.embed(["coffee tea"]), [[0, 1, 0]], atol=1e-6)
    await made.close()


async def test_the_first_token_is_the_vector_of_a_cls_model(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "tiny")
    (directory / "1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    made = OnnxEmbedder(directory)
    np.testing.assert_allclose(await made.embed(["coffee tea", "tea"]), [[0, 1, 0], [1, 0, 0]], atol=1e-6)
    await made.close()


async def test_a_known_model_has_its_own_weights(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "tiny")
    other = OnnxEmbedder(directory)
    (directory / "memstream.json").write_text('{"model": "bge-small-en-v1.5", "space": "bge"}')
    known = OnnxEmbedder(directory)
    for made, row, low in ((other, MODEL, 0.0), (known, BGE_SMALL_EN_V1_5, 0.4)):
        model = await made.model()
        assert (model.fitted, model.fitted.cosine_low) == (row, low)
        await made.close()


def test_pooled_vectors_are_only_normalised() -> None:
    found = unit_vectors(np.array([[3, 4], [1, 1]], np.float32), np.array([[1, 1], [0, 0]]))
    np.testing.assert_allclose(found, [[0.6, 0.8], [0, 0]], atol=1e-6)


def no_model(directory: Path) -> None:
    (directory / "model.onnx").unlink()


def model_in_other_folder(directory: Path) -> None:
    """As `memstream models install` lays out a model."""
    (directory / "int8").mkdir()
    (directory / "model.onnx").rename(directory / "int8" / "model.onnx")


def broken_model(directory: Path) -> None:
    (directory / "model.onnx").write_bytes(b"no model")


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def broken_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def other_pooling(directory: Path) -> None:
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')


def other_words(directory: Path) -> None:
    """A tokenizer with token ids outside the model's embedding table."""
    write_model(directory, table=TABLE[:1])


def no_tokens(directory: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"tea": 0}, unk_token="none")).save(str(directory / "tokenizer.json"))


def picture_model(directory: Path) -> None:
    write_model(directory, "input_ids", "pixel_values")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (no_model, "no model.onnx"),
        (model_in_other_folder, "tiny/int8"),
        (broken_model, "cannot be loaded"),
        (no_tokenizer, "tokenizer.json cannot be loaded"),
        (broken_config, "config.json cannot be read"),
        (other_pooling, "another pooling than mean or cls"),
        (picture_model, "asks for pixel_values"),
        (other_words, "gives no vectors"),
        (no_tokens, "gives no vectors"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_directory_that_cannot_be_used_says_why(tmp_path: Path, spoil: object, complaint: str) -> None:
    directory = write_model(tmp_path / "tiny")
    spoil(directory)  # type: ignore[operator]  # pytest types parameters loosely
    with pytest.raises(OnnxModelError, match=complaint.replace(".", "[.]")):
        OnnxEmbedder(directory)
