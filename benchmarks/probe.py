"""The longest pauses of an event loop, garbage collection included, written down while the loop runs.

    python probe.py FILE serve ...

runs memstream's command line with the probe in the server's event loop. A timer asks to be called every 5 ms; how late
it comes is how long the loop did something else, or was not let run. It says up to 5 ms too little, and costs about one
percent of a core. Each line of FILE is of a tenth of a second: when it ended (a clock that all processes of the machine
share), the longest delay in it, how much of that the loop's thread had the processor (the rest it waited, for the
interpreter lock or for a core), and the longest garbage collection.
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
    """The longest in a span of time, in seconds."""

    wall_s: float
    cpu_s: float
    """What the loop's thread computed in it; what is missing to `wall_s` it waited for others."""
    collecting_s: float
    """The longest garbage collection in the whole span, whatever else happened."""


class Probe:
    """Of the event loop it is started in, for as long as that runs."""

    def __init__(self, file: Path) -> None:
        self._out = file.open("a", encoding="utf-8", buffering=1)
        self._worst = (0.0, 0.0)
        self._collecting = self._collection_began = 0.0

    def start(self) -> None:
        """Call it in the loop."""
        self._loop = asyncio.get_running_loop()
        self._written = self._loop.time()
        gc.callbacks.append(self._collected)
        self._again()

    def _again(self) -> None:
        self._due, self._cpu = self._loop.time() + TICK_S, time.thread_time()
        self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        self._worst = max(self._worst, (now - self._due, time.thread_time() - self._cpu))
        if now - self._written >= LINE_S:
            self._out.write(json.dumps([time.monotonic(), *self._worst, self._collecting]) + "\n")
            self._written, self._worst, self._collecting = now, (0.0, 0.0), 0.0
        self._again()

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._collection_began = now
        else:
            self._collecting = max(self._collecting, now - self._collection_began)


def longest(file: Path, since: float, until: float) -> Pause:
    """The longest pause between two moments of `time.monotonic()`. Waits for the line of the second one."""
    patience = time.monotonic() + _WAIT_MAX_S
    while not (lines := _lines(file)) or lines[-1][0] < until:
        if time.monotonic() > patience:
            raise RuntimeError("the probed event loop says nothing any more")
        time.sleep(LINE_S / 5)
    within = [line for line in lines if since <= line[0] <= until + LINE_S]
    _, wall_s, cpu_s, _ = max(within, key=lambda line: line[1])
    return Pause(wall_s, cpu_s, max(line[3] for line in within))


def _lines(file: Path) -> list[list[float]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]


def main() -> None:
    """The command line of memstream, probed."""
    file = Path(sys.argv.pop(1))
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # as `serve` does, before numpy comes
        os.environ.setdefault(variable, "1")
    from memstream_server.app import process
    from memstream_server.cli import main as run

    serve: Any = process.serve

    async def probed(*given: Any, **named: Any) -> None:
        Probe(file).start()
        await serve(*given, **named)

    process.serve = probed
    run()


if __name__ == "__main__":
    main()
