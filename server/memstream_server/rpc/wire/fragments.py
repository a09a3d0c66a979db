"""Converts fragments, events, suspicions and their decisions to messages."""

from __future__ import annotations

from dataclasses import asdict
from operator import attrgetter

from memstream.v1 import event_pb2, fragment_pb2, memory_service_pb2, stream_service_pb2
from memstream_server.core.events import Event, EventType, Imported, Reason
from memstream_server.core.filters import Order, Unmatched
from memstream_server.core.policy import Truth
from memstream_server.core.printable import list_hidden
from memstream_server.core.suspicions import ConflictDecision, Suspicion
from memstream_server.core.values import Fragment, FragmentKind, Role, Tier, TruthStatus
from memstream_server.engine.requests import AsOf, fragment_etag
from memstream_server.ports.journal.reading import StoredConflict
from memstream_server.ports.journal.records import FragmentVersion
from memstream_server.rpc import validation as check
from memstream_server.rpc.validation import Violations
from memstream_server.rpc.wire import scalars
from memstream_server.rpc.wire.scalars import Enums

TIERS = Enums(fragment_pb2.Tier, Tier)
KINDS = Enums(fragment_pb2.FragmentKind, FragmentKind)
EVENT_TYPES = Enums(event_pb2.EventType, EventType)
ORDERS = Enums(fragment_pb2.FragmentOrder, Order)
ROLES = Enums(fragment_pb2.Role, Role)
TRUTHS = Enums(fragment_pb2.Truth, Truth)
STATUSES = Enums(fragment_pb2.TruthStatus, TruthStatus)
_REASONS = Enums(event_pb2.EventReason, Reason)
TIMES = (
    "observe_time",
    "create_time",
    "last_observe_time",
    "access_time",
    "expire_time",
    "forget_time",
    "supersede_time",
    "valid_from",
    "valid_until",
)
_read_times = attrgetter(
    "observe_time_us",
    "create_time_us",
    "repeat_time_us",
    "access_time_us",
    "expire_time_us",
    "forget_time_us",
    "supersede_time_us",
    "valid_from_us",
    "valid_until_us",
)
_NO_TIMES = (None, None, 0, 0, None, None, None, None, None)
"""Times of a fragment: the message's fields, the fragment's, and the values that say that there is none."""
DECISIONS = Enums(fragment_pb2.ConflictDecision, ConflictDecision)


def fragment_message(fragment: Fragment, merged_text: str = "") -> fragment_pb2.Fragment:
    """A fragment as clients see it."""
    message = fragment_pb2.Fragment(merged_text=merged_text)
    write_fragment(message, fragment)
    return message


def write_fragment(message: fragment_pb2.Fragment, fragment: Fragment) -> None:
    """Write a fragment into an empty message, in less time than a constructor and a copy take."""
    message.id = fragment.id
    message.kind = KINDS.numbers[fragment.kind]
    message.tier = TIERS.numbers[fragment.tier]
    message.speaker = fragment.speaker
    message.role = ROLES.numbers[fragment.role]
    message.session = fragment.session
    message.importance = fragment.importance
    message.access_count = fragment.access_count
    message.model = fragment.model
    message.etag = fragment_etag(fragment)
    message.enhancement_count = fragment.enhancement_count
    message.duplicate_count = fragment.duplicate_count
    message.pinned = fragment.pinned
    message.external_id = fragment.external_id
    message.token_count = fragment.token_count
    message.superseded_by = fragment.superseded_by
    if fragment.sources:
        message.sources.extend(fragment.sources)
    if fragment.supersedes:
        message.supersedes.extend(fragment.supersedes)
    if fragment.structured is None:
        message.content = fragment.content
    else:
        message.structured.CopyFrom(fragment_pb2.StructuredObservation(**asdict(fragment.structured)))
    for name, absent, time_us in zip(TIMES, _NO_TIMES, _read_times(fragment), strict=True):
        if time_us != absent:
            time = getattr(message, name)
            time.seconds, micros = divmod(time_us, 1_000_000)
            time.nanos = micros * 1_000
    texts = [fragment.content, fragment.speaker, fragment.session, fragment.external_id]
    if fragment.metadata:
        scalars.write_metadata(message.metadata, fragment.metadata)
        texts += [text for pair in fragment.metadata for text in pair if isinstance(text, str)]
    message.hidden_characters.extend(list_hidden("\n".join(texts)))


