"""Random calls of any rpc: no INTERNAL, no UNKNOWN, no data of another tenant, and no request data in the log.

MEMSTREAM_FUZZ_CALLS is the number of calls (`make fuzz`: 200,000), MEMSTREAM_FUZZ_SEED the seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import memstream
from tests.access.conftest import guarded_files
from tests.server.conftest import WITH_INDEX
from tests.support.contract import METHODS
from tests.support.fuzz_run import Caller, Report, run_calls
from tests.support.fuzzing import MEMORIES, Fuzzer
from tests.support.processes import resident_mib
from tests.support.seeds import SEEDS, rounds, seed_of
from tests.support.server import ServerProcess

CALLS = int(os.environ.get("MEMSTREAM_FUZZ_CALLS", rounds(3_000, 1_000)))
SEED = seed_of("MEMSTREAM_FUZZ_SEED")
SETTINGS: dict[str, str | float] = {
    **WITH_INDEX,
    "log_format": "json",
    "log_level": "debug",
    "content_max_bytes": 4_096,
}
ANSWERED_CALLS_MIN = 5_000
"""With fewer calls an rpc may be refused each time by chance."""
REFUSED = {
    "ReflectMemory": "needs an LLM, and the server has none",
    "GetServerStatus": "the callers of the guarded server lack its right on the whole server",
    "StartReindex": "rare by its weight, and the callers of the guarded server lack its right on the whole server",
}
"""The rpcs that may never answer OK, with the reason."""
RSS_GROWTH_MAX = 1.2
RSS_CALLS_MIN = 50_000
"""With fewer calls the server is still growing: its caches and malloc's arenas fill."""


async def fuzzed(server: ServerProcess, callers: Sequence[Caller], calls: int) -> Report:
    """Makes all calls on prepared memories; the test fails on any problem."""
    for caller in callers:
        async with memstream.connect(server.address, token=caller.token or None) as client:
            for name in MEMORIES:
                await client.create_memory(f"{caller.fuzzer.names[0]}/{name}")
            if calls >= RSS_CALLS_MIN:
                await load_language_model(client, caller.fuzzer.names[0])
    report = Report()
    await run_calls(server.address, callers, calls // 2, report)
    before = resident_mib(server.pid)
    await run_calls(server.address, callers, calls - calls // 2, report)
    after = resident_mib(server.pid)
    print(f"seed {SEED}: {report.calls} calls, RSS {before:.0f} -> {after:.0f} MiB, {report.by_code()}")
    assert not report.failures, "\n".join(report.failures[:10])
    assert {name for name, _, _ in report.codes} == {method.name for method in METHODS}
    assert calls < RSS_CALLS_MIN or after <= RSS_GROWTH_MAX * before
    answered = {name for name, code, _ in report.codes if code in ("OK", "LEFT")}
    refused = {method.name for method in METHODS} - answered
    print(f"seed {SEED}: never OK {sorted(refused)}")
    assert calls < 2_000 or len(answered) >= len(METHODS) - 4, "too much is refused to show anything"
    assert calls < ANSWERED_CALLS_MIN or refused <= set(REFUSED), "too much is refused to show anything"
    return report


async def load_language_model(client: memstream.Client, namespace: str) -> None:
    """Makes the server load py3langid, 80 MB once: any fuzzed policy may do it, between two measurements of RSS too."""
    await client.create_memory(f"{namespace}/languages", policy={"language": "auto"})


def check_lines(server: ServerProcess, marks: Sequence[str]) -> None:
    """Every line is printable JSON, reports no defect, and repeats nothing that a caller sent."""
    text = server.log()
    for mark in marks:
        assert mark not in text, f"the log has {mark}"
    assert "Traceback" not in text, text[max(0, text.index("Traceback") - 2_000) :][:6_000]
    for line in text.splitlines():
        if line.startswith("{"):
            held = json.loads(line)
            assert held.get("level") != "error", line
            assert line.isprintable()


async def test_no_input_breaks_the_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data").configure(**SETTINGS) as server:
        await fuzzed(server, [Caller(Fuzzer(SEED, ("fz-0", "fz-1"), "zebrafish"))], CALLS // 2)
        assert server.stop() == 0
        check_lines(server, ["zebrafish"])


async def test_no_input_shows_what_is_another_tenants(tmp_path: Path) -> None:
    keys_file, policy_file, keys = guarded_files(tmp_path / "access")
    settings = {**SETTINGS, "api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with ServerProcess(tmp_path / "data").configure(**settings) as server:
        alice = Fuzzer(SEED, ("a", "a", "a", "a-other", "b"), "zebrafish")
        bob = Fuzzer(SEED + 1, ("b", "b", "b", "b", "a"), "quokka", alice)
        callers = [
            Caller(alice, keys["alice"], (b"quokka",)),
            Caller(bob, keys["bob"], (b"zebrafish",)),
            Caller(Fuzzer(SEED + 2, ("a", "b"), "numbat", alice), keys["nobody"], (b"zebrafish", b"quokka")),
        ]
        await fuzzed(server, callers[:2], CALLS // 4)
        await run_calls(server.address, callers, CALLS // 4, report := Report())
        assert not report.failures, "\n".join(report.failures[:10])
        assert server.stop() == 0
        check_lines(server, ["zebrafish", "quokka", "numbat", *keys.values()])


@pytest.mark.drawn
@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_gives_the_same_requests(seed: int) -> None:
    def requests() -> list[list[bytes]]:
        fuzzer = Fuzzer(seed, ("ns",), "mark")
        return [fuzzer.requests(method) for method in METHODS for _ in range(3)]

    assert requests() == requests()
