"""Reads as of every earlier revision equal what the memory answered at that revision."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from memstream_server.core.filters import Listing
from memstream_server.core.policy import DBGPT, DEFAULT, Policy, with_value
from memstream_server.core.scores import Scored, ScorePart
from memstream_server.core.values import Fragment, MemoryKind
from memstream_server.engine.errors import InvalidField, JournalUnavailable
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import AsOf, NewMemory, Query, RecallAnswer
from memstream_server.engine.runtime.clock import Clock
from tests.engine.assembled import NAMESPACE, assembled, check, hasty
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.engine.test_fragments import observe
from tests.support.seeds import SEEDS

__all__ = ["hasty"]
pytestmark = pytest.mark.usefixtures("hasty")

WORDS = ["tea", "coffee", "Bob", "Ann", "moved", "Paris", "Rome", "likes", "sold", "garden?", "Monday", "blue", "7"]
STEPS = 40
STEP_US = 100_000_000
TTL_US = 1_950_000_000
"""Between two steps, so that the time that a busy machine takes expires nothing."""
CERTAIN = with_value(DEFAULT, "conflicts.suspect", False)
"""Without suspicions: a change ends one, and the log does not say whether it changed words."""
SMALL = with_value(with_value(CERTAIN, "short_term.capacity", 3), "history.versions", 100)
Step = Callable[..., Awaitable[None]]
MERGING = with_value(with_value(DBGPT, "short_term.overflow", DEFAULT.short_term.overflow), "history.versions", 100)
POLICIES = {
    "default": SMALL,
    "sensory": with_value(SMALL, "sensory.capacity", 2),
    "merging": with_value(with_value(MERGING, "short_term.similarity_threshold", 0.5), "short_term.capacity", 3),
}
QUERY = Query(text="where did Bob move with the blue bike", now_us=1_900_000_000_000_000, alpha=0.0, reinforce=False)
"""Without recency: it depends on access times, which have no history."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a memory answered at a revision."""

    live: list[Fragment]
    forgotten: list[Fragment]
    recalled: RecallAnswer
    time_us: int


@dataclass(slots=True)
class Walk:
    """Random changes of one memory."""

    engine: PartsEngine
    clock: SettableClock
    random: random.Random
    seen: dict[int, Seen] = field(default_factory=dict)

    def text(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(2, 6)))

    async def step(self) -> None:
        live, forgotten = await listed(self.engine, False), await listed(self.engine, True)
        choices: list[Callable[..., Awaitable[None]]] = [
            self.observe,
            self.observe,
            self.observe,
            self.repeat,
            self.observe_key,
        ]
        if live:
            choices += [self.update, self.update, self.forget, self.recollect, self.restore_version]
            choices += [self.supersede, self.restore_live]
        if forgotten:
            choices.append(self.restore)
        await self.random.choice(choices)(live, forgotten)
        await self.engine.wait_for_reinforcement()

    async def observe(self, *_: Sequence[Fragment]) -> None:
        ttl_us = self.random.choice([None, None, TTL_US])
        session = self.random.choice(["s", "t"])
        await observe(self.engine, observation(self.text(), session=session, ttl_us=ttl_us, speaker="Bob"))

    async def repeat(self, *_: Sequence[Fragment]) -> None:
        await observe(self.engine, observation("Bob likes tea", ttl_us=TTL_US), observation("Ann likes tea"))

    async def observe_key(self, *_: Sequence[Fragment]) -> None:
        key = self.random.choice(["k", "l"])
        await observe(self.engine, observation(self.text(), external_id=key, importance=self.random.random()))

    async def update(self, live: Sequence[Fragment], _: Sequence[Fragment]) -> None:
        change = self.random.choice(
            [
                {"content": self.text()},
                {"content": self.text(), "speaker": "Ann"},
                {"importance": self.random.random()},
                {"pinned": True},
                {"metadata": (("n", self.random.randint(0, 3)),)},
            ]
        )
        wanted = FragmentChange(id=self.random.choice(live).id, **change)  # type: ignore[arg-type]  # real fields
        await self.engine.fragments.update(NAMESPACE, "joy", wanted)

    async def forget(self, live: Sequence[Fragment], _: Sequence[Fragment]) -> None:
        await self.engine.fragments.forget(NAMESPACE, "joy", [self.random.choice(live).id])

    async def restore(self, _: Sequence[Fragment], forgotten: Sequence[Fragment]) -> None:
        await self.engine.fragments.restore(NAMESPACE, "joy", [self.random.choice(forgotten).id])

    async def supersede(self, live: Sequence[Fragment], _: Sequence[Fragment]) -> None:
        old, new = self.random.choice(live), self.random.choice(live)
        with contextlib.suppress(InvalidField):
            await self.engine.fragments.supersede(NAMESPACE, "joy", [old.id], new.id)

    async def restore_live(self, live: Sequence[Fragment], _: Sequence[Fragment]) -> None:
        await self.engine.fragments.restore(NAMESPACE, "joy", [self.random.choice(live).id])

    async def recollect(self, live: Sequence[Fragment], _: Sequence[Fragment]) -> None:
        await self.engine.reinforce_fragments(NAMESPACE, "joy", [self.random.choice(live).id])

    async def restore_version(self, live: Sequence[Fragment], _forgotten: Sequence[Fragment]) -> None:
        chosen = self.random.choice(live).id
        _, versions, _ = await self.engine.fragments.read_history(NAMESPACE, "joy", chosen)
        if versions:
            wanted = self.random.choice(versions).replaced
            await self.engine.fragments.restore_version(NAMESPACE, "joy", chosen, wanted)

    async def remember(self) -> None:
        """Keep what the memory answers now."""
        answers = Seen(
            await listed(self.engine, False),
            await listed(self.engine, True),
            await self.engine.recall(NAMESPACE, "joy", QUERY),
            self.clock.now_us(),
        )
        self.seen.setdefault(answers.recalled.revision, answers)
        self.clock.offset_us += self.random.choice([0, STEP_US])


