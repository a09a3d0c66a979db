"""Converts queries from messages, and answers, receipts of recalls and replays to messages of bounded size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from google.protobuf.message import Message

from memstream.v1 import memory_service_pb2 as memory_pb
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.core.filters import EVERYTHING
from memstream_server.core.lexical import WordStatistics
from memstream_server.core.policy import Truth
from memstream_server.core.ranking import NearMiss
from memstream_server.core.scores import ScorePart
from memstream_server.core.time_phrases.recognition import TimePhrase
from memstream_server.engine.recall.recall_receipts import Difference, DifferenceType, Replay
from memstream_server.engine.requests import Change, MemoryAnswer, Query, RecallAnswer, Recollection
from memstream_server.engine.runtime.turns import in_slices, pause_if_due
from memstream_server.ports.journal.records import RankedFragment, RecallReceipt
from memstream_server.rpc import validation as check
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.validation import Violations
from memstream_server.rpc.wire import fragments, observations, queries, scalars
from memstream_server.rpc.wire.filters import read_filter
from memstream_server.rpc.wire.fragments import suspicion_message
from memstream_server.rpc.wire.policies import policy_message
from memstream_server.rpc.wire.scalars import Enums
from memstream_server.rpc.wire.scan import encode_field

PART_BYTES = 1 << 20
"""A larger answer is split into several messages, so that none comes near a client's message limit."""
ENCODED_PER_SLICE = 16
"""Fragments that are written between two looks at the clock, about 0.5 ms."""
_RECOLLECTIONS: int = pb.RecallOnceResponse.DESCRIPTOR.fields_by_name["recollections"].number
_WEIGHT_MAX = 100
_TOKENS_MAX = 2**31 - 1
_COUNT_MAX = 2**53
_TERM_BYTES = 8
_LANGUAGES_MAX = 100
_TYPES = Enums(memory_pb.ReplayDifferenceType, DifferenceType)


def read_query(
    message: pb.RecallQuery, session: str, limits: RequestLimits, dimension: int, prefix: str = "query."
) -> Query:
    """A validated query. Raises InvalidField."""
    found = Violations()
    weights = message.weights
    query = Query(
        text=_text(found, message, limits, prefix),
        vector=scalars.read_vector(found, f"{prefix}embedding", message.embedding, dimension),
        now_us=scalars.time_us(found, f"{prefix}now", message.now) if message.HasField("now") else None,
        limit=int(check.check_bounds(found, f"{prefix}limit", message.limit, 1, limits.recall_limit_max))
        if message.HasField("limit")
        else None,
        alpha=_weight(found, weights, "alpha", prefix),
        beta=_weight(found, weights, "beta", prefix),
        gamma=_weight(found, weights, "gamma", prefix),
        min_relevance=check.check_bounds(found, f"{prefix}min_relevance", message.min_relevance, 0, 1)
        if message.HasField("min_relevance")
        else None,
        filter=read_filter(found, message.filter, limits, f"{prefix}filter")
        if message.HasField("filter")
        else EVERYTHING,
        min_revision=check.not_negative(found, f"{prefix}min_revision", message.min_revision),
        explain=message.explain,
        near_misses=int(
            check.check_bounds(found, f"{prefix}near_misses", message.near_misses, 0, limits.recall_limit_max)
        ),
        reinforce=message.reinforce if message.HasField("reinforce") else None,
        token_budget=int(check.check_bounds(found, f"{prefix}token_budget", message.token_budget, 0, _TOKENS_MAX)),
        session=session,
        working_memory=not message.omit_working_memory,
        fold=message.fold if message.HasField("fold") else None,
        weak_below=check.check_bounds(found, f"{prefix}weak_below", message.weak_below, 0, 1)
        if message.HasField("weak_below")
        else None,
        truth=read_truth(found, f"{prefix}truth", message.truth),
        zone=scalars.read_zone(found, f"{prefix}time_zone", message.time_zone),
        interpret_time=message.interpret_time if message.HasField("interpret_time") else True,
        as_of=fragments.read_as_of(found, message, prefix),
        receipt=message.SerializeToString(deterministic=True) if message.receipt else b"",
        words=_read_all_words(found, f"{prefix}word_statistics", message.word_statistics)
        if message.word_statistics
        else (),
    )
    if query.receipt and message.subscribe:
        found.add(f"{prefix}receipt", "is given with subscribe: a receipt is of one answer")
    if query.receipt and query.as_of is not None:
        found.add(f"{prefix}receipt", "is given with as_of: the same call ranks the past again")
    if query.as_of is not None:
        for name in ("subscribe", "min_revision"):
            if getattr(message, name):
                found.add(f"{prefix}{name}", "is given with as_of: the past neither changes nor arrives")
    if message.HasField("timeout"):
        scalars.duration_us(found, f"{prefix}timeout", message.timeout)
    found.check()
    return query


