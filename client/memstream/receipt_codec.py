"""Conversion of receipts of recalls, and of the queries in them, from the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import cast

from memstream.answer_codec import answer_from_wire, score_part_from_wire
from memstream.channel import Link, MemoryPath, iterate_pages
from memstream.codec import structured_from_wire, truth_from_wire
from memstream.filter_codec import filter_from_wire
from memstream.policy_codec import policy_from_wire
from memstream.receipt_values import DifferenceType, RankedFragment, RecallReceipt, Replay, ReplayDifference
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import stream_service_pb2
from memstream.values import RecallOptions, Structured, Weights
from memstream.wiretypes import members_by_number, optional_timestamp_from_wire, timestamp_from_wire

_TYPES = members_by_number(DifferenceType, pb.ReplayDifferenceType.DESCRIPTOR)
_PLAIN = (
    "limit",
    "min_relevance",
    "min_revision",
    "explain",
    "near_misses",
    "reinforce",
    "token_budget",
    "omit_working_memory",
    "fold",
    "weak_below",
    "time_zone",
    "interpret_time",
    "receipt",
)
"""Options with the same value on the wire."""


def iterate_receipts(link: Link, path: MemoryPath, page_size: int) -> AsyncIterator[RecallReceipt]:
    """The receipts of a memory, the latest first, page by page."""

    async def fetch(token: str) -> tuple[Sequence[RecallReceipt], str]:
        request = pb.ListRecallReceiptsRequest(
            namespace=path.namespace, memory=path.name, page_size=page_size, page_token=token
        )
        answer = await link.call(link.memories.ListRecallReceipts, request, path)
        return [receipt_from_wire(wire) for wire in answer.receipts], answer.next_page_token

    return iterate_pages(fetch)


def receipt_from_wire(wire: pb.RecallReceipt) -> RecallReceipt:
    """A receipt."""
    return RecallReceipt(
        id=wire.id,
        create_time=optional_timestamp_from_wire(wire.create_time, wire.HasField("create_time")),
        what=what_from_wire(wire.query) if wire.HasField("query") else None,
        options=options_from_wire(wire.query),
        policy=policy_from_wire(wire.policy),
        revision=wire.revision,
        formula=wire.formula,
        embedding_model=wire.embedding_model,
        ranking=tuple(
            RankedFragment(
                one.fragment_id,
                one.score,
                one.relevance,
                tuple(score_part_from_wire(part) for part in one.parts),
                one.companion,
            )
            for one in wire.ranking
        ),
        principal=wire.principal,
        degraded=wire.degraded,
        erased_ids=tuple(wire.erased_ids),
        query_erased=wire.query_erased,
    )


def replay_from_wire(wire: pb.ReplayRecallResponse) -> Replay:
    """A replay."""
    part = stream_service_pb2.Recollections(recollections=wire.recollections)
    return Replay(
        receipt=receipt_from_wire(wire.receipt),
        answer=answer_from_wire([part], wire.done) if wire.HasField("done") else None,
        same=wire.same,
        differences=tuple(
            ReplayDifference(_TYPES.get(one.type, DifferenceType.UNKNOWN), one.fragment_id, one.recorded, one.present)
            for one in wire.differences
        ),
    )


def what_from_wire(wire: stream_service_pb2.RecallQuery) -> str | Structured:
    """What a query asks."""
    return structured_from_wire(wire.structured) if wire.HasField("structured") else wire.text


def options_from_wire(wire: stream_service_pb2.RecallQuery) -> RecallOptions:
    """The options that were given."""
    given = {field.name for field, _ in wire.ListFields()}
    found: dict[str, object] = {name: getattr(wire, name) for name in _PLAIN if name in given}
    if "filter" in given:
        found["filter"] = filter_from_wire(wire.filter)
    if "now" in given:
        found["now"] = timestamp_from_wire(wire.now)
    if "truth" in given:
        found["truth"] = truth_from_wire(wire.truth)
    if "embedding" in given:
        found["embedding"] = list(wire.embedding)
    if "weights" in given:
        found["weights"] = Weights(**{field.name: value for field, value in wire.weights.ListFields()})
    return cast("RecallOptions", found)  # its keys are those of RecallOptions
