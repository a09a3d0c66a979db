"""Converts observations, fragments, queries and events between Python values and wire messages."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime
from typing import TypeAlias, Unpack

from memstream.argument_types import Moment, Several
from memstream.channel import memory_path
from memstream.conflict_values import ConflictDecision, ConflictRecord, Related, Suspicion
from memstream.filter_codec import filter_to_wire
from memstream.resources import Cursor, Event, FragmentVersion, ImportedFragment, ModelUse
from memstream.status import error_from_status
from memstream.v1 import (
    event_pb2,
    fragment_pb2,
    memory_pb2,
    memory_service_pb2,
    stream_service_pb2,
)
from memstream.v1.scope_pb2 import RecallScope
from memstream.values import (
    AckLevel,
    BatchResult,
    EventReason,
    EventType,
    Fragment,
    FragmentKind,
    MemoryKind,
    Observation,
    ObservationFields,
    Outcome,
    RecallOptions,
    Rejected,
    Role,
    Scope,
    Structured,
    Tier,
    Truth,
    TruthStatus,
    Weights,
)
from memstream.wiretypes import (
    duration_to_wire,
    encoding,
    invalid_field,
    members_by_number,
    metadata_from_wire,
    metadata_value_to_wire,
    optional_timestamp_from_wire,
    optional_timestamp_to_wire,
    pack_floats,
    timestamp_to_wire,
)

Observable: TypeAlias = str | Structured | Observation
"""What can be observed: text, a structured step of an agent, or an Observation, which adds optional fields."""

_TIERS = members_by_number(Tier, fragment_pb2.Tier.DESCRIPTOR)
_TRUTHS = members_by_number(Truth, fragment_pb2.Truth.DESCRIPTOR)
_ROLES = members_by_number(Role, fragment_pb2.Role.DESCRIPTOR)
_FRAGMENT_KINDS = members_by_number(FragmentKind, fragment_pb2.FragmentKind.DESCRIPTOR)
_EVENT_TYPES = members_by_number(EventType, event_pb2.EventType.DESCRIPTOR)
_TRUTH_STATUSES = members_by_number(TruthStatus, fragment_pb2.TruthStatus.DESCRIPTOR)
_DECISIONS = members_by_number(ConflictDecision, fragment_pb2.ConflictDecision.DESCRIPTOR)
_EVENT_REASONS = members_by_number(EventReason, event_pb2.EventReason.DESCRIPTOR)


def structured_to_wire(value: Structured) -> fragment_pb2.StructuredObservation:
    """Converts a structured observation."""
    return fragment_pb2.StructuredObservation(**{part.name: getattr(value, part.name) for part in fields(Structured)})


def structured_from_wire(wire: fragment_pb2.StructuredObservation) -> Structured:
    """Converts a structured observation."""
    return Structured(**{part.name: getattr(wire, part.name) for part in fields(Structured)})


def observation_to_wire(what: Observable, **said: Unpack[ObservationFields]) -> fragment_pb2.Observation:
    """Converts an observation; `said` overrides the fields of an Observation."""
    if isinstance(what, str) and not said:
        return _text_observation(what)
    if not isinstance(what, Observation):
        return _observation_to_wire(Observation(what, **said))
    return _observation_to_wire(replace(what, **said) if said else what)


def _text_observation(content: str) -> fragment_pb2.Observation:
    try:
        return fragment_pb2.Observation(content=content)
    except ValueError as error:  # a lone surrogate cannot be encoded as UTF-8
        raise invalid_field("content", str(error)) from error


def _body_observation(body: str | Structured) -> fragment_pb2.Observation:
    if isinstance(body, str):
        return _text_observation(body)
    with encoding("body"):
        return fragment_pb2.Observation(structured=structured_to_wire(body))


def _observation_to_wire(value: Observation) -> fragment_pb2.Observation:
    wire = _body_observation(value.body)
    if value.expire_time is not None and value.ttl is not None:
        raise invalid_field("ttl", "give expire_time or ttl, not both")
    with encoding("observation"):
        wire.MergeFrom(
            fragment_pb2.Observation(
                speaker=value.speaker,
                role=role_to_wire(value.role),
                session=value.session,
                observe_time=optional_timestamp_to_wire("observe_time", value.observe_time),
                importance=value.importance,
                external_id=value.external_id,
                token_count=value.token_count,
                supersedes=value.supersedes,
                valid_from=optional_timestamp_to_wire("valid_from", value.valid_from),
                valid_until=optional_timestamp_to_wire("valid_until", value.valid_until),
            )
        )
    if value.expire_time is not None:
        wire.expire_time.CopyFrom(timestamp_to_wire("expire_time", value.expire_time))
    if value.ttl is not None:
        wire.ttl.CopyFrom(duration_to_wire(value.ttl))
    for key, item in value.metadata.items():
        wire.metadata[key].CopyFrom(metadata_value_to_wire(f"metadata.{key}", item))
    if value.embedding is not None:
        wire.MergeFromString(pack_floats(fragment_pb2.Observation.EMBEDDING_FIELD_NUMBER, value.embedding))
    return wire


def ack_level_to_wire(level: AckLevel) -> stream_service_pb2.AckLevel.ValueType:
    """Converts an acknowledgement level."""
    return stream_service_pb2.AckLevel.Value(f"ACK_LEVEL_{AckLevel(level).name}")


def truth_to_wire(truth: Truth | None) -> fragment_pb2.Truth.ValueType:
    """Converts a truth; None lets the server choose."""
    return fragment_pb2.Truth.Value(f"TRUTH_{'UNSPECIFIED' if truth is None else Truth(truth).name}")


def role_to_wire(role: Role | None) -> fragment_pb2.Role.ValueType:
    """Converts a role; None is unset."""
    return fragment_pb2.Role.Value(f"ROLE_{'UNSPECIFIED' if role is None else Role(role).name}")


def truth_from_wire(number: int) -> Truth | None:
    """A truth; None for one that is newer than this SDK."""
    return _TRUTHS.get(number)


def kind_to_wire(kind: MemoryKind | None) -> memory_pb2.MemoryKind.ValueType:
    """Converts a memory's kind; None lets the server choose."""
    return memory_pb2.MemoryKind.Value(f"MEMORY_KIND_{'UNSPECIFIED' if kind is None else MemoryKind(kind).name}")


