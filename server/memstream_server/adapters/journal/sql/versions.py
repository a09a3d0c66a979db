"""Versions: keeps what a fragment said before a commit replaces it, and reads it again.

A version is copied from the stored row inside the database, with its terms and its vector: the commit's values are not
encoded a second time, and a recall as of an earlier revision ranks with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import BindParameter, Connection, bindparam, delete, func, select

from memstream_server.adapters.journal.sql import bulk, codec
from memstream_server.adapters.journal.sql.bulk import IDS_MAX
from memstream_server.adapters.journal.sql.reads import find_number, find_row
from memstream_server.adapters.journal.sql.schema import events, fragments, key_position, key_range, versions
from memstream_server.adapters.journal.sql.vector_forms import Computing, decode_bytes, pack
from memstream_server.core.events import EventType
from memstream_server.ports.journal.records import FragmentVersion
from memstream_server.ports.journal.writing import Commit

_KEEP = bulk.Bulk(
    "WITH given (memory, id, replaced, time_us, event, principal, space) AS (VALUES ",
    7,
    ") INSERT INTO versions (key, replaced, time_us, event, principal, model, payload, terms, vector)"
    " SELECT fragments.key, given.replaced, given.time_us, given.event, given.principal,"
    " coalesce(vectors.model, ''), fragments.payload, fragments.terms, vectors.vector"
    " FROM given JOIN fragments ON fragments.id = given.id AND fragments.memory = given.memory"
    " LEFT JOIN vectors ON vectors.key = fragments.key AND vectors.model = given.space",
)
_TRIM = bulk.Bulk(
    "WITH given (memory, id, kept, since) AS (VALUES ",
    4,
    ") DELETE FROM versions WHERE (key, replaced) IN (SELECT old.key, old.replaced FROM given"
    " JOIN fragments ON fragments.id = given.id AND fragments.memory = given.memory"
    " JOIN versions AS old ON old.key = fragments.key"
    " WHERE old.time_us < given.since OR given.kept <="
    " (SELECT count(*) FROM versions AS newer WHERE newer.key = old.key AND newer.replaced > old.replaced))",
)

_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_number: BindParameter[int] = bindparam("m")
_ids: BindParameter[Any] = bindparam("ids", expanding=True)
_COLUMNS = (versions.c.payload, versions.c.replaced, versions.c.time_us, versions.c.event, versions.c.principal)
_ALL_OF_ONE = (
    select(*_COLUMNS)
    .join(fragments, fragments.c.key == versions.c.key)
    .where(fragments.c.memory == _number, fragments.c.id == bindparam("id"))
    .order_by(versions.c.replaced.desc())
)
_KEYS = (
    select(fragments.c.id, versions.c.replaced)
    .join(fragments, fragments.c.key == versions.c.key)
    .where(versions.c.key.between(_low, _high))
    .order_by(versions.c.key, versions.c.replaced)
)
_SOME = (
    select(fragments.c.id, *_COLUMNS, versions.c.terms, versions.c.vector, versions.c.model)
    .join(fragments, fragments.c.key == versions.c.key)
    .where(
        fragments.c.memory == _number,
        fragments.c.id.in_(_ids),
        versions.c.replaced.in_(bindparam("replaced", expanding=True)),
    )
)
_FORGET = delete(versions).where(
    versions.c.key.in_(select(fragments.c.key).where(fragments.c.memory == _number, fragments.c.id.in_(_ids)))
)
_DROP = delete(versions).where(versions.c.key.between(_low, _high))
_PRUNE = _DROP.where(versions.c.time_us < bindparam("before"))
_REVISION = select(func.max(events.c.key)).where(
    events.c.key.between(_low, _high), events.c.time_us <= bindparam("until")
)


# ---- writes


def keep_versions(connection: Connection, number: int, commit: Commit) -> None:
    """Copy the stored rows of the commit's `replaced`, before it writes them, and delete those beyond the limits."""
    if not commit.replaced:
        return
    at, time_us = commit.revision + 1, commit.time_us
    kept = [(number, one.fragment, at, time_us, one.event.value, one.principal, one.space) for one in commit.replaced]
    bulk.write_rows(connection, _KEEP, kept)
    limits = (commit.versions_max, commit.versions_since_us)
    bulk.write_rows(connection, _TRIM, [(number, one.fragment, *limits) for one in commit.replaced])


