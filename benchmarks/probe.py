"""Record the longest pauses of an event loop, garbage collection included.

    python probe.py FILE serve ...

The program runs memstream's command line with the probe in the server's event loop. A timer asks to be called every 5
ms; its delay is the time during which the loop did something else or did not run. The probe reports up to 5 ms too
little and costs about one percent of a core. Each line of FILE covers a tenth of a second: its end (by a clock that all
processes of the machine share), the longest delay, the CPU time of the loop's thread during that delay (the rest is
waiting for the interpreter lock or for a core), and the longest garbage collection.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICK_S = 0.005
LINE_S = 0.1
_WAIT_MAX_S = 30.0


@dataclass(frozen=True, slots=True)
class Pause:
    """The longest pause in a span of time, in seconds."""

    wall_s: float
    cpu_s: float
    """CPU time of the loop's thread during the pause; the rest of `wall_s` it waited for others."""
    collecting_s: float
    """The longest garbage collection in the whole span, independent of the pause."""


class Probe:
    """Watches the event loop that it is started in until the loop ends."""

    def __init__(self, file: Path) -> None:
        self._out = file.open("a", encoding="utf-8", buffering=1)
        self._worst = (0.0, 0.0)
        self._collecting = self._collection_began = 0.0

    def start(self) -> None:
        """Start in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._written = self._loop.time()
        gc.callbacks.append(self._note_collection)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        self._due, self._cpu = self._loop.time() + TICK_S, time.thread_time()
        self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        self._worst = max(self._worst, (now - self._due, time.thread_time() - self._cpu))
        if now - self._written >= LINE_S:
            self._out.write(json.dumps([time.monotonic(), *self._worst, self._collecting]) + "\n")
            self._written, self._worst, self._collecting = now, (0.0, 0.0), 0.0
        self._schedule_tick()

    def _note_collection(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collection_began = now
        else:
            self._collecting = max(self._collecting, now - self._collection_began)


def longest_pause(file: Path, since: float, until: float) -> Pause:
    """The longest pause between two moments of `time.monotonic()`.

    Waits for the line that covers `until`. Raises RuntimeError when the loop writes no more lines.
    """
    deadline = time.monotonic() + _WAIT_MAX_S
    while not (lines := _read_lines(file)) or lines[-1][0] < until:
        if time.monotonic() > deadline:
            raise RuntimeError("the probed event loop has stopped writing")
        time.sleep(LINE_S / 5)
    within = [line for line in lines if since <= line[0] <= until + LINE_S]
    _, wall_s, cpu_s, _ = max(within, key=lambda line: line[1])
    return Pause(wall_s, cpu_s, max(line[3] for line in within))


def _read_lines(file: Path) -> list[list[float]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]


def main() -> None:
    """Run memstream's command line with the probe."""
    file = Path(sys.argv.pop(1))
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # as `serve` does, before numpy is imported
        os.environ.setdefault(variable, "1")
    from memstream_server.app import process
    from memstream_server.cli import main as run

    serve: Any = process.serve

    async def serve_with_probe(*given: Any, **named: Any) -> None:
        Probe(file).start()
        await serve(*given, **named)

    process.serve = serve_with_probe
    run()


if __name__ == "__main__":
    main()
