"""ObserveBatch with a request_id: the complete first answer, conflicts, concurrent calls, crashes."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import (
    EngineError,
    JournalUnavailable,
    ProducerSuperseded,
    RequestIdConflict,
    SequenceGap,
)
from memstream_server.engine.requests import AckLevel, NewMemory, NewObservation, ProducerProgress, RejectedObservation
from memstream_server.ports.journal.records import batch_request
from memstream_server.ports.operations import UNFINISHED
from tests.engine.assembled import NAMESPACE, Assembled, assembled, check, hasty
from tests.engine.memory import observation
from tests.support.faulty_journal import Fault
from tests.support.journals import only_sqlite
from tests.support.waiting import until

__all__ = ["hasty"]

pytestmark = pytest.mark.usefixtures("hasty")

LINES = [observation(f"line {number} of the log") for number in range(1, 31)]
LEVELS = list(AckLevel)


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Assembled]:
    async with assembled(tmp_path) as found:
        await create(found)
        yield found


async def create(parts: Assembled, name: str = "joy", kind: MemoryKind = MemoryKind.HYBRID) -> None:
    await parts.engine.memories.create(NewMemory(NAMESPACE, name, kind, DEFAULT, exist_ok=True))


async def batch(
    parts: Assembled,
    items: Sequence[NewObservation | RejectedObservation],
    level: AckLevel = AckLevel.STORED,
    *,
    request: str = "r",
    name: str = "joy",
    producer: str = "",
    first: int = 1,
) -> ProducerProgress:
    """Calls as the rpc does: the digest covers the whole request."""
    said = repr((name, producer, first, level, [item.digest for item in items]))
    digest = hashlib.blake2b(said.encode(), digest_size=16).digest()
    return await parts.engine.observe_batch(NAMESPACE, name, producer, first, items, level, request, digest)


async def contents(parts: Assembled, name: str = "joy") -> list[str]:
    return [row.fragment.content for row in (await check(parts.engine, name)).rows]


async def eventually(parts: Assembled, items: Sequence[NewObservation]) -> ProducerProgress:
    """Repeat the call until it is answered, as a client does."""
    for _ in range(3_000):
        try:
            return await batch(parts, items)
        except JournalUnavailable:
            await asyncio.sleep(0.02)
    raise AssertionError("it is never answered")


async def erased(parts: Assembled, ids: Sequence[str]) -> None:
    operation = await parts.engine.erasing.start(NAMESPACE, "joy", ids, None)

    async def ended() -> bool:
        return (await parts.engine.operations.get(operation.id)).state not in UNFINISHED

    await until(ended)


@pytest.mark.parametrize("producer", ["", "p"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("count", [1, 30])
async def test_repeat_gets_first_answer(tmp_path: Path, producer: str, level: AckLevel, count: int) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts)
        first = await batch(parts, LINES[:count], level, producer=producer)
        assert await batch(parts, LINES[:count], level, producer=producer) == first
        index = parts.index
    async with assembled(tmp_path, index=index) as parts:
        await batch(parts, LINES[5:7], request="another")
        assert await batch(parts, LINES[:count], level, producer=producer) == first
        assert (first.received, len(first.rejected)) == (count, 0)
        if level is not AckLevel.RECEIVED:
            assert [one.sequence for one in first.outcomes] == list(range(1, count + 1))
        if level is AckLevel.INDEXED:
            assert first.indexed == count


async def test_repeat_of_repeated_words_gets_their_outcomes(parts: Assembled) -> None:
    items = [observation("tea is hot"), observation("of a key", external_id="a"), observation("tea is hot")]
    first = await batch(parts, items)
    assert await batch(parts, items) == first
    assert {one.fragment for one in first.outcomes}


@pytest.mark.parametrize(
    "other",
    [
        {"items": LINES[:1]},
        {"items": LINES[:3]},
        {"items": [LINES[1], LINES[0]]},
        {"level": AckLevel.RECEIVED},
        {"producer": "p"},
        {"producer": "request:r"},
        {"first": 2},
    ],
    ids=str,
)
async def test_other_request_conflicts(parts: Assembled, other: dict[str, object]) -> None:
    await batch(parts, LINES[:2])
    with pytest.raises(RequestIdConflict):
        await batch(parts, **({"items": LINES[:2]} | other))  # type: ignore[arg-type]  # checked by the call
    assert len(await contents(parts)) == 2


@pytest.mark.parametrize("producer", ["request:r", "r", "\n", f"{NAMESPACE}\nObserveBatchRequest"])
async def test_producer_name_never_collides_with_request_id(parts: Assembled, producer: str) -> None:
    await batch(parts, LINES[:2])
    session = await parts.engine.open_observe(NAMESPACE, "joy", producer)
    assert session.opened.received == 0
    await session.submit(1, LINES[2:4])
    await session.wait_for_level(AckLevel.STORED, 2)
    assert (await batch(parts, LINES[:2])).received == 2
    assert [one.name for one in (await check(parts.engine, "joy")).producers] == [producer]


async def test_request_id_counts_within_its_memory(parts: Assembled) -> None:
    await create(parts, "ann")
    await batch(parts, LINES[:2])
    other = await batch(parts, LINES[2:5], name="ann")
    assert (other.received, await batch(parts, LINES[2:5], name="ann")) == (3, other)
    await parts.engine.memories.delete(NAMESPACE, "ann")
    await create(parts, "ann")
    assert (await batch(parts, LINES[5:6], name="ann")).received == 1
    assert await contents(parts, "ann") == ["line 6 of the log"]


async def test_concurrent_calls_share_one_answer(parts: Assembled) -> None:
    for request, producer in (("r", ""), ("s", "p")):
        calls = [batch(parts, LINES[:3], request=request, producer=producer) for _ in range(5)]
        calls.append(batch(parts, LINES[3:4], request=request, producer=producer))
        *answers, conflict = await asyncio.gather(*calls, return_exceptions=True)
        assert len({repr(answer) for answer in answers}) == 1
        assert isinstance(answers[0], ProducerProgress)
        assert isinstance(conflict, RequestIdConflict)
    assert len(await contents(parts)) == 6 - 3  # the second call repeats the texts of held fragments


async def test_small_batch_is_one_write(parts: Assembled) -> None:
    await batch(parts, LINES[:2], request="warm")
    parts.journal.written.clear()
    await batch(parts, LINES[2:4])
    assert [
        write for write in parts.journal.written if write in ("open_producer", "receive", "commit", "put_answer")
    ] == ["commit"]


async def test_numbered_batch_is_read_only_if_numbers_repeat(parts: Assembled) -> None:
    await batch(parts, LINES[:2], producer="p")
    for first, level in ((3, AckLevel.STORED), (5, AckLevel.INDEXED)):
        parts.journal.written.clear()
        parts.journal.fail_at(1, Fault.LOST, "get_answer")
        items = LINES[first - 1 : first + 1]
        answer = await batch(parts, items, level, producer="p", first=first, request=f"r{first}")
        assert ([one.sequence for one in answer.outcomes], parts.journal.failed) == ([first, first + 1], "")
        assert [one for one in parts.journal.written if one in ("receive", "commit", "put_answer")] == ["commit"]
        parts.journal.disarm()
        assert await batch(parts, items, level, producer="p", first=first, request=f"r{first}") == answer


@pytest.mark.parametrize("count", [2, 30])
async def test_used_id_with_new_numbers_conflicts(parts: Assembled, count: int) -> None:
    first = await batch(parts, LINES[:2], producer="p")
    with pytest.raises(RequestIdConflict):
        await batch(parts, LINES[2 : 2 + count], producer="p", first=3)
    assert len(await contents(parts)) == 2
    assert (await batch(parts, LINES[2:5], producer="p", first=3, request="s")).stored == 5
    assert await batch(parts, LINES[:2], producer="p") == first


@pytest.mark.parametrize("accepted", [0, 1])
async def test_repeat_of_refused_numbers_gets_first_answer(parts: Assembled, accepted: int) -> None:
    refused = RejectedObservation(3, "INVALID_FIELD", "scripted", b"r" * 16)
    items: list[NewObservation | RejectedObservation] = [*LINES[:accepted], refused]
    first = await batch(parts, items, producer="p")
    assert ([one.sequence for one in first.rejected], len(first.outcomes)) == ([accepted + 1], accepted)
    again = await batch(parts, items, producer="p")
    assert replace(again, indexed=first.indexed) == first  # the index goes on meanwhile


@only_sqlite("other servers may write into a new memory")
async def test_first_batch_of_a_new_memory_reads_nothing(parts: Assembled) -> None:
    await parts.engine.memories.create(NewMemory(NAMESPACE, "new", MemoryKind.HYBRID, DEFAULT))
    for read in ("get_memory", "get_answer", "load_memory"):
        parts.journal.fail_at(1, Fault.LOST, read)
        assert (await batch(parts, LINES[:2], name="new", request=read)).stored == 2
        assert parts.journal.failed == ""
    parts.journal.disarm()
    assert await contents(parts, "new") == [one.content for one in LINES[:2]]


async def test_repeat_among_others_leaves_them_stored(parts: Assembled) -> None:
    first = await batch(parts, LINES[:2])
    others = [batch(parts, LINES[place : place + 2], request=f"r{place}") for place in (2, 4, 6)]
    asked = (others[0], batch(parts, LINES[:2]), others[1], batch(parts, LINES[:1]), others[2])
    one, again, two, conflict, three = await asyncio.gather(*asked, return_exceptions=True)
    assert again == first
    assert isinstance(conflict, RequestIdConflict)
    assert [found.stored for found in (one, two, three) if isinstance(found, ProducerProgress)] == [2, 2, 2]
    assert len(await contents(parts)) == 8


async def test_repeat_to_a_full_memory_gets_first_answer(tmp_path: Path) -> None:
    async with assembled(tmp_path, memory_fragments_max=2) as parts:
        await create(parts)
        first = await batch(parts, LINES[:2])
        with pytest.raises(EngineError):
            await batch(parts, LINES[2:3], request="more")
        assert await batch(parts, LINES[:2]) == first


async def test_caller_that_leaves_does_not_end_the_call(parts: Assembled) -> None:
    release = parts.journal.hold("commit")
    leaving, staying = (asyncio.create_task(batch(parts, LINES[:2])) for _ in range(2))
    await asyncio.sleep(0.05)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    release()
    first = await staying
    assert first.stored == 2
    assert await batch(parts, LINES[:2]) == first


@pytest.mark.parametrize("request_id", ["r", ""])
async def test_call_that_fails_after_its_caller_left_is_quiet(parts: Assembled, request_id: str) -> None:
    warnings: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: warnings.append(context))
    release = parts.journal.hold("commit")
    leaving = asyncio.create_task(batch(parts, LINES[:2], request=request_id))

    async def committing() -> bool:
        return "commit" in parts.journal.written

    await until(committing)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    (actor,) = parts.actors.list_actors()
    actor.fail(JournalUnavailable("the memory ends", retry_after_s=0.1))
    release()
    await eventually(parts, LINES[2:4])
    del leaving, actor
    gc.collect()
    assert not warnings


async def test_call_that_all_callers_left_is_answered_later(parts: Assembled) -> None:
    for steps in range(30):
        items = [observation(f"try {steps}, item {item}") for item in (1, 2)]
        leaving = asyncio.create_task(batch(parts, items, request=f"r{steps}"))
        for _ in range(steps):
            await asyncio.sleep(0.0005 if steps > 15 else 0)
        leaving.cancel()
        again = asyncio.create_task(batch(parts, items, request=f"r{steps}"))
        await asyncio.gather(leaving, return_exceptions=True)
        answer = await again
        assert (answer.stored, len(answer.outcomes)) == (2, 2)
        assert await batch(parts, items, request=f"r{steps}") == answer
    assert len(await contents(parts)) == 60


async def test_failed_call_leaves_its_id_free(parts: Assembled) -> None:
    with pytest.raises(SequenceGap):
        await batch(parts, LINES[:2], producer="p", first=7)
    assert (await batch(parts, LINES[:2], producer="p")).stored == 2


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.DONE])
@pytest.mark.parametrize("write", ["receive", "commit"])
@pytest.mark.parametrize("count", [2, 30])
async def test_lost_write_is_answered_by_the_repeat(parts: Assembled, write: str, fault: Fault, count: int) -> None:
    """Two use a direct commit, thirty are received first; each loses its write before or after it takes effect."""
    parts.journal.fail_at(1, fault, write)
    answer = await eventually(parts, LINES[:count])
    assert (answer.stored, [one.sequence for one in answer.outcomes]) == (count, list(range(1, count + 1)))
    assert await contents(parts) == [line.content for line in LINES[:count]]
    assert await batch(parts, LINES[:count]) == answer
    with pytest.raises(RequestIdConflict):
        await batch(parts, LINES[:1])


async def test_repeat_after_crash_waits_for_received_batch(tmp_path: Path) -> None:
    """The journal has received the batch but not stored it, as if the process had been killed in between."""
    async with assembled(tmp_path) as parts:
        await create(parts)
        parts.journal.fail_at(1, Fault.LOST, "commit")
        release = parts.journal.hold("own_memory")  # this engine cannot activate the memory again
        with pytest.raises(EngineError):
            await batch(parts, LINES)
        release()
    async with assembled(tmp_path) as parts:
        with pytest.raises(RequestIdConflict):
            await batch(parts, LINES[:3])
        answer = await eventually(parts, LINES)
        assert (answer.stored, len(answer.outcomes)) == (30, 30)
        assert answer == await batch(parts, LINES)
        assert len(await contents(parts)) == 30


async def test_repeat_of_numbers_gets_first_outcomes(tmp_path: Path) -> None:
    """Also without a request_id: a numbered batch is safe to send again."""
    async with assembled(tmp_path) as parts:
        await create(parts)
        items = [*LINES[:3], LINES[0]]
        first = await parts.engine.observe_batch(NAMESPACE, "joy", "p", 1, items, AckLevel.STORED)
        again = await parts.engine.observe_batch(NAMESPACE, "joy", "p", 1, items, AckLevel.STORED)
        assert (again.outcomes, len(first.outcomes)) == (first.outcomes, 4)
    async with assembled(tmp_path) as parts:
        longer = await parts.engine.observe_batch(NAMESPACE, "joy", "p", 3, [*items[2:], *LINES[7:9]], AckLevel.STORED)
        assert longer.outcomes[:2] == first.outcomes[2:]
        assert [one.sequence for one in longer.outcomes] == [3, 4, 5, 6]


async def test_call_with_producer_supersedes_its_stream(parts: Assembled) -> None:
    session = await parts.engine.open_observe(NAMESPACE, "joy", "p")
    await batch(parts, LINES[:2], producer="p")
    with pytest.raises(ProducerSuperseded):
        session.take_progress()
    newer = await parts.engine.open_observe(NAMESPACE, "joy", "p")
    await batch(parts, LINES[:2], producer="p")  # the stored answer; opens no stream
    assert newer.take_progress().received == 2


async def test_erasure_leaves_answer_without_digest(parts: Assembled) -> None:
    first, other = await batch(parts, LINES[:2]), await batch(parts, LINES[2:4], request="other")
    await create(parts, "ann")
    elsewhere = await batch(parts, LINES[:2], name="ann")
    await erased(parts, [first.outcomes[0].fragment])
    assert await batch(parts, LINES[:2]) == first
    assert await batch(parts, LINES[2:4], request="other") == other
    assert await batch(parts, LINES[:2], name="ann") == elsewhere
    uid = (await parts.engine.memories.get(NAMESPACE, "joy")).uid
    for request_id in ("r", "other"):
        answer = await parts.engine.stored_answer(batch_request(NAMESPACE, uid, request_id))
        assert answer is not None
        assert answer.digest == b""
    with pytest.raises(RequestIdConflict):
        await batch(parts, LINES[:1], name="ann")
    assert await contents(parts) == [line.content for line in LINES[1:4]]
