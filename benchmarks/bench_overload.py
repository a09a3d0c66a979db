"""How long a tenant waits while another one takes all that its limits allow, and asks for more.

    python benchmarks/bench_overload.py [--full | --tiny] [--rounds N] [--json FILE]

Tenant B asks its memory of 1,000 fragments one question after the other, and observes one sentence after the other
until it is stored, some thirty a second, which is within its limits: alone, and while tenant A, a process of its own,
observes through eight streams as fast as it is read and recalls by twice as many calls as it may have under way. Both
are bound by the same limits for each caller; alone and beside take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

from claims import Claim, at_most, claim, pause, standalone
from flooding import flooding
from recalls import COLUMNS, P50, P99, Recalling, Texts, enter, fill
from report import PAUSES, Report, Size, own_cpu_s
from served import Served
from texts import Talk

import memstream
from memstream_server.rpc.access import keys

HELD = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 1_000}
"""Fragments of each memory before."""
TRIALS = {Size.TINY: 2, Size.SHORT: 300, Size.FULL: 1_000}
ROUNDS = {Size.TINY: 1, Size.SHORT: 5, Size.FULL: 5}
STREAMS, CALLS = 8, 2
PAUSE_S = 0.02
"""Of tenant B after each, so that its own limits never hold it back."""
LIMITS: dict[str, str | float] = {
    "caller_streams_max": 2 * STREAMS,
    "caller_calls_max": CALLS,
    "caller_requests_per_s": 40,
    "caller_observations_per_s": 100,
    "caller_bytes_per_s": 100_000,
    "batch_max": 16,
}
TENANTS = ("flood", "quiet")
PREFIX = {tenant: f"{tenant}/agent" for tenant in TENANTS}
RECALLS, RECALLS_BESIDE = "recalls, alone", "recalls, beside the flood"
STORES, STORES_BESIDE = "observe until stored, alone", "observe until stored, beside the flood"
LOOP, LOOP_BESIDE = "event loop, alone", "event loop, beside the flood"
FLOOD = "what the flood came to"
FLOODED = {"observed": "observed/s", "recalled": "recalled/s", "refused": "refused/s"}


def guarded(directory: Path) -> tuple[dict[str, str | float], dict[str, str]]:
    """The settings of a server that tells the tenants apart, and their keys."""
    directory.mkdir()
    keys_file, policy_file = directory / "keys.json", directory / "policy.toml"
    grants = (f'[[grant]]\nwho = ["key:{one}"]\nnamespaces = ["{one}"]\nverbs = ["*"]\n' for one in TENANTS)
    policy_file.write_text("\n".join(grants), "utf-8")
    given = {one: keys.create(keys_file, one)[1] for one in TENANTS}
    return {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}, given


class Quiet:
    """Tenant B."""

    def __init__(self, report: Report, server: Served, recalling: Recalling, texts: Texts, count: int) -> None:
        self._report = report
        self._server = server
        self._recalling = recalling
        self._texts = texts
        self._count = count
        self._talk = Talk(5)

    async def measure(self, stream: memstream.ObserveStream, recalls: str, stores: str, loop: str) -> None:
        """One round of both."""
        since = time.monotonic()
        await self._recalling.measure(self._report, recalls, self._texts.questions(self._count), PAUSE_S)
        own, before, seconds = own_cpu_s(), self._server.cpu(), []
        for _ in range(self._count):
            began = time.perf_counter()
            await (await stream.send(self._talk.sentence(), speaker="Ada", session="live"))
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)
        enter(self._report, stores, seconds, own_cpu_s() - own, self._server.cpu().since(before).both)
        self._report.pause(loop, self._server.pause(since))


async def measure(report: Report, size: Size, rounds: int) -> None:
    """Fill, start anew with limits, and all rounds."""
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        access, tokens = guarded(scratch / "access")
        with Served(scratch / "data", index_flush_interval_s=2, **access) as server:
            async with memstream.connect(server.address, token=tokens["flood"]) as client:
                await fill(client, PREFIX["flood"], [HELD[size]] * STREAMS)
            async with memstream.connect(server.address, token=tokens["quiet"]) as client:
                texts = await fill(client, PREFIX["quiet"], [HELD[size]])
        server = stack.enter_context(Served(scratch / "data", **access, **LIMITS))
        client = await stack.enter_async_context(memstream.connect(server.address, token=tokens["quiet"]))
        recalling = await stack.enter_async_context(Recalling(server, client, PREFIX["quiet"]))
        stream = await stack.enter_async_context(client.memory(f"{PREFIX['quiet']}-0").observe("quiet"))
        quiet = Quiet(report, server, recalling, texts, TRIALS[size])
        await recalling.ask(texts.questions(TRIALS[size]), PAUSE_S)  # both sides are warm
        for _ in range(rounds):
            await quiet.measure(stream, RECALLS, STORES, LOOP)
            async with flooding(server.address, tokens["flood"], PREFIX["flood"], STREAMS, CALLS) as came:
                await quiet.measure(stream, RECALLS_BESIDE, STORES_BESIDE, LOOP_BESIDE)
            report.add(FLOOD, **{column: came.get(what, 0.0) for what, column in FLOODED.items()})


def run(size: Size, rounds: int | None = None) -> Report:
    """Measure."""
    report = Report((*COLUMNS, *FLOODED.values(), *PAUSES))
    asyncio.run(measure(report, size, rounds or ROUNDS[size]))
    return report


def claims(report: Report) -> list[Claim]:
    """What is said of a tenant beside another one."""
    said = "beside a flooding tenant"
    return [
        claim(report, f"recall p50, {said}", RECALLS_BESIDE, P50, RECALLS),
        claim(report, f"recall p99, {said}", RECALLS_BESIDE, P99, RECALLS, at_most(2)),
        claim(report, f"observe until stored p50, {said}", STORES_BESIDE, P50, STORES),
        claim(report, f"observe until stored p99, {said}", STORES_BESIDE, P99, STORES, at_most(2)),
        pause(report, f"event loop's longest pause, {said}", LOOP_BESIDE, LOOP),
    ]


if __name__ == "__main__":
    standalone(__doc__, run, claims)
