"""The `hashing` embedder: vectors without a model. It is the default, so that the server runs offline.

Signed feature hashing (Weinberger et al., arXiv 0902.2206) of stems, pairs of adjacent stems and the characters
3- and 4-grams of each word into 384 dimensions. It matches shared words and parts of words, not meaning; it adds
little to BM25, hence the small weight, but gives every fragment a vector.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from threading import Lock

import numpy as np
import numpy.typing as npt

from memstream_server.adapters.models.analyzer import term_hash
from memstream_server.adapters.models.words import PerNamespace, Stems, words
from memstream_server.core.arrays import Growing
from memstream_server.core.fitted_weights import HASHING
from memstream_server.ports.journal.records import ComputeVectors
from memstream_server.ports.models import EmbeddingModel

Floats = npt.NDArray[np.float32]
DIMENSION = 384
INPUT_CHARACTERS_MAX = 8_000
# Raise the number in the name with every change that makes vectors incomparable.
MODEL = EmbeddingModel("hashing-1", DIMENSION, HASHING, instant=True, computed=True)
_PAIR_WEIGHT = 0.5
_GRAMS_WEIGHT = 0.5
"""Total weight of a word's n-gram features, relative to 1 for its stem."""
_KNOWN_FEATURES_MAX = 1 << 20
"""Limit per namespace; beyond it the lexicon is rebuilt, at a few hundred microseconds a text."""
_ALL_FEATURES_MAX = 4 << 20
"""Limit over all namespaces: about 70 MB."""
_THREADED_FEATURES_MAX = 1 << 20
"""Limit over all namespaces of `ThreadedHashing`: about 17 MB."""
_BATCH = 64
"""Texts hashed per event-loop iteration, or with the lock."""
_FEW_WORDS = 32
"""Texts with at most this many words are summed by `_sum_short_text`, longer ones by numpy."""
_STOP = -1
_VERBATIM = "\0"
"""Prefix of a word that bypasses stop list and stemmer; no word starts with it."""


def _gram_hashes(word: str) -> list[int]:
    """Hashes of the word's 3- and 4-grams, with marked ends; each gives the index and the sign of a feature."""
    framed = f"<{word}>"
    count = len(framed)
    grams = [framed[at : at + 3] for at in range(count - 2)] + [framed[at : at + 4] for at in range(count - 3)]
    digests = b"".join([blake2b(f"#{gram}".encode(errors="surrogatepass"), digest_size=8).digest() for gram in grams])
    return list(struct.unpack(f"<{len(grams)}Q", digests))


class _Lexicon(dict[str, int]):
    """Words as numbers, assigned on first use; the features of word n are rows starts[n] to starts[n + 1].

    Flat arrays, so that a batch of texts takes a few numpy calls, not a few per word.
    """

    def __init__(self, stems: Stems) -> None:
        self._stems = stems
        self.hashes = Growing(np.uint64)
        self.starts = Growing(np.int64)
        self.places = Growing(np.int32)
        self.weights = Growing(np.float32)
        self.starts.append(0)

    def __missing__(self, word: str) -> int:
        stem = word[1:] if word.startswith(_VERBATIM) else self._stems.stem(word)
        self[word] = self._learn_word(word.removeprefix(_VERBATIM), stem) if stem else _STOP
        return self[word]

    @property
    def full(self) -> bool:
        """Whether the lexicon must be rebuilt."""
        return len(self.places) > _KNOWN_FEATURES_MAX

    def _learn_word(self, word: str, stem: str) -> int:
        hashed = term_hash(stem)
        grams = _gram_hashes(word[:INPUT_CHARACTERS_MAX])
        each = _GRAMS_WEIGHT / max(len(grams), 1) ** 0.5
        self.places.extend([hashed % DIMENSION, *[gram % DIMENSION for gram in grams]])
        self.weights.extend([1.0 if hashed >> 63 else -1.0, *[each if gram >> 63 else -each for gram in grams]])
        self.hashes.append(hashed)
        self.starts.append(len(self.places))
        return len(self.hashes) - 1


