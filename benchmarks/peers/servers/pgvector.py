"""PostgreSQL with pgvector: a table for each memory, every batch a transaction, `synchronous_commit` on.

Variant `hnsw` (an index of its default parameters) or `exact` (no index). The cluster is that of the project's tests
with pgvector's own PostgreSQL, over loopback TCP and with fsync.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import psycopg
from pgvector import Vector
from pgvector.psycopg import register_vector

from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, run_peer
from benchmarks.peers.servers.processes import find_free_port, list_tree, measure
from tests.toolchains.postgres import Cluster

_DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "autovacuum": "on"}
_USUAL = {"shared_buffers": "128MB", "deadlock_timeout": "1s"}
"""PostgreSQL's defaults, which the tests change."""


class Pgvector:
    def __init__(self, given: PeerOptions, cluster: Cluster, port: int) -> None:
        self._given = given
        self._cluster = cluster
        self._connection = psycopg.connect(
            f"postgresql://memstream@127.0.0.1:{port}/postgres", autocommit=True, prepare_threshold=1
        )
        self._connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        register_vector(self._connection)

    async def open(self, memory: str) -> None:
        dimension = self._given.vectors.dimension
        self._connection.execute(
            f"CREATE TABLE IF NOT EXISTS memory_{memory}"
            f" (id bigserial PRIMARY KEY, line text NOT NULL, vector vector({dimension}) NOT NULL)"
        )
        if self._given.variant == "hnsw":
            self._connection.execute(
                f"CREATE INDEX IF NOT EXISTS near_{memory} ON memory_{memory} USING hnsw (vector vector_cosine_ops)"
            )

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        lines = [item.line for item in items]
        rows = zip(lines, map(Vector, self._given.vectors.look_up(lines)), strict=True)
        insert = f"INSERT INTO memory_{memory} (line, vector) VALUES (%s, %b)"
        if len(items) == 1:
            self._connection.execute(insert, next(rows))
            return
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.executemany(insert, rows)

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        near = Vector(self._given.vectors.look_up_one(query.text))
        asked = f"SELECT line FROM memory_{memory} ORDER BY vector <=> %b LIMIT %s"
        return [line for (line,) in self._connection.execute(asked, (near, k)).fetchall()]

    async def lines(self, memory: str) -> list[str]:
        return [line for (line,) in self._connection.execute(f"SELECT line FROM memory_{memory}").fetchall()]

    def processes(self) -> Processes:
        return measure(list_tree(self._cluster.pid))

    async def close(self) -> None:
        self._connection.close()
        self._cluster.stop()


async def make_peer(given: PeerOptions) -> Pgvector:
    port, found = find_free_port(), importlib.util.find_spec("pgserver")
    assert found is not None
    assert found.origin is not None
    binaries = Path(found.origin).parent / "pginstall" / "bin"  # not imported: that makes directories
    folder = given.directory / "cluster"
    (folder / "data" / "postmaster.pid").unlink(missing_ok=True)  # of a cluster that was killed
    settings = {"listen_addresses": "127.0.0.1", "port": str(port), **_DURABLE, **_USUAL}
    cluster = Cluster(binaries, folder, settings)
    cluster.start()
    try:
        return Pgvector(given, cluster, port)
    except BaseException:
        cluster.stop()
        raise


if __name__ == "__main__":
    run_peer(make_peer)
