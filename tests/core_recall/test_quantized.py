"""int8 copies of vectors: bounds hold, and a ranking that reads the vectors it wants is that of exact cosines."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.core import arrays, dense, ranking
from memstream_server.core.arrays import finish
from memstream_server.core.columns import Columns
from memstream_server.core.dense import DenseMatrix, QuantizedRows, multiply_rows
from memstream_server.core.lexical import LexicalIndex
from memstream_server.core.ranking import Ranking, RankingQuery, Unread
from memstream_server.core.scores import CHAIN_PART, Weights
from memstream_server.core.signals import Superseded
from memstream_server.core.time_phrases.calendar import Window
from memstream_server.core.values import Fragment, Tier

Floats = npt.NDArray[np.float32]
COUNT, DIMENSION, BLOCK = 400, 48, 16
HOUR_US = 3_600_000_000
WORDS = [f"word{number}" for number in range(60)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix quantizes blocks of 16 rows."""
    monkeypatch.setattr(dense, "QUANTIZED_BYTES", 0)
    monkeypatch.setattr(arrays, "BLOCK", BLOCK)


def random_units(random: np.random.Generator, count: int, dimension: int = DIMENSION) -> Floats:
    rows = random.normal(size=(count, dimension)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def hashed(random: np.random.Generator, count: int) -> Floats:
    texts = [" ".join(random.choice(WORDS, 5)) for _ in range(count)]
    return HashingEmbedder().vectors(texts)


def quantized(vectors: Floats, present: npt.NDArray[np.bool_]) -> DenseMatrix:
    matrix = DenseMatrix(vectors.shape[1])
    for row, has in zip(vectors, present, strict=True):
        matrix.append(row if has else None)
    assert matrix.quantized > len(vectors) - 2 * BLOCK
    return matrix


@pytest.mark.parametrize("scale", [1.0, 1e-3, 250.0])
def test_errors_stay_within_their_bounds(scale: float) -> None:
    random = np.random.default_rng(3)
    for rows in (random_units(random, 300) * np.float32(scale), hashed(random, 300)):
        rows[7] = 0
        copies = QuantizedRows()
        copies.extend(rows[:100])
        copies.extend(rows[100:])
        for query in (rows[3], random_units(random, 1, rows.shape[1])[0], np.eye(rows.shape[1], dtype=np.float32)[0]):
            products, bounds = copies.query(query).compute()
            errors = np.abs(products - rows.astype(np.float64) @ query)
            assert (errors <= bounds).all()
            assert bounds.max() < 0.05 * max(1.0, np.linalg.norm(rows, axis=1).max() * np.linalg.norm(query))
        assert products[7] == bounds[7] == 0


def test_scan_leaves_the_references_to_none_alone() -> None:
    copies = QuantizedRows()
    copies.extend(random_units(np.random.default_rng(8), 1))
    query = np.ones(DIMENSION, np.float32)
    before = sys.getrefcount(None)
    for _ in range(3_000):
        copies.query(query).compute()
    assert sys.getrefcount(None) > before - 1_000


def test_copies_are_overwritten_and_kept() -> None:
    rows = random_units(np.random.default_rng(4), 50)
    copies, expected = QuantizedRows(), QuantizedRows()
    copies.extend(rows[:20])
    copies.extend(rows[20:])
    copies.put(30, rows[0])
    slots = np.array([0, 19, 30, 49])
    copies.keep(slots)
    expected.extend(rows[[0, 19, 0, 49]])
    np.testing.assert_array_equal(copies.query(rows[1]).compute(), expected.query(rows[1]).compute())
    np.testing.assert_array_equal(
        np.ravel(copies.query_one(rows[1], 3).compute()), [each[3] for each in expected.query(rows[1]).compute()]
    )
    copies.keep(np.array([], np.int64))
    assert len(copies) == 0


@pytest.mark.usefixtures("small_blocks")
def test_estimates_follow_changes() -> None:
    random = np.random.default_rng(5)
    rows, query = random_units(random, COUNT), random_units(random, 1)[0]
    present = random.random(COUNT) > 0.1
    matrix = quantized(rows, present)
    check_estimates(matrix, rows, present, query)
    with matrix.scan(query) as scan:
        scan.compute()
        rows[3], present[3] = rows[200], True
        matrix.set(3, rows[3])
        present[4] = present[COUNT - 1] = False
        matrix.set(4, None)
        matrix.set(COUNT - 1, None)
        for row in random_units(random, 3 * BLOCK):  # rows that are new and quantized since the scan
            matrix.append(row)
            rows, present = np.vstack([rows, row]), np.append(present, True)
        cosines, errors = scan.estimate()
        check_estimates(matrix, rows, present, query)
        np.testing.assert_array_equal(np.isnan(cosines), ~present)
        assert errors is not None
        assert (np.abs(cosines - rows @ query) <= errors + 1e-6)[present].all()
    vector = matrix.vector(3)
    assert vector is not None
    np.testing.assert_array_equal(vector, rows[3])
    assert matrix.vector(5) is None
    assert matrix.has_unread(int(np.flatnonzero(present)[5]))
    assert not matrix.has_unread(3)
    slots = np.flatnonzero(np.arange(len(rows)) % 3 != 1)
    matrix.keep(slots)
    check_estimates(matrix, rows[slots], present[slots], query)
    restored = DenseMatrix(DIMENSION)
    restored.unpack(matrix.pack())
    assert restored.quantized == matrix.quantized
    check_estimates(restored, rows[slots], present[slots], query)
    restored.set(3, rows[0])  # not a view of the image
    exact = DenseMatrix(DIMENSION, quantizes=False)
    with pytest.raises(ValueError, match="int8 copies"):
        exact.unpack(matrix.pack())


@pytest.mark.usefixtures("small_blocks")
def test_many_changes_are_quantized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_CHANGED_MAX", 5)
    random = np.random.default_rng(6)
    rows, query, present = random_units(random, COUNT), random_units(random, 1)[0], np.ones(COUNT, np.bool_)
    matrix = quantized(rows, present)
    with matrix.scan(query) as scan:
        scan.compute()
        for slot in range(0, 80, 7):
            rows[slot] = random_units(random, 1)[0]
            matrix.set(slot, rows[slot])
        check_estimates(matrix, rows, present, query)
        cosines, errors = scan.estimate()
        assert errors is not None
        assert (np.abs(cosines - rows @ query) <= errors + 1e-6).all()
    assert matrix.vector(0) is None


def check_estimates(matrix: DenseMatrix, rows: Floats, present: npt.NDArray[np.bool_], query: Floats) -> None:
    cosines, errors = matrix.estimate(query)
    assert errors is not None
    np.testing.assert_array_equal(np.isnan(cosines), ~present)
    assert (np.abs(cosines - rows @ query) <= errors + 1e-6)[present].all()
    for slot in range(len(rows)):
        if present[slot] and not matrix.has_unread(slot):
            assert errors[slot] == 0


class Memory:
    """Fragments with random words, some repeated, some questions, some without a vector."""

    def __init__(self, random: np.random.Generator, make_vectors: str) -> None:
        self.columns, self.lexical = Columns(), LexicalIndex()
        texts = [" ".join(random.choice(WORDS, 3)) + ("?" if random.random() < 0.3 else "") for _ in range(COUNT)]
        for place in range(10, COUNT, 10):
            texts[place] = texts[place - 7]
        for number, text in enumerate(texts):
            words = {WORDS.index(word.rstrip("?")) for word in text.split()}
            self.columns.append(
                Fragment(
                    f"f{number}",
                    text,
                    Tier.LONG_TERM,
                    session=str(number // 40),
                    importance=random.random(),
                    observe_time_us=number * HOUR_US,
                )
            )
            hashes = np.array(sorted(words), "<u8")
            self.lexical.append(hashes.tobytes(), np.ones(len(words), "<u2").tobytes(), number // 40, len(text))
        if make_vectors == "hashing":
            self.vectors = HashingEmbedder().vectors(texts)
        elif make_vectors == "random":
            self.vectors = random_units(random, COUNT)
        else:  # many ties
            self.vectors = random_units(random, 5)[random.integers(0, 5, COUNT)]
        self.present = random.random(COUNT) > 0.05

    def rank_both(
        self, question: RankingQuery, weights: Weights, allowed: npt.NDArray[np.bool_]
    ) -> tuple[Ranking, int]:
        """The ranking by estimates, compared with that by exact cosines, and the number of vectors read."""
        assert question.vector is not None
        matrix, legs = quantized(self.vectors, self.present), self.lexical.legs(question.terms)
        cosines = np.where(self.present, multiply_rows(self.vectors, question.vector), np.float32(np.nan))
        expected = finish(ranking.rank(self.columns, legs, cosines, question, weights, allowed))
        read: set[int] = set()
        estimates, errors = matrix.estimate(question.vector)
        assert errors is not None
        unread = Unread(estimates, errors)
        for _ in range(10):
            found = finish(ranking.rank(self.columns, legs, unread.cosines, question, weights, allowed, unread))
            if not unread.wanted:
                break
            read |= unread.wanted
            unread.resolve({slot: float(cosines[slot]) for slot in unread.wanted})
        assert not unread.wanted
        assert found == expected
        return found, len(read)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["random", "hashing", "ties"])
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("near_misses", [0, 5])
def test_ranking_by_estimates_equals_exact_ranking(kind: str, fold: bool, near_misses: int) -> None:
    random = np.random.default_rng(7)
    memory = Memory(random, kind)
    few, lent = 0, 0
    newer = {f"f{number}": f"f{number + 1 + number % 30}" for number in range(0, COUNT - 31, 9)}
    outdated = np.array([id_ in newer for id_ in memory.columns.ids])
    for number in range(12):
        words = random.choice(len(WORDS), 3, replace=False)
        text = " ".join(WORDS[word] for word in words)
        vector = HashingEmbedder().vectors([text])[0] if kind == "hashing" else random_units(random, 1)[0]
        if kind == "ties":
            vector = memory.vectors[number]
        passed = memory.columns.alive & (random.random(COUNT) > 0.2)
        question = RankingQuery(
            text,
            np.sort(words).astype(np.uint64),
            vector,
            COUNT * HOUR_US,
            limit=(1, 10, 40)[number % 3],
            per_leg=20,
            min_relevance=(0.0, 0.2)[number % 2],
            near_misses=near_misses,
            fold=fold,
            outdated=passed & outdated if near_misses else None,
            superseded=Superseded(passed & outdated, lambda id_: newer.get(id_, "")),
        )
        weights = Weights(dense=(0.05, 0.3, 1.0)[number % 3], cosine_low=(0.0, 0.1)[number % 2])
        allowed = passed & ~outdated
        found, read = memory.rank_both(question, weights, allowed)
        few += read < COUNT / 2
        lent += any(CHAIN_PART in one.names for one in found.results)
        memory.rank_both(replace(question, limit=COUNT), weights, allowed)
        window = Window(number * 20 * HOUR_US, (number * 20 + 6) * HOUR_US)
        memory.rank_both(replace(question, windows=(window,)), weights, allowed)
    assert few > 6, "most rankings read few vectors"
    assert lent > 3
