"""The order of turns: by cost, principals first and then namespaces."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from memstream_server.engine.runtime import call_context
from memstream_server.engine.runtime import turns as turns_module
from memstream_server.engine.runtime.call_context import ACCOUNT, REQUEST, Account, FairQueue, Request
from memstream_server.engine.runtime.threads import Threads, run_in_thread
from memstream_server.engine.runtime.turns import Turns, in_slices, install_turns, pause_if_due, take_turn
from tests.support.waiting import until


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause ends a step, and no two steps share an iteration of the loop."""
    monkeypatch.setattr(turns_module, "SLICE_S", 0.0)
    monkeypatch.setattr(turns_module, "BUDGET_S", 0.0)


def compute(seconds: float) -> None:
    """Keep the event loop busy."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
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
        item = queue.pop()[1]
        served.append(item[0])
        queue.charge((item[0], ""), 4.0 if item[0] == "a" else 1.0)
    assert "".join(served[:10]) in ("abbbbabbbb", "babbbabbbb")


def test_an_idle_caller_has_saved_a_credit_at_most() -> None:
    queue: FairQueue[str] = FairQueue()
    cost_s = call_context.CREDIT_S / 4
    for number in range(140):
        queue.push(("a", ""), f"a{number}")
    for _ in range(100):
        queue.charge((queue.pop()[1][0], ""), cost_s)
    for number in range(20):
        queue.push(("b", ""), f"b{number}")
    served = ""
    while queue.waiting:
        served += queue.pop()[1][0]
        queue.charge((served[-1], ""), cost_s)
    assert served.startswith("bbbb")
    assert "bbbbbbb" not in served
    assert abs(served[6:36].count("a") - served[6:36].count("b")) <= 1, "then they take turns"


def test_namespaces_of_a_caller_share_its_turns() -> None:
    queue: FairQueue[tuple[str, str]] = FairQueue()
    for account in [("a", "x")] * 4 + [("a", "y")] * 4 + [("b", "x")] * 4:
        queue.push(account, account)
    served = []
    while queue.waiting:
        served.append(queue.pop()[1])
        queue.charge(served[-1], 1.0)
    assert [principal for principal, _ in served[:8]].count("b") == 4
    of_a = [namespace for principal, namespace in served if principal == "a"]
    assert all(sorted(of_a[place : place + 2]) == ["x", "y"] for place in range(0, 8, 2))


async def test_a_granted_turn_is_not_overtaken() -> None:
    """By a step of another namespace of a caller that owes, of which one waits."""
    turns = Turns(asyncio.get_running_loop())
    heavy, other, light = ("heavy", "a"), ("heavy", "b"), ("light", "")
    turns.charge(heavy, 0.02)
    waiting, granted = turns.wait(heavy), turns.wait(light)
    await granted
    assert not waiting.done()
    assert not turns.may_run(other)
    assert turns.may_run(light), "the caller of the granted turn owes nothing"
    turns.begin_granted(light)
    assert turns.may_run(other), "in its turn: no one else waits"


def test_accounts_without_debt_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_context, "ACCOUNTS_MAX", 10)
    queue: FairQueue[int] = FairQueue()
    queue.push(("waits", ""), 0)
    queue.push(("waits", ""), 1)
    for number in range(100):
        queue.charge((f"caller {number}", ""), 0.0)
    queue.charge(("owes", ""), 5.0)
    queue.charge(("one more", ""), 0.0)
    assert len(queue._shares) <= 11
    assert [queue.pop()[1], queue.pop()[1]] == [0, 1]


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


def test_large_requests_of_an_account_end_in_order_of_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    first, second = Request(), Request()
    first.cost_s = second.cost_s = 1.0
    for step in range(3):
        queue.push(("a", ""), f"second {step}", second)
        queue.push(("a", ""), f"first {step}", first)
    served = [queue.pop()[1] for _ in range(6)]
    assert served == [f"{name} {step}" for name in ("first", "second") for step in range(3)]


def test_small_requests_leave_every_fourth_turn_to_a_large_one() -> None:
    queue: FairQueue[str] = FairQueue()
    large = Request()
    large.cost_s = 1.0
    for step in range(8):
        queue.push(("a", ""), "large", large)
        queue.push(("a", ""), f"small {step}", Request())
    served = [queue.pop()[1] for _ in range(16)]
    assert served[:8] == ["small 0", "small 1", "small 2", "large", "small 3", "small 4", "small 5", "large"]
    assert served.count("large") == 8


@pytest.mark.usefixtures("short_slices")
async def test_callbacks_run_before_the_next_turn_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new call reaches its handler through six iterations of the loop: no turn of others is in between."""
    install_turns()
    order, loop = list[str](), asyncio.get_running_loop()
    reached = asyncio.Event()

    def hop(left: int) -> None:
        order.append("hop")
        loop.call_soon(hop, left - 1) if left else reached.set()

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(start(("heavy", ""), lambda: order.append("turn"), 50))
        await loop_until(lambda: order.count("turn") >= 4)
        monkeypatch.setattr(turns_module, "DEFERRED_MAX_S", 60.0)
        loop.call_soon(hop, 12)
        await reached.wait()
        hops = order[order.index("hop") :]
        assert hops.count("turn") <= 1  # it was granted before
    assert order.count("turn") == 100


