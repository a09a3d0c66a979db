"""Observations that arrive at a steady rate while something else is measured, sent by a process of its own.

    python arriving.py ADDRESS PREFIX MEMORIES

sends 500 a second to memories PREFIX-0, PREFIX-1, ... in turn, each its next one: the hard case, for every one of them
is a decision and a commit of its own. When its standard input ends it says how many a second were stored, from its
first second on: what is on its way at the beginning and at the end is the same, and counts for nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from loads import WARM_S, load, until_told
from texts import Talk

import memstream

RATE = 500
TICK_S = 0.01
PER_S = "stored/s"


def arriving(address: str, prefix: str, memories: int) -> AbstractAsyncContextManager[dict[str, float]]:
    """The load, while the block runs; filled with how many were stored (PER_S)."""
    return load(__file__, address, prefix, memories)


async def _send(streams: list[memstream.ObserveStream]) -> None:
    loop, talk, number = asyncio.get_running_loop(), Talk(3), 0
    began = loop.time()
    while True:
        while number < int((loop.time() - began) * RATE):
            await streams[number % len(streams)].send(talk.sentence(), speaker="Ada", session="live")
            number += 1
        await asyncio.sleep(TICK_S)


class _Count:
    """How many were stored since it began."""

    def __init__(self, streams: list[memstream.ObserveStream]) -> None:
        self._streams = streams
        self._before, self._began = 0, time.perf_counter()

    async def begin(self) -> None:
        await asyncio.sleep(WARM_S)
        self._before, self._began = self._stored(), time.perf_counter()
        await asyncio.Event().wait()

    def per_s(self) -> float:
        return (self._stored() - self._before) / (time.perf_counter() - self._began)

    def _stored(self) -> int:
        return sum(stream.stored for stream in self._streams)


async def _load(address: str, prefix: str, memories: int) -> None:
    async with memstream.connect(address) as client, AsyncExitStack() as stack:
        opened = [client.memory(f"{prefix}-{place}").observe("load") for place in range(memories)]
        streams = [await stack.enter_async_context(stream) for stream in opened]
        count = _Count(streams)
        await until_told(_send(streams), count.begin())
        print(json.dumps({PER_S: count.per_s()}), flush=True)


if __name__ == "__main__":
    asyncio.run(_load(sys.argv[1], sys.argv[2], int(sys.argv[3])))