def forget_versions(connection: Connection, number: int, ids: Sequence[str]) -> None:
    """Delete all versions of these fragments."""
    for start in range(0, len(ids), IDS_MAX):
        connection.execute(_FORGET, {"m": number, "ids": list(ids[start : start + IDS_MAX])})


def drop_versions(connection: Connection, number: int) -> None:
    """Delete all versions of a memory."""
    low, high = key_range(number)
    connection.execute(_DROP, {"low": low, "high": high})


def prune_versions(connection: Connection, uid: str, before_us: int) -> int:
    number = find_number(connection, uid)
    if number is None:
        return 0
    low, high = key_range(number)
    return connection.execute(_PRUNE, {"low": low, "high": high, "before": before_us}).rowcount


# ---- reads


def list_versions(connection: Connection, uid: str, fragment: str) -> list[FragmentVersion]:
    number = find_number(connection, uid)
    if number is None:
        return []
    return [_decode_version(*row) for row in connection.execute(_ALL_OF_ONE, {"m": number, "id": fragment})]


def read_keys(connection: Connection, uid: str) -> dict[str, list[int]]:
    number = find_number(connection, uid)
    found: dict[str, list[int]] = {}
    if number is not None:
        low, high = key_range(number)
        for id_, replaced in connection.execute(_KEYS, {"low": low, "high": high}):
            found.setdefault(id_, []).append(replaced)
    return found


def read_versions(
    connection: Connection, computing: Computing, uid: str, wanted: Mapping[str, int]
) -> dict[str, FragmentVersion]:
    memory = find_row(connection, uid)
    found: dict[str, FragmentVersion] = {}
    if memory is None:
        return found
    ids = list(wanted)
    for start in range(0, len(ids), IDS_MAX):
        some = ids[start : start + IDS_MAX]
        values = {"m": memory.number, "ids": some, "replaced": sorted({wanted[id_] for id_ in some})}
        for id_, *columns in connection.execute(_SOME, values):
            version = _decode_version(*columns)
            if version.replaced == wanted[id_]:
                found[id_] = version
    return found | _compute_vectors(computing, memory.namespace, found)


def _compute_vectors(
    computing: Computing, namespace: str, found: Mapping[str, FragmentVersion]
) -> dict[str, FragmentVersion]:
    """Those of the versions whose vectors are not stored, with them."""
    out: dict[str, FragmentVersion] = {}
    lacking = {id_: version for id_, version in found.items() if version.model and version.vector is None}
    for model in {version.model for version in lacking.values()}:
        some = [id_ for id_, version in lacking.items() if version.model == model]
        made = computing.compute(model, [lacking[id_].fragment for id_ in some], namespace)
        out |= {id_: replace(lacking[id_], vector=pack(vector)) for id_, vector in zip(some, made, strict=True)}
    return out


def _decode_version(
    payload: bytes,
    replaced: int,
    time_us: int,
    event: str,
    principal: str,
    terms: bytes | None = None,
    vector: bytes | None = None,
    model: str = "",
) -> FragmentVersion:
    fragment, packed = codec.decode_fragment(payload, 0, 0), pack(decode_bytes(vector)) if vector else None
    return FragmentVersion(
        fragment, replaced, time_us, EventType(event), principal, codec.decode_terms(terms), packed, model
    )


def find_revision(connection: Connection, uid: str, time_us: int) -> int | None:
    number = find_number(connection, uid)
    if number is None:
        return None
    low, high = key_range(number)
    found = connection.execute(_REVISION, {"low": low, "high": high, "until": time_us}).scalar_one()
    return None if found is None else key_position(found)
