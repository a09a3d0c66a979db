"""Receipts of recalls in the journal: kept and trimmed by commits, marked by erasures, listed from the latest on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec.structs
from sqlalchemy import BindParameter, Connection, bindparam, delete, func, insert, select, update

from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.bulk import IDS_MAX
from memstream_server.adapters.journal.sql.reads import find_number
from memstream_server.adapters.journal.sql.schema import (
    fragments,
    key_position,
    key_range,
    recall_receipts,
    row_key,
    versions,
)
from memstream_server.ports.journal.records import RecallReceipt
from memstream_server.ports.journal.writing import Commit

PAGE_BYTES = 4 << 20
"""Bytes of receipts that are read at once; one that is larger comes alone."""
_HASH_BYTES = 8

_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_number: BindParameter[int] = bindparam("m")
_ids: BindParameter[Any] = bindparam("ids", expanding=True)
_OF_MEMORY = recall_receipts.c.key.between(_low, _high)
_FIRST_OVER = (
    select(recall_receipts.c.key)
    .where(_OF_MEMORY)
    .order_by(recall_receipts.c.key.desc())
    .offset(bindparam("kept"))
    .limit(1)
)
_DELETE = delete(recall_receipts).where(_OF_MEMORY)
_PRUNE = _DELETE.where(recall_receipts.c.time_us < bindparam("before"))
_ALL = select(recall_receipts.c.key, recall_receipts.c.payload).where(_OF_MEMORY)
_SIZES = (
    select(recall_receipts.c.key, func.length(recall_receipts.c.payload))
    .where(_OF_MEMORY)
    .order_by(recall_receipts.c.key.desc())
    .limit(bindparam("limit"))
)
_LATEST_FIRST = _ALL.order_by(recall_receipts.c.key.desc())
_ONE = select(recall_receipts.c.payload).where(_OF_MEMORY, recall_receipts.c.id == bindparam("id"))
_CHANGE = update(recall_receipts).where(recall_receipts.c.key == bindparam("at")).values(payload=bindparam("new"))
_named = (fragments.c.memory == _number) & fragments.c.id.in_(_ids)
_TERMS = (
    select(fragments.c.terms).where(_named),
    select(versions.c.terms).join(fragments, fragments.c.key == versions.c.key).where(_named),
)


# ---- writes


def keep_receipt(connection: Connection, number: int, commit: Commit) -> None:
    """Write the commit's receipt, and delete those beyond the limit."""
    if (receipt := commit.recall_receipt) is not None:
        row = {
            "key": row_key(number, commit.revision + 1),
            "id": receipt.id,
            "time_us": receipt.time_us,
            "payload": codec.encode_record(receipt),
        }
        connection.execute(insert(recall_receipts), row)
    if receipt is not None or commit.policy is not None:
        trim_receipts(connection, number, commit.recall_receipts_max)


def trim_receipts(connection: Connection, number: int, kept: int) -> None:
    """Delete all but the latest `kept` receipts of a memory."""
    low, high = key_range(number)
    over = connection.execute(_FIRST_OVER, {"low": low, "high": high, "kept": kept}).scalar_one_or_none()
    if over is not None:
        connection.execute(_DELETE, {"low": low, "high": over})


def erase_evidence(connection: Connection, number: int, ids: Sequence[str]) -> None:
    """Mark receipts that rank one of these fragments; erase their queries, and those that share a word with one.

    Called while the fragments, and the versions of what they said, are still there.
    """
    if not ids:
        return
    low, high = key_range(number)
    rows = connection.execute(_ALL, {"low": low, "high": high}).all()
    if not rows:
        return
    gone, words = set(ids), _read_words(connection, number, ids)
    for key, payload in rows:
        receipt = codec.decode_recall_receipt(payload)
        changed = _without_evidence(receipt, gone, words)
        if changed != receipt:
            connection.execute(_CHANGE, {"at": key, "new": codec.encode_record(changed)})


def _read_words(connection: Connection, number: int, ids: Sequence[str]) -> tuple[set[bytes], set[int]] | None:
    """(hashes of the words of these fragments, versions of the analyzer that made them); None if those of one are
    unknown."""
    found: set[bytes] = set()
    analyzers: set[int] = set()
    for start in range(0, len(ids), IDS_MAX):
        for statement in _TERMS:
            for blob in connection.execute(statement, {"m": number, "ids": ids[start : start + IDS_MAX]}).scalars():
                terms = codec.decode_terms(blob)
                if terms is None:
                    return None
                found.update(_split_hashes(terms.hashes))
                analyzers.add(terms.version)
    return found, analyzers


def _without_evidence(
    receipt: RecallReceipt, gone: set[str], words: tuple[set[bytes], set[int]] | None
) -> RecallReceipt:
    named = [one.id for one in receipt.ranking if one.id in gone]
    # Hashes of two versions of the analyzer do not compare: such a query may share a word.
    shares = (
        words is None or bool(words[1] - {receipt.analyzer}) or not words[0].isdisjoint(_split_hashes(receipt.terms))
    )
    if named:
        erased = tuple(dict.fromkeys((*receipt.erased, *named)))
        receipt = msgspec.structs.replace(receipt, erased=erased)
    if (named or shares) and not receipt.is_query_erased:
        receipt = msgspec.structs.replace(receipt, query=b"", vector=None, terms=b"")
    return receipt


def _split_hashes(packed: bytes) -> Iterator[bytes]:
    return (packed[at : at + _HASH_BYTES] for at in range(0, len(packed), _HASH_BYTES))


def prune_receipts(connection: Connection, uid: str, before_us: int) -> int:
    number = find_number(connection, uid)
    if number is None:
        return 0
    low, high = key_range(number)
    return connection.execute(_PRUNE, {"low": low, "high": high, "before": before_us}).rowcount


# ---- reads


def list_receipts(
    connection: Connection, uid: str, before: int | None, limit: int
) -> tuple[list[tuple[int, RecallReceipt]], bool]:
    number = find_number(connection, uid)
    if number is None:
        return [], False
    low, high = key_range(number)
    high = high if before is None else row_key(number, before) - 1
    sizes = connection.execute(_SIZES, {"low": low, "high": high, "limit": limit + 1}).all()
    total, count = 0, 0
    for _, size in sizes[:limit]:
        total += size
        if count and total > PAGE_BYTES:
            break
        count += 1
    if not count:
        return [], False
    rows = connection.execute(_LATEST_FIRST, {"low": sizes[count - 1][0], "high": sizes[0][0]})
    found = [(key_position(key), codec.decode_recall_receipt(payload)) for key, payload in rows]
    return found, len(sizes) > count


def get_receipt(connection: Connection, uid: str, id_: str) -> RecallReceipt | None:
    number = find_number(connection, uid)
    if number is None:
        return None
    low, high = key_range(number)
    payload = connection.execute(_ONE, {"low": low, "high": high, "id": id_}).scalar_one_or_none()
    return None if payload is None else codec.decode_recall_receipt(payload)
