"""Between a small call's request for a turn and that turn, at most one turn of another caller runs, whatever that one
asks for."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import MethodDescriptor

from memstream.v1 import memory_service_pb2 as memories
from memstream.v1 import stream_service_pb2 as streams
from memstream_server.app.running import run_server
from memstream_server.engine.runtime import turns as turns_module
from memstream_server.engine.runtime.call_context import Account
from memstream_server.engine.runtime.turns import Turns, find_turns
from memstream_server.settings import Settings
from tests.support.journals import only_sqlite

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # the table of arguments is the benchmark's

from heavy_calls import METHODS, Caller, World, find_missing, prepare_world

FRAGMENTS, CALLS, ROUNDS = 100, 3, 2
BY_NAME = {method.name: method for method in METHODS}
SMALL = {"namespace": "light", "memory": "small"}


class Recorder:
    """The order in which steps ask for turns and get them. A step of the small calls costs a hundredth of any other."""

    def __init__(self, turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, str]] = []
        """("waits" or "runs", principal)."""
        self.light = ""
        """The principal of the small calls."""
        wait, charge = turns.wait, turns.charge

        def record_wait(account: Account) -> asyncio.Future[None]:
            self.steps.append(("waits", account[0]))
            return wait(account)

        def charge_evenly(account: Account, _cost_s: float) -> None:
            charge(account, 0.00001 if account[0] == self.light else 0.001)

        monkeypatch.setattr(turns, "wait", record_wait)
        monkeypatch.setattr(turns, "charge", charge_evenly)
        monkeypatch.setattr(turns, "on_turn", lambda account: account and self.steps.append(("runs", account[0])))

    def count_turns_behind(self) -> int:
        """The most turns of others between a request of the small calls for a turn and the turn."""
        most, behind, waits = 0, 0, False
        for what, principal in self.steps:
            if principal != self.light:
                behind += waits and what == "runs"
            elif what == "waits":
                behind, waits = 0, True
            elif waits:
                most, waits = max(most, behind), False
        return most


async def call_beside(light: Caller) -> None:
    """Small recalls and observations, one after the other."""
    observation = streams.ObserveBatchRequest(**SMALL)
    observation.observations.add(content="Bob lives in Ulm")
    for _ in range(ROUNDS):
        query = streams.RecallQuery(text="Where does Bob live?", limit=5)
        await light.call(BY_NAME["RecallOnce"], streams.RecallOnceRequest(**SMALL, query=query))
        await light.call(BY_NAME["ObserveBatch"], observation)


async def measure_beside(
    method: MethodDescriptor, world: World, heavy: Caller, light: Caller, recorder: Recorder
) -> tuple[int, int]:
    """(turns that a small call waited for, turns of the heavy calls)."""
    recorder.steps.clear()
    flood = asyncio.create_task(heavy.flood(method, world, CALLS))
    try:
        while not recorder.steps:
            assert not flood.done(), flood.exception()
            await asyncio.sleep(0)
        await call_beside(light)
        assert not flood.done(), flood.exception()
    finally:
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
    others = sum(what == "runs" and principal != recorder.light for what, principal in recorder.steps)
    return recorder.count_turns_behind(), others


def test_every_rpc_has_its_largest_arguments() -> None:
    assert find_missing() == []


@only_sqlite("turns of the loop, slowed down so much that leases end")
async def test_a_small_call_waits_for_one_turn_beside_each_rpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "BUDGET_S", 0.0)  # no two turns share an iteration of the loop
    settings = Settings(data_dir=tmp_path, listen="127.0.0.1:0", http_listen="")
    async with run_server(settings) as running, contextlib.AsyncExitStack() as stack:
        turns = find_turns()
        assert turns is not None
        heavy, light = Caller(running.address), Caller(running.address)
        for caller in (heavy, light):
            stack.push_async_callback(caller.close)
        world = await prepare_world(heavy, "heavy", FRAGMENTS)
        await light.call(BY_NAME["CreateMemory"], memories.CreateMemoryRequest(**SMALL))
        recorder = Recorder(turns, monkeypatch)
        await call_beside(light)
        recorder.light = recorder.steps[0][1]
        found = {method.name: await measure_beside(method, world, heavy, light, recorder) for method in METHODS}
    assert [name for name, (_, others) in found.items() if not others] == []
    assert {name: behind for name, (behind, _) in found.items() if behind > 1} == {}
