"""The hashing embedder: unit length for every text, the same vector in every batch, shared words bring closeness."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.adapters.models.hashing import DIMENSION, MODEL, HashingEmbedder
from memstream_server.adapters.models.words import STOP_WORDS
from tests.support.arbitrary import UNICODE

EMBEDDER = HashingEmbedder()


def cosine(one: str, other: str) -> float:
    first, second = EMBEDDER.vectors([one, other])
    return float(first @ second)


@given(st.lists(st.text(UNICODE, max_size=60), max_size=5))
def test_rows_are_finite_and_of_unit_length(texts: list[str]) -> None:
    vectors = EMBEDDER.vectors(texts)
    assert vectors.shape == (len(texts), DIMENSION)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)


@given(st.lists(st.text(UNICODE, max_size=40), min_size=1, max_size=6), st.data())
def test_a_vector_does_not_depend_on_its_batch(texts: list[str], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(texts) - 1))
    alone = HashingEmbedder().vectors([texts[place]])[0]
    assert np.array_equal(EMBEDDER.vectors(texts)[place], alone)


@pytest.mark.parametrize("text", ["", "   ", "🙂", "!!!", "the", "who are you?", "\x00", "\ud800", "我"])
def test_odd_texts_have_a_direction(text: str) -> None:
    assert cosine(text, text) == pytest.approx(1.0, abs=1e-5)


def test_empty_text_is_near_nothing() -> None:
    assert abs(cosine("", "I moved from Sweden four years ago")) < 0.3


def test_closer_words_are_closer() -> None:
    said = "Caroline adopted a grey kitten last week"
    assert cosine(said, "Caroline adopted a grey kitten last week!") == pytest.approx(1.0, abs=1e-5)
    same, parts, other = (
        cosine(said, "last week a grey kitten was adopted"),
        cosine(said, "kittens"),
        cosine(said, "stock prices fell sharply"),
    )
    assert same > parts > abs(other)
    assert same > MODEL.fitted.similarity_min


def test_order_of_words_counts_a_little() -> None:
    assert 0.7 < cosine("dog bites man", "man bites dog") < 0.999


async def test_many_texts_pass_in_batches() -> None:
    texts = [f"text number {number}" for number in range(150)]
    assert np.array_equal(await EMBEDDER.embed(texts), EMBEDDER.vectors(texts))
    assert (await EMBEDDER.embed([])).shape == (0, DIMENSION)


def test_the_space_weighs_itself_low() -> None:
    assert (MODEL.fitted.dense, MODEL.fitted.lexical, MODEL.fitted.context) == (0.05, 0.34, 0.61)


def test_vectors_of_a_space_never_change() -> None:
    """Vectors are stored. If this fails, restore the vectors, or raise the number in the name `hashing-1`."""
    texts = [
        "Perhaps the children were running 3 miles, and didn't stop.",
        "The Wi-Fi of iPhone15 is named getUserName",
        " ".join(sorted(STOP_WORDS["english"])),
        "perhaps maybe also really just however",
        "Bob trinkt grünen Tee in Zürich; Ha Noi, Hà Nội",
        "我喜欢绿茶。 안녕하세요 สวัสดี",
    ]
    rounded = np.rint(EMBEDDER.vectors(texts) * 1_000).astype(np.int16)
    assert MODEL.name == "hashing-1"
    assert sha256(rounded.tobytes()).hexdigest() == "6eb4b2dc6dbdf6c128b37d6c3fe550c6e781bdaadc3071925e4dcfd3c4ad58eb"
