"""Fails every write of a session once, in every way a write can fail: nothing acknowledged is lost or doubled.

As in SQLite's out-of-memory tests, the n-th call fails, for every n, until a run meets no failure. `make test` takes
n = 1, 2, 4, 8 ...; `make test-all` and `make crash` take every n.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from memstream_server.app.models import Models
from memstream_server.core.filters import Listing
from memstream_server.core.policy import DBGPT, DEFAULT, Overflow, Policy, with_value
from memstream_server.core.values import Fragment, MemoryKind
from memstream_server.engine.errors import EngineError, MemoryNotFound
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.memory import actor
from memstream_server.engine.requests import (
    AckLevel,
    AsOf,
    MemoryChange,
    NewMemory,
    NewObservation,
    Query,
    RejectedObservation,
)
from memstream_server.ports.index import IndexLost, IndexUnavailable
from memstream_server.ports.journal.errors import OutcomeUnknown
from memstream_server.ports.models import ModelError, ModelRefused, ModelUnavailable
from tests.engine.assembled import NAMESPACE, Assembled, assembled, check, check_index, gone, hasty, passing
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.support.faulty_journal import COMPARING, READS, WRITES, Fault
from tests.support.memory_index import MemoryIndex
from tests.support.scripted_models import VECTOR_BYTES, Outages, ScriptedEmbedder, ScriptedInsights, ScriptedScorer
from tests.support.seeds import THOROUGH, rounds
from tests.support.waiting import until

__all__ = ["hasty"]

pytestmark = [pytest.mark.usefixtures("hasty"), pytest.mark.drawn]

T = TypeVar("T")
Item = NewObservation | RejectedObservation
TRIES_MAX = 2_000
READS_MAX = rounds(2, 1)
"""Failing reads per method: background tasks read now and then, so there is no last one."""
BATCH = 3
SMALL = with_value(DEFAULT, "short_term.capacity", 3)
REFUSED = RejectedObservation(3, "INVALID_FIELD", "scripted", b"r" * 16)
FIRST: list[Item] = [
    observation("the otter eats fish"),
    observation("the otter eats fish today"),
    REFUSED,
    observation("a heron waits in the reeds"),
    observation("it rained on Monday"),
    observation("the otter eats fish again"),
    observation("badgers dig at night"),
]
SECOND: list[Item] = [observation(f"line {number} of the log") for number in range(1, 6)]


def following(number: int) -> int:
    """The next call to fail: each one in turn, or calls that lie ever further apart."""
    return number + 1 if THOROUGH else max(number + 1, 3 * number)


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat the call while the engine's error is retryable."""
    for _ in range(TRIES_MAX):
        try:
            return await call()
        except OutcomeUnknown:  # failed reads: the rpc maps them to JOURNAL_UNAVAILABLE
            await asyncio.sleep(0.01)
        except EngineError as error:
            if not passing(error):
                raise
            await asyncio.sleep(0.01)
    raise AssertionError(f"still refused after {TRIES_MAX} tries")


async def say(engine: PartsEngine, memory: str, producer: str, items: list[Item]) -> None:
    """A correct client: many batches in flight; after an error it opens again and continues from `opened`. Each time it
    requests all rejections and outcomes, and gets them for every stored number.
    """

    async def once() -> None:
        session = await engine.open_observe(NAMESPACE, memory, producer, outcomes=True)
        try:
            resumption = await session.resume(0)
            assert (resumption.rejected_since, resumption.outcomes_since) == (1, 1)
            missed = {one.sequence async for page in resumption.pages for one in (*page.rejected, *page.outcomes)}
            assert missed >= set(range(1, session.opened.stored + 1))
            start = session.opened.received
            sent = [
                session.submit(first + 1, items[first : first + BATCH]) for first in range(start, len(items), BATCH)
            ]
            answers = await asyncio.gather(*sent, return_exceptions=True)
            for answer in answers:
                if answer is not None:
                    raise answer
            await session.wait_for_level(AckLevel.STORED, len(items))
        finally:
            session.close()

    await insist(once)


async def remove(engine: PartsEngine, name: str) -> None:
    try:
        await insist(lambda: engine.memories.delete(NAMESPACE, name))
    except MemoryNotFound:
        return  # an earlier attempt with an unknown outcome deleted it


