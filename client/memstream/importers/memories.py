"""Facts of other memories: the MCP memory server, mem0, LangGraph's stores, and Chroma."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

from memstream.importers.records import (
    InvalidSource,
    Options,
    Record,
    Report,
    digest_of,
    plain_metadata,
    time_of,
)
from memstream.importers.sources import Source, is_sqlite

TEXT_FIELDS = ("text", "content", "memory", "data", "document", "value")
"""Fields of a row that may hold its text, in order of preference."""


# The MCP memory server.


def read_mcp_memory(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """Entities, their observations and their relations: JSON Lines, or one object with lists of both."""
    name = source.names[0]
    for place, line in _graph_lines(source, name):
        if line.get("type") == "relation" or "relationType" in line:
            yield from _read_relation(line, report, place)
        elif line.get("type") == "entity" or "entityType" in line:
            yield from _read_entity(line, report, place)
        else:
            report.skip("is neither an entity nor a relation", place)


def _graph_lines(source: Source, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with source.open(name) as entries:
        one_object = entries.read(1 << 16).lstrip().startswith((b'{"entities"', b"{\n", b"{ "))
    if one_object:
        for key in ("entities", "relations"):
            with source.open(name) as entries:
                yield from ((f"{name}: {key} {n}", one) for n, one in entries.items(f"{key}.item"))
        return
    with source.open(name) as entries:
        for number, text in entries.lines():
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InvalidSource(f"{name}:{number}: is no JSON, or the file is cut off ({error})") from error
            yield f"{name}:{number}", line if isinstance(line, dict) else {}


def _read_entity(line: Mapping[str, Any], report: Report, place: str) -> Iterator[Record]:
    entity, kind = str(line.get("name") or ""), str(line.get("entityType") or "")
    if not entity:
        report.skip("the entity has no name", place)
        return
    report.keep("entities")
    about = plain_metadata({"entity": entity, "entity_type": kind})
    observations = [one for one in line.get("observations") or () if isinstance(one, str) and one.strip()]
    if not observations:
        text = f"{entity}: {kind}" if kind else entity
        yield Record(id=f"entity/{digest_of(entity)}", text=text, metadata=about, place=place)
    for observation in dict.fromkeys(observations):
        key = f"{digest_of(entity)}/{digest_of(observation)}"
        yield Record(id=f"entity/{key}", text=f"{entity}: {observation}", metadata=about, place=place)


def _read_relation(line: Mapping[str, Any], report: Report, place: str) -> Iterator[Record]:
    ends = [str(line.get(key) or "") for key in ("from", "relationType", "to")]
    if not all(ends):
        report.skip("the relation lacks from, relationType or to", place)
        return
    report.keep("relations")
    about = plain_metadata(dict(zip(("from", "relation", "to"), ends, strict=True)))
    text = f"{ends[0]} {ends[1].replace('_', ' ')} {ends[2]}"
    yield Record(id=f"relation/{digest_of(chr(10).join(ends))}", text=text, metadata=about, place=place)


# mem0.

_MEM0_OWN = ("id", "memory", "hash", "score", "created_at", "updated_at", "metadata", "run_id", "actor_id", "role")


def read_mem0(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """The answer of `get_all` ({"results": [...]}) or an export: a list, or {"memories": [...]}."""
    name = source.names[0]
    with source.open(name) as entries:
        first = next((prefix for prefix, event, _ in entries.events() if event == "start_array"), None)
    if first is None:
        raise InvalidSource(f"{name}: has no list of memories")
    with source.open(name) as entries:
        for number, row in entries.items(f"{first}.item".lstrip(".")):
            place = f"{name}: memory {number}"
            own = row if isinstance(row, dict) else {}
            text = own.get("memory") or own.get("data") or own.get("text")
            if not isinstance(text, str) or not text.strip():
                report.skip("has no text", place)
                continue
            given = own.get("metadata") if isinstance(own.get("metadata"), dict) else {}
            others = {key: value for key, value in own.items() if key not in (*_MEM0_OWN, "data", "text")}
            report.lose("times of updates", own.get("updated_at") not in (None, own.get("created_at")))
            yield Record(
                id=str(own.get("id") or own.get("hash") or digest_of(text)),
                text=text,
                session=str(own.get("run_id") or ""),
                speaker=str(own.get("actor_id") or ""),
                time=time_of(own.get("created_at")),
                metadata=plain_metadata({**others, **(given or {})}),
                place=place,
            )
    if first == "results":
        with source.open(name) as entries:
            report.lose("relations of the graph", sum(1 for _ in entries.items("relations.item")))


# LangGraph's stores.


def read_langgraph(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """The items of the table `store`, of SqliteStore (a file) or PostgresStore (a URI)."""
    rows = postgres_rows(source.uri, STORE_ROWS) if source.path is None else _sqlite_store_rows(source)
    for prefix, key, value, created, ttl in rows:
        place = f"{source.title}: {prefix} {key}"
        report.lose("times to live", ttl is not None)
        read = json.loads(value) if isinstance(value, str | bytes) else value
        text, about = split_text(read if isinstance(read, dict) else {"value": read}, options, report)
        if not text:
            report.skip("has no text", place)
            continue
        yield from with_fields(
            Record(
                id=f"{prefix}/{key}",
                text=text,
                time=time_of(created),
                metadata=plain_metadata({**about, "namespace": str(prefix), "key": str(key)}),
                place=place,
            ),
            about,
            options,
            report,
        )


def _sqlite_store_rows(source: Source) -> Iterator[tuple[Any, ...]]:
    name = source.names[0]
    ttl = "ttl_minutes" if has_table(source, name, "store", {"ttl_minutes"}) else "NULL"  # not in older stores
    with closing(open_sqlite(source, name)) as database:
        yield from database.execute(f"SELECT prefix, key, value, created_at, {ttl} FROM store ORDER BY prefix, key")


STORE_ROWS = "SELECT prefix, key, value, created_at, to_jsonb(store) ->> 'ttl_minutes' FROM store ORDER BY prefix, key"


def postgres_rows(uri: str, query: str) -> Iterator[tuple[Any, ...]]:
    """The rows of a query, in parts. Raises InvalidSource."""
    try:
        import psycopg
    except ImportError as error:
        raise InvalidSource("a PostgreSQL database needs psycopg: pip install '.[postgres]'") from error
    try:
        with psycopg.connect(uri, connect_timeout=10) as database, database.cursor("memstream_import") as rows:
            rows.itersize = 500
            rows.execute(query)
            yield from rows
    except psycopg.Error as error:
        why = str(error).split("\n")[0]
        raise InvalidSource(f"the store cannot be read: {why}") from error


# Chroma.


def chroma_file(source: Source) -> str | None:
    """The database of a directory that Chroma persists to."""
    named = source.find("chroma.sqlite3")
    return named if named is not None and is_sqlite(source, named) else None


def read_chroma(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """The documents of one collection with their metadata. Vectors are in files of Chroma's own form: not read."""
    name = chroma_file(source)
    if name is None:
        raise InvalidSource(f"{source.shown}: has no chroma.sqlite3")
    with closing(open_sqlite(source, name)) as database:
        names = [row[0] for row in database.execute("SELECT name FROM collections ORDER BY name")]
        collection = options.collection or (names[0] if len(names) == 1 else "")
        if collection not in names:
            raise InvalidSource(f"{source.shown}: name one of its collections with --collection: {', '.join(names)}")
        rows = database.execute(
            "SELECT e.id, e.embedding_id, e.created_at, "
            "m.key, m.string_value, m.int_value, m.float_value, m.bool_value "
            "FROM collections c JOIN segments s ON s.collection = c.id JOIN embeddings e ON e.segment_id = s.id "
            "LEFT JOIN embedding_metadata m ON m.id = e.id WHERE c.name = ? ORDER BY e.id, m.key",
            (collection,),
        )
        lists = has_table(source, name, "embedding_metadata_array", {"id", "key"})
        for number, key, made, found in _group_chroma(rows):
            place = f"{collection}: {key}"
            if lists:
                found |= _chroma_lists(database, number)
            text = found.get(options.fields.get("text", "chroma:document"))
            if not isinstance(text, str) or not text.strip():
                report.skip("has no document", place)
                continue
            report.lose("embeddings (the server embeds the texts again)")
            about = {one: value for one, value in found.items() if not one.startswith("chroma:")}
            record = Record(
                id=f"{collection}/{key}",
                text=text,
                time=time_of(made),
                metadata=plain_metadata(about),
                place=place,
            )
            yield from with_fields(record, found, options, report)


