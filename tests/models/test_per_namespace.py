"""Caches of words: one for each namespace, bounded together, and without influence on any result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memstream_server.adapters.models import analyzer, hashing
from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.adapters.models.words import PerNamespace, Stems
from memstream_server.core.policy import AUTO_LANGUAGE

TEXT = "The launch code is xylophone-swordfish, said Ann."


def learned_of(embedder: HashingEmbedder, namespace: str) -> set[str]:
    return set(embedder._lexicons.of(namespace).lexicon)


def test_words_of_one_namespace_are_new_to_another() -> None:
    embedder, terms = HashingEmbedder(), SnowballAnalyzer()
    embedder.vectors([TEXT], "victim")
    terms.terms(TEXT, "english", "victim")
    assert "xylophone" in learned_of(embedder, "victim")
    assert "xylophone-swordfish" in terms._words.of("victim", "english")
    assert not learned_of(embedder, "attacker")
    assert not terms._words.of("attacker", "english")
    assert not terms._words.of("victim", "german")


def test_stemmer_keeps_no_words_of_its_own() -> None:
    assert Stems("english")._stemmer.maxCacheSize == 0


def test_results_do_not_depend_on_the_namespace() -> None:
    embedder, terms = HashingEmbedder(), SnowballAnalyzer()
    embedder.vectors(["other words before", TEXT], "a")
    np.testing.assert_array_equal(embedder.vectors([TEXT], "a"), embedder.vectors([TEXT], "b"))
    terms.terms("other words before", "english", "a")
    assert terms.terms(TEXT, "english", "a") == terms.terms(TEXT, "english", "b")
    assert terms.terms(TEXT, AUTO_LANGUAGE, "c") == terms.terms(TEXT, "english", "a")


def test_least_recently_used_are_dropped_whole() -> None:
    caches: PerNamespace[dict[str, int]] = PerNamespace(lambda _: {}, 10)
    for namespace in ("a", "b", "c"):
        caches.of(namespace).update({f"{namespace}{number}": number for number in range(4)})
    assert len(caches.of("c")) == 4
    assert len(caches.of("b")) == 4
    assert caches.of("a") == {}  # 12 entries were too many, and it was the oldest
    assert set(caches._caches) == {("c", ""), ("b", ""), ("a", "")}


@pytest.mark.parametrize(
    ("name", "limit", "fill"),
    [
        ("_CACHED_WORDS", 100, lambda: filled_analyzer()),
        ("_ALL_FEATURES_MAX", 2_000, lambda: filled_embedder()),
    ],
)
def test_all_namespaces_together_are_bounded(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int, fill: Callable[[], PerNamespace[Any]]
) -> None:
    monkeypatch.setattr(analyzer if name == "_CACHED_WORDS" else hashing, name, limit)
    caches = fill()
    caches.of("last", "english")
    assert caches._entries <= limit
    assert sum(len(cache) for cache in caches._caches.values()) == caches._entries


def filled_analyzer() -> PerNamespace[analyzer._Words]:
    terms = SnowballAnalyzer()
    for number in range(50):
        terms.terms(" ".join(f"word{number}x{each}" for each in range(30)), "english", f"n{number}")
    return terms._words


def filled_embedder() -> PerNamespace[hashing._Kept]:
    embedder = HashingEmbedder()
    for number in range(50):
        embedder.vectors([" ".join(f"word{number}x{each}" for each in range(10))], f"n{number}")
    return embedder._lexicons
