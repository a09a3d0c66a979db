"""Producers: contiguous numbers, repeats, conflicts, rejections, newer streams, cancelled clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from memstream_server.app.models import Models
from memstream_server.core.policy import DEFAULT, Policy, with_value
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import BacklogFull, ProducerSuperseded, SequenceConflict, SequenceGap
from memstream_server.engine.memory import producers
from memstream_server.engine.memory.ingest import ObserveSession
from memstream_server.engine.requests import AckLevel, NewMemory, NewObservation, ProducerProgress, RejectedObservation
from memstream_server.ports.journal.records import Producer
from tests.engine.assembled import NAMESPACE, Assembled, assembled, check, hasty
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.support.scripted_models import ScriptedEmbedder
from tests.support.waiting import until

__all__ = ["hasty"]

pytestmark = pytest.mark.usefixtures("hasty")

REFUSED = RejectedObservation(3, "INVALID_FIELD", "scripted", b"r" * 16)
LINES = [observation(f"line {number} of the log") for number in range(1, 21)]
STORED = AckLevel.STORED


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Assembled]:
    async with assembled(tmp_path) as found:
        await create(found.engine)
        yield found


async def create(engine: PartsEngine, policy: Policy = DEFAULT, kind: MemoryKind = MemoryKind.HYBRID) -> None:
    await engine.memories.create(NewMemory(NAMESPACE, "joy", kind, policy, exist_ok=True))


async def opened(engine: PartsEngine, producer: str = "p") -> ObserveSession:
    return await engine.open_observe(NAMESPACE, "joy", producer)


async def sent(
    session: ObserveSession, first: int, items: Sequence[NewObservation | RejectedObservation]
) -> ProducerProgress:
    await session.submit(first, items)
    return await session.wait_for_level(STORED, first + len(items) - 1)


async def contents(engine: PartsEngine) -> list[str]:
    return [row.fragment.content for row in (await check(engine, "joy")).rows]


def words(items: Sequence[NewObservation]) -> list[str]:
    return [item.content for item in items]


async def test_gap_is_refused_with_the_expected_number(parts: Assembled) -> None:
    session = await opened(parts.engine)
    await sent(session, 1, LINES[:2])
    with pytest.raises(SequenceGap) as refused:
        session.submit(4, LINES[3:4])
    assert refused.value.details == {"expected_sequence": "3"}
    assert (await sent(session, 3, LINES[2:4])).stored == 4
    assert await contents(parts.engine) == words(LINES[:4])


async def test_repeat_is_acknowledged_and_not_applied_again(parts: Assembled) -> None:
    session = await opened(parts.engine)
    await sent(session, 1, LINES[:3])
    assert (await sent(session, 1, LINES[:3])).stored == 3
    assert (await sent(session, 2, LINES[1:2])).stored == 3
    assert await contents(parts.engine) == words(LINES[:3])


async def test_partly_repeated_batch_adds_its_new_part(parts: Assembled) -> None:
    session = await opened(parts.engine)
    await sent(session, 1, LINES[:3])
    assert (await sent(session, 2, LINES[1:6])).stored == 6
    assert await contents(parts.engine) == words(LINES[:6])


async def test_conflicting_batch_adds_nothing(parts: Assembled) -> None:
    session = await opened(parts.engine)
    await sent(session, 1, LINES[:3])
    with pytest.raises(SequenceConflict) as refused:
        session.submit(3, [LINES[10], LINES[3]])
    assert refused.value.details == {"sequence": "3"}
    assert (await opened(parts.engine)).opened.received == 3
    assert await contents(parts.engine) == words(LINES[:3])


async def test_rejections_use_their_numbers_and_are_sent_again(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        session = await opened(parts.engine)
        first = await sent(session, 1, [LINES[0], REFUSED, LINES[1], REFUSED])
        assert [rejection.sequence for rejection in first.rejected] == [2, 4]
        assert first.stored == 4
        again = await sent(session, 2, [REFUSED, LINES[1]])
        assert again.rejected == first.rejected[:1]
        assert (await sent(session, 5, [REFUSED, REFUSED])).stored == 6
    async with assembled(tmp_path) as parts:
        session = await opened(parts.engine)
        assert (session.opened.received, session.opened.stored) == (6, 6)
        assert (await sent(session, 1, [LINES[0], REFUSED, LINES[1], REFUSED])).rejected == first.rejected
        assert await contents(parts.engine) == words(LINES[:2])


async def test_repeats_are_known_after_restart_and_beyond_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "RECENT_MAX", 4)
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        session = await opened(parts.engine)
        await sent(session, 1, LINES)
        assert (await sent(session, 1, LINES)).stored == len(LINES)
    async with assembled(tmp_path) as parts:
        session = await opened(parts.engine)
        assert session.opened.stored == len(LINES)
        assert (await sent(session, 1, LINES)).stored == len(LINES)
        with pytest.raises(SequenceConflict):
            await session.submit(2, [LINES[7]])
        with pytest.raises(SequenceConflict):
            await session.wait_for_level(AckLevel.INDEXED, len(LINES) + 1)
        assert await contents(parts.engine) == words(LINES)


async def test_repeat_is_not_acknowledged_before_its_original(parts: Assembled) -> None:
    session = await opened(parts.engine)
    release = parts.journal.hold("receive")
    first, again = session.submit(1, LINES[:2]), session.submit(1, LINES[:2])
    for _ in range(10):
        await asyncio.sleep(0)
    assert not again.done()
    with pytest.raises(SequenceConflict):
        session.submit(2, LINES[2:3])
    release()
    await asyncio.gather(first, again)
    assert (await session.wait_for_level(STORED, 2)).received == 2
    assert await contents(parts.engine) == words(LINES[:2])


async def test_newer_stream_counts_batches_in_flight_of_the_older(parts: Assembled) -> None:
    older = await opened(parts.engine)
    in_flight = [older.submit(1, LINES[:3]), older.submit(4, LINES[3:5])]
    newer = await opened(parts.engine)
    assert newer.opened.received == 5
    await asyncio.gather(*in_flight)
    with pytest.raises(ProducerSuperseded):
        older.submit(6, LINES[5:6])
    assert (await sent(newer, 6, LINES[5:8])).stored == 8
    assert await contents(parts.engine) == words(LINES[:8])


async def test_late_batch_of_a_superseded_stream_is_refused(parts: Assembled) -> None:
    older = await opened(parts.engine)
    await sent(older, 1, LINES[:2])
    release = parts.journal.hold("receive")
    late = older.submit(3, [LINES[18]])
    newer = await opened(parts.engine)
    assert newer.opened.received == 2
    ahead = [newer.submit(3, LINES[2:4]), newer.submit(5, LINES[4:5])]
    release()
    with pytest.raises(ProducerSuperseded):
        await late
    await asyncio.gather(*ahead)
    assert (await sent(newer, 6, LINES[5:6])).stored == 6
    assert await contents(parts.engine) == words(LINES[:6])
    async with parts.actors.use(NAMESPACE, "joy") as actor:
        assert actor.producers.backlog == 0


async def test_late_batch_ends_no_stream_that_opens_meanwhile(
    parts: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = await opened(parts.engine)
    open_producer, late = parts.journal.open_producer, list[asyncio.Future[None]]()

    async def open_and_submit(uid: str, epoch: int, name: str) -> Producer:
        found = await open_producer(uid, epoch, name)
        late.append(older.submit(1, LINES[:2]))
        return found

    monkeypatch.setattr(parts.journal, "open_producer", open_and_submit)
    newer = await opened(parts.engine)
    with pytest.raises(ProducerSuperseded):
        await late[0]
    assert (await sent(newer, 1, LINES[:2])).stored == 2
    assert await contents(parts.engine) == words(LINES[:2])


async def test_cancelled_wait_for_received_loses_nothing(parts: Assembled) -> None:
    session = await opened(parts.engine)
    release = parts.journal.hold("receive")
    waiting = session.submit(1, LINES[:2])
    await asyncio.sleep(0)
    waiting.cancel()
    release()
    assert (await session.wait_for_level(STORED, 2)).stored == 2
    assert (await sent(session, 3, LINES[2:3])).stored == 3
    assert await contents(parts.engine) == words(LINES[:3])


async def test_batch_call_cancelled_anywhere_is_all_or_nothing(parts: Assembled) -> None:
    expected: list[str] = []
    for steps in range(1, 40):
        new = [observation(f"try {steps}, item {item}") for item in (1, 2)]
        call = asyncio.create_task(parts.engine.observe_batch(NAMESPACE, "joy", f"p-{steps}", 1, new, STORED))
        for _ in range(steps):
            await asyncio.sleep(0.0005 if steps > 20 else 0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        session = await opened(parts.engine, f"p-{steps}")
        assert session.opened.received in (0, 2)
        if session.opened.received:
            await session.wait_for_level(STORED, 2)
            expected += words(new)
        session.close()
    assert sorted(await contents(parts.engine)) == sorted(expected)
    async with parts.actors.use(NAMESPACE, "joy") as actor:
        assert actor.producers.backlog == 0
    assert actor.is_idle


async def test_cancelled_open_still_supersedes_and_leaves_no_session(parts: Assembled) -> None:
    older = await opened(parts.engine)
    release = parts.journal.hold("open_producer")
    given_up = asyncio.create_task(opened(parts.engine))

    async def held() -> bool:
        return parts.journal.written.count("open_producer") == 2

    await until(held)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    release()
    with pytest.raises(ProducerSuperseded):
        await older.wait_for_level(STORED, 1)
    older.close()
    async with parts.actors.use(NAMESPACE, "joy") as actor:
        assert actor.failed is None

    async def idle() -> bool:
        return actor.is_idle

    await until(idle)


async def test_unnumbered_batches_keep_order_without_a_producer(parts: Assembled) -> None:
    calls = [parts.engine.observe_batch(NAMESPACE, "joy", "", 1, [one], STORED) for one in LINES]
    assert {done.stored for done in await asyncio.gather(*calls)} == {1}
    image = await check(parts.engine, "joy")
    assert sorted(row.fragment.content for row in image.rows) == sorted(words(LINES))
    assert image.producers == ()


async def test_backlog_is_bounded_and_shrinks_when_stored(tmp_path: Path) -> None:
    embedder = ScriptedEmbedder()
    policy = with_value(with_value(DEFAULT, "wait_for_models", True), "backlog_max", 4)
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        await create(parts.engine, policy)
        session = await opened(parts.engine)
        embedder.fail(times=1_000_000)
        await session.submit(1, LINES[:4])
        with pytest.raises(BacklogFull) as refused:
            session.submit(5, LINES[4:5])
        assert refused.value.retry_after_s
        embedder.heal()
        await session.wait_for_level(STORED, 4)
        assert (await sent(session, 5, LINES[4:8])).stored == 8
        assert await contents(parts.engine) == words(LINES[:8])


async def test_levels_only_rise_and_reach_the_last_number(parts: Assembled) -> None:
    session = await opened(parts.engine)
    seen: list[ProducerProgress] = []

    async def follow() -> None:
        while not seen or seen[-1].indexed < len(LINES):
            await session.news.wait()
            session.news.clear()
            seen.append(session.take_progress())

    following = asyncio.create_task(follow())
    for first in range(0, len(LINES), 2):
        await session.submit(first + 1, LINES[first : first + 2])
    await asyncio.wait_for(following, 30)
    for name in ("received", "stored", "indexed", "revision"):
        levels = [getattr(progress, name) for progress in seen]
        assert levels == sorted(levels)
    assert all(progress.indexed <= progress.stored <= progress.received for progress in seen)
    assert sorted(one.sequence for progress in seen for one in progress.outcomes) == list(range(1, len(LINES) + 1))


async def test_indexed_level_survives_a_restart(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        await parts.engine.observe_batch(NAMESPACE, "joy", "p", 1, LINES, AckLevel.INDEXED)
        index = parts.index
    async with assembled(tmp_path, index=index) as parts:

        async def started() -> bool:
            return parts.engine.info().degraded == ""

        await until(started)
        await asyncio.sleep(0.2)  # the indexer has read the outbox, and no row is to come
        again = await asyncio.wait_for(
            parts.engine.observe_batch(NAMESPACE, "joy", "p", 1, LINES, AckLevel.INDEXED), 30
        )
        assert again.indexed == len(LINES)


async def test_received_is_acknowledged_before_any_computation(tmp_path: Path) -> None:
    order: list[str] = []

    class Watched(ScriptedEmbedder):
        async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
            order.append("embedded")
            return await super().embed(texts)

    async with assembled(tmp_path, models=Models(Watched())) as parts:
        await create(parts.engine)
        session = await opened(parts.engine)

        async def watch() -> None:
            session.news.clear()
            await session.news.wait()
            order.append("told")

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await session.submit(1, LINES[:1], AckLevel.RECEIVED)
        await session.wait_for_level(STORED, 1)
        await watching
    assert order[:2] == ["told", "embedded"]