@pytest.mark.usefixtures("short_slices")
async def test_endless_callbacks_do_not_stop_the_turns() -> None:
    install_turns()
    loop, done = asyncio.get_running_loop(), list[int]()

    def again() -> None:
        if len(done) < 20:
            loop.call_soon(again)

    again()
    await asyncio.create_task(start(("heavy", ""), lambda: done.append(1), 20))
    assert len(done) == 20


async def test_one_caller_leaves_a_thread_to_others() -> None:
    threads, free = Threads(2, "test"), threading.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(threads.run(free.wait), context=in_account(("much", "")))
        await asyncio.sleep(0)
        other = group.create_task(threads.run(lambda: "done"), context=in_account(("little", "")))
        try:
            assert await other == "done"
        finally:
            free.set()
    threads.close()


async def compute_for_two(monkeypatch: pytest.MonkeyPatch, cores: int = 2) -> None:
    """From now on two principals compute, on so many cores."""
    monkeypatch.setattr(turns_module, "SEVERAL_S", 3600.0)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    install_turns()
    for name in ("much", "little"):
        await asyncio.create_task(start((name, ""), lambda: None))


@pytest.mark.parametrize(("cores", "first"), [(2, ["first"]), (4, ["first", "second"])])
async def test_one_of_several_callers_has_half_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, first: list[str]
) -> None:
    await compute_for_two(monkeypatch, cores)
    readers, others = Threads(3, "readers"), Threads(3, "others")
    asked, begun, free = list[str](), list[str](), threading.Event()

    def work(name: str) -> None:
        begun.append(name)
        free.wait()

    async def ask(threads: Threads, name: str) -> None:
        asked.append(name)
        await threads.run(partial(work, name))

    async def have_asked() -> bool:
        return len(asked) == 3 and sorted(begun) == first

    async with asyncio.TaskGroup() as group:
        for threads, name in ((readers, "first"), (readers, "second"), (others, "third")):
            group.create_task(ask(threads, name), context=in_account(("much", "")))
        await until(have_asked)
        little = group.create_task(others.run(lambda: begun.append("little")), context=in_account(("little", "")))
        try:
            await little
            assert sorted(begun) == sorted([*first, "little"])
        finally:
            free.set()
    assert begun[len(first) + 1] == "third", "the other threads are next"
    assert sorted(begun) == ["first", "little", "second", "third"]
    readers.close()
    others.close()


async def test_the_server_has_more_than_one_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    await compute_for_two(monkeypatch)
    readers, free = Threads(3, "readers"), threading.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(readers.run(free.wait))
        await asyncio.sleep(0)
        try:
            assert await readers.run(lambda: "done") == "done"
        finally:
            free.set()
    readers.close()


async def test_cancelled_work_leaves_its_place_in_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    await compute_for_two(monkeypatch)
    busy, idle, free = Threads(1, "busy"), Threads(2, "idle"), threading.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(busy.run(free.wait), context=in_account(("little", "")))
        await asyncio.sleep(0)
        queued = group.create_task(busy.run(lambda: None), context=in_account(("much", "")))
        await asyncio.sleep(0)
        parked = group.create_task(idle.run(lambda: "done"), context=in_account(("much", "")))
        await asyncio.sleep(0)
        queued.cancel()
        free.set()
        assert await parked == "done"
    busy.close()
    idle.close()


async def test_work_in_a_thread_is_charged_to_its_caller() -> None:
    turns, charged = install_turns(), set[str]()
    turns.on_cost = lambda principal, _: charged.add(principal)
    names = await asyncio.create_task(
        run_in_thread(lambda: threading.current_thread().name), context=in_account(("caller", ""))
    )
    turns.on_cost = None
    assert names.startswith("computing")
    assert charged == {"caller"}


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


async def test_a_step_takes_a_turn_once_its_caller_is_known() -> None:
    turns, order = install_turns(), list[str]()
    turns.charge(("heavy", ""), 1.0)

    async def identify_late() -> None:
        ACCOUNT.set(("heavy", ""))
        await take_turn()
        order.append("heavy")

    owing = asyncio.create_task(identify_late())
    await asyncio.gather(owing, asyncio.create_task(append(order, "light"), context=in_account(("light", ""))))
    assert order == ["light", "heavy"]


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


async def test_large_requests_wait_for_a_thread_of_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "THREAD_S", 60.0)
    turns, order = install_turns(), list[str]()
    turns.charge(("heavy", ""), 1.0)
    release, ends = threading.Event(), asyncio.Event()

    async def compute_much() -> None:
        large = Request()
        large.cost_s = 1.0
        ACCOUNT.set(("heavy", ""))
        REQUEST.set(large)
        await take_turn()
        while not ends.is_set():
            await asyncio.sleep(0)
            order.append("heavy")

    async def read() -> None:
        await run_in_thread(release.wait)
        order.append("read")

    reading = asyncio.create_task(read(), context=in_account(("light", "")))
    await loop_until(lambda: bool(turns._threads))
    computing = asyncio.create_task(compute_much(), context=contextvars.copy_context())
    await loop_until(lambda: turns._resuming is not None)
    assert turns._queue.waiting == 1
    await asyncio.create_task(append(order, "light"), context=in_account(("light", "")))
    assert order == ["light"]
    release.set()
    await reading
    await loop_until(lambda: "heavy" in order)
    ends.set()
    await computing
    assert turns._threads == []
