"""A hook of a coding agent from the start of its process to its exit, beside `python -c pass`.

    python benchmarks/bench_hooks.py [--full | --tiny] [--rounds N] [--json FILE]

Rounds alternate a bare interpreter and the hooks of a session start, a prompt and the end of a turn, of a host with a
running server and helper; and a prompt's hook whose server does not answer (stopped by a signal), which must end by its
deadline. A hook's limit is 300 ms from the start of its process, and the host's time to start one is on top.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from claims import Claim, at_most, make_claim, run_standalone
from report import Report, Size, percentile
from served import BenchServer

import memstream
from memstream.projects import project_name

ROUNDS = {Size.TINY: 1, Size.SHORT: 40, Size.FULL: 400}
BARE, SILENT = "python -c pass", "hook prompt, a server that does not answer"
EVENTS = {
    "session-start": {"session_id": "bench"},
    "prompt": {"session_id": "bench", "prompt": "When do we deploy?"},
    "stop": {"session_id": "bench", "prompt": "We deploy on Tuesdays", "last_assistant_message": "Noted."},
}
P50, MAX = "ms", "max ms"
COLUMNS = (P50, MAX, "answered")
START_S = 60.0


def run_hook(event: str, home: Path, address: str) -> tuple[float, bytes]:
    """(milliseconds, output) of one hook. Raises CalledProcessError if it does not exit with 0."""
    words = [sys.executable, "-m", "memstream_server", "hook", event, "--host", "claude-code"]
    given = json.dumps(EVENTS[event] | {"cwd": str(home)}).encode()
    began = time.perf_counter()
    done = subprocess.run(
        [*words, "--memory", "bench/{project}", "--target", address],
        input=given,
        stdout=subprocess.PIPE,
        env=os.environ | {"XDG_RUNTIME_DIR": str(home)},
        cwd=home,
        check=True,
    )
    return (time.perf_counter() - began) * 1e3, done.stdout


def run_bare() -> float:
    """Milliseconds of an interpreter that does nothing, started as a hook is."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], input=b"", stdout=subprocess.PIPE, check=True)
    return (time.perf_counter() - began) * 1e3


def start_helper(home: Path, address: str) -> int:
    """Starts the helper by a first hook and waits until it adds context; returns its process id."""
    until = time.monotonic() + START_S
    while not run_hook("session-start", home, address)[1]:
        if time.monotonic() > until:
            raise TimeoutError("the helper adds no context")
    (lock,) = (home / "memstream").glob("*.lock")
    return int(lock.read_text())


def stop_helpers(home: Path) -> None:
    """Ends all helpers of a home: a hook without an answer in time starts another one, which may outlive the first."""
    while found := [int(one.parent.name) for one in Path("/proc").glob("[0-9]*/cmdline") if _is_helper(one, home)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)


def _is_helper(command: Path, home: Path) -> bool:
    try:
        words = command.read_bytes()
    except OSError:
        return False  # it has ended
    return b"memstream.hooks.helper" in words and os.fsencode(home) in words


async def fill(address: str, home: Path) -> None:
    """A fact for the hooks to add."""
    async with memstream.connect(address) as client:
        memory = await client.create_memory(f"bench/{project_name(home)}")
        await memory.observe_batch(["We deploy on Tuesdays"])


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report(COLUMNS)
    with tempfile.TemporaryDirectory(prefix="hooks-", dir="/tmp") as name, BenchServer(Path(name) / "data") as server:
        home = Path(name)
        asyncio.run(fill(server.address, home))
        helper = start_helper(home, server.address)
        try:
            for _ in range(rounds or ROUNDS[size]):
                report.add_round(BARE, ms=run_bare())
                for event in EVENTS:
                    ms, output = run_hook(event, home, server.address)
                    report.add_round(f"hook {event}", ms=ms, answered=float(bool(output)))
                os.kill(server.pid, signal.SIGSTOP)
                try:
                    report.add_round(SILENT, ms=run_hook("prompt", home, server.address)[0])
                finally:
                    os.kill(server.pid, signal.SIGCONT)
        finally:
            os.kill(helper, signal.SIGTERM)
            stop_helpers(home)
    for row in report.rows:
        took = report.round_values(row, P50)
        report.add_round(row, max_ms=percentile(took, 1.0))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about each hook."""
    aim = at_most(300, "ms")
    rows = [row for row in report.rows if row != BARE]
    return [
        *(make_claim(report, f"{row}, p50", row, P50, BARE, aim) for row in rows),
        *(make_claim(report, f"{row}, max", row, MAX, BARE, aim) for row in rows),
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