async def scripted_session(engine: PartsEngine, run: str) -> None:
    """Two memories, two producers, a change of policy, a recall with reinforcement, a deletion."""
    one, two, three = f"one-{run}", f"two-{run}", f"three-{run}"
    for name, kind in ((one, MemoryKind.HYBRID), (two, MemoryKind.LONG_TERM), (three, MemoryKind.HYBRID)):
        await insist(partial(create, engine, name, kind, SMALL))
    await asyncio.gather(
        say(engine, one, "left", FIRST), say(engine, one, "right", SECOND), say(engine, two, "left", SECOND)
    )
    await say(engine, three, "left", FIRST[:2])
    change = MemoryChange(policy=with_value(SMALL, "short_term.capacity", 2))
    await insist(lambda: engine.memories.update(NAMESPACE, one, change))
    await insist(lambda: engine.recall(NAMESPACE, one, Query(text="what does the otter eat?", limit=4)))
    await engine.wait_for_reinforcement()
    await remove(engine, three)
    await say(engine, two, "left", [*SECOND, *FIRST])


async def create(engine: PartsEngine, name: str, kind: MemoryKind, policy: Policy) -> None:
    await engine.memories.create(NewMemory(NAMESPACE, name, kind, policy, exist_ok=True))


def texts(*items: Item) -> list[str]:
    return sorted(item.content for item in items if isinstance(item, NewObservation))


async def verify(parts: Assembled, run: str) -> None:
    expected = {f"one-{run}": texts(*FIRST, *SECOND), f"two-{run}": texts(*SECOND, *FIRST)}
    for name, contents in expected.items():
        image = await check(parts.engine, name)
        assert sorted(row.fragment.content for row in image.rows) == contents
        assert image.pending == ()
        assert all(producer.stored == producer.received for producer in image.producers)
        await check_index(parts, name)
    received = {producer.name: producer.received for producer in (await check(parts.engine, f"one-{run}")).producers}
    assert received == {"left": len(FIRST), "right": len(SECOND)}
    assert await gone(parts.engine, f"three-{run}")


@pytest.mark.parametrize("fault", Fault)
async def test_no_failing_write_loses_or_doubles_anything(tmp_path: Path, fault: Fault) -> None:
    index, runs, failed = MemoryIndex(), list[str](), set[str]()
    async with assembled(tmp_path, index=index) as parts:
        for write in sorted(COMPARING if fault is Fault.CONFLICT else WRITES):
            number = 0
            while number == 0 or parts.journal.failed:
                number = following(number)
                runs.append(f"{write}-{number}")
                parts.journal.fail_at(number, fault, write)
                await scripted_session(parts.engine, runs[-1])
                await verify(parts, runs[-1])
                failed.add(parts.journal.failed)
    assert {"open_producer", "receive", "commit"} <= failed
    # test_registry.py fails the taking of a memory, which only follows another failure.
    assert fault is Fault.CONFLICT or {"create_memory", "delete_memory", "outbox_done"} <= failed
    async with assembled(tmp_path, index=index) as parts:  # a restart must find the same
        for run in runs:
            await verify(parts, run)


async def read_everything(engine: PartsEngine, name: str) -> None:
    """The other reads of the rpcs, each repeated until it is answered."""

    async def watched() -> None:
        uid = (await engine.memories.get(NAMESPACE, name)).uid
        async with contextlib.aclosing(engine.watch(NAMESPACE, name, uid, 0, 0)) as steps:
            assert (await anext(steps))[1] == 1

    await insist(watched)
    await insist(lambda: engine.memories.get_statistics(NAMESPACE, name))
    await insist(lambda: engine.memories.list_page(NAMESPACE, "", 10))
    page = await insist(lambda: engine.fragments.list_page(NAMESPACE, name, Listing(), -1, 100))
    await insist(lambda: engine.reinforce_fragments(NAMESPACE, name, [one.id for one in page[0][:1]]))
    assert await insist(lambda: engine.stored_answer("none")) is None
    await read_the_past(engine, name, page[0][0])
    await read_receipts(engine, name)


