"""Converts answers to queries from wire messages."""

from __future__ import annotations

from collections.abc import Iterable

from memstream.answer_values import (
    Answer,
    ChainLink,
    Explanation,
    FragmentCount,
    InterpretedTime,
    MemoryAnswer,
    NearMiss,
    Recollection,
    ScorePart,
    Unmatched,
)
from memstream.codec import fragment_from_wire, suspicion_from_wire
from memstream.v1 import fragment_pb2, stream_service_pb2
from memstream.values import Fragment, TruthStatus
from memstream.wiretypes import members_by_number, optional_timestamp_from_wire

_TRUTH_STATUSES = members_by_number(TruthStatus, fragment_pb2.TruthStatus.DESCRIPTOR)


def answer_from_wire(parts: Iterable[stream_service_pb2.Recollections], done: stream_service_pb2.RecallDone) -> Answer:
    """Assembles the answer to a query; the wire sends each fragment once, in the ranking or in working memory."""
    recollections: list[Recollection] = []
    in_order: list[str] = []
    known: dict[str, Fragment] = {}
    for part in parts:
        recollections.extend(map(_recollection, part.recollections))
        in_order.extend(part.working_memory_ids)
        known.update((wire.id, fragment_from_wire(wire)) for wire in part.working_memory)
    known.update((one.id, one) for hit in recollections for one in hit.fragments)
    return Answer(
        recollections=tuple(recollections),
        working_memory=tuple(known[id_] for id_ in in_order if id_ in known),
        revision=done.revision,
        eligible=done.eligible,
        considered=done.considered,
        best_relevance=done.best_relevance,
        degraded=done.degraded,
        near_misses=tuple(map(_near_miss, done.near_misses)),
        timings=dict(done.timings),
        tokens=done.tokens,
        weak=done.weak,
        interpreted=tuple(map(_interpreted_time, done.interpreted)) if done.interpreted else (),
        as_of_revision=done.as_of_revision,
        receipt_id=done.receipt_id,
        unmatched=unmatched_from_wire(done.unmatched) if done.unmatched else (),
        memories=tuple(map(_memory_answer, done.memories)) if done.memories else (),
    )


def _memory_answer(wire: stream_service_pb2.MemoryAnswer) -> MemoryAnswer:
    return MemoryAnswer(
        memory=wire.memory,
        revision=wire.revision,
        eligible=wire.eligible,
        considered=wire.considered,
        best_relevance=wire.best_relevance,
        weak=wire.weak,
        degraded=wire.degraded,
        recollections=wire.recollections,
        working_memory_ids=tuple(wire.working_memory_ids),
        receipt_id=wire.receipt_id,
        as_of_revision=wire.as_of_revision,
        unmatched=unmatched_from_wire(wire.unmatched),
    )


def _interpreted_time(wire: stream_service_pb2.InterpretedTime) -> InterpretedTime:
    begin = getattr(wire, "from")  # a keyword of Python
    return InterpretedTime(
        phrase=wire.phrase,
        from_time=optional_timestamp_from_wire(begin, wire.HasField("from")),
        to_time=optional_timestamp_from_wire(wire.to, wire.HasField("to")),
    )


def _recollection(wire: stream_service_pb2.Recollection) -> Recollection:
    return Recollection(
        fragment=fragment_from_wire(wire.fragment),
        score=wire.score,
        relevance=wire.relevance,
        rank=wire.rank,
        truncated=wire.truncated,
        folded_ids=tuple(wire.folded_ids),
        suspicions=tuple(map(suspicion_from_wire, wire.suspicions)),
        explanation=_explanation(wire.explanation) if wire.HasField("explanation") else None,
        status=_TRUTH_STATUSES.get(wire.status, TruthStatus.UNKNOWN),
        chain=tuple(map(_chain_link, wire.chain)) if wire.chain else (),
        later_id=wire.later_id,
        companion=_recollection(wire.companion) if wire.HasField("companion") else None,
        memory=wire.memory,
    )


def _chain_link(wire: stream_service_pb2.ChainLink) -> ChainLink:
    return ChainLink(
        wire.fragment_id,
        optional_timestamp_from_wire(wire.observe_time, wire.HasField("observe_time")),
        _TRUTH_STATUSES.get(wire.status, TruthStatus.UNKNOWN),
    )


def _explanation(wire: stream_service_pb2.Explanation) -> Explanation:
    return Explanation(tuple(map(score_part_from_wire, wire.parts)), wire.formula)


def score_part_from_wire(wire: stream_service_pb2.ScorePart) -> ScorePart:
    """A part of a score."""
    return ScorePart(wire.name, wire.value, wire.weight, wire.contribution, dict(wire.details))


def _near_miss(wire: stream_service_pb2.NearMiss) -> NearMiss:
    return NearMiss(
        fragment_id=wire.fragment_id,
        stage=wire.stage,
        score=wire.score if wire.HasField("score") else None,
        relevance=wire.relevance if wire.HasField("relevance") else None,
        superseded_by=wire.superseded_by,
        memory=wire.memory,
    )


def count_from_wire(answers: Iterable[tuple[int, Iterable[fragment_pb2.UnmatchedCondition]]]) -> FragmentCount:
    """The counts of a call's parts, and what the memory lacks of its filter."""
    parts = list(answers)
    made = FragmentCount(sum(count for count, _ in parts))
    made.unmatched = tuple(one for _, unmatched in parts for one in unmatched_from_wire(unmatched))
    return made


def unmatched_from_wire(wire: Iterable[fragment_pb2.UnmatchedCondition]) -> tuple[Unmatched, ...]:
    """Parts of a filter."""
    return tuple(Unmatched(one.field, one.value) for one in wire)
