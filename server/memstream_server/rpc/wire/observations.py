"""Converts observations to validated values, or to rejections that keep their place in the batch.

The other way, it converts a producer's rejections and outcomes to messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import grpc

from memstream.v1 import fragment_pb2 as pb
from memstream.v1 import stream_service_pb2 as stream_pb
from memstream_server.core.rendering import drop_injected
from memstream_server.core.values import Role, Structured
from memstream_server.engine.errors import InvalidField
from memstream_server.engine.requests import AckLevel, NewObservation, RejectedObservation
from memstream_server.engine.runtime.turns import pause_if_due
from memstream_server.ports.journal.writing import Outcome, Rejection
from memstream_server.rpc import validation as check
from memstream_server.rpc.errors import status_of_rejection, violation_text
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.validation import Violations
from memstream_server.rpc.wire import scalars
from memstream_server.rpc.wire.fragments import EVENT_TYPES, ROLES, TIERS
from memstream_server.rpc.wire.scalars import Enums

DIGEST_BYTES = 16
_INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
_TOKEN_COUNT_MAX = 2**31 - 1
READ_PER_SLICE = 16
"""Observations that are read between two looks at the clock."""
SUPERSEDES_MAX = 100
"""Fragments that one observation may supersede."""
STRUCTURED_FIELDS = (
    "question",
    "thought",
    "phase",
    "action_intention",
    "action_reason",
    "action",
    "action_input",
    "observation",
)
ACK_LEVELS = Enums(stream_pb.AckLevel, AckLevel)


def digest_of(serialised: bytes) -> bytes:
    """Distinguishes a repeat from a conflict: 16 bytes of BLAKE2b."""
    return blake2b(serialised, digest_size=DIGEST_BYTES).digest()


async def read_batch(
    messages: list[pb.Observation], session: str, limits: RequestLimits, dimension: int
) -> tuple[list[NewObservation | RejectedObservation], int]:
    """The items of a batch in order, and their size in bytes; `session` is the default session of items."""
    items: list[NewObservation | RejectedObservation] = []
    size = 0
    for number, message in enumerate(messages):
        if number and number % READ_PER_SLICE == 0:
            await pause_if_due()
        # Deterministic: the same observation has the same bytes from every client, whatever the order of its maps.
        serialised = message.SerializeToString(deterministic=True)
        size += len(serialised)
        items.append(read_item(message, digest_of(serialised), session, limits, dimension))
    return items, size


def read_item(
    message: pb.Observation, digest: bytes, session: str, limits: RequestLimits, dimension: int
) -> NewObservation | RejectedObservation:
    """One observation, or its rejection."""
    found = Violations()
    item = read_observation(found, message, digest, session, limits, dimension)
    if not found.found:
        return item
    return RejectedObservation(_INVALID, InvalidField.reason, violation_text(found.found), digest)


def read_observation(
    found: Violations,
    message: pb.Observation,
    digest: bytes,
    session: str,
    limits: RequestLimits,
    dimension: int,
    prefix: str = "",
) -> NewObservation:
    """One observation; violations go to `found`, with `prefix` before the field's name."""
    structured, content = read_body(found, message, message.HasField("structured"), limits, prefix)
    expiry = message.WhichOneof("expiry")
    importance = message.importance if message.HasField("importance") else None
    if importance is not None:
        check.check_bounds(found, f"{prefix}importance", importance, 0, 1)
    check.check_bounds(found, f"{prefix}token_count", message.token_count, 0, _TOKEN_COUNT_MAX)
    new = NewObservation(
        content=content,
        structured=structured,
        speaker=check.check_identifier(found, f"{prefix}speaker", message.speaker, limits),
        role=read_role(found, f"{prefix}role", message.role),
        session=check.check_identifier(found, f"{prefix}session", message.session, limits) or session,
        observe_time_us=scalars.time_us(found, f"{prefix}observe_time", message.observe_time)
        if message.HasField("observe_time")
        else None,
        importance=importance,
        metadata=scalars.read_metadata(found, f"{prefix}metadata", message.metadata, limits),
        vector=scalars.read_vector(found, f"{prefix}embedding", message.embedding, dimension),
        expire_time_us=scalars.time_us(found, f"{prefix}expire_time", message.expire_time)
        if expiry == "expire_time"
        else None,
        ttl_us=scalars.duration_us(found, f"{prefix}ttl", message.ttl) if expiry == "ttl" else None,
        external_id=check.check_identifier(found, f"{prefix}external_id", message.external_id, limits),
        token_count=message.token_count,
        supersedes=_read_superseded(found, f"{prefix}supersedes", message, limits),
        valid_from_us=scalars.time_us(found, f"{prefix}valid_from", message.valid_from)
        if message.HasField("valid_from")
        else None,
        valid_until_us=scalars.time_us(found, f"{prefix}valid_until", message.valid_until)
        if message.HasField("valid_until")
        else None,
        digest=digest,
    )
    check_validity(found, f"{prefix}valid_until", new.valid_from_us, new.valid_until_us)
    return new


