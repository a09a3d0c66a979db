"""Receipts of recalls: a replay ranks the same to the last bit, or names what is gone."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from memstream_server.adapters.journal.sql import codec
from memstream_server.app.models import Models
from memstream_server.core import arrays, dense
from memstream_server.core.events import Event, EventType
from memstream_server.core.policy import DBGPT, DEFAULT, with_value
from memstream_server.core.ranking import FORMULA
from memstream_server.core.values import MemoryKind, Tier
from memstream_server.engine.errors import CursorCompacted, EngineError, FragmentNotFound, JournalUnavailable
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.recall.recall_receipts import Difference, DifferenceType, Replay
from memstream_server.engine.requests import MemoryChange, NewMemory, Query, RecallAnswer
from memstream_server.engine.runtime.call_context import PRINCIPAL
from memstream_server.engine.runtime.clock import Clock
from memstream_server.ports.journal.records import RecallReceipt
from memstream_server.ports.models import EmbeddingModel
from tests.engine.assembled import NAMESPACE, Assembled, assembled, check, events_of, hasty
from tests.engine.conftest import open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.engine.test_erasing import erased
from tests.engine.test_fragments import create, live, observe
from tests.engine.test_past import POLICIES, STEPS, Walk, plain
from tests.support.faulty_journal import Fault
from tests.support.journals import change_rows
from tests.support.scripted_models import VECTOR_BYTES, ScriptedEmbedder
from tests.support.seeds import SEEDS
from tests.support.waiting import until

__all__ = ["hasty"]
pytestmark = pytest.mark.usefixtures("hasty")

JOY = (NAMESPACE, "joy")
KINDS = POLICIES | {"suspecting": with_value(POLICIES["default"], "conflicts.ask_llm", True)}
QUERIES = {
    b"1": Query(text="where did Bob move with the blue bike", receipt=b"1"),
    b"2": Query(text="Ann likes coffee on Monday?", receipt=b"2", limit=3, near_misses=5, alpha=0.5),
    b"3": Query(text="garden 7 in Rome last week", receipt=b"3", token_budget=40, fold=False),
}


async def replay(engine: PartsEngine, receipt: str) -> Replay:
    return await engine.recall_receipts.replay(*JOY, receipt, QUERIES.__getitem__)


def shown(answer: RecallAnswer) -> object:
    """All of an answer that the memory, the query and the policy determine."""
    recollections = [
        (plain([one.fragment]), one.scored.parts, one.folded, one.truncated, one.status, one.chain, one.suspicions)
        for one in answer.recollections
    ]
    return (
        answer.revision,
        recollections,
        answer.working_ids,
        answer.considered,
        answer.weak,
        answer.interpreted,
        [(one.scored.id, one.stage) for one in answer.near_misses],
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.drawn
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_replay_ranks_the_same_to_the_last_bit(tmp_path: Path, kind: str, seed: int) -> None:
    await check_replays(tmp_path, kind, seed)


@pytest.mark.parametrize("kind", ["default", "merging"])
async def test_a_replay_of_int8_vectors_ranks_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(dense, "QUANTIZED_BYTES", 0)
    monkeypatch.setattr(arrays, "BLOCK", 4)
    assert await check_replays(tmp_path, kind, seed=3) > 0


async def check_replays(tmp_path: Path, kind: str, seed: int) -> int:
    """Returns the number of int8 vectors in RAM at the end."""
    clock = SettableClock()
    policy = with_value(KINDS[kind], "history.receipts", 1_000)
    async with assembled(tmp_path, clock=Clock(now_us=clock.now_us)) as parts:
        engine = parts.engine
        await engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, policy))
        walked = Walk(engine, clock, random.Random(seed))
        answers: dict[str, RecallAnswer] = {}
        for _ in range(STEPS):
            await walked.step()
            query = walked.random.choice(list(QUERIES.values()))
            answer = await engine.recall(*JOY, query)
            answers[answer.receipt_id] = answer
            clock.offset_us += walked.random.choice([0, 3_600_000_000])
        for receipt, answer in answers.items():
            replayed = await replay(engine, receipt)
            assert (replayed.same, replayed.differences) == (True, ()), receipt
            assert replayed.answer is not None
            assert shown(replayed.answer) == shown(answer)
        await check(engine, "joy")
        async with engine.actors.use(*JOY) as actor:
            assert actor.working.dense is not None
            return actor.working.dense.quantized


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
async def parts(tmp_path: Path, clock: SettableClock) -> AsyncIterator[Assembled]:
    async with assembled(tmp_path, clock=Clock(now_us=clock.now_us), maintenance_interval_s=3_600.0) as opened:
        yield opened


@pytest.fixture
def engine(parts: Assembled) -> PartsEngine:
    return parts.engine


OTTER = Query(text="what does the otter eat?", receipt=b"otter", reinforce=False)
FIRST = replace(OTTER, limit=1, receipt=b"first")
MILK = replace(OTTER, text="milk", limit=1, receipt=b"milk")
SUN = replace(OTTER, text="sun", limit=1, receipt=b"sun")
QUERIES |= {one.receipt: one for one in (OTTER, FIRST, MILK, SUN)}


async def receipts(engine: PartsEngine) -> list[RecallReceipt]:
    page, _, _ = await engine.recall_receipts.list_page(*JOY, None, 1_000)
    return [one for _, one in page]


async def recalled(engine: PartsEngine, query: Query = OTTER) -> str:
    receipt = (await engine.recall(*JOY, query)).receipt_id
    assert receipt
    return receipt


def named(replayed: Replay) -> list[tuple[DifferenceType, str]]:
    return [(one.type, one.fragment) for one in replayed.differences]


async def test_a_receipt_says_what_was_asked_and_by_whom(engine: PartsEngine, clock: SettableClock) -> None:
    uid = await create(engine)
    ids = await observe(engine, "the otter eats fish", "tea with milk")
    PRINCIPAL.set("key:alice")
    answer = await engine.recall(*JOY, OTTER)
    (receipt,) = await receipts(engine)
    assert (receipt.id, receipt.principal, receipt.query) == (answer.receipt_id, "key:alice", b"otter")
    assert (receipt.revision, receipt.formula) == (answer.revision, answer.formula)
    assert [one.id for one in receipt.ranking] == [one.fragment.id for one in answer.recollections]
    assert receipt.ranking[0].id == ids[0]
    assert receipt.policy == (await engine.memories.get(*JOY)).policy
    assert abs(receipt.time_us - clock.now_us()) < 60_000_000
    assert (await events_of(engine, uid))[-1] == Event(EventType.RECALLED, "", receipt=receipt.id)


async def test_a_receipt_changes_no_ranking(engine: PartsEngine) -> None:
    await create(engine)
    await observe(engine, "the otter eats fish", "the otter sleeps", "tea with milk")
    fixed = replace(OTTER, now_us=1_900_000_000_000_000)
    plain_answer = await engine.recall(*JOY, replace(fixed, receipt=b""))
    with_receipt = await engine.recall(*JOY, fixed)
    again = await engine.recall(*JOY, replace(fixed, receipt=b""))
    scored = [[one.scored for one in each.recollections] for each in (plain_answer, with_receipt, again)]
    assert scored[0] == scored[1] == scored[2]
    assert (plain_answer.receipt_id, again.revision) == ("", with_receipt.revision + 1)


@pytest.mark.parametrize("formula", ["absolute/4", "absolute/5", "absolute/6"])
async def test_a_receipt_of_an_older_formula_names_it(tmp_path: Path, formula: str) -> None:
    """As an older server wrote it: without the fields that came later, with the weights of its day."""
    async with open_engine(tmp_path) as engine:
        await create(engine)
        ids = await observe(engine, "the otter eats fish", "the otter sleeps")
        id_ = await recalled(engine)
        (kept,) = await receipts(engine)
    old = replace(kept, formula=formula, analyzer=1, weights=tuple((0.02, *row[1:]) for row in kept.weights))
    payload = codec.encode_record(old)
    assert b"analyzer" not in payload
    assert change_rows(tmp_path, "UPDATE recall_receipts SET payload = ?", payload) == 1
    async with open_engine(tmp_path) as engine:
        assert await receipts(engine) == [old]
        replayed = await replay(engine, id_)
        assert not replayed.same
        assert replayed.differences == (Difference(DifferenceType.FORMULA, recorded=formula, present=FORMULA),)
        assert replayed.answer is not None
        assert [one.fragment.id for one in replayed.answer.recollections] == ids


async def test_the_policy_bounds_the_receipts(engine: PartsEngine) -> None:
    policy = with_value(DEFAULT, "history.receipts", 2)
    await create(engine, policy)
    ids = [await recalled(engine) for _ in range(4)]
    assert [one.id for one in await receipts(engine)] == ids[:1:-1]
    with pytest.raises(FragmentNotFound):
        await replay(engine, ids[0])
    await engine.memories.update(*JOY, MemoryChange(policy=with_value(policy, "history.receipts", 0)))
    assert await receipts(engine) == []
    before = (await engine.memories.get(*JOY)).revision
    assert (await engine.recall(*JOY, OTTER)).receipt_id == ""
    assert (await engine.memories.get(*JOY)).revision == before


async def test_receipts_leave_with_the_events(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine, with_value(DEFAULT, "retention.event_retention_s", 3_600))
    await observe(engine, "the otter eats fish")
    old = await recalled(engine)
    clock.offset_us += 7_200_000_000
    (new,) = await observe(engine, "tea with milk")
    kept = await recalled(engine)
    await engine.run_maintenance()
    assert [one.id for one in await receipts(engine)] == [kept]
    assert (await replay(engine, kept)).same
    with pytest.raises(FragmentNotFound):
        await replay(engine, old)
    assert new in [one.id for one in await live(engine)]


async def test_a_replay_past_the_log_is_out_of_range(engine: PartsEngine) -> None:
    uid = await create(engine)
    await observe(engine, "the otter eats fish")
    receipt = await recalled(engine)
    await engine.journal.prune_events(uid, 2**62, 2)
    with pytest.raises(CursorCompacted):
        await replay(engine, receipt)


async def test_a_replay_uses_the_policy_of_the_receipt(engine: PartsEngine) -> None:
    policy = with_value(with_value(DEFAULT, "recall.gamma", 0.7), "recall.limit", 2)
    await create(engine, policy)
    await observe(engine, "the otter eats fish", "the otter sleeps", "the otter swims")
    receipt = await recalled(engine)
    await engine.memories.update(*JOY, MemoryChange(policy=DEFAULT))
    replayed = await replay(engine, receipt)
    assert (replayed.same, replayed.differences) == (True, ())
    german = with_value(DEFAULT, "language", "german")
    await engine.memories.update(*JOY, MemoryChange(policy=german))
    assert (DifferenceType.LANGUAGE, "") in named(await replay(engine, receipt))


async def test_a_version_that_is_not_kept_is_named(engine: PartsEngine) -> None:
    await create(engine, with_value(DEFAULT, "history.versions", 1))
    otter, other = await observe(engine, "the otter eats fish", "the otter sleeps")
    receipt = await recalled(engine)
    for content in ("the otter eats frogs", "the otter eats bread"):
        await engine.fragments.update(*JOY, FragmentChange(id=otter, content=content))
    replayed = await replay(engine, receipt)
    assert (replayed.same, named(replayed)) == (False, [(DifferenceType.VERSION_NOT_KEPT, otter)])
    assert replayed.answer is not None
    assert [one.fragment.id for one in replayed.answer.recollections] == [other]


async def test_erasing_marks_receipts_and_erases_their_queries(engine: PartsEngine) -> None:
    await create(engine)
    otter, tea, _ = await observe(engine, "the otter eats fish", "tea with milk", "a concert in Ulm")
    ranks = await recalled(engine, FIRST)
    shares = await recalled(engine, replace(MILK, text="fish or milk or milk"))
    other = await recalled(engine, MILK)
    await erased(engine, otter)
    found = {one.id: (one.erased, one.is_query_erased, one.vector, one.terms == b"") for one in await receipts(engine)}
    assert found[ranks] == ((otter,), True, None, True)
    assert found[shares] == ((), True, None, True)
    assert found[other] == ((), False, None, False)
    replayed = await replay(engine, ranks)
    assert (replayed.same, replayed.answer) == (False, None)
    assert named(replayed) == [(DifferenceType.QUERY_ERASED, ""), (DifferenceType.FRAGMENT_ERASED, otter)]
    assert named(await replay(engine, shares)) == [(DifferenceType.QUERY_ERASED, "")]
    replayed = await replay(engine, other)
    assert named(replayed)[0] == (DifferenceType.FRAGMENT_ERASED, otter)
    assert replayed.answer is not None
    assert [one.fragment.id for one in replayed.answer.recollections] == [tea]
    await check(engine, "joy")


async def test_clearing_and_the_grace_period_erase_queries(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine)
    otter, _, sun = await observe(engine, "the otter eats fish", "tea with milk", "the sun is hot")
    ranks = await recalled(engine, FIRST)
    await engine.fragments.forget(*JOY, [otter])
    assert not (await receipts(engine))[0].is_query_erased
    assert (await replay(engine, ranks)).same
    clock.offset_us += 8 * 86_400_000_000
    await engine.run_maintenance()
    assert [(one.erased, one.is_query_erased) for one in await receipts(engine)] == [((otter,), True)]
    await recalled(engine, SUN)
    await engine.fragments.clear(*JOY, [Tier.SHORT_TERM])
    assert (await receipts(engine))[0].erased == (sun,)


async def test_an_answer_from_before_an_erasure_is_ranked_again(parts: Assembled) -> None:
    engine, journal = parts.engine, parts.journal
    uid = await create(engine)
    otter, sleeps = await observe(engine, "the otter eats fish", "an otter sleeps")
    actor = engine.actors.peek(uid)
    assert actor is not None
    commits = journal.written.count("commit")
    let = journal.hold("commit")
    erasing = asyncio.create_task(erased(engine, otter))

    async def is_committing() -> bool:
        return journal.written.count("commit") > commits

    async def has_ranked() -> bool:
        return actor._inbox.qsize() == 1  # the receipt waits behind the erasure

    await until(is_committing)
    recalling = asyncio.create_task(engine.recall(*JOY, OTTER))
    await until(has_ranked)
    let()
    answer, _ = await asyncio.gather(recalling, erasing)
    assert [one.fragment.id for one in answer.recollections] == [sleeps]
    (receipt,) = await receipts(engine)
    assert (receipt.id, [one.id for one in receipt.ranking]) == (answer.receipt_id, [sleeps])
    await check(engine, "joy")


class RemoteEmbedder(ScriptedEmbedder):
    """One that is asked for every vector."""

    async def model(self) -> EmbeddingModel:
        return dataclasses.replace(await super().model(), instant=False)


async def test_a_recall_without_a_vector_is_replayed_without_one(tmp_path: Path) -> None:
    embedder = RemoteEmbedder()
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        engine = parts.engine
        await create(engine)
        await observe(engine, "the otter eats fish", "tea with milk")
        embedder.fail(times=1)
        lexical = await recalled(engine)
        dense = await recalled(engine)
        calls = embedder.calls
        for receipt in (lexical, dense):
            replayed = await replay(engine, receipt)
            assert (replayed.same, replayed.differences) == (True, ())
        assert embedder.calls == calls  # the query's vector is in the receipt


async def test_the_ranking_of_dbgpt_is_replayed_with_its_suspicions(engine: PartsEngine) -> None:
    policy = with_value(with_value(DBGPT, "conflicts.suspect", True), "history.receipts", 9)
    policy = with_value(policy, "conflicts.ask_llm", True)
    await create(engine, policy, MemoryKind.LONG_TERM)
    said = ("I live in Munich now.", "I live in Berlin now.")
    await observe(engine, *[observation(text, speaker="Joy") for text in said])
    query = replace(OTTER, text="where do I live?", receipt=b"live")
    QUERIES[query.receipt] = query
    receipt = await recalled(engine, query)
    await engine.reinforce_fragments(*JOY, [one.id for one in (await receipts(engine))[0].ranking][:1])
    assert len((await receipts(engine))[0].suspicions) == 1
    assert len((await receipts(engine))[0].accesses) == 2
    assert (await replay(engine, receipt)).same


async def test_a_memory_larger_than_ram_says_so_in_its_replay(tmp_path: Path) -> None:
    async with assembled(tmp_path, dense_bytes_max=2 * VECTOR_BYTES) as parts:
        await create(parts.engine, kind=MemoryKind.LONG_TERM)
        await observe(parts.engine, "the otter eats fish", *[f"tea number {number}" for number in range(6)])
        receipt = await recalled(parts.engine)
        assert (DifferenceType.INDEX, "") in named(await replay(parts.engine, receipt))


@pytest.mark.parametrize("fault", list(Fault))
async def test_a_named_receipt_survives_any_failed_commit(tmp_path: Path, fault: Fault) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        await observe(parts.engine, "the otter eats fish")
        parts.journal.fail_at(1, fault, "commit")
        with pytest.raises(EngineError) as failed:
            await parts.engine.recall(*JOY, OTTER)
        assert failed.value.retry_after_s is not None
        receipt = await until_recalled(parts.engine)
    async with assembled(tmp_path) as parts:
        assert (await replay(parts.engine, receipt)).same
        await check(parts.engine, "joy")


async def until_recalled(engine: PartsEngine) -> str:
    """Recall until it succeeds: the memory may be loaded again."""
    while True:
        try:
            return await recalled(engine)
        except JournalUnavailable:
            await asyncio.sleep(0.01)
