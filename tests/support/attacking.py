"""Runs an attack of attacks.py in a separate process and records its effect on the server and an honest client."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import memstream
from tests.support.attack_connections import TOKEN
from tests.support.attack_messages import NAMESPACE
from tests.support.forked import ForkedProgram

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 0.005


@dataclass
class Seen:
    """The observed effects of an attack."""

    before_bytes: int = 0
    """Resident memory of the server before the attack."""
    peak_bytes: int = 0
    """Peak resident memory during the attack."""
    answered: int = 0
    """Answered calls of the honest client."""
    failures: list[str] = field(default_factory=list)
    """Errors of the honest client."""
    came: Counter[str] = field(default_factory=Counter)
    """Outcomes of the attacker's calls by status or by its own labels; filled at the end of the block."""


@asynccontextmanager
async def attack_during(
    address: str, pid: int, name: str, memory: memstream.Memory, token: str = "", namespace: str = "attacker"
) -> AsyncIterator[Seen]:
    """Run the attack during the block while an honest client uses its memory."""
    environment = os.environ | {TOKEN: token, NAMESPACE: namespace}
    seen = Seen(before_bytes=resident_bytes(pid))
    tasks: list[asyncio.Task[None]] = []
    with ForkedProgram([address, name], environment, "tests.support.attacks:run") as program:
        try:
            assert await asyncio.to_thread(program.stdout.readline) == "begun\n"
            tasks = [asyncio.create_task(_sample_memory(pid, seen)), asyncio.create_task(_use_memory(memory, seen))]
            yield seen
            program.stdin.close()
            seen.came.update(json.loads(await asyncio.to_thread(program.stdout.readline)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process. Linux only."""
    return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * _PAGE_BYTES


async def _sample_memory(pid: int, seen: Seen) -> None:
    while True:
        seen.peak_bytes = max(seen.peak_bytes, resident_bytes(pid))
        await asyncio.sleep(_SAMPLE_S)


async def _use_memory(memory: memstream.Memory, seen: Seen) -> None:
    number = 0
    while True:
        number += 1
        text = f"the code of day {number} is {number}"
        for call in (partial(memory.observe_batch, [text]), partial(memory.recall_once, "code")):
            try:
                await call()
                seen.answered += 1
            except memstream.MemstreamError as error:
                seen.failures.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.01)