async def read_the_past(engine: PartsEngine, name: str, fragment: Fragment) -> None:
    """The history of a fragment after a change of its importance, and the memory before it."""
    change = FragmentChange(id=fragment.id, importance=fragment.importance / 2)
    _, revision = await insist(lambda: engine.fragments.update(NAMESPACE, name, change))
    as_of = AsOf(revision=revision - 1)
    _, versions, _ = await insist(lambda: engine.fragments.read_history(NAMESPACE, name, fragment.id))
    assert versions[0].fragment.importance == fragment.importance
    happened, *_ = await insist(lambda: engine.fragments.list_events(NAMESPACE, name, fragment.id, 0, 100))
    assert happened[-1].revision == revision
    past = await insist(lambda: engine.past.list_page(NAMESPACE, name, as_of, Listing(), -1, 100))
    assert fragment.importance in [one.importance for one in past[0] if one.id == fragment.id]
    at = AsOf(time_us=versions[0].time_us)
    assert (await insist(lambda: engine.recall(NAMESPACE, name, Query(text="otter", as_of=at)))).as_of_revision


async def read_receipts(engine: PartsEngine, name: str) -> None:
    query = Query(text="otter", receipt=b"otter", reinforce=False)
    receipt = (await insist(lambda: engine.recall(NAMESPACE, name, query))).receipt_id
    page, _, _ = await insist(lambda: engine.recall_receipts.list_page(NAMESPACE, name, None, 1))
    assert [one.id for _, one in page] == [receipt]
    replay = await insist(lambda: engine.recall_receipts.replay(NAMESPACE, name, receipt, lambda _: query))
    assert replay.answer is not None


async def nothing_waits(parts: Assembled) -> bool:
    """Reads the journal directly."""
    return bool(await parts.stored.outbox_size() == 0)


async def test_no_failing_read_loses_or_doubles_anything(tmp_path: Path) -> None:
    """As while a database is away for a moment."""
    index, runs, failed = MemoryIndex(), list[str](), set[str]()
    async with assembled(tmp_path, index=index, maintenance_interval_s=0.05, dense_bytes_max=2 * VECTOR_BYTES) as parts:
        for read in sorted(READS):
            number, failing = 0, read
            while failing and number < READS_MAX:
                number = following(number)
                runs.append(f"{read}-{number}".replace("_", "-"))
                parts.journal.fail_at(number, Fault.LOST, read)
                await scripted_session(parts.engine, runs[-1])
                await read_everything(parts.engine, f"one-{runs[-1]}")
                await until(lambda: nothing_waits(parts))
                failing = parts.journal.failed
                parts.journal.fail_at(0, Fault.LOST)  # these reads must not fail
                await verify(parts, runs[-1])
                failed.add(failing)
    # The remaining reads happen only in long operations, for images, or if RAM lacks the answer.
    others = {
        "list_indexable",
        "list_jobs",
        "outbox_fragments",
        "outbox_rows",
        "list_purgeable",
        "received_hashes",
        "pending_memories",
        "read_epochs",
        "list_citing",
    }
    assert failed >= READS - others
    async with assembled(tmp_path, index=index) as parts:
        for run in runs:
            await verify(parts, run)


# ---- models


