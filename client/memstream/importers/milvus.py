"""A collection of a Milvus server, or of a Milvus Lite directory that no other process has open; it is not changed."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memstream.importers.memories import TEXT_FIELDS, with_fields
from memstream.importers.records import InvalidSource, Options, Record, Report, plain_metadata
from memstream.importers.sources import Source

PAGE_ROWS = 256
CONNECT_S, CALL_S, LOAD_S = 10.0, 60.0, 600.0
_KEEPALIVE = {"grpc.keepalive_time_ms": 600_000}
"""With pymilvus' 10 s, Lite closes the connection (too_many_pings)."""


def is_milvus(source: Source) -> bool:
    """A server's address, or a directory of Milvus Lite 3."""
    if source.path is None:
        return not source.uri.startswith("postgres")
    return source.path.is_dir() and (source.path / "collections").is_dir() and source.find("chroma.sqlite3") is None


def read_milvus(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """The rows of one collection, ascending by the primary key."""
    with ExitStack() as stack:
        client = stack.enter_context(_connect(source, options.milvus_token))
        collection = _choose_collection(client, source, options.collection)
        described = client.describe_collection(collection, timeout=CALL_S)
        key = next(str(one["name"]) for one in described["fields"] if one.get("is_primary"))
        of_vectors = [str(one["name"]) for one in described["fields"] if one["type"].name.endswith("_VECTOR")]
        vector = _choose_vector(of_vectors, options)
        stack.enter_context(_keep_loaded(client, collection))
        text_field = ""
        for row in _iterate_rows(client, collection, key, [] if vector else of_vectors, described):
            text_field = text_field or _choose_text(row, described, options)
            yield from _read_row(row, (collection, key, text_field, vector), of_vectors, options, report)


def _read_row(
    row: Mapping[str, Any],
    names: tuple[str, str, str, str],
    of_vectors: Sequence[str],
    options: Options,
    report: Report,
) -> Iterator[Record]:
    collection, key, text_field, vector = names
    place = f"{collection}: {key} {row[key]!r}"
    text = row.get(text_field)
    if not isinstance(text, str) or not text.strip():
        report.skip(f"has no text in {text_field}", place)
        return
    if not vector:
        report.lose("embeddings (the server embeds the texts again)", bool(of_vectors))
    others = {name: value for name, value in row.items() if name not in (key, text_field, *of_vectors)}
    record = Record(
        id=f"{collection}:{row[key]}",
        text=text,
        metadata=plain_metadata(others),
        embedding=_unit(row.get(vector), place) if vector else None,
        place=place,
    )
    yield from with_fields(record, row, options, report)


def _unit(value: Any, place: str) -> tuple[float, ...] | None:
    """The vector; None for one of zeros. Raises InvalidSource for numbers that are not finite."""
    vector = tuple(map(float, value or ()))
    if not all(map(math.isfinite, vector)):
        raise InvalidSource(f"{place}: its vector has a number that is not finite")
    return vector if any(vector) else None


def _choose_collection(client: Any, source: Source, wanted: str) -> str:
    names = sorted(client.list_collections(timeout=CALL_S))
    chosen = wanted or (names[0] if len(names) == 1 else "")
    if chosen not in names:
        raise InvalidSource(f"{source.shown}: name one of its collections with --collection: {', '.join(names) or '-'}")
    return str(chosen)


def _choose_vector(of_vectors: Sequence[str], options: Options) -> str:
    """The field of the vector to keep; empty: none is kept."""
    if not options.model:
        return ""
    wanted = options.fields.get("vector") or (of_vectors[0] if len(of_vectors) == 1 else "")
    if wanted not in of_vectors:
        listed = ", ".join(of_vectors) or "none"
        raise InvalidSource(f"name the vectors with --field vector=NAME: the collection has {listed}")
    return wanted


def _choose_text(row: Mapping[str, Any], described: Mapping[str, Any], options: Options) -> str:
    listed = ", ".join(sorted(row))
    wanted = options.fields.get("text") or next((one for one in TEXT_FIELDS if isinstance(row.get(one), str)), "")
    if not wanted:
        raise InvalidSource(f"no field has text by its name: name it with --field text=NAME, of {listed}")
    known = {str(one["name"]) for one in described["fields"]}
    missing = [one for one in {wanted, *options.fields.values()} if one not in row and one not in known]
    if missing and not described.get("enable_dynamic_field"):
        raise InvalidSource(f"there is no field {', '.join(sorted(missing))}: there are {listed}")
    return wanted


def _iterate_rows(
    client: Any, collection: str, key: str, without: Sequence[str], described: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    # Not pymilvus' query_iterator: it does not escape text keys in its filter.
    names = [str(one["name"]) for one in described["fields"] if one["name"] not in without]
    # All dynamic fields come with "*" alone, which has the vectors, too.
    fields = ["*"] if described.get("enable_dynamic_field") else names
    chosen = ""
    while rows := client.query(
        collection,
        filter=chosen,
        output_fields=fields,
        limit=PAGE_ROWS,
        # The first rows by primary key, not any rows.
        iterator="True",
        reduce_stop_for_best="True",
        consistency_level="Strong",
        timeout=CALL_S,
    ):
        # Milvus 2.3 returns the limit from each of its segments.
        page = sorted((dict(row) for row in rows), key=lambda row: row[key])[:PAGE_ROWS]
        yield from page
        chosen = f"{key} > {_quote_key(page[-1][key])}"


def _quote_key(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


@contextmanager
def _keep_loaded(client: Any, collection: str) -> Iterator[None]:
    """Loads the collection for the block; releases it if it was not loaded before."""
    state = str(client.get_load_state(collection, timeout=CALL_S)["state"])
    if state != "Loaded":
        client.load_collection(collection, timeout=LOAD_S)
    try:
        yield
    finally:
        if state == "NotLoad":  # not if another client was loading it
            client.release_collection(collection, timeout=CALL_S)


@contextmanager
def _connect(source: Source, token: str) -> Iterator[Any]:
    try:
        import grpc
        import pymilvus
    except ImportError as error:
        raise InvalidSource("a Milvus collection needs pymilvus: pip install '.[server]'") from error
    # pymilvus logs a traceback for every failure that it raises; the exception is enough.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        address = source.uri if source.path is None else stack.enter_context(_serve_lite(source.path))
        try:
            client = pymilvus.MilvusClient(
                address, token=token, timeout=CONNECT_S, dedicated=True, grpc_options=_KEEPALIVE
            )
            stack.callback(client.close)
            yield client
        except pymilvus.MilvusException as error:
            raise InvalidSource(f"Milvus at {source.shown}: {error.message} (code {error.code})") from error
        except (grpc.RpcError, grpc.FutureTimeoutError) as error:
            raise InvalidSource(f"Milvus at {source.shown} does not answer: {error}") from error


@contextmanager
def _serve_lite(directory: Path) -> Iterator[str]:
    """Serves a directory in this process, under Lite's lock."""
    # Lite would create its files in any other directory.
    if not (directory / "collections").is_dir():
        raise InvalidSource(f"{directory} is no directory of Milvus Lite 3, which has a folder named collections")
    if find_spec("milvus_lite") is None:
        raise InvalidSource("a directory of Milvus Lite needs milvus-lite: pip install '.[server]'")
    from milvus_lite.adapter.grpc.server import start_server_in_thread
    from milvus_lite.exceptions import MilvusLiteError

    try:
        server, database, port = start_server_in_thread(str(directory.absolute()))
    except (MilvusLiteError, OSError, ValueError) as error:
        raise InvalidSource(f"Milvus Lite cannot open {directory}: {error}") from error
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(2).wait()
        database.close()
