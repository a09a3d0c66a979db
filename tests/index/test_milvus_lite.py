"""The vector index on a real Milvus Lite child process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from memstream_server.adapters.milvus.index import MilvusIndex, open_lite
from memstream_server.adapters.milvus.naming import partition_name
from memstream_server.ports.index import IndexUnavailable, Point, VectorIndex
from tests.index.conformance import SPACE, Conformance, Reopen, fragment_id, memory, points, unit_vectors

__all__ = ["memory"]  # a fixture

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Holder:
    """The module's index, which `reopen` replaces."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.index: MilvusIndex | None = None

    async def open(self) -> tuple[MilvusIndex, bool]:
        if self.index is not None:
            await self.index.close()
        self.index = await open_lite(self.data_dir)
        return self.index, await self.index.open(SPACE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def holder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Holder]:
    holder = Holder(tmp_path_factory.mktemp("lite"))
    _, must_fill = await holder.open()
    assert must_fill
    yield holder
    assert holder.index is not None
    await holder.index.close()


@pytest.fixture
def index(holder: Holder) -> VectorIndex:
    assert holder.index is not None
    return holder.index


@pytest.fixture
def reopen(holder: Holder) -> Reopen:
    return holder.open


class TestMilvusLite(Conformance):
    """The suite on Lite."""

    async def test_description_names_the_engine(self, index: VectorIndex) -> None:
        assert index.description.startswith("milvus-lite 3.")


async def test_closed_index_raises(tmp_path: Path) -> None:
    index = await open_lite(tmp_path)
    assert not await index.is_healthy()
    with pytest.raises(IndexUnavailable, match="not open"):
        await index.search("m", unit_vectors(1)[0], 1)
    await index.close()


async def test_two_spaces_have_two_collections(tmp_path: Path) -> None:
    """Opening another space closes the first; both have their rows when they are opened again."""
    from memstream_server.ports.journal.records import Space

    other = Space("test model/v1", 8, 4)
    index = await open_lite(tmp_path)
    assert await index.open(SPACE)
    await index.upsert([Point("m", "f", unit_vectors(1)[0])])
    await index.flush()
    assert await index.open(other)
    assert await index.count("m") == 0
    await index.upsert([Point("m", "g", unit_vectors(1, dimension=8)[0])])
    await index.flush()
    assert not await index.open(SPACE)
    assert await index.list_ids("m") == ["f"]
    assert not await index.open(other)
    assert await index.list_ids("m") == ["g"]
    await index.close()


def files_with(folder: Path, vectors: npt.NDArray[np.float32]) -> set[int]:
    """Numbers of the vectors that a file contains."""
    files = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    return {number for number, vector in enumerate(vectors) if any(vector.tobytes() in data for data in files)}


async def test_erased_vectors_are_in_no_file_and_others_stay(tmp_path: Path) -> None:
    """Deleted and replaced rows, over several flushes; the files of other partitions are not written again."""
    index = await open_lite(tmp_path)
    await index.open(SPACE)
    mine, theirs = unit_vectors(40, seed=1), unit_vectors(40, seed=2)
    own = names_in_partition(0)
    for start in range(0, 40, 10):
        await index.upsert(points(own, mine[start : start + 10], start))
        await index.upsert(points(names_in_partition(1), theirs[start : start + 10], start))
        await index.flush()
    assert await index.erase_deleted()
    before = await asyncio.to_thread(list_times, tmp_path, "p1")
    await index.delete(own, [fragment_id(number) for number in (3, 17, 18)])
    await index.upsert([Point(own, fragment_id(30), unit_vectors(1, seed=3)[0])])
    await index.flush()
    assert await asyncio.to_thread(files_with, tmp_path, mine) == set(range(40))
    assert await index.erase_deleted()
    assert await asyncio.to_thread(files_with, tmp_path, mine) == set(range(40)) - {3, 17, 18, 30}
    assert await asyncio.to_thread(files_with, tmp_path, theirs) == set(range(40))
    assert await asyncio.to_thread(list_times, tmp_path, "p1") == before
    assert len(before) > 0
    assert await index.count(own) == 37
    found, _ = await index.search(own, mine[20], 3)
    assert found[0] == fragment_id(20)
    await index.close()
    again = await open_lite(tmp_path)
    assert not await again.open(SPACE)
    assert await again.count(own) == 37
    assert (await again.search(own, mine[20], 3))[0] == found
    await again.close()


def list_times(folder: Path, partition: str) -> dict[str, int]:
    """When each data file of a partition was written."""
    return {file.name: file.stat().st_mtime_ns for file in folder.rglob(f"{partition}/data/*.parquet")}


def names_in_partition(number: int) -> str:
    """A memory of that partition."""
    return next(name for name in map(str, range(10_000)) if partition_name(name, SPACE.index_layout) == f"p{number}")