def event_types_to_wire(types: Several[EventType]) -> list[event_pb2.EventType.ValueType]:
    """Event types."""
    with encoding("types"):
        return [event_pb2.EventType.Value(f"EVENT_TYPE_{EventType(each).name}") for each in types]


def query_to_wire(
    query_id: str, what: str | Structured, **options: Unpack[RecallOptions]
) -> stream_service_pb2.RecallQuery:
    """Converts a query. `timeout_s` is not part of it: the caller handles it."""
    if isinstance(what, Structured):
        wire = stream_service_pb2.RecallQuery(structured=structured_to_wire(what))
    else:
        wire = stream_service_pb2.RecallQuery(text=what)
    weights = options.get("weights") or Weights()
    filter_ = options.get("filter")
    with encoding("query"):
        wire.MergeFrom(
            stream_service_pb2.RecallQuery(
                query_id=query_id,
                now=optional_timestamp_to_wire("now", options.get("now")),
                limit=options.get("limit"),
                min_relevance=options.get("min_relevance"),
                filter=filter_to_wire(filter_) if filter_ is not None else None,
                min_revision=options.get("min_revision") or 0,
                explain=options.get("explain") or False,
                near_misses=options.get("near_misses") or 0,
                reinforce=options.get("reinforce"),
                token_budget=options.get("token_budget") or 0,
                omit_working_memory=options.get("omit_working_memory") or False,
                fold=options.get("fold"),
                weak_below=options.get("weak_below"),
                truth=truth_to_wire(options.get("truth")),
                time_zone=options.get("time_zone") or "",
                interpret_time=options.get("interpret_time"),
                receipt=options.get("receipt") or False,
            )
        )
        set_as_of(wire, options.get("as_of"))
        if weights != Weights():
            wire.weights.MergeFrom(
                stream_service_pb2.RecallWeights(alpha=weights.alpha, beta=weights.beta, gamma=weights.gamma)
            )
    if (embedding := options.get("embedding")) is not None:
        wire.MergeFromString(pack_floats(stream_service_pb2.RecallQuery.EMBEDDING_FIELD_NUMBER, embedding))
    return wire


