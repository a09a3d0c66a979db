"""The vector index on a real Milvus server passes the conformance suite."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from memstream_server.adapters.milvus.collection import Timeouts
from memstream_server.adapters.milvus.index import MilvusIndex, connect_milvus
from memstream_server.ports.index import VectorIndex
from tests.index.conformance import SPACE, Conformance, Reopen, memory
from tests.toolchains.milvus import MilvusServer

__all__ = ["memory"]  # a fixture

pytestmark = [pytest.mark.toolchain, pytest.mark.asyncio(loop_scope="module")]


class Holder:
    """The module's index, which `reopen` replaces."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.index: MilvusIndex | None = None

    async def open(self) -> tuple[MilvusIndex, bool]:
        if self.index is not None:
            await self.index.close()
        # The suite looks for its writes at once; the server's own Bounded leaves that to the overlay.
        self.index = connect_milvus(
            self.uri, prefix="conformance", consistency="Strong", timeouts=Timeouts(search_s=60, probe_s=10)
        )
        return self.index, await self.index.open(SPACE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def holder(milvus: MilvusServer) -> AsyncIterator[Holder]:
    holder = Holder(milvus.uri)
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


class TestMilvusServer(Conformance):
    """See conformance.py."""

    async def test_description_names_the_engine(self, index: VectorIndex) -> None:
        assert index.description.startswith("milvus 2.")
