"""Standing queries: the first answer and its changes; a client that applies all changes has the current answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from memstream_server.app.models import Models
from memstream_server.core.events import Event, EventType
from memstream_server.core.policy import DEFAULT, with_value
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import MemoryNotFound
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.recall import standing_query
from memstream_server.engine.requests import AckLevel, Change, NewMemory, Query, RecallAnswer
from memstream_server.engine.runtime.clock import Clock
from tests.engine.assembled import NAMESPACE, Assembled, assembled
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.support.scripted_models import ScriptedEmbedder
from tests.support.scripts import until
from tests.support.waiting import skip_time

TEA = "Bob likes tea more than anything"
QUERY = Query(text="What does Bob like?", limit=3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_query, "PAUSE_S", 0.01)


@pytest.fixture
def rankings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The revision of each ranking."""
    seen: list[int] = []
    change = standing_query.StandingQuery.next_change

    def counted(self: standing_query.StandingQuery, answer: RecallAnswer) -> Change | None:
        seen.append(answer.revision)
        return change(self, answer)

    monkeypatch.setattr(standing_query.StandingQuery, "next_change", counted)
    return seen


class Follower:
    """Applies each change to its answer, as a client does."""

    def __init__(self) -> None:
        self.changes = 0
        self.held: dict[str, str] = {}
        """Contents of the answer, best first."""
        self.told: list[str] = []
        self.retracted: list[str] = []
        self.degraded = ""

    def apply(self, change: Change) -> None:
        self.changes += 1
        self.retracted += [self.held.pop(id_) for id_ in change.retracted]
        for rank, found in zip(change.ranks, change.answer.recollections, strict=True):
            assert change.ids[rank - 1] == found.fragment.id
            self.held[found.fragment.id] = found.fragment.content
            self.told.append(found.fragment.content)
        assert set(self.held) == set(change.ids)
        self.held = {id_: self.held[id_] for id_ in change.ids}
        self.degraded = change.answer.degraded

    @property
    def contents(self) -> list[str]:
        return list(self.held.values())


async def at_once() -> None:
    """Lets every ranking begin at once."""


@asynccontextmanager
async def following(
    engine: PartsEngine, query: Query = QUERY, again: Callable[[], Awaitable[None]] = at_once
) -> AsyncIterator[Follower]:
    """A client that follows a query; starts after the first answer."""
    follower = Follower()

    async def follow() -> None:
        async with aclosing(engine.follow_query(NAMESPACE, "joy", query, again)) as changes:
            async for change in changes:
                follower.apply(change)

    task = asyncio.create_task(follow())
    try:
        await until(lambda: follower.changes > 0 or task.done())
        yield follower
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def memory(tmp_path: Path, *said: str, **given: object) -> AsyncIterator[Assembled]:
    async with assembled(tmp_path, **given) as parts:  # type: ignore[arg-type]  # tests name what it takes
        policy = with_value(DEFAULT, "short_term.capacity", 3)
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, policy))
        if said:
            await observe(parts.engine, *said)
        yield parts


async def observe(engine: PartsEngine, *texts: str, **fields: object) -> list[str]:
    """The fragments' ids."""
    items = [observation(text, **fields) for text in texts]  # type: ignore[arg-type]  # tests name real fields
    done = await engine.observe_batch(NAMESPACE, "joy", "", 1, items, AckLevel.STORED)
    return [each.fragment for each in done.outcomes]


async def test_first_change_is_the_whole_answer(tmp_path: Path) -> None:
    async with memory(tmp_path, TEA, "Bob likes otters", "the weather is fine") as parts:
        answer = await parts.engine.recall(NAMESPACE, "joy", QUERY)
        async with following(parts.engine) as follower:
            assert follower.contents == [found.fragment.content for found in answer.recollections]
            assert (follower.changes, follower.retracted) == (1, [])


async def test_first_answer_may_be_empty(tmp_path: Path) -> None:
    async with memory(tmp_path) as parts, following(parts.engine) as follower:
        assert (follower.changes, follower.contents) == (1, [])
        await observe(parts.engine, TEA)
        await until(lambda: follower.contents == [TEA])


async def test_new_fragment_is_sent_once_and_retracts_the_displaced(tmp_path: Path) -> None:
    first = ["Bob said a word", "Bob said two words", "Bob said three words"]
    async with memory(tmp_path, *first) as parts, following(parts.engine) as follower:
        assert sorted(follower.told) == sorted(first)
        await observe(parts.engine, "What does Bob like? Bob does like tea")
        await until(lambda: len(follower.retracted) == 1)
        assert follower.contents[0] == "What does Bob like? Bob does like tea"
        assert follower.told.count("What does Bob like? Bob does like tea") == 1
        assert follower.retracted[0] in first