def read_truth(found: Violations, field: str, value: int) -> Truth | None:
    """The truth that a request asks for; None if it gives none."""
    return fragments.TRUTHS.read_value(found, field, value, Truth.ALL) if value else None


async def recollection_responses(
    query_id: str,
    answer: RecallAnswer,
    explain: bool,
    done: pb.RecallDone | None = None,
    ranks: Sequence[int] | None = None,
) -> AsyncIterator[pb.RecallResponse]:
    """The answer's fragments, in one or more messages of about PART_BYTES; the last one has `done`.

    `ranks` are the ranks of these fragments if they are not the whole answer. Fragments are written into the message
    that is sent: each copy of an answer costs twice its serialisation.
    """
    response = pb.RecallResponse()
    response.recollections.query_id = query_id
    response.recollections.working_memory_ids.extend(answer.working_ids)
    size = response.ByteSize()
    formula = answer.formula if explain else ""
    for number, (rank, recollection) in enumerate(_ranked(answer, ranks), 1):
        added = response.recollections.recollections.add()
        _write_recollection(added, recollection, rank, formula)
        more = added.ByteSize()
        if size + more > PART_BYTES and size:
            full, response, size = response, _move_last(response, "recollections"), 0
            yield full
        size += more
        if number % ENCODED_PER_SLICE == 0:
            await pause_if_due()
    for number, fragment in enumerate(answer.working, 1):
        written = response.recollections.working_memory.add()
        fragments.write_fragment(written, fragment)
        more = written.ByteSize()
        if size + more > PART_BYTES and size:
            full, response, size = response, _move_last(response, "working_memory"), 0
            yield full
        size += more
        if number % ENCODED_PER_SLICE == 0:
            await pause_if_due()
    if done is not None:
        response.recollections.done.CopyFrom(done)
    yield response


async def encode_answer(query_id: str, answer: RecallAnswer, explain: bool, done: pb.RecallDone) -> bytes:
    """A serialised RecallOnceResponse. Its lists are serialised in slices, which are joined within one field: protobuf
    merges the parts of a singular field, Envoy's transcoder refuses them."""
    begin = pb.Recollections(query_id=query_id, working_memory_ids=answer.working_ids)
    parts = [begin.SerializeToString()]
    formula = answer.formula if explain else ""
    async for part in in_slices(_ranked(answer), ENCODED_PER_SLICE):
        found = pb.Recollections()
        for rank, recollection in part:
            _write_recollection(found.recollections.add(), recollection, rank, formula)
        parts.append(found.SerializeToString())
    async for held in in_slices(answer.working, ENCODED_PER_SLICE):
        working = pb.Recollections()
        for fragment in held:
            fragments.write_fragment(working.working_memory.add(), fragment)
        parts.append(working.SerializeToString())
    rest = pb.RecallOnceResponse(done=done)
    return encode_field(_RECOLLECTIONS, b"".join(parts)) + rest.SerializeToString()


async def encode_recollections(answer: RecallAnswer, into: type[Message]) -> bytes:
    """Serialised recollections of a message that has a field `recollections` of them."""
    parts = []
    async for part in in_slices(_ranked(answer), ENCODED_PER_SLICE):
        message: Any = into()
        for rank, recollection in part:
            _write_recollection(message.recollections.add(), recollection, rank, answer.formula)
        parts.append(message.SerializeToString())
    return b"".join(parts)


def _ranked(answer: RecallAnswer, ranks: Sequence[int] | None = None) -> list[tuple[int, Recollection]]:
    return list(zip(count(1) if ranks is None else ranks, answer.recollections, strict=False))


def _move_last(full: pb.RecallResponse, name: str) -> pb.RecallResponse:
    """A new part with the last entry of a list of a full part, which loses it."""
    response = pb.RecallResponse()
    response.recollections.query_id = full.recollections.query_id
    entries = getattr(full.recollections, name)
    getattr(response.recollections, name).append(entries[-1])
    del entries[-1]
    return response


