"""The vector index on a real Milvus Lite child process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from memstream_server.adapters.milvus.index import MilvusIndex, open_lite
from memstream_server.ports.index import IndexUnavailable, VectorIndex
from tests.index.conformance import SPACE, Conformance, Reopen, memory, unit_vectors

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
    from memstream_server.ports.index import Point
    from memstream_server.ports.journal.spaces import Space

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
