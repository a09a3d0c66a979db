"""`memstream verify`: checks a memory's fragments, and what refers to them, against its event log.

What refers to fragments: their earlier versions, suspicions between two of them, and receipts of recalls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

from sqlalchemy import BigInteger, Boolean, Connection, Row, Select, bindparam, func, select

from memstream_server.adapters.journal.database.migrate import UNENTERED
from memstream_server.adapters.journal.sql import codec, reads
from memstream_server.adapters.journal.sql.bulk import PAGE_ROWS, fetch_pages, fetch_rows
from memstream_server.adapters.journal.sql.fragment_reads import FRAGMENT
from memstream_server.adapters.journal.sql.schema import (
    anchors,
    conflicts,
    event_fragments,
    events,
    fragments,
    key_position,
    key_range,
    outbox,
    recall_receipts,
    row_key,
    vectors,
    versions,
)
from memstream_server.adapters.journal.sql.vector_forms import has_valid_length
from memstream_server.core.events import Event, EventType, list_concerned
from memstream_server.core.replay_events import GONE, Place, fold_event, fold_known, list_differences, place_of
from memstream_server.core.suspicions import ConflictDecision, ConflictReason
from memstream_server.core.values import Enhancement, Fragment, Tier
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Space

if TYPE_CHECKING:
    from memstream_server.adapters.journal.verify.report import Report


_low, _high, _limit = (
    bindparam("low", type_=BigInteger),
    bindparam("high", type_=BigInteger),
    bindparam("limit", type_=BigInteger),
)
_columns = ("id", "tier", "kind", "session", "speaker", "external_id", "model", "forget_time_us", "due_time_us")
_FRAGMENTS: Select[*tuple[Any, ...]] = (
    select(fragments.c.key, *FRAGMENT, *(fragments.c[name] for name in _columns))
    .where(fragments.c.key.between(_low, _high))
    .order_by(fragments.c.key)
    .limit(_limit)
)
_EVENTS = (
    select(events.c.key, events.c.payload).where(events.c.key.between(_low, _high)).order_by(events.c.key).limit(_limit)
)
_ENTRIES = select(event_fragments.c.fragment, event_fragments.c.revision).where(
    event_fragments.c.memory == bindparam("number")
)
_ANCHORS = select(
    anchors.c.id,
    anchors.c.model,
    func.length(anchors.c.vector, type_=BigInteger),
    anchors.c.next_model,
    func.length(anchors.c.next_vector, type_=BigInteger),
    anchors.c.enhancements,
).where(anchors.c.memory == bindparam("number"))
_VECTORS = (
    select(vectors.c.key, vectors.c.model, func.length(vectors.c.vector, type_=BigInteger))
    .where(vectors.c.key.between(_low, _high))
    .order_by(vectors.c.key, vectors.c.model)
    .limit(_limit)
)
_OUTBOX = (
    select(outbox.c.id, outbox.c.fragment, outbox.c.deleted.cast(Boolean))
    .where(outbox.c.memory == bindparam("uid"), outbox.c.id > bindparam("after"))
    .order_by(outbox.c.id)
    .limit(_limit)
)


@dataclass(slots=True)
class _FragmentTable:
    """A memory's fragments, as read from the fragments table."""

    places: dict[str, Place] = field(default_factory=dict)
    models: dict[int, str] = field(default_factory=dict)
    """The space of each fragment's vector by key; empty for none."""
    ids: dict[int, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Source id -> a fragment that names it; sources that are found are removed."""
    supersedes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By id of a fragment that supersedes others: their ids."""


@dataclass(frozen=True, slots=True)
class _MemoryCheck:
    """The memory that is checked."""

    connection: Connection
    memory: Row[Any]
    name: str
    report: Report
    space: Space | None
    """The space in force."""
    computed: Collection[str]
    """Spaces whose vectors need not be stored."""

    def is_valid_vector(self, model: str, length: int, *, anchor: bool = False) -> bool:
        dimension = self.space.dimension if self.space is not None and model == self.space.model else None
        return has_valid_length(length, dimension, computed=model in self.computed, anchor=anchor)

    def add_violation(self, check: str, text: str, fragment: str = "") -> None:
        self.report.add_violation(check, text, self.name, fragment)

    def fetch_pages(self, statement: Select[*tuple[Any, ...]]) -> Iterable[list[Any]]:
        return fetch_pages(self.connection, statement, *key_range(self.memory.number))


def check_fragments(
    connection: Connection, memory: Row[Any], name: str, space: Space | None, report: Report, computed: Collection[str]
) -> bool:
    """Check everything of a memory except its producers; returns whether fragments were erased, or may have been before
    the log begins. Raises DBAPIError and JournalError for unreadable rows."""
    checking = _MemoryCheck(connection, memory, name, report, space, computed)
    enhancements = _check_anchors(checking)
    listing = _check_records(checking, enhancements)
    for id_ in enhancements:
        place = listing.places.get(id_)
        if place is None or place.tier is Tier.LONG_TERM or place.forgotten:
            checking.add_violation("anchors", "has an anchor and is not held", id_)
    present = sum(not place.forgotten for place in listing.places.values())
    if present != memory.fragments:
        text = f"has {present} fragments that are not forgotten, and counts {memory.fragments}"
        checking.add_violation("memories", text)
    _check_chains(checking, listing)
    _check_vectors(checking, listing, space)
    entered = _check_outbox(checking, listing)
    return _check_log(checking, listing, entered)


def _check_anchors(checking: _MemoryCheck) -> dict[str, tuple[Enhancement, ...]]:
    sides: dict[str, tuple[Enhancement, ...]] = {}
    for id_, *stored, packed in checking.connection.execute(_ANCHORS, {"number": checking.memory.number}):
        checking.report.count_checked("anchors")
        for model, length in zip(stored[::2], stored[1::2], strict=True):
            if length is not None and not checking.is_valid_vector(model, length, anchor=True):
                checking.add_violation("anchors", f"its content's vector has {length} bytes", id_)
        try:
            sides[id_] = codec.decode_enhancements(packed)
        except JournalError as error:
            checking.add_violation("anchors", f"its enhancements cannot be read: {error}", id_)
            sides[id_] = ()
    return sides


def _check_records(checking: _MemoryCheck, enhancements: dict[str, tuple[Enhancement, ...]]) -> _FragmentTable:
    listing = _FragmentTable()
    for key, blob, count, at, *columns in checking.fetch_pages(_FRAGMENTS):
        checking.report.count_checked("columns")
        id_ = columns[0]
        listing.ids[key] = id_
        try:
            fragment = codec.decode_fragment(blob, count, at)
        except JournalError as error:
            checking.add_violation("columns", f"its record cannot be read: {error}", id_)
            continue
        if fragment.id in listing.places:
            checking.add_violation("fragments", "exists twice", fragment.id)
        _check_columns(checking, fragment, key, columns)
        listing.models[key] = fragment.model
        listing.places[fragment.id] = place_of(fragment, enhancements.get(fragment.id, ()))
        for source in fragment.sources:
            checking.report.count_checked("lineage")
            listing.sources.setdefault(source, fragment.id)
        if fragment.supersedes:
            listing.supersedes[fragment.id] = fragment.supersedes
    for id_ in listing.places:
        listing.sources.pop(id_, None)
    return listing


def _check_chains(checking: _MemoryCheck, listing: _FragmentTable) -> None:
    """Both ends of a supersession name each other, the newer one is not forgotten, and no chain closes."""
    places, ended = listing.places, set[str]()
    for id_, place in places.items():
        if not place.superseded_by:
            continue
        checking.report.count_checked("chains")
        newer = places.get(place.superseded_by)
        if newer is None or newer.forgotten:
            what = "does not exist" if newer is None else "is forgotten"
            checking.add_violation("chains", f"is superseded by {place.superseded_by}, which {what}", id_)
        elif id_ not in listing.supersedes.get(place.superseded_by, ()):
            checking.add_violation("chains", f"is superseded by {place.superseded_by}, which does not name it", id_)
        passed: dict[str, None] = {}
        at = id_
        while at in places and at not in ended and at not in passed and places[at].superseded_by:
            passed[at] = None
            at = places[at].superseded_by
        if at in passed:
            checking.add_violation("chains", "is part of a chain that closes", id_)
        ended.update(passed)
    for id_, older in listing.supersedes.items():
        for each in older:
            there = places.get(each)
            if there is None:
                checking.add_violation("chains", f"names {each} as superseded, which does not exist", id_)
            elif id_ in places and not places[id_].forgotten and there.superseded_by != id_:
                checking.add_violation("chains", f"names {each} as superseded, which does not name it", id_)


def _check_columns(checking: _MemoryCheck, fragment: Fragment, key: int, columns: list[Any]) -> None:
    due = None if fragment.pinned or fragment.forget_time_us is not None else fragment.expire_time_us
    said = {
        "id": fragment.id,
        "tier": fragment.tier.value,
        "kind": fragment.kind.value,
        "session": fragment.session,
        "speaker": fragment.speaker,
        "external_id": fragment.external_id or None,
        "model": fragment.model,
        "forget_time_us": fragment.forget_time_us,
        "due_time_us": due,
    }
    for name, column in zip(_columns, columns, strict=True):
        if column != said[name]:
            checking.add_violation("columns", f"column {name} has {column!r}, its record {said[name]!r}", fragment.id)
    if fragment.position != key_position(key):
        checking.add_violation(
            "columns", f"is at position {key_position(key)}, its record says {fragment.position}", fragment.id
        )
    if fragment.position >= checking.memory.next_position:
        checking.add_violation("columns", f"is at position {fragment.position}, which is not assigned yet", fragment.id)
    if fragment.version > checking.memory.revision:
        checking.add_violation("columns", f"has version {fragment.version}, above the memory's revision", fragment.id)


def _check_vectors(checking: _MemoryCheck, listing: _FragmentTable, space: Space | None) -> None:
    # A record from before a reindex names the former space, whose vectors are gone.
    missing = {key: model for key, model in listing.models.items() if model and (space is None or model == space.model)}
    for key, model, length in _vector_rows(checking):
        checking.report.count_checked("vectors")
        id_ = listing.ids.get(key)
        if id_ is None:
            checking.add_violation("vectors", f"a vector is at position {key_position(key)}, which has no fragment")
            continue
        if missing.get(key) == model:
            del missing[key]
        if not checking.is_valid_vector(model, length):
            in_force = space is not None and model == space.model
            of = f", the space in force has {space.dimension} numbers" if space is not None and in_force else ""
            checking.add_violation("vectors", f"its vector of {model} has {length} bytes{of}", id_)
    for key, model in missing.items():
        checking.add_violation("vectors", f"its vector of {model} is missing", listing.ids[key])


def _vector_rows(checking: _MemoryCheck) -> Iterator[list[Any]]:
    """Not `pages`: a fragment may have vectors of two spaces, and both must be in the same page."""
    low, high = key_range(checking.memory.number)
    while True:
        rows = fetch_rows(checking.connection, _VECTORS, {"low": low, "high": high, "limit": PAGE_ROWS})
        if len(rows) < PAGE_ROWS:
            yield from rows
            return
        cut = rows[-1][0]
        yield from (row for row in rows if row[0] < cut)
        low = cut


def _check_outbox(checking: _MemoryCheck, listing: _FragmentTable) -> dict[str, None]:
    """Fragments with an outbox entry that are not in the fragments table."""
    entered: dict[str, None] = {}
    after = 0
    while True:
        values = {"uid": checking.memory.uid, "after": after, "limit": PAGE_ROWS}
        rows = fetch_rows(checking.connection, _OUTBOX, values)
        for id_, fragment, deleted in rows:
            checking.report.count_checked("outbox")
            after = id_
            if not deleted and fragment not in listing.places:
                entered[fragment] = None
        if len(rows) < PAGE_ROWS:
            return entered


# ---- the log


def _check_log(checking: _MemoryCheck, listing: _FragmentTable, entered: dict[str, None]) -> bool:
    """Returns whether the log has an erasure, or does not begin with the memory."""
    places: dict[str, Place] = {}
    first = last = named = 0
    is_erased = False
    for key, payload in checking.fetch_pages(_EVENTS):
        revision = key_position(key)
        checking.report.count_checked("revisions")
        first = first or revision
        if last and revision != last + 1:
            checking.add_violation("revisions", f"revision {revision} follows {last}")
        last = revision
        try:
            happened = codec.decode_events(payload)
        except JournalError as error:
            checking.add_violation("revisions", f"revision {revision} cannot be read: {error}")
            continue
        named += sum(_sum_entry(id_, revision) for id_ in list_concerned(happened))
        for event in happened:
            is_erased = is_erased or event.type is EventType.ERASED
            _fold_event(checking, places, event, revision, whole=first == 1)
            for id_ in (event.fragment, event.other):
                listing.sources.pop(id_, None)
                entered.pop(id_, None)
            if event.type in GONE and event.fragment in listing.places:
                checking.add_violation(
                    "fragments", f"left by revision {revision} ({event.type}) and still exists", event.fragment
                )
    if last != checking.memory.revision:
        checking.add_violation("revisions", f"the log ends at {last}, the memory is at {checking.memory.revision}")
    _check_entries(checking, named)
    _compare_places(checking, listing, places, whole=first == 1)
    if first != 1:
        checking.report.compacted[checking.name] = first
        return True
    for source, id_ in listing.sources.items():
        checking.add_violation("lineage", f"its source {source} was never in this memory", id_)
    for id_ in entered:
        checking.add_violation("outbox", "waits to be indexed and was never in this memory", id_)
    return is_erased


def _sum_entry(fragment: str, revision: int) -> int:
    return 1 << 64 | crc32(f"{fragment} {revision}".encode())


def _check_entries(checking: _MemoryCheck, named: int) -> None:
    """`named`: the sum over what the log names. The entries by which events are found are these, once all are made."""
    if reads.meta_value(checking.connection, UNENTERED) is not None:
        return
    found = sum(_sum_entry(*row) for row in checking.connection.execute(_ENTRIES, {"number": checking.memory.number}))
    if found != named:
        checking.add_violation("revisions", "events are not found by the fragments that they concern, or by others")


def _fold_event(checking: _MemoryCheck, places: dict[str, Place], event: Event, revision: int, *, whole: bool) -> None:
    """Fold one event. A gap in a log that should be complete is reported, and folding continues as after compaction."""
    try:
        if whole:
            fold_event(places, event)
        else:
            fold_known(places, event)
    except KeyError:
        text = f"revision {revision} mentions it ({event.type}) before it existed"
        checking.add_violation("revisions", text, event.fragment)
        fold_known(places, event)
    except ValueError as error:
        checking.add_violation("revisions", f"revision {revision}: {error}", event.fragment)


def _compare_places(checking: _MemoryCheck, listing: _FragmentTable, places: dict[str, Place], *, whole: bool) -> None:
    for id_, expected in places.items():
        listed = listing.places.get(id_)
        checking.report.count_checked("fragments")
        if listed is None:
            checking.add_violation("fragments", f"does not exist, its events say it is in {expected.tier}", id_)
            continue
        for text in list_differences(expected, listed):
            checking.add_violation("fragments", text, id_)
    for id_, listed in listing.places.items():
        if id_ not in places and whole:
            checking.report.count_checked("fragments")
            checking.add_violation("fragments", f"is in {listed.tier}, its events say it does not exist", id_)


_CONFLICTS = select(conflicts).where(conflicts.c.memory == bindparam("number"))
_known_ids = select(fragments.c.id).where(fragments.c.memory == bindparam("number"))
_STRAYS = {
    side.name: select(side).where(conflicts.c.memory == bindparam("number"), side.not_in(_known_ids))
    for side in (conflicts.c.newer, conflicts.c.older)
}
_REASONS, _DECISIONS = frozenset(ConflictReason), frozenset(ConflictDecision)


def check_conflicts(connection: Connection, memory: Row[Any], name: str, report: Report) -> None:
    """Each names two fragments of the memory, a known reason, and a known decision with its time. Raises DBAPIError."""
    for row in connection.execute(_CONFLICTS, {"number": memory.number}):
        report.count_checked("conflicts")
        if row.newer == row.older:
            report.add_violation("conflicts", "a suspicion names one fragment twice", name, row.newer)
        if row.reason not in _REASONS:
            report.add_violation("conflicts", f"its suspicion has the reason {row.reason!r}", name, row.newer)
        if row.decision and row.decision not in _DECISIONS:
            report.add_violation("conflicts", f"its suspicion has the decision {row.decision!r}", name, row.newer)
        if bool(row.decision) != (row.decide_time_us is not None):
            report.add_violation("conflicts", "its suspicion has a decision or its time, not both", name, row.newer)
    for side, statement in _STRAYS.items():
        for (id_,) in connection.execute(statement, {"number": memory.number}):
            report.add_violation("conflicts", f"is the {side} of a suspicion and is not in the memory", name, id_)


RECEIPTS_CHECK = "recall_receipts"
_RECEIPTS = (
    select(recall_receipts.c.key, recall_receipts.c.id, recall_receipts.c.payload, events.c.payload)
    .outerjoin(events, events.c.key == recall_receipts.c.key)
    .where(recall_receipts.c.key.between(bindparam("low"), bindparam("high")))
    .order_by(recall_receipts.c.key)
)


def check_recall_receipts(connection: Connection, memory: Row[Any], name: str, report: Report) -> None:
    """Each must be readable, of an earlier revision, and named by the RECALLED of its revision. Raises DBAPIError."""
    low, high = key_range(memory.number)
    for key, id_, payload, logged in connection.execute(_RECEIPTS, {"low": low, "high": high}):
        report.count_checked(RECEIPTS_CHECK)
        for text in _find_receipt_faults(key_position(key), id_, payload, logged, memory.revision):
            report.add_violation(RECEIPTS_CHECK, f"the receipt {id_} {text}", name)


def _find_receipt_faults(written: int, id_: str, payload: bytes, logged: bytes | None, revision: int) -> list[str]:
    """`logged`: the events of the revision that wrote it; None if the log no longer has it."""
    try:
        receipt = codec.decode_recall_receipt(payload)
        happened = () if logged is None else codec.decode_events(logged)
    except (JournalError, ValueError) as error:
        return [f"cannot be read: {error}"]
    found = []
    if receipt.id != id_:
        found.append(f"says that it is {receipt.id}")
    if written > revision:
        found.append("is above the memory's revision")
    if receipt.revision >= written:
        found.append(f"ranks revision {receipt.revision}, and was written by revision {written}")
    if logged is not None and not any(one.type is EventType.RECALLED and one.receipt == id_ for one in happened):
        found.append("is not named by an event of its revision")
    if not {one.id for one in receipt.ranking}.issuperset(receipt.erased):
        found.append("marks a fragment as erased that it does not rank")
    return found


VERSIONS_CHECK = "versions"
_after = bindparam("after", type_=BigInteger)
_VERSIONS: Select[*tuple[Any, ...]] = (
    select(
        versions.c.key,
        versions.c.replaced,
        fragments.c.id,
        versions.c.event,
        versions.c.payload,
        versions.c.terms,
        versions.c.model,
        func.length(versions.c.vector, type_=BigInteger),
    )
    .outerjoin(fragments, fragments.c.key == versions.c.key)
    .where(versions.c.key.between(_low, _high), (versions.c.key > _low) | (versions.c.replaced > _after))
    .order_by(versions.c.key, versions.c.replaced)
    .limit(_limit)
)
_REPLACING_EVENT = select(events.c.payload).where(events.c.key == bindparam("key"))


def check_versions(
    connection: Connection, memory: Row[Any], name: str, report: Report, computed: Collection[str]
) -> None:
    """Each version must be readable, belong to a fragment, and be replaced by an event of it that the log names."""
    low, high = key_range(memory.number)
    after = -1
    while True:
        rows = fetch_rows(connection, _VERSIONS, {"low": low, "high": high, "after": after, "limit": PAGE_ROWS})
        for row in rows:
            report.count_checked(VERSIONS_CHECK)
            for text in _find_version_faults(connection, memory, row, computed):
                report.add_violation(VERSIONS_CHECK, text, name, row[2] or "")
        if len(rows) < PAGE_ROWS:
            return
        low, after = rows[-1][0], rows[-1][1]


def _find_version_faults(
    connection: Connection, memory: Row[Any], row: list[Any], computed: Collection[str]
) -> list[str]:
    _, replaced, id_, event, payload, terms, model, vector_bytes = row
    if id_ is None:
        return [f"a version that revision {replaced} replaced has no fragment"]
    found = []
    try:
        fragment = codec.decode_fragment(payload, 0, 0)
        codec.decode_terms(terms)
        if fragment.id != id_:
            found.append(f"its version {replaced} is of the fragment {fragment.id}")
        if fragment.version >= replaced:
            found.append(f"its version {replaced} was written at revision {fragment.version}")
    except (JournalError, ValueError) as error:
        found.append(f"its version {replaced} cannot be read: {error}")
    if vector_bytes is not None and not has_valid_length(vector_bytes, None, computed=model in computed):
        found.append(f"the vector of its version {replaced} has {vector_bytes} bytes")
    if replaced > memory.revision:
        found.append(f"its version {replaced} is above the memory's revision")
    elif not _is_logged(connection, row_key(memory.number, replaced), id_, event):
        found.append(f"its version {replaced} was replaced ({event}), and the events of that revision do not say so")
    return found


def _is_logged(connection: Connection, key: int, fragment: str, event: str) -> bool:
    """Whether the log has that event; true if it no longer has the revision."""
    payload = connection.execute(_REPLACING_EVENT, {"key": key}).scalar_one_or_none()
    if payload is None:
        return True
    try:
        return any(one.fragment == fragment and one.type is EventType(event) for one in codec.decode_events(payload))
    except (JournalError, ValueError):
        return False
