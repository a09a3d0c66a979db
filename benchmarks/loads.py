"""Something that goes on in a process of its own while something else is measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any

WARM_S = 1.0


@contextlib.asynccontextmanager
async def load(program: str, *arguments: object, **variables: str) -> AsyncIterator[dict[str, float]]:
    """`python PROGRAM ARGUMENTS`, under way for a second when the block begins; filled with what it told at its end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, program, *map(str, arguments)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | variables,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if not await process.stdout.readline():
            raise RuntimeError("the load did not begin")
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


async def until_told(*work: Coroutine[Any, Any, None]) -> None:
    """In that process: does the work until standard input ends. Raises what any of it raised before."""
    tasks = [asyncio.create_task(one) for one in work]
    print("begun", flush=True)
    ended = asyncio.create_task(_ended())
    await asyncio.wait({*tasks, ended}, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _ended() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