def write_version(message: memory_service_pb2.FragmentVersion, version: FragmentVersion) -> None:
    """Write a version into an empty message."""
    message.version = version.replaced
    write_fragment(message.fragment, version.fragment.but(version=0))
    scalars.write_time(message.replace_time, version.time_us)
    message.replaced_by = EVENT_TYPES.numbers[version.event]
    message.principal = version.principal


def unmatched_message(unmatched: Unmatched) -> fragment_pb2.UnmatchedCondition:
    """A part of a filter that nothing can match."""
    return fragment_pb2.UnmatchedCondition(field=unmatched.field, value=unmatched.value)


def read_as_of(
    found: Violations,
    message: memory_service_pb2.GetFragmentRequest
    | memory_service_pb2.ListFragmentsRequest
    | stream_service_pb2.RecallQuery,
    prefix: str = "",
) -> AsOf | None:
    """The moment of a read of the past; None: the present."""
    which = message.WhichOneof("as_of")
    if which is None:
        return None
    if which == "as_of_time":
        return AsOf(time_us=scalars.time_us(found, f"{prefix}as_of_time", message.as_of_time))
    return AsOf(revision=check.not_negative(found, f"{prefix}as_of_revision", message.as_of_revision))


def event_message(event: Event, uid: str, revision: int, ordinal: int, time_us: int) -> event_pb2.Event:
    """One event; (revision, ordinal) is the cursor after it."""
    return event_pb2.Event(
        cursor=event_pb2.Cursor(memory_uid=uid, revision=revision, ordinal=ordinal),
        time=scalars.timestamp_message(time_us),
        type=EVENT_TYPES.numbers[event.type],
        fragment_id=event.fragment,
        other_id=event.other,
        from_tier=TIERS.numbers[event.from_tier],
        to_tier=TIERS.numbers[event.to_tier],
        reason=_REASONS.numbers[None if event.reason is Reason.NONE else event.reason],
        cosine=event.cosine,
        draw=event.draw,
        importance=event.importance,
        sources=event.sources,
        model_use=None
        if event.use is None
        else event_pb2.ModelUse(
            purpose=event.use.purpose.value,
            model=event.use.model,
            requests=event.use.requests,
            prompt_tokens=event.use.prompt_tokens,
            completion_tokens=event.use.completion_tokens,
        ),
        imported=None if event.imported is None else _imported_message(event.imported),
        conflict_reason=event.conflict_reason,
        conflict_decision=event.conflict_decision,
        receipt_id=event.receipt,
        version=event.version,
    )


def _imported_message(had: Imported) -> event_pb2.ImportedFragment:
    return event_pb2.ImportedFragment(
        kind=KINDS.numbers[had.kind],
        enhancers=had.enhancements,
        enhancement_count=had.enhancement_count,
        duplicate_count=had.duplicate_count,
        forgotten=had.forgotten,
    )


def suspicion_message(suspicion: Suspicion) -> fragment_pb2.Suspicion:
    """A suspicion as clients see it."""
    return fragment_pb2.Suspicion(
        newer_id=suspicion.newer,
        older_id=suspicion.older,
        reason=suspicion.reason.value,
        create_time=scalars.timestamp_message(suspicion.time_us),
    )


def conflict_message(conflict: StoredConflict) -> fragment_pb2.ConflictRecord:
    """A suspicion with its decision, if there is one."""
    message = fragment_pb2.ConflictRecord(
        suspicion=suspicion_message(conflict.suspicion),
        decision=DECISIONS.numbers[conflict.decision],
        note=conflict.note,
    )
    if conflict.decide_time_us is not None:
        scalars.write_time(message.decide_time, conflict.decide_time_us)
    return message
