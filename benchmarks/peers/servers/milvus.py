"""A Milvus server (PyPI's milvus, as the project's tests start it) through pymilvus, with one collection a memory.

Variant: the consistency level of searches. It runs in a network namespace, so its client reaches it through a unix
socket and a forwarder in Python. Its time is in every call; its memory is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from pymilvus import DataType, MilvusClient

from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, run_peer
from benchmarks.peers.servers.processes import list_tree, measure, name_of
from tests.toolchains.milvus import MilvusServer

LOAD_MAX_S = 20.0
"""Limit of loading a collection after a kill, which has taken longer than 15 minutes."""
_PAGE = 16_000
"""Rows that a query may return at most, minus a few."""


class Milvus:
    def __init__(self, given: PeerOptions, server: MilvusServer) -> None:
        self._given = given
        self._server = server
        self._client = MilvusClient(server.uri, dedicated=True)

    async def open(self, memory: str) -> None:
        if self._client.has_collection(memory):
            self._client.load_collection(memory, timeout=LOAD_MAX_S)
            return
        schema = MilvusClient.create_schema(auto_id=True)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("line", DataType.VARCHAR, max_length=4_096)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self._given.vectors.dimension)
        index = MilvusClient.prepare_index_params()
        index.add_index("vector", index_type="HNSW", metric_type="COSINE", params={"M": 16, "efConstruction": 64})
        self._client.create_collection(
            memory, schema=schema, index_params=index, consistency_level=self._given.variant, num_shards=1
        )

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        lines = [item.line for item in items]
        vectors = self._given.vectors.look_up(lines)
        rows = [{"line": line, "vector": vector} for line, vector in zip(lines, vectors, strict=True)]
        self._client.insert(memory, rows)

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        near = [self._given.vectors.look_up_one(query.text)]
        (found,) = self._client.search(memory, near, limit=k, output_fields=["line"])
        return [hit["entity"]["line"] for hit in found]

    async def lines(self, memory: str) -> list[str]:
        asked = self._client.query(
            memory, filter="id >= 0", output_fields=["line"], limit=_PAGE, consistency_level="Strong"
        )
        return [row["line"] for row in asked]

    def processes(self) -> Processes:
        """Milvus itself; the processes that put it into a namespace are only killed."""
        tree = list_tree(self._server.pid)
        own = measure([pid for pid in tree if name_of(pid).startswith("milvus")])
        return Processes(tree, own.resident_mb, own.cpu_s, own.proportional_mb)

    async def close(self) -> None:
        self._client.close()
        self._server.remove()


async def make_peer(given: PeerOptions) -> Milvus:
    server = MilvusServer(given.directory / "milvus")
    try:
        server.wait()
        return Milvus(given, server)
    except BaseException:
        server.remove()
        raise


if __name__ == "__main__":
    run_peer(make_peer)
