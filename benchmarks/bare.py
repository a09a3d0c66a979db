"""Baselines without a server: SQLite commits, a numpy scan, BM25, messages, a Milvus Lite."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from served import cpu_s

import memstream
from memstream.answer_codec import answer_from_wire
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.adapters.milvus.collection import MilvusCollection, Timeouts
from memstream_server.adapters.milvus.lite import LiteProcess
from memstream_server.adapters.milvus.naming import collection_name
from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import MODEL
from memstream_server.core.lexical import LexicalIndex, query_terms
from memstream_server.core.scores import PARTS, Scored
from memstream_server.core.values import Fragment, Tier
from memstream_server.engine.requests import RecallAnswer, Recollection
from memstream_server.ports.index import Point
from memstream_server.ports.journal.records import Space
from memstream_server.rpc.wire import queries

Floats = npt.NDArray[np.float32]
PARTITIONS = 64
"""Partitions of a bare Milvus Lite: the server's default."""
_K1, _B = 0.9, 0.4


@contextlib.contextmanager
def open_database(file: Path) -> Iterator[sqlite3.Connection]:
    """SQLite with the journal's settings (WAL, synchronous=FULL) and one table of blobs."""
    opened = sqlite3.connect(file, isolation_level=None)
    try:
        opened.execute("PRAGMA journal_mode = WAL")
        opened.execute("PRAGMA synchronous = FULL")
        opened.execute("CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, observation BLOB, vector BLOB)")
        yield opened
    finally:
        opened.close()


def time_commits(opened: sqlite3.Connection, rows: Sequence[tuple[bytes, bytes | None]], group: int) -> float:
    """Seconds to commit rows of (observation, vector), `group` per transaction, each on disk before the next."""
    began = time.perf_counter()
    for start in range(0, len(rows), group):
        opened.execute("BEGIN IMMEDIATE")
        opened.executemany("INSERT INTO rows (observation, vector) VALUES (?, ?)", rows[start : start + group])
        opened.execute("COMMIT")
    return time.perf_counter() - began


def time_scan(matrix: Floats, query: Floats, limit: int) -> float:
    """Seconds of an exact search of one memory's vectors for the `limit` nearest."""
    began = time.perf_counter()
    _top_indices(matrix @ query, limit)
    return time.perf_counter() - began


def _top_indices(values: Floats, limit: int) -> npt.NDArray[np.int64]:
    nearest = np.argpartition(-values, min(limit, len(values) - 1))[:limit]
    best: npt.NDArray[np.int64] = nearest[np.argsort(-values[nearest])]
    return best


class Bm25:
    """BM25 over one memory's texts: a dict of posting arrays, no neighbours, the server's tokens and stems."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._analyzer = SnowballAnalyzer()
        postings: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        lengths = np.zeros(len(texts), np.float32)
        for place, text in enumerate(texts):
            for term, count in self._terms(text):
                postings[term][0].append(place)
                postings[term][1].append(count)
                lengths[place] += count
        self._norms = _K1 * (1 - _B + _B * lengths / max(float(lengths.mean()), 1.0))
        self._postings = {
            term: (np.array(places), np.array(counts, np.float32)) for term, (places, counts) in postings.items()
        }

    def _terms(self, text: str) -> list[tuple[int, int]]:
        terms = self._analyzer.terms(text)
        hashes, counts = np.frombuffer(terms.hashes, "<u8"), np.frombuffer(terms.counts, "<u2")
        return list(zip(hashes.tolist(), counts.tolist(), strict=True))

    def time_search(self, query: str, limit: int) -> float:
        """Seconds from the query's text to the `limit` best."""
        began = time.perf_counter()
        values = np.zeros(len(self._norms), np.float32)
        for term, _ in self._terms(query):
            held = self._postings.get(term)
            if held is not None:
                places, counts = held
                idf = math.log1p((len(values) - len(places) + 0.5) / (len(places) + 0.5))
                values[places] += idf * (_K1 + 1) * counts / (counts + self._norms[places])
        _top_indices(values, limit)
        return time.perf_counter() - began


class BothLegs:
    """The server's two lexical legs over one memory's texts (one session), called without a server."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._analyzer = SnowballAnalyzer()
        self._index = LexicalIndex()
        for text in texts:
            terms = self._analyzer.terms(text)
            self._index.append(terms.hashes, terms.counts, 0, len(text))
        self._index.settle()

    def time_query(self, query: str) -> float:
        """Seconds from the query's text to the scores of both legs for every fragment."""
        began = time.perf_counter()
        self._index.legs(query_terms(self._analyzer.terms(query).hashes))
        return time.perf_counter() - began


