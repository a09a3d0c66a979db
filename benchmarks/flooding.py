"""A tenant that takes all it may and asks for more, as a process of its own, while another one is measured.

    python flooding.py ADDRESS PREFIX STREAMS CALLS     (its key in MEMSTREAM_FLOODING_TOKEN)

observes through STREAMS streams, into as many memories PREFIX-0, PREFIX-1, ..., as fast as it is read, and asks by
twice CALLS calls at once, again as soon as it is answered or refused. When its standard input ends it says how much of
it got through, and how much was refused, a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator

from texts import Talk

import memstream

TOKEN = "MEMSTREAM_FLOODING_TOKEN"
REFUSED_S = 0.01
"""How soon it asks again after a refusal, whatever the server says."""
WARM_S = 1.0


@contextlib.asynccontextmanager
async def flooding(address: str, token: str, prefix: str, streams: int, calls: int) -> AsyncIterator[dict[str, float]]:
    """The flood, under way when the block begins; filled with what it came to when the block has ended."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, address, prefix, str(streams), str(calls)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {TOKEN: token},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():
            raise RuntimeError("the flood did not begin")
        await asyncio.sleep(WARM_S)
        came: dict[str, float] = {}
        yield came
        process.stdin.close()
        came.update(json.loads(await process.stdout.readline()))
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


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


async def _ended() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def _flood(address: str, prefix: str, streams: int, calls: int) -> None:
    came: Counter[str] = Counter()
    async with memstream.connect(address, token=os.environ[TOKEN]) as client:
        memories = [client.memory(f"{prefix}-{place}") for place in range(streams)]
        work = [asyncio.create_task(_observe(memory, place, came)) for place, memory in enumerate(memories)]
        work += [asyncio.create_task(_ask(memories[place % streams], place, came)) for place in range(2 * calls)]
        print("begun", flush=True)
        began, ended = time.perf_counter(), asyncio.create_task(_ended())
        await asyncio.wait({*work, ended}, return_when=asyncio.FIRST_COMPLETED)
        seconds = time.perf_counter() - began
        for task in work:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        print(json.dumps({what: count / seconds for what, count in came.items()}), flush=True)


if __name__ == "__main__":
    asyncio.run(_flood(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
