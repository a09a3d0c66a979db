"""The ONNX reranker on a tiny cross-encoder made here, whose logit is the words that both sides share, less a half."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from memstream_server.adapters.models.onnx_models import BATCH_PAIRS, OnnxModelError, OnnxReranker
from memstream_server.diagnosis import check_reranker
from memstream_server.ports.models import ModelUnavailable
from memstream_server.settings import Settings
from tests.support.tiny_model import write_cross_encoder, write_model

pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("tokenizers", reason="the extra onnx is not installed")


def logistic(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


@pytest.fixture
async def reranker(tmp_path: Path) -> AsyncIterator[OnnxReranker]:
    made = OnnxReranker(write_cross_encoder(tmp_path / "tiny"))
    yield made
    await made.close()


async def test_closeness_does_not_depend_on_its_batch(reranker: OnnxReranker) -> None:
    texts = ["tea", "coffee", "rain coffee coffee", "tea tea tea"]
    found = await reranker.closeness("tea", texts)
    np.testing.assert_allclose(found, [logistic(each) for each in (0.5, -0.5, -1.5, 2.5)], atol=1e-6)
    other = await reranker.closeness("coffee", texts)
    np.testing.assert_allclose(other, [logistic(each) for each in (-0.5, 0.5, 1.5, -0.5)], atol=1e-6)
    assert found.dtype == np.float32
    assert (await reranker.closeness("tea", [])).shape == (0,)


async def test_more_than_a_batch_stays_in_order(reranker: OnnxReranker) -> None:
    texts = ["tea " * (number % 4) + "coffee" for number in range(3 * BATCH_PAIRS + 1)]
    together = await reranker.closeness("tea", texts)
    alone = np.concatenate([await reranker.closeness("tea", [text]) for text in texts[:5]])
    np.testing.assert_allclose(together[:5], alone, atol=1e-6)
    np.testing.assert_allclose(together[-1], together[0], atol=1e-6)


async def test_long_texts_are_cut_to_what_the_model_takes(reranker: OnnxReranker) -> None:
    found = await reranker.closeness("tea", ["tea " * 400, "tea " * 7])
    np.testing.assert_allclose(found, [logistic(6.5)] * 2, atol=1e-6)
    assert 0 <= (await reranker.closeness("tea " * 400, ["tea " * 400]))[0] <= 1


async def test_cancelled_recall_leaves_one_batch(reranker: OnnxReranker) -> None:
    asking = asyncio.create_task(reranker.closeness("tea", ["tea coffee"] * (8 * BATCH_PAIRS)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await reranker.closeness("tea", ["tea"]))[0] > 0.5


async def test_a_runtime_that_fails_is_an_outage(reranker: OnnxReranker) -> None:
    class Broken:
        def run(self, _outputs: object, _inputs: object) -> list[np.ndarray]:
            raise RuntimeError("out of memory")

    class Nothing:
        def run(self, _outputs: object, _inputs: object) -> list[np.ndarray]:
            return [np.array([[np.nan]], np.float32)]

    for session, complaint in ((Broken(), "tiny@.*out of memory"), (Nothing(), "no number")):
        reranker._session = session
        with pytest.raises(ModelUnavailable, match=complaint):
            await reranker.closeness("tea", ["tea"])


def no_model(directory: Path) -> None:
    (directory / "model.onnx").unlink()


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def three_labels(directory: Path) -> None:
    write_cross_encoder(directory, outputs=3)


def an_embedder(directory: Path) -> None:
    write_model(directory)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (no_model, "no model.onnx"),
        (no_tokenizer, "tokenizer.json cannot be loaded"),
        (three_labels, "not one each"),
        (an_embedder, "not one each"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_directory_that_cannot_be_used_says_why(
    tmp_path: Path, spoil: Callable[[Path], None], complaint: str
) -> None:
    directory = write_cross_encoder(tmp_path / "tiny")
    spoil(directory)
    with pytest.raises(OnnxModelError, match=complaint.replace(".", "[.]")):
        OnnxReranker(directory)


def test_doctor_checks_the_reranker(tmp_path: Path) -> None:
    directory = write_cross_encoder(tmp_path / "tiny")
    assert list(check_reranker(Settings())) == []
    (sound,) = check_reranker(Settings(reranker_model_dir=directory))
    assert (sound.level, sound.text.partition("@")[0]) == ("ok", "tiny")
    no_model(directory)
    (bad,) = check_reranker(Settings(reranker_model_dir=directory))
    assert bad.level == "problem"
    assert "no model.onnx" in bad.text
