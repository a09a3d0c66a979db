"""A tenant that uses all that its limits allow and asks for more, in a separate process.

    python flooding.py ADDRESS PREFIX STREAMS CALLS     (its key in MEMSTREAM_FLOODING_TOKEN)

The program observes through STREAMS streams into as many memories PREFIX-0, PREFIX-1, ... at full speed, and keeps
twice CALLS recalls in flight, retrying each as soon as it is answered or rejected. When standard input ends, it prints
the rates per second of what got through and what was rejected.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager

from loads import run_load, run_until_stdin_ends
from texts import SentenceSource

import memstream

TOKEN = "MEMSTREAM_FLOODING_TOKEN"
REFUSED_S = 0.01
"""Delay before a retry after a rejection, whatever the server asks for."""
NICENESS = 19
"""In production the tenant runs on another machine; here it takes only the CPU that the server and the other tenant
leave."""


def run_flood(
    address: str, token: str, prefix: str, streams: int, calls: int
) -> AbstractAsyncContextManager[dict[str, float]]:
    """Run the flood during the block. The dict is filled with its rates per second at the end."""
    return run_load(__file__, address, prefix, streams, calls, **{TOKEN: token})


async def _observe_forever(memory: memstream.Memory, place: int, counts: Counter[str]) -> None:
    talk = SentenceSource(place)
    async with memory.observe("flood") as stream:
        before = stream.stored
        while True:
            await stream.send(talk.make_sentence(), speaker="Ada", session="live")
            counts["observed"] += stream.stored - before
            before = stream.stored


async def _recall_forever(memory: memstream.Memory, place: int, counts: Counter[str]) -> None:
    talk = SentenceSource(place)
    while True:
        try:
            await memory.recall_once(talk.make_sentence())
            counts["recalled"] += 1
        except memstream.QuotaExceeded:
            counts["refused"] += 1
            await asyncio.sleep(REFUSED_S)


async def _run_flood(address: str, prefix: str, streams: int, calls: int) -> None:
    counts: Counter[str] = Counter()
    async with memstream.connect(address, token=os.environ[TOKEN]) as client:
        memories = [client.memory(f"{prefix}-{place}") for place in range(streams)]
        observing = [_observe_forever(memory, place, counts) for place, memory in enumerate(memories)]
        asking = [_recall_forever(memories[place % streams], place, counts) for place in range(2 * calls)]
        began = time.perf_counter()
        await run_until_stdin_ends(*observing, *asking)
        seconds = time.perf_counter() - began
        print(json.dumps({what: count / seconds for what, count in counts.items()}), flush=True)


if __name__ == "__main__":
    os.nice(NICENESS)
    asyncio.run(_run_flood(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
