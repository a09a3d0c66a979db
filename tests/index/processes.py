"""Inspects Milvus Lite's child processes through /proc, on Linux."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

DEADLINE_S = 60.0


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition. Raises TimeoutError after a deadline that only a failure reaches."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            result = condition()
            if await result if isinstance(result, Awaitable) else result:
                return
            await asyncio.sleep(0.02)


def children(data_dir: Path) -> list[int]:
    """Pids of the living Milvus Lite children of a data directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended meanwhile; a zombie's command line is empty
            if os.fsencode(data_dir / "milvus") in arguments:
                found.append(int(entry.name))
    return found


def sockets(pid: int) -> set[str]:
    """Inodes of a process' sockets."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}


def listening(pid: int) -> list[str]:
    """Local addresses, hexadecimal as in /proc/net, on which a process listens for TCP."""
    own = sockets(pid)
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                found.append(fields[1])
    return found
