"""The order of turns: by cost, principals first and then namespaces."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable

import pytest

from memstream_server.engine.runtime import turns as turns_module
from memstream_server.engine.runtime.call_context import ACCOUNT, Account
from memstream_server.engine.runtime.turns import FairQueue, in_slices, install_turns, pause_if_due


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause ends a step, and no two steps share an iteration of the loop."""
    monkeypatch.setattr(turns_module, "SLICE_S", 0.0)
    monkeypatch.setattr(turns_module, "BUDGET_S", 0.0)


def compute(seconds: float) -> None:
    """Keep the event loop busy."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


async def start(account: Account, work: Callable[[], object], slices: int = 1) -> None:
    """Work of an account: `work` once a slice."""
    ACCOUNT.set(account)
    await asyncio.sleep(0)
    for _ in range(slices):
        work()
        await asyncio.sleep(0)


async def loop_until(reached: Callable[[], bool]) -> None:
    """Let the event loop run until then."""
    for _ in range(100_000):
        if reached():
            return
        await asyncio.sleep(0)
    raise AssertionError("the event loop never got there")


async def append(order: list[str], name: str) -> None:
    """One step."""
    order.append(name)


def in_account(account: Account) -> contextvars.Context:
    """A context of this account."""
    context = contextvars.copy_context()
    context.run(ACCOUNT.set, account)
    return context


def test_a_caller_whose_turns_cost_more_gets_fewer() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push(("a", ""), f"a{number}")
    for number in range(8):
        queue.push(("b", ""), f"b{number}")
    served = []
    while queue.waiting:
        item = queue.pop()
        served.append(item[0])
        queue.charge((item[0], ""), 4.0 if item[0] == "a" else 1.0)
    assert "".join(served[:10]) in ("abbbbabbbb", "babbbabbbb")


def test_an_idle_caller_has_saved_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(8):
        queue.push(("a", ""), f"a{number}")
    for _ in range(4):
        queue.charge((queue.pop()[0], ""), 1.0)
    for number in range(4):
        queue.push(("b", ""), f"b{number}")
    served = []
    while queue.waiting:
        item = queue.pop()
        served.append(item[0])
        queue.charge((item[0], ""), 1.0)
    assert served.count("b") == 4
    assert all(served[place : place + 2].count("b") <= 1 for place in range(0, 8, 2))


def test_namespaces_of_a_caller_share_its_turns() -> None:
    queue: FairQueue[tuple[str, str]] = FairQueue()
    for account in [("a", "x")] * 4 + [("a", "y")] * 4 + [("b", "x")] * 4:
        queue.push(account, account)
    served = []
    while queue.waiting:
        served.append(queue.pop())
        queue.charge(served[-1], 1.0)
    assert [principal for principal, _ in served[:8]].count("b") == 4
    of_a = [namespace for principal, namespace in served if principal == "a"]
    assert all(sorted(of_a[place : place + 2]) == ["x", "y"] for place in range(0, 8, 2))


def test_accounts_without_debt_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "ACCOUNTS_MAX", 10)
    queue: FairQueue[int] = FairQueue()
    queue.push(("waits", ""), 0)
    queue.push(("waits", ""), 1)
    for number in range(100):
        queue.charge((f"caller {number}", ""), 0.0)
    queue.charge(("owes", ""), 5.0)
    queue.charge(("one more", ""), 0.0)
    assert len(queue._shares) <= 11
    assert [queue.pop(), queue.pop()] == [0, 1]


@pytest.mark.usefixtures("short_slices")
async def test_a_small_call_waits_for_one_slice_of_others() -> None:
    turns, order = install_turns(), list[str]()
    async with asyncio.TaskGroup() as group:

        def work() -> None:
            compute(0.002)
            order.append("heavy")

        for number in range(16):
            group.create_task(start(("heavy", str(number % 4)), work, 8))
        await loop_until(lambda: len(order) >= 20)
        begun = len(order)
        await group.create_task(append(order, "light"), context=in_account(("light", "")))
        # One turn may still run in this iteration of the loop, and one in the next, before the task's first step.
        assert order.index("light") - begun <= 2
    assert order.count("heavy") == 16 * 8
    assert turns._queue.waiting == turns._granted == 0


@pytest.mark.usefixtures("short_slices")
async def test_a_cancelled_task_leaves_its_turn_to_others() -> None:
    turns, done = install_turns(), list[int]()

    async def work(number: int) -> None:
        ACCOUNT.set(("one", ""))
        await asyncio.sleep(0)
        compute(0.001)
        await asyncio.sleep(0)
        done.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(6)]
    await loop_until(lambda: turns._queue.waiting > 0)
    tasks[1].cancel()
    tasks[4].cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(done) == [0, 2, 3, 5]
    assert [type(one) for one in ended].count(asyncio.CancelledError) == 2
    assert turns._queue.waiting == turns._granted == 0


async def test_a_turn_granted_to_a_cancelled_task_is_given_up() -> None:
    turns = install_turns()
    entered = asyncio.Event()

    async def work() -> None:
        ACCOUNT.set(("one", ""))
        entered.set()
        await asyncio.Event().wait()

    waiting = asyncio.create_task(work())
    await entered.wait()
    turn = turns.wait(("one", ""))
    await asyncio.wait({turn})
    assert turns._granted == 1
    turns.give_up(turn)
    assert turns._granted == 0
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_every_step_is_charged_to_the_account_of_its_task() -> None:
    turns, cost_s = install_turns(), dict[str, float]()
    turns.on_cost = lambda principal, seconds: cost_s.update({principal: cost_s.get(principal, 0.0) + seconds})
    await asyncio.gather(
        asyncio.create_task(start(("much", ""), lambda: compute(0.01), 3)),
        asyncio.create_task(start(("little", ""), lambda: None, 3)),
    )
    turns.on_cost = None
    assert cost_s["much"] >= 0.03
    assert cost_s.keys() == {"much", "little"}


async def test_a_failed_step_is_charged_and_raises() -> None:
    turns, charged = install_turns(), list[str]()
    turns.on_cost = lambda principal, _: charged.append(principal)

    async def fail() -> None:
        ACCOUNT.set(("fails", ""))
        raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        await asyncio.create_task(fail())
    turns.on_cost = None
    assert charged == ["fails"]


@pytest.mark.usefixtures("short_slices")
async def test_slices_keep_the_values_and_let_others_run() -> None:
    install_turns()
    seen: list[int | str] = []

    async def long() -> None:
        async for part in in_slices(range(10), 3):
            seen.extend(part)

    async def other() -> None:
        await asyncio.sleep(0)
        seen.append("other")

    await asyncio.gather(asyncio.create_task(long()), asyncio.create_task(other()))
    assert [one for one in seen if one != "other"] == list(range(10))
    assert seen.index("other") < 9


async def test_no_pause_within_a_slice() -> None:
    turns, steps = install_turns(), list[Account | None]()
    turns.on_turn = steps.append

    async def work() -> None:
        for _ in range(5):
            await pause_if_due()

    turns_module.SLICE_S, before = 60.0, turns_module.SLICE_S
    try:
        await asyncio.create_task(work())
    finally:
        turns_module.SLICE_S, turns.on_turn = before, None
    assert len(steps) <= 2  # of the task, and of this test's own
