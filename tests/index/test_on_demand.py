"""An embedded index starts its Milvus Lite process with the first row, not before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memstream_server.adapters.milvus.index import open_lite
from memstream_server.adapters.milvus.on_demand import OnDemandIndex
from memstream_server.ports.index import IndexUnavailable, Point
from memstream_server.ports.journal.spaces import Space
from tests.index.conformance import SPACE, fragment_id, points, unit_vectors
from tests.index.processes import children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the child process in /proc")

OTHER = Space("another model", 8, 4)


async def create_index(data_dir: Path) -> OnDemandIndex:
    return OnDemandIndex(await open_lite(data_dir, lock_timeout_s=0.2), data_dir / "milvus")


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