async def test_unrelated_commit_sends_no_change(tmp_path: Path, rankings: list[int]) -> None:
    query = Query(text="Bob tea", limit=1)
    async with memory(tmp_path, TEA) as parts, following(parts.engine, query) as follower:
        await observe(parts.engine, "the weather is fine")
        revision = (await parts.engine.memories.get(NAMESPACE, "joy")).revision
        await until(lambda: rankings[-1] == revision)
        assert follower.changes == 1
        await parts.engine.wait_for_reinforcement()
        assert (await parts.engine.memories.get(NAMESPACE, "joy")).revision == revision, "nothing is reinforced"


async def test_edited_fragment_is_sent_again_forgotten_one_retracted(tmp_path: Path) -> None:
    async with memory(tmp_path) as parts:
        (id_,) = await observe(parts.engine, TEA)
        async with following(parts.engine) as follower:
            change = FragmentChange(id=id_, content="Bob likes coffee now")
            await parts.engine.fragments.update(NAMESPACE, "joy", change)
            await until(lambda: follower.contents == ["Bob likes coffee now"])
            assert follower.retracted == []
            await parts.engine.fragments.forget(NAMESPACE, "joy", [id_])
            await until(lambda: follower.contents == [])
            assert follower.retracted == ["Bob likes coffee now"]
            await parts.engine.fragments.restore(NAMESPACE, "joy", [id_])
            await until(lambda: follower.contents == ["Bob likes coffee now"])


async def test_expired_fragment_is_retracted_without_a_commit(tmp_path: Path) -> None:
    settable, ttl_s = SettableClock(), 3_600
    async with memory(tmp_path, clock=Clock(settable.now_us), maintenance_interval_s=10.0 * ttl_s) as parts:
        parts.engine.watchers.quiet_s = 10.0 * ttl_s
        await observe(parts.engine, TEA, ttl_us=ttl_s * 1_000_000)
        async with following(parts.engine) as follower:
            assert follower.contents == [TEA]
            settable.offset_us += ttl_s * 1_000_000
            skip_time(ttl_s)
            await until(lambda: follower.contents == [])


async def test_burst_of_commits_makes_one_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rankings: list[int]
) -> None:
    monkeypatch.setattr(standing_query, "PAUSE_S", 0.5)
    async with memory(tmp_path) as parts, following(parts.engine, Query(text="Bob", limit=50)) as follower:
        began_s = time.monotonic()
        for number in range(20):
            await observe(parts.engine, f"Bob said number {number} of many")
        await until(lambda: len(follower.held) == 20)
        assert len(rankings) <= 2 + (time.monotonic() - began_s) / 0.5


async def test_each_later_ranking_awaits_again(tmp_path: Path, rankings: list[int]) -> None:
    gate, asked = asyncio.Event(), []

    async def again() -> None:
        asked.append(len(rankings))
        await gate.wait()

    async with memory(tmp_path, TEA) as parts, following(parts.engine, QUERY, again) as follower:
        assert (asked, len(rankings)) == ([], 1)
        await observe(parts.engine, "Bob likes otters")
        await until(lambda: asked == [1])
        await observe(parts.engine, "Bob likes rain")
        assert len(rankings) == 1
        gate.set()
        await until(lambda: len(follower.held) == 3)
        assert asked == list(range(1, len(rankings)))


