"""Converts receipts of recalls and their replays to messages."""

from __future__ import annotations

from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import stream_service_pb2 as stream_pb
from memstream_server.engine.recall.recall_receipts import Difference, DifferenceType, Replay
from memstream_server.ports.journal.recall_receipts import RankedFragment, RecallReceipt
from memstream_server.rpc.wire import queries, scalars
from memstream_server.rpc.wire.policies import policy_message
from memstream_server.rpc.wire.scalars import Enums

_TYPES = Enums(pb.ReplayDifferenceType, DifferenceType)


def receipt_message(receipt: RecallReceipt) -> pb.RecallReceipt:
    """A receipt as clients see it."""
    message = pb.RecallReceipt(
        id=receipt.id,
        create_time=scalars.timestamp_message(receipt.time_us),
        policy=policy_message(receipt.policy),
        revision=receipt.revision,
        formula=receipt.formula,
        embedding_model=receipt.space,
        ranking=[_ranked_message(receipt, one) for one in receipt.ranking],
        principal=receipt.principal,
        degraded=receipt.degraded,
        erased_ids=receipt.erased,
        query_erased=receipt.is_query_erased,
    )
    if not receipt.is_query_erased:
        message.query.MergeFromString(receipt.query)
    return message


def _ranked_message(receipt: RecallReceipt, one: RankedFragment) -> pb.RankedFragment:
    named = zip(receipt.names[one.names], one.values, receipt.weights[one.weights], strict=True)
    parts = [
        stream_pb.ScorePart(name=name, value=value, weight=weight, contribution=value * weight)
        for name, value, weight in named
    ]
    return pb.RankedFragment(fragment_id=one.id, score=one.score, relevance=one.relevance, parts=parts)


def replay_message(replay: Replay) -> pb.ReplayRecallResponse:
    """A replay as clients see it."""
    message = pb.ReplayRecallResponse(
        receipt=receipt_message(replay.receipt),
        same=replay.same,
        differences=[_difference_message(one) for one in replay.differences],
    )
    if (answer := replay.answer) is not None:
        budgeted = message.receipt.query.token_budget > 0
        message.done.CopyFrom(queries.done_response(message.receipt.query.query_id, answer, budgeted))
        for part in queries.recollection_responses("", answer, explain=True):
            message.recollections.extend(part.recollections.recollections)
    return message


def _difference_message(one: Difference) -> pb.ReplayDifference:
    return pb.ReplayDifference(
        type=_TYPES.to_number(one.type), fragment_id=one.fragment, recorded=one.recorded, present=one.present
    )
