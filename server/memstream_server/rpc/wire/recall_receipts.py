"""Converts receipts of recalls and their replays to messages."""

from __future__ import annotations

from memstream.v1 import memory_service_pb2 as pb
from memstream_server.engine.recall.recall_receipts import Difference, DifferenceType, Replay
from memstream_server.engine.runtime.turns import in_slices, pause_if_due
from memstream_server.ports.journal.recall_receipts import RankedFragment, RecallReceipt
from memstream_server.rpc.wire import queries, scalars
from memstream_server.rpc.wire.policies import policy_message
from memstream_server.rpc.wire.scalars import Enums

_TYPES = Enums(pb.ReplayDifferenceType, DifferenceType)


async def write_receipt(message: pb.RecallReceipt, receipt: RecallReceipt) -> None:
    """Writes a receipt into an empty message."""
    described = pb.RecallReceipt(
        id=receipt.id,
        create_time=scalars.timestamp_message(receipt.time_us),
        policy=policy_message(receipt.policy),
        revision=receipt.revision,
        formula=receipt.formula,
        embedding_model=receipt.space,
        principal=receipt.principal,
        degraded=receipt.degraded,
        erased_ids=receipt.erased,
        query_erased=receipt.is_query_erased,
    )
    message.CopyFrom(described)
    if not receipt.is_query_erased:
        message.query.MergeFromString(receipt.query)
    async for part in in_slices(receipt.ranking, queries.ENCODED_PER_SLICE):
        for one in part:
            _write_ranked(message.ranking.add(), receipt, one)


def _write_ranked(message: pb.RankedFragment, receipt: RecallReceipt, one: RankedFragment) -> None:
    message.fragment_id, message.score, message.relevance = one.id, one.score, one.relevance
    message.companion = one.companion
    for name, value, weight in zip(receipt.names[one.names], one.values, receipt.weights[one.weights], strict=True):
        message.parts.add(name=name, value=value, weight=weight, contribution=value * weight)


async def encode_replay(replay: Replay) -> bytes:
    """A serialised ReplayRecallResponse. Its recollections are serialised in parts: joined, they are one message."""
    message = pb.ReplayRecallResponse(
        same=replay.same, differences=[_difference_message(one) for one in replay.differences]
    )
    await write_receipt(message.receipt, replay.receipt)
    if (answer := replay.answer) is None:
        return message.SerializeToString()
    budgeted = message.receipt.query.token_budget > 0
    message.done.CopyFrom(queries.done_response(message.receipt.query.query_id, answer, budgeted))
    await pause_if_due()
    return message.SerializeToString() + await queries.encode_recollections(answer, pb.ReplayRecallResponse)


def _difference_message(one: Difference) -> pb.ReplayDifference:
    return pb.ReplayDifference(
        type=_TYPES.numbers[one.type], fragment_id=one.fragment, recorded=one.recorded, present=one.present
    )
