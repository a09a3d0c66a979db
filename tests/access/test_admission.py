"""One caller at its limits leaves the other callers theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

import memstream
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.fragment_pb2 import Observation
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream_server.engine.errors import QuotaExceeded
from memstream_server.rpc.access.admission import REFUSAL_WAIT_MAX_S, REFUSALS_PER_S, Admission
from memstream_server.rpc.access.authorization import OpenAccess
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.pipeline import Pipeline
from tests.access.conftest import guarded_files
from tests.server.conftest import MakeServer, started
from tests.support.waiting import until


def test_ended_calls_are_released_per_principal() -> None:
    admission = Admission(streams_max=1, calls_max=2)
    with (
        admission.count_open("key:a", "streams"),
        admission.count_open("key:a", "calls"),
        admission.count_open("key:a", "calls"),
    ):
        for what in ("streams", "calls"):
            with pytest.raises(QuotaExceeded), admission.count_open("key:a", what):
                pass
            with admission.count_open("key:b", what):
                pass
    with admission.count_open("key:a", "streams"):
        pass
    assert not admission._under_way


def test_rate_allows_one_second_then_waits() -> None:
    now_s = 100.0
    admission = Admission(observations_per_s=10, bytes_per_s=1e9, now_s=lambda: now_s)
    five = pb.ObserveRequest(batch=pb.ObservationBatch(observations=[Observation(content="x")] * 5))
    for owed_s in (0.0, 0.0, 0.5, 1.0):
        assert admission.charge_message("key:a", five) == pytest.approx(owed_s)
    assert admission.charge_message("key:b", five) == 0
    one = pb.ObserveBatchRequest(observations=[Observation(content="x")])
    with pytest.raises(QuotaExceeded) as raised:
        admission.charge_call("key:a", one)
    assert raised.value.retry_after_s == pytest.approx(1.0)
    admission.charge_call("key:a", pb.RecallOnceRequest())  # a caller over its observation rate may still query
    now_s = 101.0
    admission.charge_call("key:a", one)
    assert admission.charge_message("key:a", five) == pytest.approx(0.6)
    now_s = 200.0  # at most one second is saved up
    assert [admission.charge_message("key:a", five) for _ in range(3)] == pytest.approx([0, 0, 0.5])


def test_every_request_is_charged_and_full_buckets_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memstream_server.rpc.access.admission.ACCOUNTS_MAX", 3)
    now_s = 100.0
    admission = Admission(bytes_per_s=100, now_s=lambda: now_s)
    query = pb.RecallRequest(query=pb.RecallQuery(text="x" * 250))
    assert admission.charge_message("key:debtor", query) == pytest.approx(query.ByteSize() / 100 - 1)
    for number in range(10):
        now_s += 0.01
        admission.charge_message(f"key:{number}", pb.RecallRequest(close=pb.RecallClose()))
    now_s += 1.0
    admission.charge_message("key:last", query)
    assert set(admission._rates[-1]._paid_until) == {"key:debtor", "key:last"}


def test_what_asks_for_something_anew_is_a_request() -> None:
    admission = Admission(requests_per_s=1, now_s=lambda: 100.0)
    for message, first, owed_s in (
        (pb.RecallOnceRequest(), True, 1),
        (pb.ObserveRequest(open=pb.ObserveOpen()), True, 1),
        (pb.RecallRequest(query=pb.RecallQuery()), False, 1),
        (pb.RecallRequest(cancel=pb.RecallCancel()), False, 0),
        (pb.ObserveRequest(batch=pb.ObservationBatch(observations=[Observation(content="x")] * 5)), False, 0),
    ):
        who = type(message).__name__ + str(owed_s) + str(message)
        assert [admission.charge_message(who, message, first=first) for _ in range(2)] == [0, owed_s]


def test_refusal_delay_grows_up_to_a_bound() -> None:
    now_s = 100.0
    admission = Admission(calls_max=1, requests_per_s=1, now_s=lambda: now_s)

    def told_in_s(principal: str = "key:a") -> float:
        with pytest.raises(QuotaExceeded) as raised, admission.count_open(principal, "calls"):
            admission.charge_call(principal, pb.RecallOnceRequest())
        return raised.value.refusal_delay_s

    admission.charge_call("key:a", pb.RecallOnceRequest())
    admission.charge_call("key:b", pb.RecallOnceRequest())
    admission.charge_call("key:a", pb.RecallOnceRequest())
    admission.charge_call("key:b", pb.RecallOnceRequest())
    assert [told_in_s() for _ in range(REFUSALS_PER_S)] == [0.0] * REFUSALS_PER_S
    assert [told_in_s() for _ in range(3)] == pytest.approx([0.0, 1 / REFUSALS_PER_S, 2 / REFUSALS_PER_S])
    assert told_in_s("key:b") == 0
    later = [told_in_s() for _ in range(3 * REFUSALS_PER_S)]
    assert max(later) == later[-1] == pytest.approx(REFUSAL_WAIT_MAX_S)
    with admission.count_open("key:c", "calls"):
        assert told_in_s("key:c") == 0


def test_caller_in_debt_is_refused_until_it_is_paid() -> None:
    now_s = 100.0
    admission = Admission(cpu_s_per_s=0.5, now_s=lambda: now_s)
    with admission.count_open("key:a", "calls"):
        admission.charge_cost("key:a", 0.4)  # less than one second's worth
    with admission.count_open("key:a", "calls"):
        admission.charge_cost("key:a", 2.1)
    with pytest.raises(QuotaExceeded) as refused, admission.count_open("key:a", "calls"):
        pytest.fail("a caller in debt is admitted")
    assert refused.value.details["quota"] == "caller_cpu_s_per_s"
    assert refused.value.retry_after_s == pytest.approx(4.0)
    assert admission.charge_message("key:a", pb.RecallRequest(), first=True) == pytest.approx(4.0)
    with admission.count_open("key:a", "streams"), admission.count_open("key:b", "calls"):
        now_s += 4.0
    with admission.count_open("key:a", "calls"):
        pass


async def test_caller_over_its_cost_is_refused_with_a_delay(tmp_path: Path, make_server: MakeServer) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    settings = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    server = await started(make_server(**settings, caller_cpu_s_per_s=0.0001))
    async with memstream.connect(server.address, token=keys["alice"], timeout_s=1) as alice:

        async def create_often() -> None:
            for _ in range(20):  # one call of some milliseconds uses up ten seconds' worth
                await alice.create_memory("a/joy", exist_ok=True)

        with pytest.raises(memstream.QuotaExceeded) as refused:
            await create_often()
        assert refused.value.details["quota"] == "caller_cpu_s_per_s"
        assert refused.value.retry_after is not None


async def test_delayed_refusals_take_no_slot_of_others(tmp_path: Path, make_server: MakeServer) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    settings = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    server = await started(make_server(**settings, caller_requests_per_s=1.0, calls_in_flight_max=2))
    async with (
        memstream.connect(server.address, token=keys["alice"], timeout_s=0.5) as alice,
        memstream.connect(server.address, token=keys["alice"]) as patient,
        memstream.connect(server.address, token=keys["bob"]) as bob,
    ):
        await patient.create_memory("a/joy")
        mine, other = alice.memory("a/joy"), await bob.create_memory("b/joy")
        asking = [asyncio.create_task(mine.recall_once("and now?")) for _ in range(3 * REFUSALS_PER_S)]
        assert len(await other.recall_once("anything?")) == 0
        answers = await asyncio.gather(*asking, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, BaseException)]
        assert len(refused) > REFUSALS_PER_S
        # Late ones are the machine's: the next test says how long the server waits.
        assert {type(one) for one in refused} <= {memstream.QuotaExceeded, memstream.DeadlineExceeded}


@pytest.mark.parametrize("remaining_s", [0.5, 30.0, None])
async def test_delayed_refusal_meets_the_deadline(remaining_s: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)

    class Context:
        def time_remaining(self) -> float | None:
            return remaining_s

    error = QuotaExceeded("too many", quota="caller_requests_per_s", limit=1)
    error.refusal_delay_s = REFUSAL_WAIT_MAX_S
    limits = Pipeline(Drain(), RequestLimits(), OpenAccess())
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await limits.wait_refusal_delay(error, cast("Any", Context()))
    assert len(slept_s) == 1
    if remaining_s == 0.5:
        assert 0 < slept_s[0] < 0.5
    else:
        assert slept_s == [REFUSAL_WAIT_MAX_S]


async def test_excess_requests_wait_on_streams_else_refused(tmp_path: Path, make_server: MakeServer) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    settings = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    server = await started(make_server(**settings, caller_requests_per_s=20.0))
    loop = asyncio.get_running_loop()
    async with (
        memstream.connect(server.address, token=keys["alice"], timeout_s=1) as alice,
        memstream.connect(server.address, token=keys["alice"]) as patient,
        memstream.connect(server.address, token=keys["bob"]) as bob,
    ):
        await patient.create_memory("a/joy")
        mine, other = alice.memory("a/joy"), await bob.create_memory("b/joy")
        began_s = loop.time()
        async with mine.recall() as stream:
            answers = [asyncio.create_task(stream.query(f"number {number}", timeout_s=60)) for number in range(60)]
            await answers[0]
            assert await until(lambda: quotas_met(mine)) == {"caller_requests_per_s"}
            assert len(await other.recall_once("anything?")) == 0
            await asyncio.gather(*answers)
        assert loop.time() - began_s >= 1.9  # 20 of them at once, 20 a second after that


async def quotas_met(memory: memstream.Memory) -> set[str]:
    """The quotas that a burst of calls meets; none if the deadline of each passes first, on a busy machine."""
    calls = await asyncio.gather(*(memory.recall_once("and now?") for _ in range(40)), return_exceptions=True)
    return {one.details["quota"] for one in calls if isinstance(one, memstream.QuotaExceeded)}


async def test_each_ranking_of_a_standing_query_is_a_request(tmp_path: Path, make_server: MakeServer) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    settings = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    server = await started(make_server(**settings, caller_requests_per_s=20.0))
    async with (
        memstream.connect(server.address, token=keys["alice"]) as alice,
        memstream.connect(server.address, token=keys["alice"]) as patient,
        memstream.connect(server.address, token=keys["bob"]) as bob,
    ):
        await patient.create_memory("a/joy")
        mine, other = alice.memory("a/joy"), await bob.create_memory("b/joy")
        async with mine.observe("p") as teller, mine.recall() as recalls, AsyncExitStack() as stack:
            for number in range(40):
                await stack.enter_async_context(recalls.subscribe(f"number {number}"))
            taken = [await _asked(mine)]
            while not taken[-1]:  # the cost of these queries themselves is paid
                taken.append(await _asked(mine))
            for number in range(1_000):
                await teller.send(f"number {number}")
                if number % 10 == 9 and not await _asked(mine):
                    break
            else:
                pytest.fail("40 rankings a second are not 40 requests")
            assert len(await other.recall_once("anything?")) == 0


async def _asked(memory: memstream.Memory) -> bool:
    """Whether a query is accepted; two a second are."""
    await asyncio.sleep(0.5)
    try:
        await memory.recall_once("and now?")
    except memstream.QuotaExceeded:
        return False
    return True


async def test_excess_stream_data_is_slowed_and_kept(tmp_path: Path, make_server: MakeServer) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    settings = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    server = await started(make_server(**settings, caller_observations_per_s=50.0))
    loop = asyncio.get_running_loop()
    async with (
        memstream.connect(server.address, token=keys["alice"]) as alice,
        memstream.connect(server.address, token=keys["alice"]) as patient,
        memstream.connect(server.address, token=keys["bob"]) as bob,
    ):
        await patient.create_memory("a/joy")
        mine, other = alice.memory("a/joy"), await bob.create_memory("b/joy")
        began_s = loop.time()
        async with mine.observe("p") as stream:
            for number in range(150):
                await stream.send(f"number {number}")
            await stream.flush()
            assert loop.time() - began_s >= 1.9  # 50 of them at once, 50 a second after that
            for number in range(150, 300):
                await stream.send(f"number {number}")
            await until(lambda: refused(mine))
            assert not await refused(other)
            await stream.flush()
        async with mine.observe("p") as stream:
            assert stream.stored == 300


async def refused(memory: memstream.Memory) -> bool:
    """Whether the server refuses one more observation by a call, with a retry delay."""
    try:
        await memory.observe_batch(["one"])
    except memstream.QuotaExceeded as error:
        return (error.retry_after or 0) > 0
    return False


async def test_streams_of_one_caller_leave_room_for_another(tmp_path: Path, make_server: MakeServer) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    server = await started(
        make_server(api_keys_file=str(keys_file), access_policy_file=str(policy_file), caller_streams_max=2)
    )
    for name, path in (("alice", "a/joy"), ("bob", "b/joy")):
        async with memstream.connect(server.address, token=keys[name]) as client:
            await client.create_memory(path)
    async with grpc.aio.insecure_channel(server.address) as channel:

        async def opened(name: str, namespace: str) -> grpc.aio.StreamStreamCall[pb.RecallRequest, pb.RecallResponse]:
            metadata = (("authorization", f"Bearer {keys[name]}"),)

            async def requests() -> AsyncIterator[pb.RecallRequest]:
                yield pb.RecallRequest(open=pb.RecallOpen(namespace=namespace, memory="joy"))
                await asyncio.Event().wait()

            call = StreamServiceStub(channel).Recall(requests(), metadata=metadata, timeout=60)
            await call.read()
            return call

        async def opens(name: str, namespace: str) -> bool:
            try:
                (await opened(name, namespace)).cancel()
            except grpc.aio.AioRpcError as error:
                if error.details() == "Internal error from Core":  # the refusal met the write, and its reason is lost
                    return await opens(name, namespace)
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                return False
            return True

        mine = [await opened("alice", "a") for _ in range(2)]
        assert not await opens("alice", "a")
        assert await opens("bob", "b")
        mine[0].cancel()
        await until(lambda: opens("alice", "a"))