async def listed(engine: PartsEngine, forgotten: bool, as_of: AsOf | None = None) -> list[Fragment]:
    which = Listing(forgotten=forgotten), -1, 1_000
    if as_of is None:
        return (await engine.fragments.list_page(NAMESPACE, "joy", *which))[0]
    return (await engine.past.list_page(NAMESPACE, "joy", as_of, *which))[0]


def plain(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Without what has no history: etags, access statistics, and the microseconds of a forgetting or superseding."""
    return [
        one.but(
            version=0,
            access_count=0,
            access_time_us=0,
            forget_time_us=one.forget_time_us and 1,
            supersede_time_us=one.supersede_time_us and 1,
        )
        for one in fragments
    ]


def timeless(scored: Scored) -> list[ScorePart]:
    """The parts of the score except recency."""
    return [part for part in scored.parts if part.name != "recency"]


def told(answer: RecallAnswer) -> object:
    """Everything of an answer that a ranking determines, to the last bit."""
    recollections = [
        (plain([one.fragment]), one.scored.score, one.scored.relevance, timeless(one.scored), one.folded)
        for one in answer.recollections
    ]
    return (
        answer.revision,
        recollections,
        answer.working_ids,
        plain(answer.working),
        answer.eligible,
        answer.considered,
        answer.best_relevance,
        answer.weak,
        [(one.scored.id, one.stage) for one in answer.near_misses],
    )


async def walk(engine: PartsEngine, clock: SettableClock, seed: int, policy: Policy, steps: int = STEPS) -> Walk:
    await engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, policy))
    walked = Walk(engine, clock, random.Random(seed))
    await walked.remember()
    for _ in range(steps):
        await walked.step()
        await walked.remember()
    return walked


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.drawn
@pytest.mark.parametrize("seed", SEEDS)
async def test_the_past_is_what_the_memory_answered_then(tmp_path: Path, kind: str, seed: int) -> None:
    clock = SettableClock()
    async with assembled(tmp_path, clock=Clock(now_us=clock.now_us)) as parts:
        walked = await walk(parts.engine, clock, seed, POLICIES[kind])
        assert len(walked.seen) > STEPS / 2
        for revision, seen in walked.seen.items():
            as_of = AsOf(revision=revision)
            assert plain(await listed(parts.engine, False, as_of)) == plain(seen.live), revision
            assert plain(await listed(parts.engine, True, as_of)) == plain(seen.forgotten), revision
            answer = await parts.engine.recall(NAMESPACE, "joy", replace(QUERY, as_of=as_of))
            assert told(answer) == told(seen.recalled), revision
            for one in seen.live[:2]:
                found, _, at = await parts.engine.past.get(NAMESPACE, "joy", AsOf(time_us=seen.time_us), one.id)
                assert (plain([found]), at) == (plain([one]), revision)
        await check(parts.engine, "joy")


async def test_the_past_stays_while_the_memory_changes(tmp_path: Path) -> None:
    clock = SettableClock()
    async with assembled(tmp_path, clock=Clock(now_us=clock.now_us)) as parts:
        walked = await walk(parts.engine, clock, 3, SMALL, steps=20)
        revision = max(walked.seen)
        seen, as_of = walked.seen[revision], AsOf(revision=revision)
        query = replace(QUERY, as_of=as_of)

        async def change() -> None:
            for _ in range(20):
                await walked.step()

        changing = asyncio.create_task(change())
        reads = 0
        while not changing.done() or reads < 2:
            with contextlib.suppress(JournalUnavailable):  # it changed faster than it was read: a client tries again
                assert plain(await listed(parts.engine, False, as_of)) == plain(seen.live)
                assert told(await parts.engine.recall(NAMESPACE, "joy", query)) == told(seen.recalled)
                reads += 1
        await changing