def scope_to_wire(value: str | Scope) -> RecallScope:
    """Converts a scope, or the path of a memory."""
    if isinstance(value, str):
        return RecallScope(memory=str(memory_path(value)))
    with encoding("scope"):
        wire = RecallScope(
            weight=value.weight,
            limit=value.limit,
            filter=filter_to_wire(value.filter) if value.filter is not None else None,
            min_revision=value.min_revision,
        )
        given = [name for name in ("memory", "prefix", "labels") if getattr(value, name)]
        if len(given) != 1:
            raise invalid_field("scope", f"has {' and '.join(given) or 'nothing'}: give memory, prefix or labels")
        if value.memory:
            wire.memory = str(memory_path(value.memory))
        elif value.prefix:
            wire.prefix = value.prefix
        else:
            wire.labels.namespace = value.namespace
            wire.labels.labels.update(value.labels)
        return wire


def set_as_of(
    wire: stream_service_pb2.RecallQuery
    | memory_service_pb2.GetFragmentRequest
    | memory_service_pb2.ListFragmentsRequest,
    as_of: Moment | None,
) -> None:
    """Sets the moment of a read of the past, if any: a revision, or a time."""
    if isinstance(as_of, datetime):
        wire.as_of_time.CopyFrom(timestamp_to_wire("as_of", as_of))
    elif as_of is not None:
        wire.as_of_revision = as_of


def fragment_from_wire(wire: fragment_pb2.Fragment) -> Fragment:
    """A fragment."""
    return Fragment(
        id=wire.id,
        kind=_FRAGMENT_KINDS.get(wire.kind, FragmentKind.OBSERVATION),
        tier=_TIERS.get(wire.tier),
        content=wire.content,
        structured=structured_from_wire(wire.structured) if wire.HasField("structured") else None,
        merged_text=wire.merged_text,
        speaker=wire.speaker,
        session=wire.session,
        importance=wire.importance,
        observe_time=optional_timestamp_from_wire(wire.observe_time, wire.HasField("observe_time")),
        create_time=optional_timestamp_from_wire(wire.create_time, wire.HasField("create_time")),
        access_time=optional_timestamp_from_wire(wire.access_time, wire.HasField("access_time")),
        access_count=wire.access_count,
        enhancement_count=wire.enhancement_count,
        duplicate_count=wire.duplicate_count,
        sources=tuple(wire.sources) if wire.sources else (),
        metadata=metadata_from_wire(wire.metadata) if wire.metadata else {},
        expire_time=optional_timestamp_from_wire(wire.expire_time, wire.HasField("expire_time")),
        pinned=wire.pinned,
        external_id=wire.external_id,
        model=wire.model,
        etag=wire.etag,
        forget_time=optional_timestamp_from_wire(wire.forget_time, wire.HasField("forget_time")),
        token_count=wire.token_count,
        superseded_by=wire.superseded_by,
        supersedes=tuple(wire.supersedes) if wire.supersedes else (),
        supersede_time=optional_timestamp_from_wire(wire.supersede_time, wire.HasField("supersede_time")),
        valid_from=optional_timestamp_from_wire(wire.valid_from, wire.HasField("valid_from")),
        valid_until=optional_timestamp_from_wire(wire.valid_until, wire.HasField("valid_until")),
        last_observe_time=optional_timestamp_from_wire(wire.last_observe_time, wire.HasField("last_observe_time")),
        role=_ROLES.get(wire.role),
        hidden_characters=tuple(wire.hidden_characters),
    )


def suspicion_from_wire(wire: fragment_pb2.Suspicion) -> Suspicion:
    """Converts a suspicion."""
    return Suspicion(
        newer_id=wire.newer_id,
        older_id=wire.older_id,
        reason=wire.reason,
        create_time=optional_timestamp_from_wire(wire.create_time, wire.HasField("create_time")),
    )


def conflict_from_wire(wire: fragment_pb2.ConflictRecord) -> ConflictRecord:
    """Converts a suspicion with its decision."""
    return ConflictRecord(
        suspicion=suspicion_from_wire(wire.suspicion),
        decision=_DECISIONS.get(wire.decision, ConflictDecision.UNKNOWN) if wire.decision else None,
        note=wire.note,
        decide_time=optional_timestamp_from_wire(wire.decide_time, wire.HasField("decide_time")),
    )


