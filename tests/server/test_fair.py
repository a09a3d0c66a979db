"""Between a small call's request for a turn and that turn, at most one turn of another caller runs, whatever that one
asks for, on either port.

The rpcs are those of the contract's descriptors. HTTP has all but those with a stream of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor

from memstream.v1 import memory_service_pb2 as memories
from memstream.v1 import stream_service_pb2 as streams
from memstream_server.app.running import run_server
from memstream_server.engine.operations.transfer.upload import Upload
from memstream_server.engine.runtime import turns as turns_module
from memstream_server.engine.runtime.call_context import Account
from memstream_server.engine.runtime.turns import SLICE_S, Turns, find_turns
from memstream_server.rpc.access import keys
from memstream_server.settings import Settings
from tests.support.journals import only_sqlite

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # the table of arguments is the benchmark's

from bench_http import free_address
from heavy_calls import ARGUMENTS, METHODS, QUIET, Caller, find_missing, flood_http, prepare_call, prepare_world

FRAGMENTS, CALLS, ROUNDS = 100, 3, 2
CALLS_MAX = 4_500
"""Python calls of a step: some two milliseconds."""
LONGER = {"Observe": 23_000, "ObserveBatch": 23_000, "RecallOnce": 11_000}
"""The working set shows a commit of 1,024 fragments at once, and an answer of 1,000 is of one revision."""
BY_NAME = {method.name: method for method in METHODS}
LIGHT, HEAVY = "key:light", "key:heavy"
SMALL = {"namespace": "light", "memory": "small"}
Flood = Callable[[MethodDescriptor], Coroutine[Any, Any, None]]
"""Keeps calls of one rpc in flight."""


class Recorder:
    """The order in which steps ask for turns, get them and end. A step of the small calls costs a hundredth of any
    other."""

    def __init__(self, turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, str]] = []
        """("waits", "runs" or "ends", principal). A step whose caller is known only after it began just ends."""
        wait, charge = turns.wait, turns.charge

        def record_wait(account: Account) -> asyncio.Future[None]:
            self.steps.append(("waits", account[0]))
            return wait(account)

        def charge_evenly(account: Account, _cost_s: float) -> None:
            self.steps.append(("ends", account[0]))
            charge(account, 2 * SLICE_S * (0.01 if account[0] == LIGHT else 1))

        monkeypatch.setattr(turns, "wait", record_wait)
        monkeypatch.setattr(turns, "charge", charge_evenly)
        monkeypatch.setattr(turns, "on_turn", lambda account: account and self.steps.append(("runs", account[0])))

    def count_steps(self, principal: str) -> int:
        """Steps that have ended."""
        return self.steps.count(("ends", principal))

    def count_turns_behind(self) -> int:
        """The most turns of others between a request of the small calls for a turn and the turn."""
        most, behind, waits = 0, 0, False
        for what, principal in self.steps:
            if principal != LIGHT:
                behind += waits and what == "runs"
            elif what == "waits":
                behind, waits = 0, True
            elif what == "runs" and waits:
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


async def measure_beside(flood: Flood, method: MethodDescriptor, light: Caller, recorder: Recorder) -> tuple[int, int]:
    """(turns that a small call waited for, steps of the heavy calls)."""
    recorder.steps.clear()
    flooding = asyncio.create_task(flood(method))
    try:
        while not recorder.count_steps(HEAVY):
            assert not flooding.done(), flooding.exception()
            await asyncio.sleep(0)
        await call_beside(light)
        assert not flooding.done(), flooding.exception()
    finally:
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
    return recorder.count_turns_behind(), recorder.count_steps(HEAVY)


def make_access(directory: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Settings with a key for each caller, and the keys: HTTP has a connection for each call, and without a key each
    connection is a caller of its own."""
    keys_file, policy_file = directory / "keys.json", directory / "policy.toml"
    names = {each.removeprefix("key:"): each for each in (LIGHT, HEAVY)}
    grants = (f'[[grant]]\nwho = ["{each}"]\nnamespaces = ["*"]\nverbs = ["*"]\n' for each in names.values())
    policy_file.write_text("\n".join(grants), "utf-8")
    given = {each: keys.create_key(keys_file, name)[1] for name, each in names.items()}
    return {"api_keys_file": keys_file, "access_policy_file": policy_file}, given


