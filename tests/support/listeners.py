"""The end of a server that a test made with asyncio."""

from __future__ import annotations

import asyncio


async def close_listener(server: asyncio.Server) -> None:
    """Close a server once its accepted sockets have transports: for a closed one asyncio makes none, and leaves the
    sockets open, which fails the next test."""
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener)
    await asyncio.sleep(0)
    server.close()
