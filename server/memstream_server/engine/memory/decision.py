"""A decision for one memory, and the journal transaction that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from memstream_server.core.events import Event, EventType, ModelUse, Purpose, Reason
from memstream_server.core.transition import Transition, anchors_changed
from memstream_server.core.values import Fragment, Held, Tier, Vector
from memstream_server.engine.memory.enrich import Embedded, EnrichedFragment
from memstream_server.engine.runtime.call_context import PRINCIPAL
from memstream_server.engine.runtime.turns import pause_if_due
from memstream_server.ports.journal.records import IndexEntry, MemoryRecord
from memstream_server.ports.journal.rows import Anchor, Origin, Row
from memstream_server.ports.journal.writing import EFFECTS, BatchReceipt, Commit, Effects, Replaced
from memstream_server.ports.models import Account

if TYPE_CHECKING:
    from memstream_server.engine.memory.enrich import Embedding
    from memstream_server.engine.memory.producers import Batch
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime

ROWS_PER_SLICE = 128
"""Rows that are built in one step, about a millisecond."""
_effects_of = attrgetter(*EFFECTS)


@dataclass(frozen=True, slots=True, eq=False)
class Decision(Effects):
    """One transition of one memory before its commit, with the effects that the commit takes as they are."""

    transition: Transition | None = None
    gathered: Mapping[str, EnrichedFragment] = field(default_factory=dict)
    """Terms and vectors of new fragments and of changed texts, by fragment id."""
    batches: tuple[Batch, ...] = ()
    events: tuple[Event, ...] = ()
    """Events of the memory itself; they follow those of the transition."""
    time_us: int | None = None
    """Time of the decision if the answer contains it; None: the commit sets it."""

    def with_gathered(self, more: Sequence[EnrichedFragment]) -> Decision:
        """A copy with terms and vectors of merged texts. Their fragments name the model of the new vector."""
        if self.transition is None:
            return self
        found = {part.fragment.id: part for part in more}
        puts = tuple(
            put.but(model=found[put.id].fragment.model) if put.id in found else put for put in self.transition.puts
        )
        return replace(self, transition=replace(self.transition, puts=puts), gathered={**self.gathered, **found})

    def with_cost(self, account: Account, purpose: Purpose) -> Decision:
        """A copy with an event for the LLM requests and tokens that the decision cost, if there were any."""
        if not account.requests:
            return self
        use = ModelUse(purpose, account.model, account.requests, account.prompt_tokens, account.completion_tokens)
        return replace(self, events=(*self.events, Event(EventType.MODEL_ASKED, "", use=use)))


def account_of(record: MemoryRecord) -> Account:
    """A new account for the model requests of a memory."""
    return Account(record.namespace, record.uid)


async def commit_of(working: WorkingSet, decision: Decision, models: EngineModels, runtime: Runtime) -> Commit:
    """The journal transaction of a decision on the memory's current working set, which only the caller changes."""
    record, before = working.record, working.state
    transition = decision.transition or Transition(before)
    other = models.embeddings.other_than(working.embedding.name)
    held, released = anchors_changed(before, transition.state)
    time_us = runtime.clock.now_us() if decision.time_us is None else decision.time_us
    received: list[BatchReceipt] = []
    waited: list[BatchReceipt] = []
    for batch in decision.batches:
        if batch.at_once:
            received.append(batch.receipt)
        else:
            waited.append(batch.receipt)
    kept_s = record.policy.history.version_retention_s
    rows: list[Row] = []
    for start in range(0, len(transition.puts), ROWS_PER_SLICE):
        if start:
            await pause_if_due()
        part = transition.puts[start : start + ROWS_PER_SLICE]
        rows += _build_rows(working, decision, part, record.revision + 1, other)
    added = _count_added(working, rows, transition.removed)
    index = tuple(_list_index_entries(working, transition, decision.gathered))
    if len(rows) > ROWS_PER_SLICE:
        await pause_if_due()
    return Commit(
        memory=record.uid,
        epoch=record.epoch,
        revision=record.revision,
        time_us=time_us,
        events=transition.events + decision.events,
        rows=tuple(rows),
        removed=transition.removed,
        added=added,
        replaced=tuple(_list_replaced(working, decision, transition)),
        versions_max=record.policy.history.versions,
        versions_since_us=time_us - kept_s * 1_000_000 if kept_s else 0,
        anchors=tuple([_build_anchor(working, decision, one, was, other) for one, was in held if _has_anchor(one)]),
        released=tuple([one.fragment.id for one in released if _has_anchor(one)]),
        receipts=tuple(received),
        stored_positions=tuple([receipt.position for receipt in waited]) if waited else (),
        producers=_stored_numbers(waited) if waited else (),
        index=index,
        reflection_aggregate=transition.state.reflection_aggregate,
        recall_receipts_max=(decision.policy or record.policy).history.receipts,
        erased_evidence=_erased_evidence(decision, transition),
        **dict(zip(EFFECTS, _effects_of(decision), strict=True)),
    )


