"""One Milvus collection over pymilvus: blocking calls, and the only user of its untyped API.

The code serves Milvus Lite and a Milvus server; `get_server_version()` tells them apart. The differences:

| | Lite | server, Zilliz |
|---|---|---|
| a memory's rows | partition by hash, named in every call | partition key (from 2.4), never named (an error) |
| index | none: exact scan; its FLAT index is also a scan, with sidecar files that can be damaged | HNSW |
| reads | see every write | Bounded for search unless configured, Strong for counts and ids |

Every call has a timeout; every failure raises IndexUnavailable. Not thread-safe for writes: one at a time.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from memstream_server.adapters.milvus.naming import (
    ID_LENGTH_MAX,
    KEY_LENGTH_MAX,
    SCHEMA_VERSION,
    bucket_name,
    encode_id,
    make_key,
    parse_fragment,
    partition_name,
    quote_id,
)
from memstream_server.adapters.milvus.pandas_later import pandas_later
from memstream_server.core.values import Vector
from memstream_server.ports.index import IndexUnavailable, Point
from memstream_server.ports.journal.records import Space

if TYPE_CHECKING:
    from memstream_server.adapters.milvus.columns import ColumnInserter

T = TypeVar("T")

Row: TypeAlias = tuple[str, str, Vector]
"""Stored key, stored memory id, vector."""

COLLECTION_NOT_FOUND = 100
COLLECTION_NOT_LOADED = 101

IDS_PAGE = 1_000
"""Ids per page."""
LIMIT_MAX = 16_384
"""Most rows that a Milvus server returns."""

UPSERT_BYTES_MAX = 4 * 1024 * 1024
"""Vector bytes in one call; a server rejects messages over 64 MB."""

DELETE_IDS_MAX = 1_000

HNSW = {"M": 16, "efConstruction": 200}
EF_MIN = 128
"""Candidates that HNSW keeps during a search; raised to the requested limit."""

KEYED_SINCE = (2, 4)
"""Older servers put upserted rows into the partition of another field's value, where searches do not find them
(https://github.com/milvus-io/milvus/pull/30772); for them the column is not a partition key."""

METRIC = "IP"
"""For unit vectors the inner product equals the cosine, and no engine has to compute norms."""

CHANNEL = {"grpc.keepalive_time_ms": 600_000}
"""With pymilvus' 10 s, Lite closes the connection (too_many_pings). Deadlines detect a dead connection."""


class CollectionMissing(IndexUnavailable):
    """The collection does not exist: it was dropped, or the server lost it."""


class CallTimedOut(IndexUnavailable):
    """The call's timeout expired before Milvus answered."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of calls, in seconds."""

    connect_s: float = 10.0
    search_s: float = 5.0
    write_s: float = 60.0
    flush_s: float = 120.0
    define_s: float = 60.0
    """Creating and loading a collection; a server needs long for a large one."""
    probe_s: float = 2.0


class MilvusCollection:
    """The collection of an embedding space, on one connection. Made by `connect`; call `make` before use."""

    def __init__(self, client: Any, name: str, space: Space, timeouts: Timeouts, consistency: str) -> None:
        self._client = client
        self._name = name
        self._space = space
        self._timeouts = timeouts
        self._consistency = consistency
        self._columns: ColumnInserter | None = None
        """Inserts rows instead of pymilvus; only for Lite."""
        with translating_errors("connect"):
            version = str(client.get_server_version(timeout=timeouts.connect_s))
        self.lite = version.startswith("milvus_lite")
        self._keyed = not self.lite and parse_release(version) >= KEYED_SINCE
        self.description = (
            f"milvus-lite {version.rpartition('-')[2]}" if self.lite else f"milvus {version.removeprefix('v')}"
        )

    @classmethod
    def connect(
        cls, uri: str, token: str, name: str, space: Space, timeouts: Timeouts, consistency: str
    ) -> MilvusCollection:
        """Connect and identify the engine. Raises IndexUnavailable."""
        # Imported here: the import is slow, and only this thread should wait for it.
        with pandas_later():
            import pymilvus

        from memstream_server.adapters.milvus.columns import ColumnInserter, grpc_target

        # pymilvus logs a traceback for every failure that it raises; the exception is enough.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        with translating_errors("connect"):
            # Dedicated: a shared connection would outlive this object and be reused by the next one.
            client = pymilvus.MilvusClient(
                uri, token=token, timeout=timeouts.connect_s, dedicated=True, grpc_options=CHANNEL
            )
        made = cls(client, name, space, timeouts, consistency)
        target = grpc_target(uri, token)
        if made.lite and target is not None:
            made._columns = ColumnInserter(target, name)
        return made

    def close(self) -> None:
        """Close the connection; running calls fail."""
        self._client.close()
        if self._columns is not None:
            self._columns.close()

    def request_version(self) -> None:
        """Request the version. Raises IndexUnavailable if there is no answer."""
        with translating_errors("probe"):
            self._client.get_server_version(timeout=self._timeouts.probe_s)

    def ensure_ready(self) -> bool:
        """Create the collection if it is missing, finish one whose creation was interrupted, and load it.

        True if it was missing.
        """
        with translating_errors("make collection"):
            missing = not self._client.has_collection(self._name, timeout=self._timeouts.define_s)
            if missing:
                self._create_collection()
            if self.lite:
                self._create_partitions()
            else:
                self._client.load_collection(self._name, timeout=self._timeouts.define_s)
        return missing

    def drop_collection(self) -> None:
        """Drop the collection; a missing one is no error."""
        with translating_errors("drop collection"):
            self._client.drop_collection(self._name, timeout=self._timeouts.define_s)

    def is_empty(self) -> bool:
        """Whether the collection has no rows."""
        with translating_errors("count"):
            statistics = self._client.get_collection_stats(self._name, timeout=self._timeouts.define_s)
        return int(statistics["row_count"]) == 0

    def upsert(self, points: Sequence[Point]) -> None:
        """Upsert whole rows, grouped by partition on Lite; of several with one fragment id the last wins."""
        rows_max = max(1, UPSERT_BYTES_MAX // (4 * self._space.dimension))
        memories: defaultdict[str, list[Point]] = defaultdict(list)
        for point in points:
            if point.vector.shape != (self._space.dimension,):
                raise ValueError(f"a vector of {self._space.dimension} numbers expected, got {point.vector.shape}")
            memories[point.memory].append(point)
        groups: defaultdict[str | None, dict[str, Row]] = defaultdict(dict)
        for memory, held in memories.items():
            name, group = encode_id(memory), groups[self._partition_name(memory)]
            for point in held:
                key = make_key(memory, point.fragment)
                group[key] = (key, name, point.vector)
        with translating_errors("upsert"):
            for partition, rows in groups.items():
                for batch in split_batches(list(rows.values()), rows_max):
                    self._put_rows(batch, partition)

    def _put_rows(self, rows: Sequence[Row], partition: str | None) -> None:
        keys, memories, vectors = (list(column) for column in zip(*rows, strict=True))
        texts = {"id": keys, "memory": memories, "spare_text": [""] * len(rows)}
        numbers = {"schema_version": [SCHEMA_VERSION] * len(rows), "spare_number": [0] * len(rows)}
        if self._columns is not None and partition is not None:
            self._columns.insert_rows(partition, vectors, texts, numbers, self._timeouts.write_s)
            return
        vectors = [np.ascontiguousarray(vector, dtype=np.float32) for vector in vectors]
        columns = {"vector": vectors, **texts, **numbers}
        named = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        self._client.upsert(self._name, named, partition_name=partition, timeout=self._timeouts.write_s)

    def delete(self, memory: str, fragments: Sequence[str]) -> None:
        """Delete by id, in the memory's partition on Lite. Unknown ids are no error."""
        partition = self._partition_name(memory)
        with translating_errors("delete"):
            for batch in split_batches(fragments, DELETE_IDS_MAX):
                # Lite deletes by id only for this form of filter; quoted here because pymilvus' `ids` does not quote.
                keys = ", ".join(f'"{make_key(memory, fragment)}"' for fragment in batch)
                chosen = f"id in [{keys}]"
                self._client.delete(self._name, filter=chosen, partition_name=partition, timeout=self._timeouts.write_s)

    def flush(self) -> None:
        """Make all earlier writes durable."""
        with translating_errors("flush"):
            self._client.flush(self._name, timeout=self._timeouts.flush_s)

    def compact_lite(self) -> bool:
        """Let the child process rewrite the files that hold deleted or replaced rows. False if it cannot: Lite's own
        call does nothing and answers 0."""
        with translating_errors("compact"):
            return bool(self._client.compact(self._name, timeout=self._timeouts.flush_s))

    def search(
        self, memory: str, vector: Vector, limit: int, timeout_s: float
    ) -> tuple[list[str], npt.NDArray[np.float32]]:
        """Fragment ids and cosines, best first."""
        limit = min(limit, LIMIT_MAX)
        parameters = {} if self.lite else {"ef": max(EF_MIN, limit)}
        arguments = {
            "data": [np.ascontiguousarray(vector, dtype=np.float32)],
            "anns_field": "vector",
            "filter": f"memory == {quote_id(memory)}",
            "limit": limit,
            "search_params": {"metric_type": METRIC, "params": parameters},
        }
        with translating_errors("search"):
            scope = self._read_options(memory, self._consistency) | {"timeout": timeout_s}
            answers = self._call_loaded(self._client.search, **arguments, **scope)
        if not answers or not answers[0]:
            return [], np.empty(0, np.float32)
        # Not by the key's name in each hit: Milvus 2.3 does not return it.
        ids = [parse_fragment(key) for key in answers[0].ids]
        return ids, np.clip(np.asarray(answers[0].distances, dtype=np.float32), -1, 1)

    def count_rows(self, memory: str) -> int:
        """The number of a memory's rows."""
        with translating_errors("count"):
            rows = self._query_rows(memory, f"memory == {quote_id(memory)}", output_fields=["count(*)"])
        return int(rows[0]["count(*)"])

    def list_ids(self, memory: str, after: str = "") -> tuple[list[str], bool]:
        """(a page of the fragment ids greater than `after`, ascending; whether there may be more)."""
        chosen = f'memory == {quote_id(memory)} and id > "{make_key(memory, after)}"'
        with translating_errors("ids"):
            rows = self._query_rows(
                memory,
                chosen,
                output_fields=["id"],
                limit=IDS_PAGE,
                # As pymilvus' own iterator: the first rows by primary key, not any rows. Milvus 2.3 then returns the
                # limit from each of its segments.
                iterator="True",
                reduce_stop_for_best="True",
            )
        ids = [parse_fragment(key) for key in sorted(row["id"] for row in rows)[:IDS_PAGE]]
        # A Milvus server's page ends where the first of its segments ends.
        return ids, len(ids) == IDS_PAGE if self.lite else bool(ids)

    def _query_rows(self, memory: str, chosen: str, **arguments: Any) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self._call_loaded(
            self._client.query, filter=chosen, **arguments, **self._read_options(memory, "Strong")
        )
        return answer

    def _call_loaded(self, call: Any, **arguments: Any) -> Any:
        """Run a read; if the collection is not loaded, load it and repeat the read."""
        from pymilvus import MilvusException

        try:
            return call(self._name, **arguments)
        except MilvusException as error:
            if error.code != COLLECTION_NOT_LOADED:
                raise
            self._client.load_collection(self._name, timeout=self._timeouts.define_s)
            return call(self._name, **arguments)

    def _read_options(self, memory: str, consistency: str) -> dict[str, Any]:
        """A read's partition, consistency level and timeout."""
        if self.lite:
            return {"partition_names": [self._partition_name(memory)], "timeout": self._timeouts.search_s}
        return {"consistency_level": consistency, "timeout": self._timeouts.search_s}

    def _partition_name(self, memory: str) -> str | None:
        return partition_name(memory, self._space.index_layout) if self.lite else None

    def _create_collection(self) -> None:
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=KEY_LENGTH_MAX)
        schema.add_field(
            "memory", DataType.VARCHAR, max_length=ID_LENGTH_MAX, **({"is_partition_key": True} if self._keyed else {})
        )
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=self._space.dimension)
        schema.add_field("schema_version", DataType.INT64)
        # Spare columns, because Lite cannot add one later.
        schema.add_field("spare_number", DataType.INT64)
        schema.add_field("spare_text", DataType.VARCHAR, max_length=1024)
        self._client.create_collection(
            self._name, schema=schema, timeout=self._timeouts.define_s, **({} if self.lite else self._server_options())
        )

    def _server_options(self) -> dict[str, Any]:
        managed = self._client.get_server_type() == "zilliz"
        index = self._client.prepare_index_params()
        index.add_index(
            "vector", index_type="AUTOINDEX" if managed else "HNSW", metric_type=METRIC, params={} if managed else HNSW
        )
        partitions = {"num_partitions": self._space.index_layout} if self._keyed else {}
        return {"index_params": index, "consistency_level": self._consistency, **partitions}

    def _create_partitions(self) -> None:
        present = set(self._client.list_partitions(self._name, timeout=self._timeouts.define_s))
        for bucket in range(self._space.index_layout):
            if bucket_name(bucket) not in present:
                self._client.create_partition(self._name, bucket_name(bucket), timeout=self._timeouts.define_s)


def parse_release(version: str) -> tuple[int, int]:
    """Major and minor of a server's version string; (999, 0), the newest, if it has no number."""
    numbers = re.search(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (999, 0)


def split_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in order, in slices of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))


@contextmanager
def translating_errors(doing: str) -> Iterator[None]:
    """Convert errors of pymilvus and gRPC to IndexUnavailable, CollectionMissing or TooLate."""
    from pymilvus import MilvusException

    try:
        yield
    except MilvusException as error:
        kind = CollectionMissing if error.code == COLLECTION_NOT_FOUND else IndexUnavailable
        raise kind(f"Milvus {doing}: {error.message} (code {error.code})") from error
    except grpc.RpcError as error:
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        raise (CallTimedOut if late else IndexUnavailable)(f"Milvus {doing}: {error}") from error
    except grpc.FutureTimeoutError as error:
        raise IndexUnavailable(f"Milvus {doing}: {error}") from error
