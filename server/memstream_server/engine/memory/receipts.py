"""From validated items to a receipt for the journal, and from receipts to enriched fragments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from memstream_server.core.values import Fragment, Tier, Vector
from memstream_server.engine.memory.enrich import EnrichedFragment
from memstream_server.engine.memory.producers import Batch, ProducerState
from memstream_server.engine.requests import NewObservation, ProducerProgress, RejectedObservation
from memstream_server.engine.runtime.call_context import capture_origin
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Answer, MemoryRecord
from memstream_server.ports.journal.writing import BatchReceipt, Outcome, Rejection
from memstream_server.ports.models import Account

if TYPE_CHECKING:
    from memstream_server.engine.memory.enrich import Embedding
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime


_decoder = msgspec.msgpack.Decoder(ProducerProgress)
encode_progress = msgspec.msgpack.Encoder().encode
decode_progress = _decoder.decode


def complete_answer(receipt: BatchReceipt, revision: int, outcomes: tuple[Outcome, ...]) -> Answer | None:
    """The answer that the commit of a receipt writes; None if the receipt has none, or a complete one."""
    answer, last = receipt.answer, receipt.last_sequence
    if answer is None or answer.response:
        return None
    progress = ProducerProgress(last, last, 0, revision, receipt.rejections, outcomes)
    return replace(answer, response=encode_progress(progress))


def batch_of(
    models: EngineModels,
    runtime: Runtime,
    record: MemoryRecord,
    state: ProducerState,
    first: int,
    items: Sequence[NewObservation | RejectedObservation],
    position: int,
    answer: Answer | None = None,
) -> Batch:
    """Assign ids, positions and times to a batch's observations. Refused items keep only their numbers."""
    now_us = runtime.clock.now_us()
    fragments: list[Fragment] = []
    sequences: list[int] = []
    importances: list[float | None] = []
    vectors: dict[str, bytes] = {}
    rejections: list[Rejection] = []
    for number, item in enumerate(items, first):
        if isinstance(item, RejectedObservation):
            rejections.append(Rejection(number, item.code, item.reason, item.message, item.details))
            continue
        fragment = fragment_of(item, runtime.ids.next_id(), now_us, position + len(fragments), record)
        fragments.append(fragment)
        sequences.append(number)
        importances.append(item.importance)
        if item.vector is not None:
            vectors[fragment.id] = item.vector.astype("<f4").tobytes()
    receipt = BatchReceipt(
        memory=record.uid,
        epoch=record.epoch,
        producer=state.name,
        producer_epoch=state.epoch,
        first_sequence=first,
        hashes=tuple([item.digest for item in items]),
        fragments=tuple(fragments),
        sequences=tuple(sequences),
        importances=tuple(importances),
        vectors=vectors,
        rejections=tuple(rejections),
        model=models.embedding_model.name,
        position=position,
        outcomes=state.outcomes,
        related=state.related,
        answer=answer,
    )
    return Batch(receipt, state, runtime.clock.monotonic_s(), capture_origin())


def fragment_of(item: NewObservation, id_: str, now_us: int, position: int, record: MemoryRecord) -> Fragment:
    """The observation as a fragment that is about to enter its memory."""
    expire = item.expire_time_us
    if expire is None and item.ttl_us is not None:
        expire = now_us + item.ttl_us
    return Fragment(
        id=id_,
        content=item.content,
        tier=Tier.SENSORY,
        structured=item.structured,
        speaker=item.speaker,
        role=item.role,
        session=item.session,
        importance=record.policy.importance_default if item.importance is None else item.importance,
        observe_time_us=now_us if item.observe_time_us is None else item.observe_time_us,
        create_time_us=now_us,
        access_time_us=now_us,
        metadata=item.metadata,
        expire_time_us=expire,
        external_id=item.external_id,
        token_count=item.token_count,
        own_vector=item.vector is not None,
        own_importance=item.importance is not None,
        ttl_us=item.ttl_us if item.expire_time_us is None else None,
        supersedes=item.supersedes,
        valid_from_us=item.valid_from_us,
        valid_until_us=item.valid_until_us,
        position=position,
    )


async def verify_repeats(
    journal: Journal, uid: str, state: ProducerState, first: int, items: Sequence[NewObservation | RejectedObservation]
) -> list[Rejection]:
    """The first rejections of repeated numbers. Raises SequenceConflict if the content differs.

    Numbers with compacted receipts count as repeats: they were acknowledged long ago.
    """
    known: Mapping[int, tuple[bytes, Rejection | None]] = state.recent
    if any(number not in known for number in range(first, first + len(items))):
        rows = await journal.received_hashes(uid, state.name, first, first + len(items) - 1)
        known = {number: (digest, rejection) for number, digest, rejection in rows} | dict(state.recent)
    found = (
        state.check_repeat(number, item.digest, known[number])
        for number, item in enumerate(items, first)
        if number in known
    )
    return [rejection for rejection in found if rejection is not None]


async def observations_in(
    batches: Sequence[Batch], models: EngineModels, record: MemoryRecord, account: Account, embedding: Embedding
) -> list[EnrichedFragment]:
    """Enrich the fragments of some receipts, in order of position.

    A client's vector in a space that is no longer in force is ignored, and the text is embedded.
    """
    in_force = models.embedding_model.name
    fragments: list[Fragment] = []
    importances: list[float | None] = []
    vectors: dict[str, Vector] = {}
    for batch in batches:
        receipt = batch.receipt
        usable = receipt.model in ("", in_force)
        fragments += receipt.fragments if usable else [one.but(own_vector=False) for one in receipt.fragments]
        importances.extend(receipt.importances or (None,) * len(receipt.fragments))
        if usable:
            vectors.update({id_: np.frombuffer(packed, dtype="<f4") for id_, packed in receipt.vectors.items()})
    if not fragments:
        return []
    return await models.enricher.enrich_fragments(fragments, vectors, importances, record, account, embedding)