class HashingEmbedder:
    """ports.models.Embedder. Deterministic, always available; refuses no text."""

    def __init__(self, features_max: int | None = None) -> None:
        """`features_max`: limit of the cached features, over all namespaces; None: the usual one."""
        # One language for all memories: the embedding space belongs to the server, not to a memory.
        self._stems = Stems("english")
        self._lexicons = PerNamespace(lambda _: _Kept(_Lexicon(self._stems)), features_max or _ALL_FEATURES_MAX)

    async def model(self) -> EmbeddingModel:
        """The space; constant."""
        return MODEL

    async def embed(self, texts: Sequence[str], namespace: str = "") -> Floats:
        """(len(texts), 384), finite rows of unit length; an empty text gets a fixed direction."""
        vectors = np.empty((len(texts), DIMENSION), np.float32)
        for start in range(0, len(texts), _BATCH):
            if start:
                await asyncio.sleep(0)
            batch = texts[start : start + _BATCH]
            vectors[start : start + len(batch)] = self.vectors(batch, namespace)
        return vectors

    async def close(self) -> None:
        """Nothing to release."""

    def vectors(self, texts: Sequence[str], namespace: str = "") -> Floats:
        """The synchronous form of `embed`."""
        kept = self._lexicons.of(namespace)
        if kept.lexicon.full:
            kept.lexicon = _Lexicon(self._stems)
        known = kept.lexicon
        per_text = [_word_numbers(known, text) for text in texts]
        if len(texts) == 1 and len(per_text[0]) <= _FEW_WORDS:
            return _unit_rows(_sum_short_text(known, per_text[0])[None])
        found = np.fromiter(chain.from_iterable(per_text), np.int64)
        rows = np.repeat(np.arange(len(texts)), [len(each) for each in per_text])
        first, sizes = known.starts.view[found], known.starts.view[found + 1] - known.starts.view[found]
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        features = np.repeat(first, sizes) + within
        places = known.places.view[features] + np.repeat(rows * DIMENSION, sizes)
        same = rows[:-1] == rows[1:]
        pair_places, pair_weights = _pair_features(known.hashes.view[found])
        places = np.concatenate([places, (pair_places + rows[:-1] * DIMENSION)[same]])
        weights = np.concatenate([known.weights.view[features], pair_weights[same]])
        sums = np.bincount(places, weights, len(texts) * DIMENSION).astype(np.float64, copy=False)
        return _unit_rows(sums.reshape(len(texts), DIMENSION))


class ThreadedHashing:
    """The same vectors for any thread, with a lexicon of its own: the embedder never waits for a thread."""

    def __init__(self) -> None:
        self._embedder = HashingEmbedder(_THREADED_FEATURES_MAX)
        self._lock = Lock()

    def vectors(self, texts: Sequence[str], namespace: str = "") -> Floats:
        """ports.journal.records.ComputeVectors"""
        vectors = np.empty((len(texts), DIMENSION), np.float32)
        for start in range(0, len(texts), _BATCH):
            batch = texts[start : start + _BATCH]
            with self._lock:  # per batch: a large memory that is loaded does not stop the reads of the others
                vectors[start : start + len(batch)] = self._embedder.vectors(batch, namespace)
        return vectors


class _Kept:
    """A namespace's lexicon, whose `len` is its number of features."""

    def __init__(self, lexicon: _Lexicon) -> None:
        self.lexicon = lexicon

    def __len__(self) -> int:
        return len(self.lexicon.places)


def _sum_short_text(known: _Lexicon, found: list[int]) -> npt.NDArray[np.float64]:
    """Feature sums of one short text, such as a query: the same sums in the same order, with half the numpy calls."""
    at = np.array(found, np.int64)
    spans = list(map(slice, known.starts.view[at].tolist(), known.starts.view[at + 1].tolist()))
    pair_places, pair_weights = _pair_features(known.hashes.view[at])
    places = np.concatenate([*map(known.places.view.__getitem__, spans), pair_places])
    weights = np.concatenate([*map(known.weights.view.__getitem__, spans), pair_weights])
    return np.bincount(places, weights, DIMENSION).astype(np.float64, copy=False)


def _word_numbers(known: _Lexicon, text: str) -> list[int]:
    """The word numbers of a text. Stop words count only in a text of stop words, signs only in a text without words."""
    number = known.__getitem__
    found = words(text[:INPUT_CHARACTERS_MAX])
    features = [each for each in map(number, found) if each != _STOP]
    if features:
        return features
    return [number(_VERBATIM + word) for word in found or text[:INPUT_CHARACTERS_MAX].split()]


def _pair_features(hashes: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], Floats]:
    """Features of ordered pairs of adjacent stems: the two hashes mixed as in splitmix64."""
    mixed = hashes[:-1] * np.uint64(0x9E3779B97F4A7C15) + hashes[1:]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    signs = np.where(mixed >> np.uint64(63), _PAIR_WEIGHT, -_PAIR_WEIGHT).astype(np.float32)
    return (mixed % np.uint64(DIMENSION)).astype(np.int64), signs


def _unit_rows(sums: npt.NDArray[np.float64]) -> Floats:
    """Rows of unit length. A zero row becomes the all-ones direction, which Milvus accepts and is near nothing."""
    lengths = np.sqrt(np.add.reduce(sums * sums, axis=1, keepdims=True))
    empty = lengths[:, 0] < 1e-9
    sums[empty], lengths[empty] = 1.0, DIMENSION**0.5
    unit: Floats = (sums / lengths).astype(np.float32)
    return unit


def computed_spaces() -> dict[str, ComputeVectors]:
    """The spaces whose vectors the journal computes, whatever the model in force: it may have rows of them."""
    return {MODEL.name: ThreadedHashing().vectors}
