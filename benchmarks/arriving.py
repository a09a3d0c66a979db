"""Observations that arrive at a steady rate while something else is measured, sent by a process of its own.

    python arriving.py ADDRESS PREFIX MEMORIES

sends 500 a second to memories PREFIX-0, PREFIX-1, ... in turn, each its next one: the hard case, for every one of them
is a decision and a commit of its own. When its standard input ends it says how many a second were stored.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from loads import load, until_told
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


async def _load(address: str, prefix: str, memories: int) -> None:
    async with memstream.connect(address) as client, AsyncExitStack() as stack:
        opened = [client.memory(f"{prefix}-{place}").observe("load") for place in range(memories)]
        streams = [await stack.enter_async_context(stream) for stream in opened]
        before = sum(stream.stored for stream in streams)
        began = time.perf_counter()
        await until_told(_send(streams))
        stored, seconds = sum(stream.stored for stream in streams) - before, time.perf_counter() - began
        print(json.dumps({PER_S: stored / seconds}), flush=True)


if __name__ == "__main__":
    asyncio.run(_load(sys.argv[1], sys.argv[2], int(sys.argv[3])))
