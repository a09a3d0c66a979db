"""A tenant that takes all it may and asks for more, as a process of its own, while another one is measured.

    python flooding.py ADDRESS PREFIX STREAMS CALLS     (its key in MEMSTREAM_FLOODING_TOKEN)

observes through STREAMS streams, into as many memories PREFIX-0, PREFIX-1, ..., as fast as it is read, and asks by
twice CALLS calls at once, again as soon as it is answered or refused. When its standard input ends it says how much of
it got through, and how much was refused, a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager

from loads import load, until_told
from texts import Talk

import memstream

TOKEN = "MEMSTREAM_FLOODING_TOKEN"
REFUSED_S = 0.01
"""How soon it asks again after a refusal, whatever the server says."""
YIELDING = 19
"""What runs on other machines elsewhere gets of these cores what the server and the other tenant leave."""


def flooding(
    address: str, token: str, prefix: str, streams: int, calls: int
) -> AbstractAsyncContextManager[dict[str, float]]:
    """The flood, while the block runs; filled with what it came to."""
    return load(__file__, address, prefix, streams, calls, **{TOKEN: token})


async def _observe(memory: memstream.Memory, place: int, came: Counter[str]) -> None:
    talk = Talk(place)
    async with memory.observe("flood") as stream:
        before = stream.stored
        while True:
            await stream.send(talk.sentence(), speaker="Ada", session="live")
            came["observed"] += stream.stored - before
            before = stream.stored


async def _ask(memory: memstream.Memory, place: int, came: Counter[str]) -> None:
    talk = Talk(place)
    while True:
        try:
            await memory.recall_once(talk.sentence())
            came["recalled"] += 1
        except memstream.QuotaExceeded:
            came["refused"] += 1
            await asyncio.sleep(REFUSED_S)


async def _flood(address: str, prefix: str, streams: int, calls: int) -> None:
    came: Counter[str] = Counter()
    async with memstream.connect(address, token=os.environ[TOKEN]) as client:
        memories = [client.memory(f"{prefix}-{place}") for place in range(streams)]
        observing = [_observe(memory, place, came) for place, memory in enumerate(memories)]
        asking = [_ask(memories[place % streams], place, came) for place in range(2 * calls)]
        began = time.perf_counter()
        await until_told(*observing, *asking)
        seconds = time.perf_counter() - began
        print(json.dumps({what: count / seconds for what, count in came.items()}), flush=True)


if __name__ == "__main__":
    os.nice(YIELDING)
    asyncio.run(_flood(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