def decision_to_wire(decision: ConflictDecision) -> fragment_pb2.ConflictDecision.ValueType:
    """Converts a decision."""
    with encoding("decision"):
        return fragment_pb2.ConflictDecision.Value(f"CONFLICT_DECISION_{ConflictDecision(decision).name}")


def rejected_from_wire(wire: stream_service_pb2.RejectedObservation) -> Rejected:
    """Converts a rejection."""
    return Rejected(wire.sequence, error_from_status(wire.status))


def outcome_from_wire(wire: stream_service_pb2.ObservationOutcome) -> Outcome:
    """Converts the outcome of an observation."""
    type_ = _EVENT_TYPES.get(wire.type, EventType.UNKNOWN)
    related = tuple(Related(one.fragment_id, one.share) for one in wire.related)
    return Outcome(wire.sequence, wire.fragment_id, type_, wire.other_id, _TIERS.get(wire.tier), related)


def batch_result_from_wire(wire: stream_service_pb2.Ack) -> BatchResult:
    """Converts the acknowledgement of a batch."""
    return BatchResult(
        received=wire.received,
        stored=wire.stored,
        indexed=wire.indexed,
        revision=wire.revision,
        rejected=tuple(map(rejected_from_wire, wire.rejected)),
        outcomes=tuple(map(outcome_from_wire, wire.outcomes)),
    )


def cursor_to_wire(value: Cursor) -> event_pb2.Cursor:
    """Converts a cursor."""
    return event_pb2.Cursor(memory_uid=value.memory_uid, revision=value.revision, ordinal=value.ordinal)


def cursor_from_wire(wire: event_pb2.Cursor) -> Cursor:
    """Converts a cursor."""
    return Cursor(wire.memory_uid, wire.revision, wire.ordinal)


def event_from_wire(wire: event_pb2.Event, fragment: Fragment | None = None) -> Event:
    """Converts an event."""
    return Event(
        cursor=cursor_from_wire(wire.cursor),
        time=optional_timestamp_from_wire(wire.time, wire.HasField("time")),
        type=_EVENT_TYPES.get(wire.type, EventType.UNKNOWN),
        fragment_id=wire.fragment_id,
        other_id=wire.other_id,
        from_tier=_TIERS.get(wire.from_tier),
        to_tier=_TIERS.get(wire.to_tier),
        reason=_EVENT_REASONS.get(wire.reason, EventReason.UNKNOWN) if wire.reason else None,
        cosine=wire.cosine if wire.HasField("cosine") else None,
        draw=wire.draw if wire.HasField("draw") else None,
        importance=wire.importance if wire.HasField("importance") else None,
        sources=tuple(wire.sources),
        fragment=fragment,
        model_use=ModelUse(**{each.name: getattr(wire.model_use, each.name) for each in fields(ModelUse)})
        if wire.HasField("model_use")
        else None,
        imported=_imported_from_wire(wire.imported) if wire.HasField("imported") else None,
        conflict_reason=wire.conflict_reason,
        conflict_decision=wire.conflict_decision,
        version=wire.version,
        receipt_id=wire.receipt_id,
    )


def version_from_wire(wire: memory_service_pb2.FragmentVersion) -> FragmentVersion:
    """A version of a fragment."""
    return FragmentVersion(
        version=wire.version,
        fragment=fragment_from_wire(wire.fragment),
        replace_time=optional_timestamp_from_wire(wire.replace_time, wire.HasField("replace_time")),
        replaced_by=_EVENT_TYPES.get(wire.replaced_by, EventType.UNKNOWN),
        principal=wire.principal,
    )


def _imported_from_wire(wire: event_pb2.ImportedFragment) -> ImportedFragment:
    return ImportedFragment(
        kind=_FRAGMENT_KINDS.get(wire.kind),
        enhancers=tuple(wire.enhancers),
        enhancement_count=wire.enhancement_count,
        duplicate_count=wire.duplicate_count,
        forgotten=wire.forgotten,
    )
