"""Background load: a program that runs in its own process while a benchmark measures something else."""

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
async def run_load(program: str, *arguments: object, **variables: str) -> AsyncIterator[dict[str, float]]:
    """Run `python PROGRAM ARGUMENTS`; the block starts one second into the load.

    The dict is filled with the program's figures when the block ends. Raises RuntimeError when the program does not
    start.
    """
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
            raise RuntimeError("the load did not start")
        await asyncio.sleep(WARM_S)
        figures: dict[str, float] = {}
        yield figures
        process.stdin.close()
        figures.update(json.loads(await process.stdout.readline()))
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run_until_stdin_ends(*work: Coroutine[Any, Any, None]) -> None:
    """Called by the load program: run the coroutines until standard input ends. Raises the first error of any."""
    tasks = [asyncio.create_task(one) for one in work]
    print("begun", flush=True)
    ended = asyncio.create_task(_wait_for_stdin_end())
    await asyncio.wait({*tasks, ended}, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_stdin_end() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
