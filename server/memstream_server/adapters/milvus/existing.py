"""Reads a foreign Milvus collection row by row, ordered by its primary key, without changing it.

Blocking. A thread of this process serves a Milvus Lite directory and takes Lite's lock: no other process may have it
open. Every failure raises IndexUnavailable, CollectionMissing or FileNotFoundError.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memstream_server.adapters.milvus.collection import CHANNEL, CollectionMissing, translating_errors
from memstream_server.adapters.milvus.pandas_later import pandas_later
from memstream_server.ports.index import IndexUnavailable

PAGE_ROWS = 256
CONNECT_S = 10.0
CALL_S = 60.0
LOAD_S = 600.0
"""Loading a large collection on a server takes long."""
SCHEMES = ("http://", "https://", "tcp://", "unix:")


@dataclass(frozen=True, slots=True)
class Field:
    """A column of the collection. `type` is Milvus' name; empty if only the first row shows the column."""

    name: str
    type: str
    dimension: int = 0
    primary: bool = False


class ExistingCollection:
    """A foreign collection, loaded for reading. Made by `existing_collection`."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._name = name
        with translating_errors("describe collection"):
            if not client.has_collection(name, timeout=CALL_S):
                there = ", ".join(sorted(client.list_collections(timeout=CALL_S))) or "none at all"
                raise CollectionMissing(f"there is no collection {name!r}: there is {there}")
            described = client.describe_collection(name, timeout=CALL_S)
        self.dynamic = bool(described.get("enable_dynamic_field"))
        """Whether rows may have columns outside the schema."""
        self._schema = tuple(_decode_field(one) for one in described["fields"])
        self.primary = next(field for field in self._schema if field.primary)

    @contextmanager
    def keep_loaded(self) -> Iterator[None]:
        """Load the collection for the block; releases it if it was not loaded before."""
        with translating_errors("load collection"):
            state = str(self._client.get_load_state(self._name, timeout=CALL_S)["state"])
            if state != "Loaded":
                self._client.load_collection(self._name, timeout=LOAD_S)
        try:
            yield
        finally:
            if state == "NotLoad":  # not if another client was loading it
                with translating_errors("release collection"):
                    self._client.release_collection(self._name, timeout=CALL_S)

    def list_fields(self) -> tuple[Field, ...]:
        """The schema's columns, and additional ones of the first row."""
        if not self.dynamic:
            return self._schema
        rows = self._query_rows("", ["*"], 1)
        known = {field.name for field in self._schema}
        return self._schema + tuple(Field(name, "") for name in (rows[0] if rows else ()) if name not in known)

    def rows_about(self) -> int:
        """Approximate number of rows: a server counts flushed rows, deleted ones included."""
        with translating_errors("count"):
            return int(self._client.get_collection_stats(self._name, timeout=CALL_S)["row_count"])

    def iterate_pages(self, fields: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """Rows with these fields and the primary key, ascending by the key."""
        key = self.primary.name
        # Not pymilvus' query_iterator: it does not escape text keys in its filter.
        chosen = ""
        while rows := self._query_rows(chosen, [*{key: None, **dict.fromkeys(fields)}], PAGE_ROWS):
            # Milvus 2.3 returns the limit from each of its segments.
            page = sorted(rows, key=lambda row: row[key])[:PAGE_ROWS]
            yield page
            chosen = f"{key} > {_quote_key(page[-1][key])}"

    def _query_rows(self, chosen: str, fields: list[str], limit: int) -> list[dict[str, Any]]:
        with translating_errors("query"):
            found: list[dict[str, Any]] = self._client.query(
                self._name,
                filter=chosen,
                output_fields=fields,
                limit=limit,
                # The first rows by primary key, not any rows.
                iterator="True",
                reduce_stop_for_best="True",
                consistency_level="Strong",
                timeout=CALL_S,
            )
        return list(found)


@contextmanager
def open_existing_collection(uri: str, token: str, name: str) -> Iterator[ExistingCollection]:
    """Open a collection of a Milvus server (by URI) or of a Milvus Lite directory (by path)."""
    # Imported here: the import is slow, and --help should not wait for it.
    with pandas_later():
        import pymilvus

    # pymilvus logs a traceback for every failure that it raises; the exception is enough.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        address = uri if uri.startswith(SCHEMES) else stack.enter_context(_serve_lite(Path(uri)))
        with translating_errors("connect"):
            client = pymilvus.MilvusClient(
                address, token=token, timeout=CONNECT_S, dedicated=True, grpc_options=CHANNEL
            )
        stack.callback(client.close)
        collection = ExistingCollection(client, name)
        stack.enter_context(collection.keep_loaded())
        yield collection


@contextmanager
def _serve_lite(directory: Path) -> Iterator[str]:
    if not directory.exists():
        raise FileNotFoundError(f"there is no Milvus Lite directory {directory}")
    # Lite would create its files in any other directory.
    if not (directory / "collections").is_dir():
        raise FileNotFoundError(f"{directory} is no directory of Milvus Lite 3, which has a folder named collections")
    if find_spec("milvus_lite") is None:
        raise IndexUnavailable("Milvus Lite is not installed: pip install '.[server]'")
    from milvus_lite.adapter.grpc.server import start_server_in_thread
    from milvus_lite.exceptions import MilvusLiteError

    try:
        server, database, port = start_server_in_thread(str(directory.absolute()))
    except (MilvusLiteError, OSError, ValueError) as error:
        raise IndexUnavailable(f"Milvus Lite cannot open {directory}: {error}") from error
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(2).wait()
        database.close()


def _decode_field(described: dict[str, Any]) -> Field:
    return Field(
        described["name"],
        described["type"].name,
        int(described["params"].get("dim", 0)),
        bool(described.get("is_primary")),
    )


def _quote_key(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
