"""Latency of one tenant while another one uses all that its limits allow and asks for more.

    python benchmarks/bench_overload.py [--full | --tiny] [--rounds N] [--json FILE]

Tenant B recalls from its memory of 1,000 fragments, one question after the other, and observes one sentence after the
other until it is stored, some thirty a second, within its limits. It does so alone, and while tenant A, a separate
process, observes through eight streams at full speed and keeps twice as many recalls in flight as allowed. Both have
the same per-caller limits; rounds alternate between alone and with the flood.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

from claims import Claim, at_most, make_claim, make_pause_claim, run_standalone
from flooding import run_flood
from recalls import COLUMNS, P50, P99, RecallClient, Texts, add_times, fill_memories
from report import PAUSES, Report, Size, own_cpu_s
from served import BenchServer
from texts import SentenceSource

import memstream
from memstream_server.rpc.access import keys

HELD = {Size.TINY: 20, Size.SHORT: 1_000, Size.FULL: 1_000}
"""Fragments per memory at the start."""
TRIALS = {Size.TINY: 2, Size.SHORT: 300, Size.FULL: 1_000}
ROUNDS = {Size.TINY: 1, Size.SHORT: 5, Size.FULL: 5}
STREAMS, CALLS = 8, 2
PAUSE_S = 0.02
"""Pause of tenant B after each call, so that its own limits never delay it."""
LIMITS: dict[str, Any] = {
    "caller_streams_max": 2 * STREAMS,
    "caller_calls_max": CALLS,
    "caller_requests_per_s": 40,
    "caller_observations_per_s": 100,
    "caller_bytes_per_s": 100_000,
    "batch_max": 16,
}
TENANTS = ("flood", "quiet")
PREFIX = {tenant: f"{tenant}/agent" for tenant in TENANTS}
RECALLS, RECALLS_BESIDE = "recalls, alone", "recalls, with the flood"
STORES, STORES_BESIDE = "observe until stored, alone", "observe until stored, with the flood"
LOOP, LOOP_BESIDE = "event loop, alone", "event loop, with the flood"
FLOOD = "rates of the flood"
FLOODED = {"observed": "observed/s", "recalled": "recalled/s", "refused": "refused/s"}


def make_access(directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings of a server with API keys for both tenants, and the keys."""
    directory.mkdir()
    keys_file, policy_file = directory / "keys.json", directory / "policy.toml"
    grants = (f'[[grant]]\nwho = ["key:{one}"]\nnamespaces = ["{one}"]\nverbs = ["*"]\n' for one in TENANTS)
    policy_file.write_text("\n".join(grants), "utf-8")
    given = {one: keys.create_key(keys_file, one)[1] for one in TENANTS}
    return {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}, given


class QuietTenant:
    """Tenant B."""

    def __init__(self, report: Report, server: BenchServer, recalling: RecallClient, texts: Texts, count: int) -> None:
        self._report = report
        self._server = server
        self._recalling = recalling
        self._texts = texts
        self._count = count
        self._talk = SentenceSource(5)

    async def measure(self, stream: memstream.ObserveStream, recalls: str, stores: str, loop: str) -> None:
        """One round of recalls and observations."""
        since = time.monotonic()
        await self._recalling.measure(self._report, recalls, self._texts.draw_questions(self._count), PAUSE_S)
        own, before, seconds = own_cpu_s(), self._server.cpu_used(), []
        for _ in range(self._count):
            began = time.perf_counter()
            await (await stream.send(self._talk.make_sentence(), speaker="Ada", session="live"))
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)
        add_times(self._report, stores, seconds, own_cpu_s() - own, self._server.cpu_used().since(before).total)
        self._report.add_pause(loop, self._server.longest_pause(since))


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """Fill, restart with limits, and run all rounds."""
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        access, tokens = make_access(scratch / "access")
        with BenchServer(scratch / "data", index_flush_interval_s=2, **access) as server:
            async with memstream.connect(server.address, token=tokens["flood"]) as client:
                await fill_memories(client, PREFIX["flood"], [HELD[size]] * STREAMS)
            async with memstream.connect(server.address, token=tokens["quiet"]) as client:
                texts = await fill_memories(client, PREFIX["quiet"], [HELD[size]])
        server = stack.enter_context(BenchServer(scratch / "data", **access, **LIMITS))
        client = await stack.enter_async_context(memstream.connect(server.address, token=tokens["quiet"]))
        recalling = await stack.enter_async_context(RecallClient(server, client, PREFIX["quiet"]))
        stream = await stack.enter_async_context(client.memory(f"{PREFIX['quiet']}-0").observe("quiet"))
        quiet = QuietTenant(report, server, recalling, texts, TRIALS[size])
        await recalling.ask(texts.draw_questions(TRIALS[size]), PAUSE_S)  # warm up both sides
        for _ in range(rounds):
            await quiet.measure(stream, RECALLS, STORES, LOOP)
            async with run_flood(server.address, tokens["flood"], PREFIX["flood"], STREAMS, CALLS) as flood_rates:
                await quiet.measure(stream, RECALLS_BESIDE, STORES_BESIDE, LOOP_BESIDE)
            report.add_round(FLOOD, **{column: flood_rates.get(what, 0.0) for what, column in FLOODED.items()})


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report((*COLUMNS, *FLOODED.values(), *PAUSES))
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about a tenant next to a flooding one."""
    suffix = "with a flooding tenant"
    return [
        make_claim(report, f"recall p50, {suffix}", RECALLS_BESIDE, P50, RECALLS),
        make_claim(report, f"recall p99, {suffix}", RECALLS_BESIDE, P99, RECALLS, at_most(2)),
        make_claim(report, f"observe until stored p50, {suffix}", STORES_BESIDE, P50, STORES),
        make_claim(report, f"observe until stored p99, {suffix}", STORES_BESIDE, P99, STORES, at_most(2)),
        make_pause_claim(report, f"longest event-loop pause, {suffix}", LOOP_BESIDE, LOOP),
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