class Messages:
    """An answer's messages, built and serialised as the server does, parsed and read as the SDK does."""

    def __init__(self, answer: memstream.Answer) -> None:
        hits = [_to_fragment(hit.fragment, Tier.LONG_TERM) for hit in answer]
        found = {one.id for one in hits}
        beside = [_to_fragment(one, Tier.SHORT_TERM) for one in answer.working_memory if one.id not in found]
        zeros = (0.5,) * len(PARTS)
        self._answer = RecallAnswer(
            revision=answer.revision,
            recollections=tuple(
                Recollection(one, Scored(0, one.id, 0.5, 0.5, 0.5, PARTS, zeros, zeros), False) for one in hits
            ),
            working_ids=tuple(one.id for one in answer.working_memory),
            working=tuple(beside),
            eligible=answer.eligible,
            considered=answer.considered,
            best_relevance=answer.best_relevance,
            degraded="",
            near_misses=(),
            timings_s=answer.timings,
            tokens=0,
            formula="",
        )

    def build(self) -> list[pb.RecallResponse]:
        """The answer's messages, made without a pause. To be called in a running event loop."""
        making = self._collect()
        try:
            making.send(None)
        except StopIteration as made:
            return cast("list[pb.RecallResponse]", made.value)
        raise AssertionError("a loop without turns never pauses")

    async def _collect(self) -> list[pb.RecallResponse]:
        done = await queries.done_response("1", self._answer, False)
        return [each async for each in queries.recollection_responses("1", self._answer, False, done)]

    def time_round_trip(self) -> float:
        """Seconds to build, serialise, parse and read one answer."""
        began = time.perf_counter()
        sent = self.build()
        read = [pb.RecallResponse.FromString(each.SerializeToString()).recollections for each in sent]
        answer_from_wire(read, read[-1].done)
        return time.perf_counter() - began


def _to_fragment(one: memstream.Fragment, tier: Tier) -> Fragment:
    return Fragment(
        id=one.id,
        content=one.content,
        tier=tier,
        speaker=one.speaker,
        session=one.session,
        observe_time_us=1_700_000_000_000_000,
        create_time_us=1_700_000_000_000_000,
        access_time_us=1_700_000_000_000_000,
        access_count=one.access_count,
        model=one.model,
        version=1,
    )


class MilvusLite:
    """A separate Milvus Lite process with a collection like the server's. Created by `start_milvus_lite`."""

    def __init__(self, child: LiteProcess, collection: MilvusCollection) -> None:
        self.collection = collection
        self._child = child

    def cpu_s(self) -> float:
        """CPU seconds of its process so far."""
        return cpu_s(self._child.pid)

    async def fill_collection(self, memories: Sequence[Floats]) -> float:
        """Seconds to upsert and flush the vectors of memory-0, memory-1, ..."""
        points = [
            Point(f"memory-{place}", f"{place}-{number}", vector)
            for place, held in enumerate(memories)
            for number, vector in enumerate(held)
        ]
        began = time.perf_counter()
        await asyncio.to_thread(self.collection.upsert, points)
        await asyncio.to_thread(self.collection.flush)
        return time.perf_counter() - began

    def time_search(self, place: int, query: Floats, limit: int) -> float:
        """Seconds of a search for the `limit` nearest in memory-`place`: its partition, filtered by memory."""
        began = time.perf_counter()
        self.collection.search(f"memory-{place}", query, limit, Timeouts().search_s)
        return time.perf_counter() - began


@contextlib.asynccontextmanager
async def start_milvus_lite(directory: Path) -> AsyncIterator[MilvusLite]:
    """Start an empty one."""
    space = Space(MODEL.name, MODEL.dimension, PARTITIONS)
    name = collection_name(space, "bench")
    child = await LiteProcess.start(directory, [name], start_timeout_s=60.0, lock_timeout_s=10.0, stop_timeout_s=30.0)
    try:
        collection = await asyncio.to_thread(MilvusCollection.connect, child.uri, "", name, space, Timeouts(), "Strong")
        try:
            await asyncio.to_thread(collection.ensure_ready)
            yield MilvusLite(child, collection)
        finally:
            collection.close()
    finally:
        await child.stop()
