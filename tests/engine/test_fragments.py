"""Effects of requests, restarts and clocks on fragments: external ids, etags, echoes, jobs, order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from memstream_server.app.models import Models
from memstream_server.core.events import EventType
from memstream_server.core.filters import Listing
from memstream_server.core.policy import DEFAULT, Overflow, Policy, with_value
from memstream_server.core.rendering import indexed_text
from memstream_server.core.values import Fragment, MemoryKind, Tier
from memstream_server.engine.background import jobs
from memstream_server.engine.errors import EtagMismatch
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.memory.decision import pack_vector
from memstream_server.engine.requests import AckLevel, MemoryChange, NewMemory, NewObservation, Query, fragment_etag
from memstream_server.engine.runtime.clock import Clock
from memstream_server.ports.index import IndexUnavailable, Point
from tests.engine.assembled import NAMESPACE, assembled, check, check_index, events_of, hasty
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.support.memory_index import MemoryIndex
from tests.support.scripted_models import VECTOR_BYTES, ScriptedEmbedder, ScriptedInsights
from tests.support.waiting import until

__all__ = ["hasty"]

pytestmark = pytest.mark.usefixtures("hasty")

TEA = "Bob likes tea more than anything"


async def create(engine: PartsEngine, policy: Policy = DEFAULT, kind: MemoryKind = MemoryKind.HYBRID) -> str:
    record, _ = await engine.memories.create(NewMemory(NAMESPACE, "joy", kind, policy))
    return record.uid


async def observe(engine: PartsEngine, *items: str | NewObservation, level: AckLevel = AckLevel.STORED) -> list[str]:
    new = [observation(item) if isinstance(item, str) else item for item in items]
    done = await engine.observe_batch(NAMESPACE, "joy", "", 1, new, level)
    return [outcome.fragment for outcome in done.outcomes]


async def live(engine: PartsEngine) -> list[Fragment]:
    return (await engine.fragments.list_page(NAMESPACE, "joy", Listing(), -1, 1_000))[0]


def keyed(text: str, key: str = "k") -> NewObservation:
    return observation(text, external_id=key)


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.LONG_TERM])
async def test_observing_the_external_id_restores_a_forgotten_fragment(tmp_path: Path, kind: MemoryKind) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, kind=kind)
        (first,) = await observe(parts.engine, keyed("the otter eats fish"))
        await parts.engine.fragments.forget(NAMESPACE, "joy", [first])
        assert await observe(parts.engine, keyed("the otter eats frogs")) == [first]
        answer = await parts.engine.recall(NAMESPACE, "joy", Query(text="what does the otter eat?"))
        assert [found.fragment.content for found in answer.recollections] == ["the otter eats frogs"]
        await check(parts.engine, "joy")
        await check_index(parts, "joy")


async def test_external_id_promoted_and_updated_in_one_group_stays(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, with_value(DEFAULT, "short_term.capacity", 2))
        (first,) = await observe(parts.engine, keyed("the otter eats fish"))
        await observe(parts.engine, "it rained on Monday", "badgers dig at night", keyed("the otter eats frogs"))
        (found,) = [one for one in await live(parts.engine) if one.id == first]
        assert (found.content, found.tier) == ("the otter eats frogs", Tier.LONG_TERM)
        await check(parts.engine, "joy")


async def test_external_id_dropped_and_sent_again_in_one_group_is_new(tmp_path: Path) -> None:
    policy = with_value(with_value(DEFAULT, "short_term.capacity", 2), "short_term.overflow", Overflow.DROP)
    async with assembled(tmp_path) as parts:
        await create(parts.engine, policy)
        (first,) = await observe(parts.engine, keyed("the otter eats fish"))
        *_, again = await observe(
            parts.engine, "it rained on Monday", "badgers dig at night", keyed("the otter eats frogs")
        )
        assert again != first
        assert [one.content for one in await live(parts.engine) if one.external_id] == ["the otter eats frogs"]
        await check(parts.engine, "joy")


async def test_held_fragment_has_the_etag_of_its_listing(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        (id_,) = await observe(parts.engine, "the otter eats fish")
        await observe(parts.engine, "it rained on Monday")
        (listed, _) = await live(parts.engine)
        assert listed.tier is Tier.SHORT_TERM
        change = FragmentChange(id_, importance=0.9, etag=fragment_etag(listed))
        changed, _ = await parts.engine.fragments.update(NAMESPACE, "joy", change)
        assert fragment_etag(changed) == fragment_etag((await live(parts.engine))[0])
        with pytest.raises(EtagMismatch):
            await parts.engine.fragments.update(NAMESPACE, "joy", change)


async def test_text_of_a_forgotten_fragment_is_no_echo(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        uid = await create(parts.engine)
        (first,) = await observe(parts.engine, observation(TEA, session="s"))
        await parts.engine.recall(NAMESPACE, "joy", Query(text="tea", session="s"))
        await parts.engine.wait_for_reinforcement()  # an answer takes longer than that to reach its caller
        await observe(parts.engine, observation(TEA, session="s"))
        assert EventType.ECHOED in [event.type for event in await events_of(parts.engine, uid)]
        await parts.engine.fragments.forget(NAMESPACE, "joy", [first])
        (second,) = await observe(parts.engine, observation(TEA, session="s"))
        assert [one.id for one in await live(parts.engine)] == [second]


async def test_former_text_of_a_changed_fragment_is_no_echo(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        uid = await create(parts.engine)
        (first,) = await observe(parts.engine, observation(TEA, session="s"))
        await parts.engine.recall(NAMESPACE, "joy", Query(text="tea", session="s"))
        await parts.engine.wait_for_reinforcement()  # as above
        await parts.engine.fragments.update(NAMESPACE, "joy", FragmentChange(first, pinned=True))
        await observe(parts.engine, observation(TEA, session="s"))
        assert EventType.ECHOED in [event.type for event in await events_of(parts.engine, uid)]
        await parts.engine.fragments.update(NAMESPACE, "joy", FragmentChange(first, content="Bob likes coffee"))
        await observe(parts.engine, observation(TEA, session="s"))
        assert [one.content for one in await live(parts.engine)] == ["Bob likes coffee", TEA]


async def test_echo_counts_as_an_access(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        await observe(parts.engine, observation(TEA, session="s"))
        await parts.engine.recall(NAMESPACE, "joy", Query(text="tea", session="s"))
        await parts.engine.wait_for_reinforcement()  # as above
        await observe(parts.engine, observation(TEA, session="s"))

        async def counted() -> bool:
            return [one.access_count for one in await live(parts.engine)] == [2]

        await until(counted)


async def test_offers_of_imported_memory_use_its_own_vectors(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        await observe(parts.engine, "the otter eats fish")
        await parts.engine.memories.create(NewMemory(NAMESPACE, "copy", MemoryKind.HYBRID, DEFAULT))
        (one,) = await live(parts.engine)
        # As after an import of this memory under another name, with as many changes of the fragment.
        other = one.but(content="badgers dig at night")
        found = []
        for name, fragment in (("joy", one), ("copy", other)):
            async with parts.actors.use(NAMESPACE, name) as actor:
                space = actor.working.embedding
                found += await parts.engine.reinforcement._content_vectors(actor, [fragment], space)
                (expected,) = await space.embedder.embed([fragment.content])
                np.testing.assert_array_equal(found[-1], expected)


async def test_order_holds_when_the_clock_goes_back(tmp_path: Path) -> None:
    clock = SettableClock()
    texts = [f"line {number} of the log" for number in range(1, 9)]
    for start in range(0, len(texts), 2):
        async with assembled(tmp_path, clock=Clock(now_us=clock.now_us)) as parts:
            if start == 0:
                await create(parts.engine, with_value(DEFAULT, "short_term.capacity", 3))
            await observe(parts.engine, *texts[start : start + 2])
            image = await check(parts.engine, "joy")
            assert [row.fragment.content for row in image.rows] == texts[: start + 2]
            assert [held.fragment.content for held in image.short_term] == texts[: start + 2][-3:]
        clock.offset_us -= 3_600_000_000


async def test_more_jobs_than_one_page_are_all_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PAGE", 2)
    insights = ScriptedInsights()
    insights.fail(times=12)  # so that all of them wait at the same time
    async with assembled(tmp_path, models=Models(ScriptedEmbedder(), insights=insights)) as parts:
        await create(parts.engine, with_value(DEFAULT, "short_term.enhance_threshold", 1))
        for subject in ("otters", "herons", "badgers", "foxes", "weasels"):
            await observe(parts.engine, f"{subject} were seen by the river", f"{subject} were seen by the river today")

        async def done() -> bool:
            return not await parts.journal.list_jobs(100)

        await until(done)
        assert sum(one.kind == "insight" for one in await live(parts.engine)) >= 5
        await check(parts.engine, "joy")


async def test_jobs_of_a_deleted_memory_are_deleted(tmp_path: Path) -> None:
    insights = ScriptedInsights()
    insights.fail(times=1_000_000)
    async with assembled(tmp_path, models=Models(ScriptedEmbedder(), insights=insights)) as parts:
        await create(parts.engine, with_value(DEFAULT, "short_term.enhance_threshold", 1))
        await observe(parts.engine, TEA, f"{TEA} today")
        assert [job.type for job in await parts.journal.list_jobs(10)] == ["insight"]
        await parts.engine.memories.delete(NAMESPACE, "joy")
        assert await parts.journal.list_jobs(10) == []
        calls = insights.calls
        await asyncio.sleep(0.1)
        assert insights.calls <= calls + 1


async def test_policy_change_that_promotes_requests_insights(tmp_path: Path) -> None:
    scripted = ScriptedInsights(["Bob is a tea drinker"])
    async with assembled(tmp_path, models=Models(ScriptedEmbedder(), insights=scripted)) as parts:
        await create(parts.engine)
        await observe(parts.engine, TEA, f"{TEA} today")
        record = await parts.engine.memories.get(NAMESPACE, "joy")
        ripe = with_value(record.policy, "short_term.enhance_threshold", 1)
        await parts.engine.memories.update(NAMESPACE, "joy", MemoryChange(policy=ripe))

        async def there() -> bool:
            return any(one.content == "Bob is a tea drinker" for one in await live(parts.engine))

        await until(there)
        await check(parts.engine, "joy")


async def test_memory_that_outgrows_ram_finds_unindexed_fragments(tmp_path: Path) -> None:
    texts = [f"{animal} at the river" for animal in ("otters", "herons", "badgers", "foxes", "weasels", "martens")]
    async with assembled(tmp_path, dense_bytes_max=2 * VECTOR_BYTES, index_flush_interval_s=3_600.0) as parts:
        await create(parts.engine)
        for text in texts:
            await observe(parts.engine, text)
        async with parts.actors.use(NAMESPACE, "joy") as actor:
            assert actor.working.dense is None
        for text in texts:
            query = Query(text=text, reinforce=False, limit=1)
            (found,) = (await parts.engine.recall(NAMESPACE, "joy", query)).recollections
            assert found.fragment.content == text
            assert found.scored.cosine is not None
            assert found.scored.cosine > 0.5


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.LONG_TERM])
async def test_fragment_forgotten_without_vector_gets_it_for_restore(tmp_path: Path, kind: MemoryKind) -> None:
    embedder = ScriptedEmbedder()
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        await create(parts.engine, kind=kind)
        embedder.fail(times=1_000)
        (id_,) = await observe(parts.engine, "the otter eats fish")
        await parts.engine.fragments.forget(NAMESPACE, "joy", [id_])
        embedder.heal()

        async def done() -> bool:
            return not await parts.journal.list_jobs(10)

        await until(done)
        await parts.engine.fragments.restore(NAMESPACE, "joy", [id_])
        (found,) = await live(parts.engine)
        assert found.model
        await check(parts.engine, "joy")
        await check_index(parts, "joy")


class DownIndex(MemoryIndex):
    """Refuses writes while it is `down`."""

    down = False

    async def upsert(self, points: Sequence[Point], model: str = "") -> None:
        if self.down:
            raise IndexUnavailable("scripted: down")
        await super().upsert(points, model)


async def test_changed_fragment_is_found_before_it_is_reindexed(tmp_path: Path) -> None:
    texts = [f"{animal} at the river" for animal in ("otters", "herons", "foxes", "weasels")]
    index = DownIndex()
    async with assembled(tmp_path, index=index, dense_bytes_max=1 * VECTOR_BYTES, index_overlay_s=0.5) as parts:
        await create(parts.engine, kind=MemoryKind.LONG_TERM)
        id_, *others = await observe(parts.engine, *texts)
        await check_index(parts, "joy")
        index.down = True
        await parts.engine.fragments.update(NAMESPACE, "joy", FragmentChange(id_, content="badgers dig at night"))
        async with parts.actors.use(NAMESPACE, "joy") as actor:

            async def let_go() -> bool:
                return not actor.working.fresh.keys() & set(others)

            await until(let_go)
            assert list(actor.working.fresh) == actor.working.list_unsettled() == [id_]
            index.down = False

            async def all_let_go() -> bool:
                return not actor.working.fresh

            await until(all_let_go)


async def test_reindexed_fragment_is_found_before_the_index_shows_it(tmp_path: Path) -> None:
    now_s, overlay_s = [0.0], 100.0
    clock = Clock(monotonic_s=lambda: now_s[0])
    async with assembled(tmp_path, clock=clock, dense_bytes_max=0, index_overlay_s=overlay_s, lease_s=600.0) as parts:
        await create(parts.engine, kind=MemoryKind.LONG_TERM)
        id_, *others = await observe(parts.engine, *(f"{animal} at the river" for animal in ("otters", "herons")))
        async with parts.actors.use(NAMESPACE, "joy") as actor:
            overlays = parts.engine.indexer.overlays

            async def flushed(*ids: str) -> None:
                """Wait until the overlay's time of these has started: shortly after the outbox is empty."""

                async def timed() -> bool:
                    return Counter(overlays.list_unsettled(actor.uid)) >= Counter(ids)

                await check_index(parts, "joy")
                await until(timed)

            async def left() -> list[str]:
                return [one for one in (id_, *others) if one in actor.working.fresh]

            async def at(part: float, text: str) -> None:
                now_s[0] = part * overlay_s
                await flushed(*await observe(parts.engine, text))  # the indexer checks the time when it has work

            await flushed(id_, *others)
            assert await left() == [id_, *others]
            now_s[0] = 0.5 * overlay_s
            await parts.engine.fragments.update(NAMESPACE, "joy", FragmentChange(id_, content="badgers dig at night"))
            await flushed(id_, id_, *others)
            await at(1.1, "foxes bark")

            async def others_let_go() -> bool:
                return not set(await left()) & set(others)

            await until(others_let_go)
            assert await left() == [id_]
            await at(1.6, "weasels run")

            async def all_let_go() -> bool:
                return not await left()

            await until(all_let_go)


