"""The `hashing` embedder: text to a vector without any model, the default so that the server runs offline.

Signed feature hashing (Weinberger et al., arXiv 0902.2206) of stems, pairs of adjacent stems and the characters
3- and 4-grams of each word into 384 dimensions. It knows no meaning, only shared words and parts of words; it
adds little beside BM25, hence the small weight, but gives every fragment a vector.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from memstream_server.adapters.models.analyzer import term_hash
from memstream_server.adapters.models.words import Stems, words
from memstream_server.ports.models import EmbeddingModel

Floats = npt.NDArray[np.float32]
DIMENSION = 384
INPUT_CHARACTERS_MAX = 8_000
MODEL = EmbeddingModel(
    name="hashing-1",  # the number rises when the same text gets another vector
    dimension=DIMENSION,
    similarity_min=0.5,
    dense_weight=0.1,
    lexical_weight=0.45,
    context_weight=0.45,
)
_PAIR_WEIGHT = 0.5
_GRAMS_WEIGHT = 0.5
"""Length of a word's n-gram features together, beside 1 for its stem."""
_CACHED_WORDS = 32_768
_BATCH = 64
"""Texts hashed between two turns of the event loop."""

_Word = tuple[int, npt.NDArray[np.int32], Floats]
"""(hash of the stem, places of the features, signed weights)"""


def _place(hashed: int) -> tuple[int, float]:
    return hashed % DIMENSION, 1.0 if hashed >> 63 else -1.0


def _grams(word: str) -> list[str]:
    framed = f"<{word}>"
    return [framed[start : start + size] for size in (3, 4) for start in range(len(framed) - size + 1)]


class HashingEmbedder:
    """ports.models.Embedder. Deterministic, needs nothing, never unavailable; refuses no text."""

    def __init__(self) -> None:
        # One language for all memories: a vector's space is the server's, not the memory's.
        self._stems = Stems("english")
        self._word = lru_cache(_CACHED_WORDS)(self._features)

    async def model(self) -> EmbeddingModel:
        """The space, known without asking anyone."""
        return MODEL

    async def embed(self, texts: Sequence[str]) -> Floats:
        """(len(texts), 384), rows of unit length, finite for every text; an empty one gets a fixed direction."""
        vectors = np.empty((len(texts), DIMENSION), np.float32)
        for start in range(0, len(texts), _BATCH):
            if start:
                await asyncio.sleep(0)
            batch = texts[start : start + _BATCH]
            vectors[start : start + len(batch)] = self.vectors(batch)
        return vectors

    async def close(self) -> None:
        """Nothing to release."""

    def vectors(self, texts: Sequence[str]) -> Floats:
        """The same, synchronously."""
        per_text = [self._words(text) for text in texts]
        sums: npt.NDArray[np.float64] = np.zeros(len(texts) * DIMENSION)
        found = [word for each in per_text for word in each]
        if found:
            rows = np.repeat(np.arange(len(texts)), [len(each) for each in per_text])
            sizes = [len(word[1]) for word in found]
            places = np.concatenate([word[1] for word in found]) + np.repeat(rows * DIMENSION, sizes)
            weights = np.concatenate([word[2] for word in found])
            pair_places, pair_weights = _pairs(np.array([word[0] for word in found], np.uint64), rows)
            places, weights = np.concatenate([places, pair_places]), np.concatenate([weights, pair_weights])
            sums = np.bincount(places, weights, len(sums)).astype(np.float64, copy=False)
        return _unit(sums.reshape(len(texts), DIMENSION))

    def _words(self, text: str) -> list[_Word]:
        """Stop words count only where there is nothing else, and bare signs only where there are no words."""
        found = words(text[:INPUT_CHARACTERS_MAX])
        features = [word for word in map(self._word, found) if word[0]]
        if not features:
            features = [self._made(word, word) for word in found or text[:INPUT_CHARACTERS_MAX].split()]
        return features

    def _features(self, word: str) -> _Word:
        stem = self._stems.stem(word)
        return self._made(word, stem) if stem else (0, np.empty(0, np.int32), np.empty(0, np.float32))

    def _made(self, word: str, stem: str) -> _Word:
        hashed = term_hash(stem)
        grams = _grams(word[:INPUT_CHARACTERS_MAX])
        features = [(*_place(hashed), 1.0)]
        each = _GRAMS_WEIGHT / max(len(grams), 1) ** 0.5
        features += [(*_place(term_hash(f"#{gram}")), each) for gram in grams]
        places = np.array([place for place, _, _ in features], np.int32)
        return hashed, places, np.array([sign * weight for _, sign, weight in features], np.float32)


def _pairs(hashes: npt.NDArray[np.uint64], rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Floats]:
    """Features of adjacent stems of the same text, order counting: the two hashes mixed as in splitmix64."""
    mixed = hashes[:-1] * np.uint64(0x9E3779B97F4A7C15) + hashes[1:]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    same = rows[:-1] == rows[1:]
    places = (mixed % np.uint64(DIMENSION)).astype(np.int64) + rows[:-1] * DIMENSION
    signs = np.where(mixed >> np.uint64(63), _PAIR_WEIGHT, -_PAIR_WEIGHT).astype(np.float32)
    return places[same], signs[same]


def _unit(sums: npt.NDArray[np.float64]) -> Floats:
    """Rows of unit length; one without direction gets that of all ones, which Milvus accepts and nothing is near."""
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    empty = lengths[:, 0] < 1e-9
    sums[empty], lengths[empty] = 1.0, DIMENSION**0.5
    unit: Floats = (sums / lengths).astype(np.float32)
    return unit