def _group_chroma(
    rows: Iterator[tuple[Any, ...]] | sqlite3.Cursor,
) -> Iterator[tuple[int, str, Any, dict[str, Any]]]:
    """Rows of one embedding, one for each key of its metadata, as one: its number, id, time and metadata."""
    for (number, key, made), group in groupby(rows, lambda row: row[:3]):
        yield number, str(key), made, {str(row[3]): _chroma_value(*row[4:]) for row in group if row[3] is not None}


def _chroma_lists(database: sqlite3.Connection, number: int) -> dict[str, list[Any]]:
    """The metadata of an embedding whose values are lists, which Chroma 1.5 and later keep apart."""
    found: dict[str, list[Any]] = {}
    for key, *values in database.execute(
        "SELECT key, string_value, int_value, float_value, bool_value FROM embedding_metadata_array "
        "WHERE id = ? ORDER BY rowid",
        (number,),
    ):
        found.setdefault(str(key), []).append(_chroma_value(*values))
    return found


def _chroma_value(text: str | None, whole: int | None, real: float | None, flag: int | None) -> Any:
    return bool(flag) if flag is not None else next((one for one in (text, whole, real) if one is not None), None)


# Rows with fields, for all of these.


def open_sqlite(source: Source, name: str) -> sqlite3.Connection:
    """A database, read only. Raises InvalidSource: for a member of an archive, too."""
    if source.path is None or (source.path.is_file() and PurePosixPath(name).name != source.path.name):
        raise InvalidSource(f"{source.shown}: unpack the archive: a database is not read from inside it")
    path = source.path / name if source.path.is_dir() else source.path
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.Error as error:
        raise InvalidSource(f"{path}: cannot be read: {error}") from error
    return database


