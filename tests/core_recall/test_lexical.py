"""The lexical index against the plain formulas, through every kind of change."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memstream_server.core import lexical, neighbours, postings
from memstream_server.core.lexical import LexicalIndex, query_terms
from tests.core_recall.naive import Doc, context_leg, fragment_leg

TERMS = st.dictionaries(st.integers(0, 7), st.integers(1, 5), max_size=6)
CHARACTERS = st.sampled_from([10, 10, 10, 2_000, 2_001])
SCALE = 2**60
"""Real hashes fill 64 bits."""


def packed(terms: dict[int, int] | Counter[int]) -> tuple[bytes, bytes]:
    ordered = sorted(term for term in terms if terms[term])
    hashes = np.array([term * SCALE + term for term in ordered], "<u8")
    return hashes.tobytes(), np.array([terms[term] for term in ordered], "<u2").tobytes()


def asked(*terms: int) -> np.ndarray:
    return query_terms(packed(dict.fromkeys(terms, 1))[0])


class LexicalMachine(RuleBasedStateMachine):
    """Appends, removals, restorations, replacements and compactions, checked after each."""

    def __init__(self) -> None:
        super().__init__()
        self.docs: list[Doc] = []
        self.index = LexicalIndex()

    @rule(terms=TERMS, session=st.integers(0, 2), characters=CHARACTERS)
    def append(self, terms: dict[int, int], session: int, characters: int) -> None:
        assert self.index.append(*packed(terms), session, characters) == len(self.docs)
        self.docs.append(Doc(Counter(terms), session, characters))

    @rule(rows=st.lists(st.tuples(TERMS, st.integers(0, 2), CHARACTERS), max_size=6))
    def extend(self, rows: list[tuple[dict[int, int], int, int]]) -> None:
        terms, sessions, characters = zip(*rows, strict=True) if rows else ((), (), ())
        each = [packed(one) for one in terms]
        hashes, counts = (
            np.frombuffer(b"".join(h for h, _ in each), "<u8"),
            np.frombuffer(b"".join(c for _, c in each), "<u2"),
        )
        first = self.index.extend(hashes, counts, np.array([len(c) // 2 for _, c in each], int), sessions, characters)
        assert first == len(self.docs)
        self.docs += [Doc(Counter(terms), session, characters) for terms, session, characters in rows]

    @rule(data=st.data(), alive=st.booleans())
    def remove_or_restore(self, data: st.DataObject, alive: bool) -> None:
        if self.docs:
            slot = data.draw(st.integers(0, len(self.docs) - 1))
            (self.index.restore if alive else self.index.remove)(slot)
            self.docs[slot].alive = alive

    @rule(data=st.data(), terms=TERMS, characters=CHARACTERS)
    def replace(self, data: st.DataObject, terms: dict[int, int], characters: int) -> None:
        if self.docs:
            slot = data.draw(st.integers(0, len(self.docs) - 1))
            self.index.replace(slot, *packed(terms), characters)
            self.docs[slot].terms, self.docs[slot].characters = Counter(terms), characters

    @rule()
    def compact(self) -> None:
        self.index.keep(np.array([slot for slot, doc in enumerate(self.docs) if doc.alive], np.int64))
        self.docs = [doc for doc in self.docs if doc.alive]

    @rule()
    def restore_from_image(self) -> None:
        sessions = np.array([doc.session for doc in self.docs], np.int32)
        alive = np.array([doc.alive for doc in self.docs], np.bool_)
        restored = LexicalIndex()
        restored.unpack(self.index.pack(), sessions, alive)
        self.index = restored

    @invariant()
    def legs_are_the_formulas(self) -> None:
        for terms in ((0, 1, 2, 9), (3, 4, 5, 6, 7), ()):
            for leg, plain in ((self.index.bm25, fragment_leg), (self.index.bm25_context, context_leg)):
                answer, (scores, attainable) = leg(asked(*terms)), plain(self.docs, terms)
                np.testing.assert_allclose(answer.values, scores, rtol=1e-4, atol=1e-5)
                assert answer.attainable == pytest.approx(attainable, rel=1e-6)
                assert (answer.shares <= 1).all()
        assert self.index.live == sum(doc.alive for doc in self.docs)


TestLexical = LexicalMachine.TestCase
TestLexical.settings = settings(max_examples=60, stateful_step_count=15)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine's few postings must go through merges, too, and its few fragments each way of summing windows.
    monkeypatch.setattr(postings, "_TAIL_MIN", 7)
    monkeypatch.setattr(neighbours, "_NEW_MIN", 3)
    monkeypatch.setattr(lexical, "_GATHER_MAX", 8)


def filled(count: int, seed: int) -> tuple[list[Doc], LexicalIndex]:
    random = np.random.default_rng(seed)
    docs, index = [], LexicalIndex()
    for _ in range(count):
        # Some terms in nearly every fragment and some in very few, so that each way of summing windows is taken.
        terms = Counter({min(int(term), 13): int(random.integers(1, 4)) for term in random.geometric(0.2, 5)})
        docs.append(Doc(terms, int(random.integers(0, 12)), 2_001 if random.random() < 0.1 else 10))
        index.append(*packed(terms), docs[-1].session, docs[-1].characters)
    return docs, index


@pytest.mark.parametrize("removed", [0, 60])
@pytest.mark.parametrize("sparse_share", [0, 16])
@pytest.mark.parametrize("gather_max", [0, 1_024])
def test_rare_and_frequent_terms(
    removed: int, sparse_share: int, gather_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lexical, "_SPARSE_SHARE", sparse_share)
    monkeypatch.setattr(lexical, "_GATHER_MAX", gather_max)
    docs, index = filled(400, seed=removed)
    for slot in range(0, removed * 3, 3):
        index.remove(slot)
        docs[slot].alive = False
    for terms in ([1], [3], [7], [9], [12], [1, 3, 7, 9, 11, 12]):
        legs = index.legs(asked(*terms))
        np.testing.assert_allclose(legs.alone.values, fragment_leg(docs, terms)[0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(legs.around.values, context_leg(docs, terms)[0], rtol=1e-4, atol=1e-6)


def test_unseen_terms_raise_attainable() -> None:
    _, index = filled(30, seed=3)
    legs = index.legs(asked(1))
    assert legs.alone.attainable == index.bm25(asked(1)).attainable
    assert legs.around.attainable == index.bm25_context(asked(1)).attainable
    assert index.bm25(asked(1, 14)).attainable > legs.alone.attainable
    assert index.bm25_context(asked(1, 14)).attainable > legs.around.attainable


def test_an_empty_index_and_an_empty_query_answer() -> None:
    index = LexicalIndex()
    for terms in (asked(1), asked()):
        legs = index.legs(terms)
        assert [legs.alone.shares.tolist(), legs.around.shares.tolist()] == [[], []]
    index.append(b"", b"", 0, 0)
    assert index.bm25_context(asked(1)).shares.tolist() == [0.0]
    assert index.bm25(asked()).shares.tolist() == [0.0]


def test_bytes_follow_the_content() -> None:
    small, large = filled(10, seed=1)[1], filled(2_000, seed=1)[1]
    assert 0 < small.bytes < large.bytes
    before = large.bytes
    large.keep(np.arange(10))
    assert large.bytes < before
