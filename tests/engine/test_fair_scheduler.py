"""The order of slots in the fair scheduler."""

from __future__ import annotations

import asyncio

import pytest

from memstream_server.engine.runtime import fair_scheduler
from memstream_server.engine.runtime.fair_scheduler import FairScheduler, Lane


@pytest.fixture
def one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two computations are short enough to share a slot."""
    monkeypatch.setattr(fair_scheduler, "SLOT_S", 0.0)


@pytest.mark.usefixtures("one_each")
async def test_namespaces_alternate_and_each_is_first_in_first_out() -> None:
    scheduler, served = FairScheduler(), list[str]()

    async def compute(namespace: str, name: str) -> None:
        async with scheduler.slot(namespace):
            served.append(name)

    asked = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("a", "a4"), ("c", "c1"), ("b", "b2")]
    await asyncio.gather(*(compute(*each) for each in asked))
    assert served == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


@pytest.mark.usefixtures("one_each")
async def test_busy_writer_answers_reads_in_between() -> None:
    scheduler, served = FairScheduler(), list[str]()

    async def compute(namespace: str, lane: Lane, name: str) -> None:
        async with scheduler.slot(namespace, lane):
            served.append(name)

    written = [("a", Lane.WRITE, f"w{number}") for number in range(4)]
    asked = [("a", Lane.READ, "r0"), ("a", Lane.READ, "r1"), ("b", Lane.WRITE, "b0")]
    await asyncio.gather(*(compute(*each) for each in written + asked))
    assert served == ["w0", "w1", "b0", "r0", "w2", "r1", "w3"]


async def test_short_computations_share_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, seen = FairScheduler(), list[str]()
    monkeypatch.setattr(fair_scheduler, "SLOT_S", 60.0)

    async def compute(name: str) -> None:
        async with scheduler.slot("a"):
            await asyncio.sleep(0)
            seen.append(name)
            async with scheduler.slot("b", Lane.READ):
                seen.append(f"{name} inside")

    async def other() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        seen.append("other")

    async with asyncio.timeout(60):
        await asyncio.gather(*(compute(str(number)) for number in range(50)), other())
    assert sorted(seen[:100]) == sorted([str(number) for number in range(50)] + [f"{n} inside" for n in range(50)])
    assert seen[100:] == ["other"]


@pytest.mark.usefixtures("one_each")
async def test_one_slot_at_a_time_with_the_loop_between() -> None:
    scheduler, seen = FairScheduler(), list[str]()

    async def compute(name: str) -> None:
        async with scheduler.slot("a"):
            seen.append(f"{name} begins")
            await asyncio.sleep(0)
            seen.append(f"{name} ends")

    async def other() -> None:
        for _ in range(3):
            seen.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(compute("one"), compute("two"), other())
    computed = [each for each in seen if each != "other"]
    assert computed == ["one begins", "one ends", "two begins", "two ends"]
    assert "other" in seen[seen.index("one ends") : seen.index("two begins")]


@pytest.mark.usefixtures("one_each")
async def test_cancelled_or_failed_task_frees_its_slot() -> None:
    scheduler, served = FairScheduler(), list[str]()

    async def compute(name: str) -> None:
        async with scheduler.slot("a"):
            served.append(name)
            if name == "fails":
                raise ValueError(name)

    names = ["first", "waits", "is given", "fails", "last"]
    tasks = {name: asyncio.create_task(compute(name)) for name in names}
    await asyncio.sleep(0)
    assert served == ["first"]
    tasks["waits"].cancel()
    await asyncio.sleep(0)  # the slot is now granted to the next task, which has not run yet
    tasks["is given"].cancel()
    done = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert served == ["first", "fails", "last"]
    assert [type(each) for each in done[1:4]] == [asyncio.CancelledError, asyncio.CancelledError, ValueError]
    async with asyncio.timeout(60), scheduler.slot("b"):
        pass


@pytest.mark.usefixtures("one_each")
async def test_overrunning_slot_continues_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_scheduler, "SLOT_MAX_S", 0.01)
    scheduler, seen = FairScheduler(), list[str]()
    begun = {name: asyncio.Event() for name in ("late", "next", "last")}
    goes_on, next_goes_on = asyncio.Event(), asyncio.Event()

    async def wait(name: str, until: asyncio.Event) -> None:
        async with scheduler.slot("a"):
            seen.append(f"{name} begins")
            begun[name].set()
            await until.wait()
        seen.append(f"{name} ends")

    late = asyncio.create_task(wait("late", goes_on))
    await begun["late"].wait()
    following = asyncio.create_task(wait("next", next_goes_on))
    last = asyncio.create_task(wait("last", next_goes_on))
    await begun["next"].wait()
    monkeypatch.setattr(fair_scheduler, "SLOT_MAX_S", 60.0)
    goes_on.set()
    await late
    for _ in range(5):
        await asyncio.sleep(0)
    assert seen == ["late begins", "next begins", "late ends"]
    next_goes_on.set()
    await asyncio.gather(following, last)
    assert seen[3:] == ["next ends", "last begins", "last ends"]