def read_role(found: Violations, field: str, value: int) -> Role | None:
    """A role; None if it is unset."""
    return ROLES.read_value(found, field, value, Role.USER) if value else None


def check_validity(found: Violations, field: str, from_us: int | None, until_us: int | None) -> None:
    """Validates that a validity ends after it begins."""
    if from_us is not None and until_us is not None and until_us <= from_us:
        found.add(field, "must be after valid_from")


def _read_superseded(found: Violations, field: str, message: pb.Observation, limits: RequestLimits) -> tuple[str, ...]:
    if len(message.supersedes) > SUPERSEDES_MAX:
        found.add(field, f"has {len(message.supersedes)} entries, at most {SUPERSEDES_MAX} are allowed")
        return ()
    for number, each in enumerate(message.supersedes):
        check.check_identifier(found, f"{field}[{number}]", each, limits, required=True)
    return tuple(dict.fromkeys(message.supersedes))


def structured_of(message: pb.StructuredObservation) -> Structured:
    """A structured step of an agent."""
    return Structured(**{name: getattr(message, name) for name in STRUCTURED_FIELDS})


def content_checked(found: Violations, field: str, content: str, limits: RequestLimits) -> str:
    """Validates text: neither blank nor too long."""
    if not content or content.isspace():
        found.add(field, "is empty")
        return content
    size = len(content) if content.isascii() else len(content.encode())
    if size > limits.content_bytes_max:
        found.add(field, f"has {size} bytes, at most {limits.content_bytes_max} are allowed")
    return content


def read_body(
    found: Violations, message: pb.Observation | pb.Fragment, structured: bool, limits: RequestLimits, prefix: str
) -> tuple[Structured | None, str]:
    """(parts, text) of the structured body, or (None, text), without what a context injected into them."""
    if structured:
        step = structured_of(message.structured)
        step = Structured(**{name: drop_injected(getattr(step, name)) for name in STRUCTURED_FIELDS})
        return step, content_checked(found, f"{prefix}structured", step.text(), limits)
    content = drop_injected(message.content)
    if message.content and not content:
        found.add(f"{prefix}content", "has only what a context injected")
        return None, content
    return None, content_checked(found, f"{prefix}content", content, limits)


def rejected_messages(rejections: Iterable[Rejection]) -> list[stream_pb.RejectedObservation]:
    """Rejected items, each with its status."""
    return [
        stream_pb.RejectedObservation(sequence=each.sequence, status=status_of_rejection(each)) for each in rejections
    ]


def outcome_messages(outcomes: Iterable[Outcome]) -> list[stream_pb.ObservationOutcome]:
    """Outcomes of stored items."""
    return [
        stream_pb.ObservationOutcome(
            sequence=each.sequence,
            fragment_id=each.fragment,
            type=EVENT_TYPES.numbers[each.type],
            other_id=each.other,
            tier=TIERS.numbers[each.tier],
            related=[stream_pb.RelatedFragment(fragment_id=one.fragment, share=one.share) for one in each.related],
        )
        for each in outcomes
    ]
