"""Send observations at a steady rate from a separate process while a benchmark measures something else.

    python arriving.py ADDRESS PREFIX MEMORIES

The program sends 500 observations a second to memories PREFIX-0, PREFIX-1, ... in turn. This is the hard case: each
observation is a decision and a commit of its own. When standard input ends, the program prints the number stored per
second, counted from its first second on, so that what is in flight at both ends cancels out.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from loads import WARM_S, run_load, run_until_stdin_ends
from texts import SentenceSource

import memstream

RATE = 500
TICK_S = 0.01
PER_S = "stored/s"


def send_steadily(address: str, prefix: str, memories: int) -> AbstractAsyncContextManager[dict[str, float]]:
    """Run the load during the block. The dict is filled with the stored rate (PER_S) at the end."""
    return run_load(__file__, address, prefix, memories)


async def _send_observations(streams: list[memstream.ObserveStream]) -> None:
    loop, talk, number = asyncio.get_running_loop(), SentenceSource(3), 0
    began = loop.time()
    while True:
        while number < int((loop.time() - began) * RATE):
            await streams[number % len(streams)].send(talk.make_sentence(), speaker="Ada", session="live")
            number += 1
        await asyncio.sleep(TICK_S)


class _RateCounter:
    """Counts the stored observations since `start_counting`."""

    def __init__(self, streams: list[memstream.ObserveStream]) -> None:
        self._streams = streams
        self._before, self._began = 0, time.perf_counter()

    async def start_counting(self) -> None:
        await asyncio.sleep(WARM_S)
        self._before, self._began = self._count_stored(), time.perf_counter()
        await asyncio.Event().wait()

    def rate_per_s(self) -> float:
        return (self._count_stored() - self._before) / (time.perf_counter() - self._began)

    def _count_stored(self) -> int:
        return sum(stream.stored for stream in self._streams)


async def _run_load(address: str, prefix: str, memories: int) -> None:
    async with memstream.connect(address) as client, AsyncExitStack() as stack:
        opened = [client.memory(f"{prefix}-{place}").observe("load") for place in range(memories)]
        streams = [await stack.enter_async_context(stream) for stream in opened]
        count = _RateCounter(streams)
        await run_until_stdin_ends(_send_observations(streams), count.start_counting())
        print(json.dumps({PER_S: count.rate_per_s()}), flush=True)


if __name__ == "__main__":
    asyncio.run(_run_load(sys.argv[1], sys.argv[2], int(sys.argv[3])))
