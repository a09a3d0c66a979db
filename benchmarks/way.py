"""The way of one observation and of one recall through the server: files, functions, calls.

    python benchmarks/way.py [--list | --json]

A server runs with a profiler on all of its threads (the first argument `serve`, used by this program itself). After a
warm-up, lone observations on an open stream until *stored*, and lone recalls on another, alternate with idle pauses.
Each is traced from its arrival until the server is idle again, reinforcement included; the figures are the lowest of
ROUNDS, because background work adds calls to some. All words are known to the server: it analyses a new word once. A
call is a function of memstream_server that is entered, or a coroutine or generator that is resumed. A change is a call
that follows one of another file in the same thread. `--list` prints the calls of the last recall and observation, in
order. `--json` prints the figures alone, by operation and column: scripts/house.py compares them with their limits.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

from report import format_number
from texts import SentenceSource

import memstream
import memstream_server

ROUNDS = 9
FRAGMENTS = 200
WARM_UP = 20
QUIET_S = 0.3
"""Time in which the work after an answer ends."""
ROOT = str(Path(memstream_server.__file__).parent)
COLUMNS = ("files", "functions", "calls", "changes of file")


class Tracer:
    """Records calls between SIGUSR1 and SIGUSR2, and writes them to a file at the latter."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._calls: list[tuple[int, str, int, str]] = []
        self._on = False
        signal.signal(signal.SIGUSR1, self._start)
        signal.signal(signal.SIGUSR2, self._stop)
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self._on and event == "call" and code.co_filename.startswith(ROOT):
            at = (threading.get_ident(), code.co_filename, code.co_firstlineno, code.co_qualname)
            self._calls.append(at)

    def _start(self, _: int, __: FrameType | None) -> None:
        self._calls, self._on = [], True

    def _stop(self, _: int, __: FrameType | None) -> None:
        self._on = False
        new = self._out.with_suffix(".new")
        new.write_text(json.dumps(self._calls), "utf-8")
        new.rename(self._out)


class TracedServer:
    """A memstream server in a process of its own that runs a Tracer."""

    def __init__(self, scratch: Path) -> None:
        self._traced = scratch / "calls.json"
        port_file = scratch / "address"
        command = [sys.executable, __file__, "serve", str(self._traced), "--listen", "127.0.0.1:0"]
        command += ["--port-file", str(port_file), "--data", str(scratch / "data")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MEMSTREAM_")}
        settings = {"MEMSTREAM_ACCESS_FLUSH_INTERVAL_S": "3600", "MEMSTREAM_INDEX_FLUSH_INTERVAL_S": "3600"}
        self._process = subprocess.Popen(
            command, env=kept | settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._port_file = port_file

    async def address(self) -> str:
        """Returns once the server is serving. Raises RuntimeError if it ended."""
        await asyncio.to_thread(self._wait_until_serving)
        return self._port_file.read_text("utf-8").strip()

    async def trace(self, work: Callable[[], Awaitable[object]]) -> list[tuple[int, str, int, str]]:
        """The server's calls during this work, in order: thread, file, line, name."""
        self._traced.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(0.05)
        await work()
        await asyncio.sleep(QUIET_S)
        self._process.send_signal(signal.SIGUSR2)
        await asyncio.to_thread(self._wait_until_written)
        return [tuple(call) for call in json.loads(self._traced.read_text("utf-8"))]

    def _wait_until_serving(self) -> None:
        while not self._port_file.exists():
            if self._process.poll() is not None:
                raise RuntimeError("the server did not start")
            time.sleep(0.05)

    def _wait_until_written(self) -> None:
        while not self._traced.exists():
            time.sleep(0.02)

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait(60)


def count_calls(calls: list[tuple[int, str, int, str]]) -> tuple[int, ...]:
    """The figures of COLUMNS."""
    last: dict[int, str] = {}
    changes = 0
    for thread, file, _, _ in calls:
        changes += last.get(thread, file) != file
        last[thread] = file
    return len({call[1] for call in calls}), len({call[1:] for call in calls}), len(calls), changes


async def measure_way() -> dict[str, list[list[tuple[int, str, int, str]]]]:
    """The calls of each round, by operation."""
    talk, found = SentenceSource(), dict[str, list[list[tuple[int, str, int, str]]]]()
    with tempfile.TemporaryDirectory() as scratch:
        server = TracedServer(Path(scratch))
        try:
            async with memstream.connect(await server.address()) as client:
                memory = await client.create_memory("way/agent")
                stored = talk.make_observations(FRAGMENTS)
                await memory.observe_batch(stored)
                texts = itertools.cycle([str(one.body) for one in stored])

                def mix_words() -> str:
                    return " ".join(" ".join(itertools.islice(texts, 5)).split()[::5])  # resembles none of the five

                async with memory.observe("way") as observing, memory.recall() as recalling:

                    async def observe() -> None:
                        await (await observing.send(mix_words(), speaker="Ada"))

                    async def recall() -> None:
                        await recalling.query(talk.draw_question(next(texts)))

                    async def rest() -> None:
                        await asyncio.sleep(0)

                    for _ in range(WARM_UP):
                        await observe()
                        await recall()
                    await asyncio.sleep(1)
                    for _ in range(ROUNDS):
                        for name, work in (("observation", observe), ("recall", recall), ("idle", rest)):
                            found.setdefault(name, []).append(await server.trace(work))
        finally:
            server.stop()
    return found


def main() -> None:
    """Print the table."""
    found = asyncio.run(measure_way())
    figures = {
        name: [min(each) for each in zip(*map(count_calls, rounds), strict=True)] for name, rounds in found.items()
    }
    if "--json" in sys.argv:
        kept = {name: dict(zip(COLUMNS[:3], row, strict=False)) for name, row in figures.items() if name != "idle"}
        print(json.dumps(kept))
        return
    print(f"{'':14}" + "".join(f"{name:>18}" for name in COLUMNS))
    for name, row in figures.items():
        print(f"{name:14}" + "".join(f"{format_number(figure):>18}" for figure in row))
        if "--list" in sys.argv:
            for _, file, line, called in found[name][-1]:
                print(f"    {file.removeprefix(ROOT)}:{line} {called}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        Tracer(Path(sys.argv[2]))
        sys.argv[1:] = ["serve", *sys.argv[3:]]
        from memstream_server.cli import main as run_server

        run_server()
    else:
        main()