def has_table(source: Source, name: str, table: str, columns: set[str]) -> bool:
    """Whether a SQLite file has a table with these columns."""
    if not is_sqlite(source, name):
        return False
    with closing(open_sqlite(source, name)) as database:
        return columns <= {str(row[1]) for row in database.execute(f"PRAGMA table_info({table})")}


def split_text(row: Mapping[str, Any], options: Options, report: Report) -> tuple[str, dict[str, Any]]:
    """The text of a row and its other fields; without a field of text the row itself as JSON."""
    wanted = options.fields.get("text")
    named = wanted or next((one for one in TEXT_FIELDS if isinstance(row.get(one), str)), None)
    if named is None:
        return json.dumps(row, ensure_ascii=False, default=str) if row else "", {}
    text = row.get(named)
    return text if isinstance(text, str) else "", {key: value for key, value in row.items() if key != named}


def with_fields(record: Record, row: Mapping[str, Any], options: Options, report: Report) -> Iterator[Record]:
    """The record with what `--field` takes from its row. Skips one with an importance that is none."""
    from dataclasses import replace

    changed: dict[str, Any] = {
        name: str(row[field])
        for name in ("id", "speaker", "session")
        if (field := options.fields.get(name)) and row.get(field) is not None
    }
    if field := options.fields.get("time"):
        changed["time"] = time_of(row.get(field), options.time_zone, required=True)
    if (field := options.fields.get("importance")) and row.get(field) is not None:
        value = row[field]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            report.skip(f"{field} must be a number from 0 to 1, is {value!r}", record.place)
            return
        changed["importance"] = float(value)
    yield replace(record, **changed)
