"""The contract of every ports.index.VectorIndex. A test module subclasses `Conformance` and provides the fixtures.

Fixtures to give: `index`, an opened VectorIndex of SPACE, shared by the module; `reopen`, which closes it, opens
it again and returns (index, whether `open` said it must be filled). Each test uses memories of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pytest

from memstream_server.core.values import Vector
from memstream_server.ports.index import IndexUnavailable, Point, VectorIndex
from memstream_server.ports.journal.records import Space

SPACE = Space("test model/v1", 24, 64)

Reopen = Callable[[], Awaitable[tuple[VectorIndex, bool]]]

STRANGE = [
    'quote"quote',
    "it's",
    "back\\slash",
    '" or memory != "',
    "new\nline",
    "100%",
    "%22",
    "tab\tnul\0",
    "日本語 ✓",
    "a/b:c",
]


def unit_vectors(count: int, seed: int = 0, dimension: int = SPACE.dimension) -> npt.NDArray[np.float32]:
    """(count, dimension) random rows of unit length."""
    rows = np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def fragment_id(number: int) -> str:
    return f"01J{number:023d}"


def points(memory: str, vectors: npt.NDArray[np.float32], first: int = 0) -> list[Point]:
    return [Point(memory, fragment_id(first + place), vector) for place, vector in enumerate(vectors)]


def brute_force(
    vectors: npt.NDArray[np.float32], query: Vector, limit: int
) -> tuple[list[str], npt.NDArray[np.float32]]:
    """The expected answer."""
    cosines = vectors @ query
    best = np.argsort(-cosines, kind="stable")[:limit]
    return [fragment_id(int(place)) for place in best], cosines[best]


@pytest.fixture
def memory() -> str:
    """The uid of a memory that only this test uses."""
    return uuid4().hex


class Conformance:
    """The conformance suite."""

    async def test_search_returns_exact_cosines_best_first(self, index: VectorIndex, memory: str) -> None:
        vectors = unit_vectors(300)
        await index.upsert(points(memory, vectors))
        for query in (vectors[17], *unit_vectors(5, seed=9)):
            ids, cosines = await index.search(memory, query, 10)
            right_ids, right_cosines = brute_force(vectors, query, 10)
            assert ids == right_ids
            assert cosines.dtype == np.float32
            np.testing.assert_allclose(cosines, right_cosines, atol=1e-5)

    async def test_flush_does_not_change_answers(self, index: VectorIndex, memory: str) -> None:
        vectors, query = unit_vectors(200), unit_vectors(1, seed=3)[0]
        await index.upsert(points(memory, vectors[:120]))
        await index.flush()
        await index.upsert(points(memory, vectors[120:], first=120))
        ids, cosines = await index.search(memory, query, 20)
        right_ids, right_cosines = brute_force(vectors, query, 20)
        assert ids == right_ids
        np.testing.assert_allclose(cosines, right_cosines, atol=1e-5)

    async def test_cosines_stay_within_minus_one_and_one(self, index: VectorIndex, memory: str) -> None:
        vectors = unit_vectors(50, seed=4)
        await index.upsert(points(memory, np.concatenate([vectors, -vectors])))
        for vector in vectors[:10]:
            _, cosines = await index.search(memory, vector, 100)
            assert cosines.max() <= 1
            assert cosines.min() >= -1

    async def test_limit_bounds_the_answer(self, index: VectorIndex, memory: str) -> None:
        vectors = unit_vectors(12)
        await index.upsert(points(memory, vectors))
        for limit, expected in ((0, 0), (1, 1), (5, 5), (12, 12), (500, 12)):
            ids, cosines = await index.search(memory, vectors[0], limit)
            assert len(ids) == len(cosines) == len(set(ids)) == expected

    async def test_unknown_memory_is_empty(self, index: VectorIndex, memory: str) -> None:
        ids, cosines = await index.search(memory, unit_vectors(1)[0], 10)
        assert ids == []
        assert cosines.shape == (0,)
        assert await index.count(memory) == 0
        assert await index.list_ids(memory) == []
        await index.delete(memory, [fragment_id(1)])

    async def test_empty_write_is_no_error(self, index: VectorIndex, memory: str) -> None:
        await index.upsert([])
        await index.delete(memory, [])
        await index.flush()
        await index.flush()

    async def test_upsert_is_idempotent(self, index: VectorIndex, memory: str) -> None:
        vectors = unit_vectors(40)
        for _ in range(3):
            await index.upsert(points(memory, vectors))
            await index.upsert(points(memory, vectors))
            await index.flush()
        assert await index.count(memory) == 40
        ids, _ = await index.search(memory, vectors[0], 100)
        assert sorted(ids) == [fragment_id(number) for number in range(40)]

    async def test_upsert_replaces_vector(self, index: VectorIndex, memory: str) -> None:
        old, new = unit_vectors(2, seed=5)
        await index.upsert([Point(memory, fragment_id(1), old)])
        await index.flush()
        await index.upsert([Point(memory, fragment_id(1), new)])
        for _ in range(2):
            ids, cosines = await index.search(memory, new, 5)
            assert ids == [fragment_id(1)]
            np.testing.assert_allclose(cosines, [1], atol=1e-5)
            await index.flush()

    async def test_last_of_duplicate_ids_in_a_call_wins(self, index: VectorIndex, memory: str) -> None:
        old, new = unit_vectors(2, seed=6)
        await index.upsert([Point(memory, fragment_id(1), old), Point(memory, fragment_id(1), new)])
        ids, cosines = await index.search(memory, new, 5)
        assert ids == [fragment_id(1)]
        np.testing.assert_allclose(cosines, [1], atol=1e-5)

    async def test_deleted_ids_are_gone_before_and_after_flush(self, index: VectorIndex, memory: str) -> None:
        vectors = unit_vectors(30)
        await index.upsert(points(memory, vectors))
        await index.delete(memory, [fragment_id(0), fragment_id(7), fragment_id(999)])
        await index.flush()
        await index.delete(memory, [fragment_id(8), fragment_id(0)])
        for _ in range(2):
            ids, _ = await index.search(memory, vectors[7], 100)
            assert {fragment_id(0), fragment_id(7), fragment_id(8)}.isdisjoint(ids)
            assert await index.count(memory) == len(ids) == 27
            await index.flush()

    async def test_deleted_id_can_be_upserted_again(self, index: VectorIndex, memory: str) -> None:
        vector = unit_vectors(1)[0]
        await index.upsert([Point(memory, fragment_id(1), vector)])
        await index.flush()
        await index.delete(memory, [fragment_id(1)])
        await index.upsert([Point(memory, fragment_id(1), vector)])
        await index.flush()
        assert (await index.search(memory, vector, 5))[0] == [fragment_id(1)]

    async def test_many_deletions_in_one_call(self, index: VectorIndex, memory: str) -> None:
        await index.upsert(points(memory, unit_vectors(2500)))
        await index.flush()
        await index.delete(memory, [fragment_id(number) for number in range(2499)])
        assert await index.list_ids(memory) == [fragment_id(2499)]

    async def test_search_is_limited_to_its_memory(self, index: VectorIndex, memory: str) -> None:
        """300 memories in 64 partitions: most share one."""
        vectors = unit_vectors(300)
        await index.upsert(
            [Point(f"{memory}-{place}", fragment_id(place), vector) for place, vector in enumerate(vectors)]
        )
        for place in range(0, 300, 10):
            ids, cosines = await index.search(f"{memory}-{place}", vectors[place], 10)
            assert ids == [fragment_id(place)]
            np.testing.assert_allclose(cosines, [1], atol=1e-5)
        assert await index.count(f"{memory}-3") == 1
        assert await index.list_ids(f"{memory}-3") == [fragment_id(3)]

    async def test_deletion_is_limited_to_its_memory(self, index: VectorIndex, memory: str) -> None:
        vectors = unit_vectors(100)
        others = [f"{memory}-{place}" for place in range(100)]
        await index.upsert([Point(other, f"{other}-f", vector) for other, vector in zip(others, vectors, strict=True)])
        await index.delete(others[0], [f"{others[0]}-f"])
        counts = [await index.count(other) for other in others]
        assert counts == [0] + [1] * 99

    async def test_same_id_in_two_memories_is_two_rows(self, index: VectorIndex, memory: str) -> None:
        """An import keeps fragment ids in a memory of another name."""
        vectors, other = unit_vectors(3), f"{memory}-imported"
        await index.upsert([*points(memory, vectors), *points(other, vectors)])
        await index.flush()
        await index.delete(memory, [fragment_id(1)])
        await index.flush()
        assert await index.list_ids(memory) == [fragment_id(0), fragment_id(2)]
        assert await index.list_ids(other) == [fragment_id(0), fragment_id(1), fragment_id(2)]
        assert (await index.search(other, vectors[1], 1))[0] == [fragment_id(1)]

    async def test_ids_are_paged_in_order(self, index: VectorIndex, memory: str) -> None:
        count = 2_300
        numbers = np.random.default_rng(1).permutation(count)
        vectors = unit_vectors(count)
        half = count // 2
        for part in (numbers[:half], numbers[half:], numbers[: half // 2]):  # the last part repeats some
            await index.upsert([Point(memory, fragment_id(int(number)), vectors[number]) for number in part])
            await index.flush()
        await index.upsert(points(memory, vectors[:5], first=count))
        await index.delete(memory, [fragment_id(100)])
        expected = [fragment_id(number) for number in range(count + 5) if number != 100]
        assert await index.list_ids(memory) == expected  # in pages of a thousand

    async def test_unusual_ids_round_trip(self, index: VectorIndex, memory: str) -> None:
        vectors = unit_vectors(len(STRANGE))
        names = [f"{memory}{strange}" for strange in STRANGE]
        await index.upsert(
            [Point(name, strange, vector) for name, strange, vector in zip(names, STRANGE, vectors, strict=True)]
        )
        for name, strange, vector in zip(names, STRANGE, vectors, strict=True):
            assert (await index.search(name, vector, 10))[0] == [strange]
            assert await index.list_ids(name) == [strange]
            assert await index.count(name) == 1
        for name, strange in zip(names[::2], STRANGE[::2], strict=True):
            await index.delete(name, [strange])
        assert [await index.count(name) for name in names] == [0, 1] * (len(STRANGE) // 2)

    async def test_wrong_dimension_is_refused(self, index: VectorIndex, memory: str) -> None:
        with pytest.raises(ValueError, match="24 numbers"):
            await index.upsert([Point(memory, fragment_id(1), unit_vectors(1, dimension=23)[0])])
        assert await index.count(memory) == 0

    async def test_searches_run_during_a_write(self, index: VectorIndex, memory: str) -> None:
        vectors = unit_vectors(400)
        await index.upsert(points(memory, vectors))
        await index.flush()
        other = asyncio.create_task(index.upsert(points(f"{memory}-other", unit_vectors(2000, seed=8), first=1000)))
        answers = await asyncio.gather(*(index.search(memory, vector, 1) for vector in vectors[:40]))
        await other
        assert [ids for ids, _ in answers] == [[fragment_id(number)] for number in range(40)]

    async def test_description_and_health(self, index: VectorIndex) -> None:
        assert index.description.startswith("milvus")
        assert any(character.isdigit() for character in index.description)
        assert await index.is_healthy()

    async def test_dropped_index_can_be_refilled(self, index: VectorIndex, reopen: Reopen, memory: str) -> None:
        """It replaces the module's index."""
        vectors = unit_vectors(20)
        await index.upsert(points(memory, vectors))
        await index.flush()
        await index.upsert(points(memory, vectors, first=20))
        await index.drop_all()
        with pytest.raises(IndexUnavailable):
            await index.search(memory, vectors[0], 1)
        assert await index.open(SPACE)
        assert await index.count(memory) == 0
        await index.upsert(points(memory, vectors[:5]))
        await index.flush()
        again, must_fill = await reopen()
        assert not must_fill
        assert await again.count(memory) == 5

    async def test_flushed_data_survives_restart(self, index: VectorIndex, reopen: Reopen, memory: str) -> None:
        """Last in the suite: it replaces the module's index."""
        vectors = unit_vectors(60)
        await index.upsert(points(memory, vectors))
        await index.delete(memory, [fragment_id(3)])
        await index.flush()
        again, must_fill = await reopen()
        assert not must_fill
        assert await again.count(memory) == 59
        ids, _ = await again.search(memory, vectors[5], 1)
        assert ids == [fragment_id(5)]
