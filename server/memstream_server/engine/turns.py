"""Turns: one long computation at a time, a millisecond each, with a turn of the event loop after every one.

Without them eight busy memories make a turn of the loop eight computations long, and a small call, which takes
several turns, waits for all of them each time.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Turns:
    """`async with turns:` around a millisecond of computing; first come, first served."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> None:
        await self._lock.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await asyncio.sleep(0)  # others run before the next turn
        finally:
            self._lock.release()
