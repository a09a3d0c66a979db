"""Waiting for what happens in the background, without timing anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 60.0


async def until(look: Callable[[], Awaitable[T]], deadline_s: float = DEADLINE_S) -> T:
    """Look until what is seen is true, and return it. Raises TimeoutError after a deadline no machine needs."""
    async with asyncio.timeout(deadline_s):
        while True:
            seen = await look()
            if seen:
                return seen
            await asyncio.sleep(0.02)