async def change_responses(
    query_id: str, change: Change, explain: bool, budgeted: bool, inside: bool
) -> AsyncIterator[pb.RecallResponse]:
    """Changes of a standing query's answer; `inside`: whether the last part contains `done`."""
    if change.retracted:
        yield pb.RecallResponse(retracted=pb.Retracted(query_id=query_id, fragment_ids=change.retracted))
    end = await done_response(query_id, change.answer, budgeted)
    end.ranking_ids.extend(change.ids)
    async for response in recollection_responses(
        query_id, change.answer, explain, end if inside else None, change.ranks
    ):
        yield response
    if not inside:
        yield pb.RecallResponse(done=end)


async def done_response(query_id: str, answer: RecallAnswer, budgeted: bool) -> pb.RecallDone:
    """The end of a query's answer."""
    done = pb.RecallDone(
        query_id=query_id,
        revision=answer.revision,
        eligible=answer.eligible,
        considered=answer.considered,
        best_relevance=answer.best_relevance,
        weak=answer.weak,
        degraded=answer.degraded,
        timings=dict(answer.timings_s),
        tokens=answer.tokens if budgeted else 0,
        interpreted=[_interpreted_time(each) for each in answer.interpreted],
        as_of_revision=answer.as_of_revision,
        receipt_id=answer.receipt_id,
        unmatched=map(fragments.unmatched_message, answer.unmatched),
        memories=map(memory_message, answer.memories),
    )
    async for some in in_slices(answer.near_misses, ENCODED_PER_SLICE):
        done.near_misses.extend(map(_near_miss, some))
    return done


def _interpreted_time(found: TimePhrase) -> pb.InterpretedTime:
    message = pb.InterpretedTime(phrase=found.phrase)
    if found.window.start_us is not None:
        scalars.write_time(getattr(message, "from"), found.window.start_us)  # a keyword of Python
    if found.window.end_us is not None:
        scalars.write_time(message.to, found.window.end_us)
    return message


def _write_recollection(message: pb.Recollection, recollection: Recollection, rank: int, formula: str) -> None:
    scored = recollection.scored
    fragments.write_fragment(message.fragment, recollection.fragment)
    message.score, message.relevance, message.rank = scored.score, scored.relevance, rank
    message.status = fragments.STATUSES.numbers[recollection.status]
    if recollection.truncated:
        message.truncated = True
    if recollection.folded:
        message.folded_ids.extend(recollection.folded)
    if recollection.suspicions:
        message.suspicions.extend(map(suspicion_message, recollection.suspicions))
    if recollection.later_id:
        message.later_id = recollection.later_id
    if recollection.memory:
        message.memory = recollection.memory
    if recollection.companion is not None:
        _write_recollection(message.companion, recollection.companion, 0, formula)
    for link in recollection.chain:
        added = message.chain.add(fragment_id=link.id, status=fragments.STATUSES.numbers[link.status])
        scalars.write_time(added.observe_time, link.observe_time_us)
    if formula:
        message.explanation.formula = formula
        message.explanation.parts.extend(_part(part, scored.cosine) for part in scored.parts)


def _part(part: ScorePart, cosine: float | None) -> pb.ScorePart:
    details = {"cosine": cosine} if part.name == "dense" and cosine is not None else {}
    return pb.ScorePart(
        name=part.name, value=part.value, weight=part.weight, contribution=part.contribution, details=details
    )


def _near_miss(missed: NearMiss) -> pb.NearMiss:
    scored = missed.scored
    return pb.NearMiss(
        fragment_id=scored.id,
        stage=missed.stage.value,
        score=scored.score,
        relevance=scored.relevance,
        superseded_by=missed.superseded_by,
        memory=missed.memory,
    )


def words_message(words: WordStatistics) -> pb.WordStatistics:
    """Statistics as other servers read them."""
    return pb.WordStatistics(
        fragments=words.fragments,
        words=words.words,
        window_words=words.window_words,
        terms=words.terms,
        fragments_with=words.holding.tolist(),
        windows_with=words.windows.tolist(),
    )


