"""Waiting for background work without asserting how long it takes, and not waiting for a timer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 60.0


async def until(predicate: Callable[[], Awaitable[T]], deadline_s: float = DEADLINE_S) -> T:
    """Poll until the predicate returns a true value, and return it. Raises TimeoutError after a generous deadline."""
    async with asyncio.timeout(deadline_s):
        while True:
            seen = await predicate()
            if seen:
                return seen
            await asyncio.sleep(0.02)


def skip_time(seconds: float) -> None:
    """Make everything that waits on the running event loop for less than this due at once. Time goes on from there."""
    loop = asyncio.get_running_loop()
    now_s = loop.time
    loop.time = lambda: now_s() + seconds  # type: ignore[method-assign]  # ends with the loop, which is the test's own