def _count_added(working: WorkingSet, rows: Sequence[Row], removed: Sequence[str]) -> int:
    """How many more fragments are there after the commit."""
    after: dict[str, bool] = {}
    for row in rows:
        after[row.fragment.id] = row.fragment.forget_time_us is None
    after.update(dict.fromkeys(removed, False))
    added = 0
    for id_, is_there in after.items():
        added += is_there - working.is_present(id_)
    return added


def _erased_evidence(decision: Decision, transition: Transition) -> tuple[str, ...]:
    """The fragments whose content leaves for good by request or after the grace period, not by a tier's capacity."""
    gone = [
        event.fragment
        for event in transition.events
        if event.type is EventType.ERASED or event.reason is Reason.CLEARED
    ]
    return tuple(dict.fromkeys((*decision.erased, *decision.forgotten_versions, *gone)))


def _build_rows(
    working: WorkingSet, decision: Decision, puts: Sequence[Fragment], version: int, other: Embedding | None
) -> list[Row]:
    rows: list[Row] = []
    for put in puts:
        part = decision.gathered.get(put.id)
        fragment = put.but(version=version)
        if part is None:
            rows.append(Row(fragment))
        else:
            vector = None if part.embedded.vector is None else pack_vector(part.embedded.vector)
            seen = None if part.beside is None else _other_space(part, other)
            beside = None if seen is None or seen.vector is None else (seen.space, pack_vector(seen.vector))
            replaces = working.tier_of(put.id) is not None
            rows.append(Row(fragment, part.terms, vector, beside, replaces, _computed_space(put, part, seen)))
    return rows


def _computed_space(put: Fragment, part: EnrichedFragment, seen: Embedded | None) -> str:
    """The space in which the vector follows from the text of `put`; empty if there is none."""
    known = part.fragment
    if put.content != known.content or put.speaker != known.speaker or put.observe_time_us != known.observe_time_us:
        return ""
    for one in (part.embedded, seen):
        if one is not None and one.computed:
            return one.space
    return ""


def _list_replaced(working: WorkingSet, decision: Decision, transition: Transition) -> list[Replaced]:
    """Existing fragments whose content or attributes the decision replaces, each once; not those of an erasure."""
    if not working.record.policy.history.versions or decision.erased:
        return []
    replacing: dict[str, EventType] = {}
    for event in transition.events:
        if event.type is EventType.UPDATED:
            replacing.setdefault(event.fragment, event.type)
        elif event.type is EventType.PROMOTED and event.fragment in transition.merged:
            replacing[event.fragment] = event.type
    if not replacing:
        return []
    gone = set(transition.removed)
    callers = _callers_by_key(decision)
    found: list[Replaced] = []
    for put in transition.puts:
        type_ = replacing.get(put.id)
        if type_ is not None and put.id not in gone and working.tier_of(put.id) is not None:
            updated = type_ is EventType.UPDATED
            principal = callers.get(put.external_id, PRINCIPAL.get()) if updated else ""
            found.append(Replaced(put.id, type_, principal, working.embedding.name))
    return found