class FailingEmbedder(ScriptedEmbedder):
    """Fails on its n-th call."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0
        self.error: ModelError = ModelUnavailable("scripted")

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return await super().embed(texts)


async def talk(engine: PartsEngine, name: str, policy: Policy) -> None:
    await create(engine, name, MemoryKind.HYBRID, policy)
    await say(engine, name, "left", FIRST)
    await insist(lambda: engine.recall(NAMESPACE, name, Query(text="what does the otter eat?", limit=4)))
    await engine.wait_for_reinforcement()
    await say(engine, name, "right", SECOND)


@pytest.mark.parametrize(
    ("profile", "error"),
    [(DEFAULT, ModelUnavailable("down")), (DEFAULT, ModelRefused("no", (0,))), (DBGPT, ModelUnavailable("down"))],
)
async def test_no_failing_embedder_call_loses_anything(tmp_path: Path, profile: Policy, error: ModelError) -> None:
    embedder = FailingEmbedder()
    embedder.error = error
    policy = with_value(with_value(profile, "short_term.capacity", 3), "short_term.overflow", Overflow.PROMOTE)
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        number = 0
        while number == 0 or embedder.left <= 0:
            number = following(number)
            embedder.left = number
            name = f"m-{number}"
            await talk(parts.engine, name, policy)
            contents = [row.fragment.content for row in (await check(parts.engine, name)).rows]
            if profile is DEFAULT:
                assert sorted(contents) == texts(*FIRST, *SECOND)
            else:  # merged texts are contents in this memory
                assert set(texts(*FIRST, *SECOND)) == {part for content in contents for part in content.split(";")}
            if isinstance(error, ModelUnavailable):
                await until(lambda name=name: all_have_vectors(parts.engine, name))  # type: ignore[misc]  # a lambda's default has no type
            await check_index(parts, name)
        assert number > 3


async def all_have_vectors(engine: PartsEngine, name: str) -> bool:
    return all(row.vector is not None for row in (await check(engine, name)).rows)


class Nth(Outages):
    """Fails on its n-th call, n being `left`."""

    left = 0

    def _called(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise ModelUnavailable("scripted")
        super()._called()


class NthScorer(Nth, ScriptedScorer):
    """A scorer."""


class NthInsights(Nth, ScriptedInsights):
    """An LLM for insights."""


async def kept(engine: PartsEngine, name: str) -> list[tuple[str, str, float]]:
    rows = (await check(engine, name)).rows
    return sorted((row.fragment.kind.value, row.fragment.content, row.fragment.importance) for row in rows)


async def test_no_failing_llm_call_loses_or_doubles_anything(tmp_path: Path) -> None:
    scorer, insights = NthScorer({"it rained on Monday": 0.9}), NthInsights()
    models = Models(ScriptedEmbedder(), scorer, insights)
    policy = with_value(SMALL, "short_term.enhance_threshold", 1)
    async with assembled(tmp_path, models=models) as parts:
        await talk(parts.engine, "whole", policy)
        await until(lambda: no_jobs(parts))
        whole = await kept(parts.engine, "whole")
        assert {kind for kind, _, _ in whole} == {"observation", "insight"}
        for model, what in ((scorer, "score"), (insights, "derive")):
            number = 0
            while number == 0 or model.left <= 0:
                number = following(number)
                model.left = number
                name = f"{what}-{number}"
                await talk(parts.engine, name, policy)
                await until(lambda: no_jobs(parts))
                assert await kept(parts.engine, name) == whole
            assert number > 1
            model.left = 0


async def no_jobs(parts: Assembled) -> bool:
    """Reads the journal directly."""
    return not await parts.stored.list_jobs(1)


# ---- the index


@pytest.mark.parametrize("error", [IndexUnavailable, IndexLost])
async def test_no_failing_index_call_leaves_it_incomplete(tmp_path: Path, error: type[IndexUnavailable]) -> None:
    index = MemoryIndex()
    async with assembled(tmp_path, index=index, dense_bytes_max=0) as parts:
        for call in ("upsert", "flush", "search", "delete"):
            number = 0
            while number == 0 or index.failed:
                number = following(number)
                index.fail_at(number, error, call)
                await fill_ask_and_delete(parts, f"{call}-{number}")
            assert number > 1


async def fill_ask_and_delete(parts: Assembled, name: str) -> None:
    await create(parts.engine, name, MemoryKind.LONG_TERM, DEFAULT)
    await say(parts.engine, name, "left", SECOND)
    answers = [await parts.engine.recall(NAMESPACE, name, Query(text=one, limit=1)) for one in texts(*SECOND)]
    assert [answer.recollections[0].fragment.content for answer in answers] == texts(*SECOND)
    await check_index(parts, name)
    await parts.engine.memories.delete(NAMESPACE, name)
    await until(lambda: nothing_indexed(parts.index))


async def nothing_indexed(index: MemoryIndex) -> bool:
    return not index.flushed


async def test_deletions_work_on_a_full_disk_and_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observation that waits for disk space does not delay a clear, and is stored after it."""
    monkeypatch.setattr(actor, "STORAGE_RETRY_S", 3_600.0)
    async with assembled(tmp_path) as parts:
        engine = parts.engine
        await engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, DEFAULT))
        session = await engine.open_observe(NAMESPACE, "joy", "p")
        await session.submit(1, [observation("the first")])
        await session.wait_for_level(AckLevel.STORED, 1)
        parts.journal.fail_at(1, Fault.FULL, "commit")
        for number in (2, 3):
            await session.submit(number, [observation(f"number {number}")])

        async def refused() -> bool:
            return parts.journal.failed == "commit"

        await until(refused)
        assert (await engine.fragments.clear(NAMESPACE, "joy", ())).count == 1
        await session.wait_for_level(AckLevel.STORED, 3)
        session.close()
        assert [row.fragment.content for row in (await check(engine, "joy")).rows] == ["number 2", "number 3"]
