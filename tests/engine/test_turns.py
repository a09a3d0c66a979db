"""Who computes next."""

from __future__ import annotations

import asyncio

import pytest

from memstream_server.engine import turns as turns_module
from memstream_server.engine.turns import Turns


async def test_namespaces_take_turns_and_each_serves_its_own_in_order() -> None:
    turns, served = Turns(), list[str]()

    async def compute(namespace: str, name: str) -> None:
        async with turns.of(namespace):
            served.append(name)

    asked = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("a", "a4"), ("c", "c1"), ("b", "b2")]
    await asyncio.gather(*(compute(*each) for each in asked))
    assert served == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_one_at_a_time_and_others_run_between() -> None:
    turns, seen = Turns(), list[str]()

    async def compute(name: str) -> None:
        async with turns.of("a"):
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


async def test_whoever_gives_up_or_fails_leaves_the_turn_to_the_next() -> None:
    turns, served = Turns(), list[str]()

    async def compute(name: str) -> None:
        async with turns.of("a"):
            served.append(name)
            if name == "fails":
                raise ValueError(name)

    names = ["first", "waits", "is given", "fails", "last"]
    tasks = {name: asyncio.create_task(compute(name)) for name in names}
    await asyncio.sleep(0)
    assert served == ["first"]
    tasks["waits"].cancel()
    await asyncio.sleep(0)  # the turn is given to the next by now, who has not run since
    tasks["is given"].cancel()
    done = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert served == ["first", "fails", "last"]
    assert [type(each) for each in done[1:4]] == [asyncio.CancelledError, asyncio.CancelledError, ValueError]
    async with asyncio.timeout(10), turns.of("b"):
        pass


async def test_whoever_waits_too_long_in_his_turn_goes_on_beside_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "TURN_MAX_S", 0.01)
    turns, seen = Turns(), list[str]()
    begun = {name: asyncio.Event() for name in ("late", "next", "last")}
    goes_on, next_goes_on = asyncio.Event(), asyncio.Event()

    async def wait(name: str, until: asyncio.Event) -> None:
        async with turns.of("a"):
            seen.append(f"{name} begins")
            begun[name].set()
            await until.wait()
        seen.append(f"{name} ends")

    late = asyncio.create_task(wait("late", goes_on))
    await begun["late"].wait()
    monkeypatch.setattr(turns_module, "TURN_MAX_S", 60.0)
    following = asyncio.create_task(wait("next", next_goes_on))
    last = asyncio.create_task(wait("last", next_goes_on))
    await begun["next"].wait()
    goes_on.set()
    await late
    for _ in range(5):
        await asyncio.sleep(0)
    assert seen == ["late begins", "next begins", "late ends"]
    next_goes_on.set()
    await asyncio.gather(following, last)
    assert seen[3:] == ["next ends", "last begins", "last ends"]