class GatedEmbedder(ScriptedEmbedder):
    """Blocks calls with a text about otters until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.waiting = False

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        answer = await super().embed(texts)
        if any("otter" in text for text in texts):
            self.waiting = True
            await self.gate.wait()
        return answer


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.SHORT_TERM])
async def test_put_that_overtakes_an_observation_follows_it_in_order(tmp_path: Path, kind: MemoryKind) -> None:
    embedder = GatedEmbedder()
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        await create(parts.engine, kind=kind)
        await observe(parts.engine, "the otter eats fish", level=AckLevel.RECEIVED)

        async def asked() -> bool:
            return embedder.waiting

        await until(asked)
        await parts.engine.fragments.put(NAMESPACE, "joy", observation("badgers dig at night"))
        embedder.gate.set()

        async def both() -> bool:
            return len(await live(parts.engine)) == 2

        await until(both)
        await check(parts.engine, "joy")  # otherwise a restart would change which one is the oldest


async def test_late_vector_does_not_undo_a_change(tmp_path: Path) -> None:
    embedder = GatedEmbedder()
    embedder.fail()
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        uid = await create(parts.engine, kind=MemoryKind.LONG_TERM)
        (id_,) = await observe(parts.engine, "the otter eats fish")

        async def asked() -> bool:
            return embedder.waiting

        await until(asked)
        await parts.engine.fragments.update(NAMESPACE, "joy", FragmentChange(id_, content="badgers dig at night"))
        embedder.gate.set()

        async def done() -> bool:
            return not await parts.journal.list_jobs(10)

        await until(done)
        (found,) = await live(parts.engine)
        assert found.content == "badgers dig at night"
        (vector,) = await embedder.embed([indexed_text(found)])
        assert await parts.journal.get_vectors(uid, found.model, [id_]) == {id_: pack_vector(vector)}
        await check(parts.engine, "joy")
