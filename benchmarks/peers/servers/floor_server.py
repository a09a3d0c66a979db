"""A bare grpc.aio server that takes memstream's messages and does as little as a durable server in Python can.

    python -m benchmarks.peers.servers.floor_server DIRECTORY PORT

A batch of observations is one row of SQLite, committed with fsync on the event loop. A query is one numpy product with
all vectors of its memory. No validation, order, tiers, words or reasons, and only the calls that the comparison makes.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt

from memstream.v1 import fragment_pb2, memory_pb2, memory_service_pb2, stream_service_pb2
from memstream.v1.memory_service_pb2_grpc import MemoryServiceServicer, add_MemoryServiceServicer_to_server
from memstream.v1.stream_service_pb2_grpc import StreamServiceServicer, add_StreamServiceServicer_to_server

WINDOW_OBSERVATIONS, WINDOW_BYTES = 1 << 16, 1 << 28
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 4000")
_ROWS_FIRST = 1_024


class Kept:
    """The observations of one memory in RAM, with their vectors as one array that grows."""

    def __init__(self) -> None:
        self.fragments: list[fragment_pb2.Fragment] = []
        self._vectors: npt.NDArray[np.float32] = np.empty((0, 0), np.float32)

    def add(self, observations: Sequence[fragment_pb2.Observation]) -> None:
        """Keep committed observations."""
        for one in observations:
            count, vector = len(self.fragments), np.array(one.embedding, np.float32)
            if count == len(self._vectors):
                grown = np.empty((max(_ROWS_FIRST, 2 * count), len(vector)), np.float32)
                if count:
                    grown[:count] = self._vectors
                self._vectors = grown
            self._vectors[count] = vector
            said = fragment_pb2.Fragment(id=str(count), content=one.content, speaker=one.speaker, session=one.session)
            said.observe_time.CopyFrom(one.observe_time)
            self.fragments.append(said)

    def find_nearest(self, query: stream_service_pb2.RecallQuery) -> list[stream_service_pb2.Recollection]:
        """The best fragments for a query's vector."""
        scores = self._vectors[: len(self.fragments)] @ np.array(query.embedding, np.float32)
        limit = min(query.limit, len(scores))
        near = np.argpartition(-scores, limit - 1)[:limit] if limit else np.empty(0, np.int64)
        best = near[np.argsort(-scores[near])].tolist()
        return [
            stream_service_pb2.Recollection(fragment=self.fragments[place], score=float(scores[place]), rank=rank)
            for rank, place in enumerate(best, 1)
        ]


class Floor(MemoryServiceServicer, StreamServiceServicer):
    """The four calls."""

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file, isolation_level=None)
        for pragma in _PRAGMAS:
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute("CREATE TABLE IF NOT EXISTS batches (memory TEXT, batch BLOB)")
        self._kept: dict[str, Kept] = {}
        for memory, packed in self._database.execute("SELECT memory, batch FROM batches ORDER BY rowid"):
            batch = stream_service_pb2.ObservationBatch.FromString(packed)
            self._kept.setdefault(memory, Kept()).add(batch.observations)

    async def CreateMemory(self, request: Any, context: Any) -> memory_service_pb2.CreateMemoryResponse:  # noqa: N802
        created = request.memory not in self._kept
        self._kept.setdefault(request.memory, Kept())
        made = memory_pb2.Memory(namespace=request.namespace, name=request.memory, uid=request.memory)
        return memory_service_pb2.CreateMemoryResponse(memory=made, created=created)

    async def ListFragments(self, request: Any, context: Any) -> memory_service_pb2.ListFragmentsResponse:  # noqa: N802
        return memory_service_pb2.ListFragmentsResponse(fragments=self._kept[request.memory].fragments)

    async def Observe(  # noqa: N802
        self, requests: AsyncIterator[stream_service_pb2.ObserveRequest], context: Any
    ) -> AsyncIterator[stream_service_pb2.ObserveResponse]:
        memory = (await anext(requests)).open.memory
        kept = self._kept[memory]
        last = len(kept.fragments)
        opened = stream_service_pb2.ObserveOpened(
            received=last,
            stored=last,
            expected_sequence=last + 1,
            window_observations=WINDOW_OBSERVATIONS,
            window_bytes=WINDOW_BYTES,
        )
        yield stream_service_pb2.ObserveResponse(opened=opened)
        async for request in requests:
            if request.HasField("close"):
                yield stream_service_pb2.ObserveResponse(
                    closed=stream_service_pb2.ObserveClosed(received=last, stored=last)
                )
                return
            if request.HasField("batch"):
                self._database.execute("INSERT INTO batches VALUES (?, ?)", (memory, request.batch.SerializeToString()))
                kept.add(request.batch.observations)
                last = len(kept.fragments)
            ack = stream_service_pb2.Ack(received=last, stored=last, indexed=last, flushed=request.flush.flush_id)
            yield stream_service_pb2.ObserveResponse(ack=ack)

    async def Recall(  # noqa: N802
        self, requests: AsyncIterator[stream_service_pb2.RecallRequest], context: Any
    ) -> AsyncIterator[stream_service_pb2.RecallResponse]:
        kept = self._kept[(await anext(requests)).open.memory]
        yield stream_service_pb2.RecallResponse(opened=stream_service_pb2.RecallOpened())
        async for request in requests:
            if request.HasField("close"):
                return
            answer = stream_service_pb2.Recollections(
                query_id=request.query.query_id,
                recollections=kept.find_nearest(request.query),
                done=stream_service_pb2.RecallDone(query_id=request.query.query_id),
            )
            yield stream_service_pb2.RecallResponse(recollections=answer)


async def serve(directory: Path, port: int) -> None:
    """Runs until the process is ended."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    floor = Floor(directory / "floor.db")
    add_MemoryServiceServicer_to_server(floor, server)
    add_StreamServiceServicer_to_server(floor, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
