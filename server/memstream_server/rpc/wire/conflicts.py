"""Converts suspicions and their decisions to messages."""

from __future__ import annotations

from memstream.v1 import fragment_pb2
from memstream_server.core.suspicions import ConflictDecision, Suspicion
from memstream_server.ports.journal.reading import StoredConflict
from memstream_server.rpc.wire import scalars
from memstream_server.rpc.wire.scalars import Enums

DECISIONS = Enums(fragment_pb2.ConflictDecision, ConflictDecision)


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
