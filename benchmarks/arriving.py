"""Observations that arrive at a steady rate while something else is measured, sent by a process of its own.

    python arriving.py ADDRESS PREFIX MEMORIES

sends 500 a second to memories PREFIX-0, PREFIX-1, ... in turn, each its next one: the hard case, for every one of them
is a decision and a commit of its own. When its standard input ends it says how many a second were stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from texts import Talk

import memstream

RATE = 500
TICK_S = 0.01
WARM_S = 1.0


@dataclass
class Arrived:
    """What the load came to, once it has ended."""

    per_s: float = 0.0
    """Stored a second."""


@contextlib.asynccontextmanager
async def arriving(address: str, prefix: str, memories: int) -> AsyncIterator[Arrived]:
    """The load, under way for a second when the block begins."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, address, prefix, str(memories)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():
            raise RuntimeError("the load did not begin")
        await asyncio.sleep(WARM_S)
        arrived = Arrived()
        yield arrived
        process.stdin.close()
        arrived.per_s = json.loads(await process.stdout.readline())
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ended() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def _send(streams: list[memstream.ObserveStream]) -> None:
    loop, talk, number = asyncio.get_running_loop(), Talk(3), 0
    began = loop.time()
    while True:
        while number < int((loop.time() - began) * RATE):
            await streams[number % len(streams)].send(talk.sentence(), speaker="Ada", session="live")
            number += 1
        await asyncio.sleep(TICK_S)


async def _load(address: str, prefix: str, memories: int) -> None:
    async with memstream.connect(address) as client, contextlib.AsyncExitStack() as stack:
        opened = [client.memory(f"{prefix}-{place}").observe("load") for place in range(memories)]
        streams = [await stack.enter_async_context(stream) for stream in opened]
        before = sum(stream.stored for stream in streams)
        sending = asyncio.create_task(_send(streams))
        print("begun", flush=True)
        began = time.perf_counter()
        ended = asyncio.create_task(_ended())
        await asyncio.wait({sending, ended}, return_when=asyncio.FIRST_COMPLETED)
        stored, seconds = sum(stream.stored for stream in streams) - before, time.perf_counter() - began
        sending.cancel()
        if not ended.done():
            sending.result()
        print(json.dumps(stored / seconds), flush=True)


if __name__ == "__main__":
    asyncio.run(_load(sys.argv[1], sys.argv[2], int(sys.argv[3])))