def read_words(found: Violations, field: str, message: pb.WordStatistics) -> WordStatistics | None:
    """None, and a violation, for numbers that cannot be statistics: they would be no scores."""
    terms, rest = divmod(len(message.terms), _TERM_BYTES)
    counts = (*message.fragments_with, *message.windows_with)
    sizes = len(message.fragments_with) == len(message.windows_with) == terms and not rest
    sums = 0 <= message.words <= _COUNT_MAX and 0 <= message.window_words <= _COUNT_MAX  # also of NaN
    if not (sizes and sums and 0 <= message.fragments <= _COUNT_MAX) or any(
        not 0 <= each <= message.fragments for each in counts
    ):
        found.add(field, "are no statistics: counts of each term between 0 and `fragments`, for terms of 8 bytes")
        return None
    return WordStatistics(
        message.terms,
        message.fragments,
        message.words,
        message.window_words,
        np.array(message.fragments_with, np.int64),
        np.array(message.windows_with, np.int64),
    )


def _read_all_words(found: Violations, field: str, given: Sequence[pb.WordStatistics]) -> tuple[WordStatistics, ...]:
    if len(given) > _LANGUAGES_MAX:
        found.add(field, f"has more than {_LANGUAGES_MAX} entries")
        return ()
    read = [read_words(found, f"{field}[{number}]", each) for number, each in enumerate(given)]
    return tuple([each for each in read if each is not None])


def add_words(message: bytes, words: Sequence[WordStatistics]) -> bytes:
    """A serialised query with these statistics: serialised messages that are joined are one."""
    return message + pb.RecallQuery(word_statistics=map(words_message, words)).SerializeToString()


def memory_message(part: MemoryAnswer) -> pb.MemoryAnswer:
    """What one of several memories contributed."""
    own = part.answer
    return pb.MemoryAnswer(
        memory=part.memory,
        revision=own.revision,
        eligible=own.eligible,
        considered=own.considered,
        best_relevance=own.best_relevance,
        weak=own.weak,
        degraded=own.degraded,
        recollections=part.recollections,
        working_memory_ids=part.working_ids,
        receipt_id=own.receipt_id,
        as_of_revision=own.as_of_revision,
        unmatched=map(fragments.unmatched_message, own.unmatched),
    )


def _text(found: Violations, message: pb.RecallQuery, limits: RequestLimits, prefix: str) -> str:
    if message.WhichOneof("observation") == "structured":
        text = observations.structured_of(message.structured).text()
        return observations.content_checked(found, f"{prefix}structured", text, limits)
    return observations.content_checked(found, f"{prefix}text", message.text, limits)


def _weight(found: Violations, weights: pb.RecallWeights, name: str, prefix: str) -> float | None:
    if not _has_field(weights, name):
        return None
    return check.check_bounds(found, f"{prefix}weights.{name}", getattr(weights, name), 0, _WEIGHT_MAX)


def _has_field(message: Message, name: str) -> bool:
    return message.HasField(name)  # the stub accepts only literals


async def write_receipt(message: memory_pb.RecallReceipt, receipt: RecallReceipt) -> None:
    """Writes a receipt into an empty message."""
    described = memory_pb.RecallReceipt(
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


def _write_ranked(message: memory_pb.RankedFragment, receipt: RecallReceipt, one: RankedFragment) -> None:
    message.fragment_id, message.score, message.relevance = one.id, one.score, one.relevance
    message.companion = one.companion
    for name, value, weight in zip(receipt.names[one.names], one.values, receipt.weights[one.weights], strict=True):
        message.parts.add(name=name, value=value, weight=weight, contribution=value * weight)


async def encode_replay(replay: Replay) -> bytes:
    """A serialised ReplayRecallResponse. Its recollections are serialised in parts: joined, they are one message."""
    message = memory_pb.ReplayRecallResponse(
        same=replay.same, differences=[_difference_message(one) for one in replay.differences]
    )
    await write_receipt(message.receipt, replay.receipt)
    if (answer := replay.answer) is None:
        return message.SerializeToString()
    budgeted = message.receipt.query.token_budget > 0
    message.done.CopyFrom(await queries.done_response(message.receipt.query.query_id, answer, budgeted))
    await pause_if_due()
    return message.SerializeToString() + await queries.encode_recollections(answer, memory_pb.ReplayRecallResponse)


def _difference_message(one: Difference) -> memory_pb.ReplayDifference:
    return memory_pb.ReplayDifference(
        type=_TYPES.numbers[one.type], fragment_id=one.fragment, recorded=one.recorded, present=one.present
    )
