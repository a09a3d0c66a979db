"""An embedded index starts its Milvus Lite process when a memory needs it, not before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from memstream_server.adapters.milvus.index import open_lite
from memstream_server.adapters.milvus.lite import OnDemandIndex
from memstream_server.ports.index import IndexLost, IndexUnavailable, Point
from memstream_server.ports.journal.records import Space
from tests.index.conformance import SPACE, fragment_id, points, unit_vectors
from tests.index.processes import children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the child process in /proc")

OTHER = Space("another model", 8, 4)


async def create_index(data_dir: Path, counts: Sequence[int] = (0,), needed_from: int = 0) -> OnDemandIndex:
    """`counts`: of the fragments of the largest memory, one for each time that they are counted."""
    left = iter(counts)

    async def count_largest() -> int:
        return next(left)

    return OnDemandIndex(await open_lite(data_dir, lock_timeout_s=0.2), data_dir / "milvus", count_largest, needed_from)


async def test_first_row_starts_milvus_lite(tmp_path: Path) -> None:
    vectors, index = unit_vectors(3), await create_index(tmp_path)
    assert await index.open(SPACE)
    await index.upsert([])
    await index.delete("m", [fragment_id(1)])
    await index.flush()
    found, cosines = await index.search("m", vectors[0], 5)
    assert (found, cosines.shape, await index.list_ids("m"), await index.count("m")) == ([], (0,), [], 0)
    assert await index.is_healthy()
    assert (children(tmp_path), (tmp_path / "milvus").exists()) == ([], False)
    await index.upsert(points("m", vectors))
    await index.flush()
    assert len(children(tmp_path)) == 1
    assert (await index.search("m", vectors[1], 1))[0] == [fragment_id(1)]
    assert await index.is_healthy()
    await index.close()
    again = await create_index(tmp_path)
    assert not await again.open(SPACE), "an index with a directory starts when it is opened"
    assert await again.count("m") == 3
    await again.drop_all()
    assert children(tmp_path) == []
    with pytest.raises(IndexUnavailable):
        await again.count("m")
    assert await again.open(SPACE), "a dropped index has no directory"
    assert children(tmp_path) == []
    await again.close()


async def test_next_row_repeats_a_failed_start(tmp_path: Path) -> None:
    first, second = await create_index(tmp_path), await create_index(tmp_path)
    for index in (first, second):
        assert await index.open(SPACE)
    await first.upsert(points("m", unit_vectors(1)))
    with pytest.raises(IndexUnavailable, match="another process holds the lock"):
        await second.upsert(points("m", unit_vectors(1)))
    assert (await second.count("m"), await second.is_healthy()) == (0, False)
    await first.close()
    await second.upsert(points("m", unit_vectors(1)))
    assert (await second.count("m"), await second.is_healthy()) == (1, True)
    await second.close()


async def test_start_opens_the_spaces_of_that_time(tmp_path: Path) -> None:
    index, third = await create_index(tmp_path), Space("third model", 8, 4)
    assert await index.open(SPACE, OTHER)
    assert await index.add_space(third)
    await index.remove_space(SPACE)
    vector = unit_vectors(1, dimension=8)[0]
    await index.upsert([Point("m", "f", vector)])
    await index.upsert([Point("m", "g", vector)], third.model)
    assert (await index.list_ids("m"), await index.list_ids("m", third.model)) == (["f"], ["g"])
    await index.remove_space(third)
    await index.close()


async def test_the_only_space_cannot_be_removed(tmp_path: Path) -> None:
    index = await create_index(tmp_path)
    await index.open(SPACE)
    with pytest.raises(IndexUnavailable, match="only one"):
        await index.remove_space(SPACE)
    await index.close()


async def test_rows_start_nothing_while_memories_are_small(tmp_path: Path) -> None:
    index = await create_index(tmp_path, [10, 20, 30], needed_from=80)
    assert not await index.open(SPACE), "nothing is to be filled in"
    assert not await index.add_space(OTHER)
    for _ in range(20):  # counted again after ten rows, an eighth of 80
        await index.upsert(points("m", unit_vectors(1)))
    await index.delete("m", [fragment_id(1)])
    await index.flush()
    assert (index.is_idle, await index.is_healthy(), await index.list_ids("m")) == (True, True, [])
    assert (children(tmp_path), (tmp_path / "milvus").exists()) == ([], False)
    await index.close()


async def test_grown_memory_has_the_index_filled(tmp_path: Path) -> None:
    index = await create_index(tmp_path, [10, 100], needed_from=80)
    assert not await index.open(SPACE)
    await index.upsert(points("m", unit_vectors(9)))
    with pytest.raises(IndexLost, match="grown"):
        await index.upsert(points("m", unit_vectors(1)))
    assert (index.is_idle, children(tmp_path)) == (False, [])
    await index.upsert(points("m", unit_vectors(3)))
    assert (await index.count("m"), len(children(tmp_path))) == (3, 1)
    await index.close()


async def test_search_of_an_idle_index_has_it_filled(tmp_path: Path) -> None:
    index = await create_index(tmp_path, [10], needed_from=80)
    assert not await index.open(SPACE)
    with pytest.raises(IndexLost, match="does not fit"):
        await index.search("m", unit_vectors(1)[0], 5)
    assert not index.is_idle
    await index.upsert(points("m", unit_vectors(1)))
    assert await index.count("m") == 1
    await index.close()


async def test_large_memory_is_filled_in_at_the_start(tmp_path: Path) -> None:
    index = await create_index(tmp_path, [80], needed_from=80)
    assert await index.open(SPACE)
    assert (index.is_idle, children(tmp_path)) == (False, [])
    await index.close()