def test_every_rpc_has_its_largest_arguments() -> None:
    assert find_missing() == []


class CallCounter:
    """The Python calls of the longest step of the heavy caller: unlike its duration, the same on every machine."""

    def __init__(self, turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._calls = self._began = 0
        end_step = turns.end_step

        def begin(_account: Account | None) -> None:
            self._began = self._calls

        def end(account: Account | None, waited: bool) -> None:
            if account is not None and account[0] == HEAVY:
                self.most = max(self.most, self._calls - self._began)
            end_step(account, waited)

        monkeypatch.setattr(turns, "on_turn", begin)
        monkeypatch.setattr(turns, "end_step", end)

    def _count(self, _frame: object, event: str, _value: object) -> None:
        self._calls += event in ("call", "c_call")

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls of this thread, which runs the event loop."""
        self.most = 0
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)


@only_sqlite("arguments and steps of the loop, not what a store does")
async def test_no_rpc_has_a_long_step_at_its_largest_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "SLICE_S", 0.0)  # each pause that may be due is
    access, given = make_access(tmp_path)
    settings = Settings(data_dir=tmp_path / "data", listen="127.0.0.1:0", **access)
    async with run_server(settings) as running, contextlib.aclosing(Caller(running.address, given[HEAVY])) as heavy:
        world = await prepare_world(heavy, "heavy", FRAGMENTS)
        turns = find_turns()
        assert turns is not None
        counter, longest = CallCounter(turns, monkeypatch), dict[str, int]()
        for method in METHODS:
            if method.name in QUIET or method.name == "ReflectMemory":  # that one needs an LLM
                continue
            await prepare_call(heavy.send, method, world)
            with counter.counting():
                quiet_s = 0.05 if method.name == "Recall" else None  # others end by themselves
                await heavy.call(method, ARGUMENTS[method.name](world), quiet_s)
            longest[method.name] = counter.most
    assert {name: most for name, most in longest.items() if most > LONGER.get(name, CALLS_MAX)} == {}


@only_sqlite("threads of the server, whatever its journal")
async def test_an_import_is_checked_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, add_lines = list[str](), Upload.add_lines

    def note_thread(upload: Upload, lines: bytes) -> None:
        threads.append(threading.current_thread().name)
        add_lines(upload, lines)

    monkeypatch.setattr(Upload, "add_lines", note_thread)
    settings = Settings(data_dir=tmp_path / "data", listen="127.0.0.1:0")
    async with run_server(settings) as running, contextlib.aclosing(Caller(running.address)) as caller:
        world = await prepare_world(caller, "heavy", 3)
        await caller.call(BY_NAME["ImportMemories"], ARGUMENTS["ImportMemories"](world))
    assert {name.rsplit("_", 1)[0] for name in threads} == {"computing"}


@only_sqlite("turns of the loop, slowed down so much that leases end")
@pytest.mark.parametrize("port", ["gRPC", "HTTP"])
async def test_a_small_call_waits_for_one_turn_beside_each_rpc(
    port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "BUDGET_S", 0.0)  # no two turns share an iteration of the loop
    monkeypatch.setattr(turns_module, "COST_MAX_S", 1e-6)  # and none is charged before it runs
    access, given = make_access(tmp_path)
    http = free_address()
    settings = Settings(data_dir=tmp_path / "data", listen="127.0.0.1:0", http_listen=http, **access)
    async with run_server(settings) as running, contextlib.AsyncExitStack() as stack:
        turns = find_turns()
        assert turns is not None
        heavy, light = Caller(running.address, given[HEAVY]), Caller(running.address, given[LIGHT])
        for caller in (heavy, light):
            stack.push_async_callback(caller.aclose)
        world = await prepare_world(heavy, "heavy", FRAGMENTS)
        await light.call(BY_NAME["CreateMemory"], memories.CreateMemoryRequest(**SMALL))
        recorder = Recorder(turns, monkeypatch)

        def flood(method: MethodDescriptor) -> Coroutine[Any, Any, None]:
            if port == "HTTP":
                return flood_http(http, method, world, CALLS, given[HEAVY])
            return heavy.flood(method, world, CALLS)

        methods = [one for one in METHODS if port == "gRPC" or not one.client_streaming]
        found = {each.name: await measure_beside(flood, each, light, recorder) for each in methods}
    assert {name: behind for name, (behind, _) in found.items() if behind > 1} == {}
