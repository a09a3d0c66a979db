"""Converts a producer's rejections and outcomes to messages."""

from __future__ import annotations

from collections.abc import Iterable

from memstream.v1 import stream_service_pb2 as pb
from memstream_server.engine.requests import AckLevel
from memstream_server.ports.journal.writing import Outcome, Rejection
from memstream_server.rpc.errors import status_of_rejection
from memstream_server.rpc.wire.fragments import EVENT_TYPES, TIERS
from memstream_server.rpc.wire.scalars import Enums

ACK_LEVELS = Enums(pb.AckLevel, AckLevel)


def rejected_messages(rejections: Iterable[Rejection]) -> list[pb.RejectedObservation]:
    """Rejected items, each with its status."""
    return [pb.RejectedObservation(sequence=each.sequence, status=status_of_rejection(each)) for each in rejections]


def outcome_messages(outcomes: Iterable[Outcome]) -> list[pb.ObservationOutcome]:
    """Outcomes of stored items."""
    return [
        pb.ObservationOutcome(
            sequence=each.sequence,
            fragment_id=each.fragment,
            type=EVENT_TYPES.numbers[each.type],
            other_id=each.other,
            tier=TIERS.numbers[each.tier],
            related=[pb.RelatedFragment(fragment_id=one.fragment, share=one.share) for one in each.related],
        )
        for each in outcomes
    ]
