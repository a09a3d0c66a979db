"""Under random operations through the SDK, replaying every event gives the same state as a listing."""

from __future__ import annotations

import uuid
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

import memstream
from memstream import Capability, Memory, MemoryKind, Observation, Profile, Tier
from memstream_server.core.replay_events import fold_all, place_of
from tests.server.listing import fragments, history
from tests.server.memory import event_of, fragment_of
from tests.support.server import ServerProcess

WORDS = st.sampled_from(["tea", "more tea", "tea again", "rain", "snow and rain", "a ship", "the ship again", "Bob"])
OBSERVE = st.tuples(st.just("observe"), WORDS, st.sampled_from(["", "a"]), st.sampled_from([None, 0.1, 0.9]))
KEYED = st.tuples(st.just("keyed"), WORDS, st.sampled_from(["k1", "k2"]))
RECALL = st.tuples(st.just("recall"), WORDS)
POLICY = st.tuples(st.just("policy"), st.integers(1, 4), st.integers(0, 2))
LIFECYCLE = st.tuples(
    st.sampled_from(["forget", "restore", "clear", "pin", "reweigh"]), st.integers(0, 30), st.sampled_from(Tier)
)
STEPS = st.lists(st.one_of(OBSERVE, OBSERVE, OBSERVE, KEYED, RECALL, POLICY, LIFECYCLE), min_size=5, max_size=30)


class Doing:
    """Random operations on one memory."""

    def __init__(self, memory: Memory, lifecycle: bool) -> None:
        self._memory = memory
        self._lifecycle = lifecycle

    async def do(self, name: str, *given: Any) -> None:
        if name in ("forget", "restore", "clear", "pin", "reweigh"):
            if self._lifecycle:
                await self._change(name, *given)
        else:
            await getattr(self, f"_{name}")(*given)

    async def _observe(self, words: str, session: str, importance: float | None) -> None:
        await self._memory.observe_batch([Observation(words, session=session, importance=importance)])

    async def _keyed(self, words: str, key: str) -> None:
        await self._memory.observe_batch([Observation(words, external_id=key)])

    async def _recall(self, words: str) -> None:
        await self._memory.recall_once(words, limit=3)

    async def _policy(self, capacity: int, sensory: int) -> None:
        await self._memory.update(policy={"short_term": {"capacity": capacity}, "sensory": {"capacity": sensory}})

    async def _change(self, name: str, number: int, tier: Tier) -> None:
        if name == "clear":
            await self._memory.clear([tier])
            return
        listed = await fragments(self._memory, forgotten=name == "restore")
        if not listed:
            return
        chosen = listed[number % len(listed)]
        if name == "forget":
            await self._memory.forget_fragments([chosen.id])
        elif name == "restore":
            await self._memory.restore_fragments([chosen.id])
        elif name == "pin":
            await self._memory.update_fragment(chosen.id, pinned=not chosen.pinned)
        else:
            await self._memory.update_fragment(chosen.id, importance=0.7, content=f"{chosen.content} indeed")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(MemoryKind),
    profile=st.sampled_from(Profile),
    threshold=st.integers(1, 3),
    steps=STEPS,
)
async def test_events_fold_to_the_listing(
    shared: ServerProcess, kind: MemoryKind, profile: Profile, threshold: int, steps: list[tuple[Any, ...]]
) -> None:
    async with memstream.connect(shared.address) as client:
        info = await client.server_info()
        policy = {"profile": str(profile), "short_term": {"capacity": 2, "enhance_threshold": threshold}}
        memory = await client.create_memory(f"property/{uuid.uuid4().hex}", kind=kind, policy=policy)
        doing = Doing(memory, Capability.LIFECYCLE in info.capabilities)
        for name, *given_ in steps:
            await doing.do(name, *given_)
        # Reinforcement continues: the events are those up to the revision of the listing. A cursor inside a revision
        # has the revision before, and the number of events of the next one that were seen.
        listed, revision = await _listed_at(memory)
        seen = [one for one in await history(memory) if (one.cursor.revision, one.cursor.ordinal) <= (revision, 0)]
        events = [event_of(one) for one in seen if one.fragment_id]
        folded = fold_all(events)
        assert {id_: _told(place) for id_, place in folded.items()} == {
            one.id: _told(place_of(fragment_of(one))) for one in listed
        }
        assert len({one.id for one in listed}) == len(listed)


async def _listed_at(memory: Memory) -> tuple[list[memstream.Fragment], int]:
    """Live and forgotten fragments of one revision."""
    while True:
        live, forgotten = memory.list_fragments(), memory.list_fragments(forgotten=True)
        found = [one async for one in live] + [one async for one in forgotten]
        assert live.cursor is not None
        assert forgotten.cursor is not None
        if live.cursor == forgotten.cursor and (await memory.describe()).revision == live.cursor.revision:
            return found, live.cursor.revision


def _told(place: Any) -> tuple[Any, ...]:
    """Fields of both: the wire does not list the enhancers of a held fragment."""
    return (
        place.tier,
        place.kind,
        round(place.importance, 6),
        place.enhancement_count,
        place.duplicate_count,
        place.sources,
        place.forgotten,
    )
