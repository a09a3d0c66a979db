"""Hostile requests over HTTP: no internal error, no growth, no defect in the log, and honest calls work.

MEMSTREAM_HTTP_FUZZ_CALLS is the number of requests (`make fuzz`: 50,000), MEMSTREAM_FUZZ_SEED the seed.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import memstream
from tests.http_port.test_edges import INFO, RECALL, call
from tests.rpc.test_fuzz_server import RSS_GROWTH_MAX, SEED, SETTINGS, check_lines, load_language_model
from tests.support.contract import METHODS
from tests.support.fuzzing import MEMORIES, Fuzzer
from tests.support.http_fuzz_run import HttpReport, run_hostile
from tests.support.http_fuzzing import HttpFuzzer
from tests.support.processes import resident_mib
from tests.support.server import ServerProcess, free_address

CALLS = int(os.environ.get("MEMSTREAM_HTTP_FUZZ_CALLS", "400"))
RSS_CALLS_MIN = 10_000
"""With fewer requests the server is still growing: its caches and malloc's arenas fill."""


async def test_no_http_request_breaks_the_server(tmp_path: Path) -> None:
    address = free_address()
    with ServerProcess(tmp_path / "data", http_listen=address).configure(**SETTINGS) as server:
        async with memstream.connect(server.address) as client:
            for name in MEMORIES:
                await client.create_memory(f"fz-0/{name}")
            if CALLS >= RSS_CALLS_MIN:
                await load_language_model(client, "fz-0")
            honest = await client.create_memory("honest/joy")
            await honest.observe_batch(["Ann lives in Berlin"])
        fuzzer, report = HttpFuzzer(Fuzzer(SEED, ("fz-0", "fz-1"), "zebrafish"), address), HttpReport()
        await run_hostile(address, fuzzer, CALLS // 2, report)
        before = resident_mib(server.pid)
        await run_hostile(address, fuzzer, CALLS - CALLS // 2, report)
        after = resident_mib(server.pid)
        print(f"seed {SEED}: {report.calls} requests, RSS {before:.0f} -> {after:.0f} MiB, {report.by_outcome()}")
        assert not report.failures, f"seed {SEED}\n" + "\n".join(report.failures[:10])
        assert report.rpcs == {method.name for method in METHODS}
        assert CALLS < RSS_CALLS_MIN or after <= RSS_GROWTH_MAX * before
        assert {"200", "400", "404", "415"} <= report.by_outcome().keys()
        assert (await asyncio.to_thread(call, address, INFO)).status_code == 200
        body = '{"namespace": "honest", "memory": "joy", "query": {"text": "Where does Ann live?"}}'
        answer = await asyncio.to_thread(call, address, RECALL, body)
        (found,) = answer.json()["recollections"]["recollections"]
        assert found["fragment"]["content"] == "Ann lives in Berlin"
        assert server.stop() == 0
        check_lines(server, ["zebrafish"])