def _callers_by_key(decision: Decision) -> dict[str, str]:
    """The callers of a group's batches by the external ids that they observed; the last one of a key is the one whose
    content stays."""
    return {
        fragment.external_id: batch.origin.get(PRINCIPAL, "")
        for batch in decision.batches
        for fragment in batch.receipt.fragments
        if fragment.external_id
    }


def _other_space(part: EnrichedFragment, other: Embedding | None) -> Embedded | None:
    """The fragment's vectors in the second space, if that space is still in use."""
    kept = part.beside is not None and other is not None and part.beside.space == other.name
    return part.beside if kept else None


def _list_index_entries(
    working: WorkingSet, transition: Transition, gathered: Mapping[str, EnrichedFragment]
) -> list[IndexEntry]:
    """Long-term fragments with a vector that is new to the index, and those to delete from it."""
    uid, found = working.record.uid, list[IndexEntry]()
    for put in transition.puts:
        if put.tier is Tier.LONG_TERM and put.model:
            new = working.tier_of(put.id) is not Tier.LONG_TERM
            if put.forget_time_us is not None:
                found.append(IndexEntry(uid, put.id, delete=True))
            elif new or put.id in gathered or working.is_forgotten(put.id):
                found.append(IndexEntry(uid, put.id))
        elif put.id in gathered and working.tier_of(put.id) is Tier.LONG_TERM:
            found.append(IndexEntry(uid, put.id, delete=True))  # the new text has no vector yet
    for id_ in transition.removed:
        if working.tier_of(id_) is Tier.LONG_TERM:
            found.append(IndexEntry(uid, id_, delete=True))
    return found


def _stored_numbers(receipts: Sequence[BatchReceipt]) -> tuple[tuple[str, int], ...]:
    """Each producer with its last number that the commit of these receipts brings to *stored*."""
    out: dict[str, int] = {}
    for receipt in receipts:
        if receipt.producer:
            out[receipt.producer] = max(out.get(receipt.producer, 0), receipt.last_sequence)
    return tuple(out.items())


def _has_anchor(held: Held) -> bool:
    return held.vector is not None or bool(held.enhancements)


def _build_anchor(
    working: WorkingSet, decision: Decision, held: Held, was: Held | None, other: Embedding | None
) -> Anchor:
    vector = None if held.vector is None else pack_vector(held.vector)
    part = decision.gathered.get(held.fragment.id)
    beside: tuple[str, bytes | None] | None = None
    origin = origin_beside = Origin.GIVEN
    if part is not None:  # the content is new, so the stored vector in the other space is out of date
        seen = None if part.beside is None else _other_space(part, other)
        given = None if seen is None or seen.content_vector is None else pack_vector(seen.content_vector)
        beside = ("" if seen is None else seen.space, given)
        origin_beside = Origin.GIVEN if seen is None else _find_origin(held, part, seen)
        if held.vector is part.embedded.content_vector:
            origin = _find_origin(held, part, part.embedded)
    elif was is not None and held.vector is not None and was.vector is held.vector:
        origin = Origin.KEPT
    return Anchor(held.fragment.id, vector, held.enhancements, working.embedding.name, beside, origin, origin_beside)


def _find_origin(held: Held, part: EnrichedFragment, embedded: Embedded) -> Origin:
    """That of `embedded.content_vector`, of a fragment whose vector is written with it."""
    if embedded.content_vector is embedded.vector:
        return Origin.INDEXED
    return Origin.CONTENT if embedded.computed and held.fragment.content == part.fragment.content else Origin.GIVEN


def pack_vector(vector: Vector) -> bytes:
    """A vector as the journal stores it: float32, little-endian."""
    return np.ascontiguousarray(vector, dtype="<f4").tobytes()