async def test_unnotified_commits_are_found_by_polling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As commits of another process are."""
    async with memory(tmp_path) as parts:
        watchers = parts.engine.watchers
        monkeypatch.setattr(watchers, "notify_commit", lambda uid, revision: None)
        monkeypatch.setattr(watchers, "quiet_s", 0.05)
        async with following(parts.engine) as follower:
            await observe(parts.engine, TEA)
            await until(lambda: follower.contents == [TEA])


async def test_deletion_ends_the_standing_query(tmp_path: Path) -> None:
    async with memory(tmp_path, TEA) as parts:
        changes = parts.engine.follow_query(NAMESPACE, "joy", QUERY, at_once)
        async with aclosing(changes):
            await anext(changes)
            assert parts.engine.memory_stats().watchers == 1
            next_change = asyncio.create_task(anext(changes))  # type: ignore[arg-type]  # a coroutine all the same
            await asyncio.sleep(0.05)
            await parts.engine.memories.delete(NAMESPACE, "joy")
            with pytest.raises(MemoryNotFound):
                await next_change
        assert parts.engine.memory_stats().watchers == 0


async def test_recreated_memory_ends_the_standing_query(tmp_path: Path) -> None:
    async with memory(tmp_path, TEA) as parts:
        changes = parts.engine.follow_query(NAMESPACE, "joy", QUERY, at_once)
        async with aclosing(changes):
            await anext(changes)
            await parts.engine.memories.delete(NAMESPACE, "joy")
            await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, DEFAULT))
            with pytest.raises(MemoryNotFound):
                await anext(changes)


async def test_query_is_embedded_once_and_again_after_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = ScriptedEmbedder()
    async with memory(tmp_path, TEA, models=Models(embedder)) as parts:
        monkeypatch.setattr(parts.engine.watchers, "quiet_s", 0.05)
        embedder.fail(times=2)
        async with following(parts.engine) as follower:
            assert "lexical legs only" in follower.degraded
            await until(lambda: not follower.degraded)
            await observe(parts.engine, "Bob likes some of them")
            await until(lambda: len(follower.held) == 2)
            await observe(parts.engine, "Bob likes all of them")
            await until(lambda: len(follower.held) == 3)
        assert embedder.texts.count(QUERY.text) == 1


async def test_observing_a_sent_fragment_is_an_echo(tmp_path: Path) -> None:
    async with memory(tmp_path, TEA) as parts:
        async with following(parts.engine, Query(text="Bob", session="monday")):
            await parts.engine.wait_for_reinforcement()
            await observe(parts.engine, TEA, session="monday")
        assert EventType.ECHOED in [event.type for event in await events(parts.engine)]


async def events(engine: PartsEngine) -> list[Event]:
    last = (await engine.memories.get(NAMESPACE, "joy")).revision
    found: list[Event] = []
    async with aclosing(engine.watch(NAMESPACE, "joy", "", 0, 0)) as steps:
        async for _, revision, _, told in steps:
            found += told
            if revision >= last:
                break
    return found


@pytest.mark.parametrize("seed", range(4))
async def test_applied_changes_equal_a_recall(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    words = ["Bob", "tea", "likes", "otters", "rain", "sings", "river", "blue"]
    query = Query(text="Bob likes tea", limit=4, now_us=int(time.time() * 1e6), alpha=0.0)
    async with memory(tmp_path) as parts, following(parts.engine, query) as follower:
        known: list[str] = []
        for _ in range(40):
            chosen = draw.random()
            if chosen < 0.6 or not known:
                known += await observe(parts.engine, *(" ".join(draw.sample(words, 3)) for _ in range(2)))
            elif chosen < 0.75:
                await parts.engine.fragments.forget(NAMESPACE, "joy", [draw.choice(known)])
            elif chosen < 0.9:
                await parts.engine.fragments.restore(NAMESPACE, "joy", [draw.choice(known)])
            else:
                await parts.engine.recall(NAMESPACE, "joy", Query(text=draw.choice(words)))
            await asyncio.sleep(draw.choice([0, 0, 0.02]))
        await parts.engine.wait_for_reinforcement()
        answer = await parts.engine.recall(NAMESPACE, "joy", standing_query.as_standing(query))
        now = {found.fragment.id: found.fragment.content for found in answer.recollections}
        await until(lambda: list(follower.held.items()) == list(now.items()))


async def test_folded_fragments_do_not_displace_each_other(tmp_path: Path) -> None:
    async with memory(tmp_path) as parts:
        engine = parts.engine
        (first,) = await observe(engine, TEA, session="s0")
        held: list[tuple[str, ...]] = []

        async def follow() -> None:
            async with aclosing(engine.follow_query(NAMESPACE, "joy", QUERY, at_once)) as changes:
                async for change in changes:
                    assert change.retracted == ()
                    folded = {one.fragment.id: one.folded for one in change.answer.recollections}
                    if first in folded:
                        held.append(folded[first])

        task = asyncio.create_task(follow())
        try:
            await until(lambda: held == [()] or task.done())
            for number in range(1, 6):  # each is newer and would rank first
                await observe(engine, TEA, session=f"s{number}")
                await until(lambda count=number: len(held[-1]) == count or task.done())  # type: ignore[misc]
            best = (await engine.recall(NAMESPACE, "joy", QUERY)).recollections[0].fragment.id
            assert best != first
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
