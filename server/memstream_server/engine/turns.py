"""Turns: one long computation at a time, a millisecond each, with a turn of the event loop after every one.

Without them eight busy memories make a turn of the loop eight computations long, and a small call, which takes
several turns, waits for all of them each time. Namespaces are tenants: one that has much to do waits for itself.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """`async with turns.of(namespace):` around a millisecond of computing.

    Namespaces that wait are served in turn; within one it is first come, first served.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, namespace: str) -> AsyncIterator[None]:
        await self._take(namespace)
        try:
            yield
        finally:
            asyncio.get_running_loop().call_soon(self._pass_on)  # others run before the next turn

    async def _take(self, namespace: str) -> None:
        if not self._taken:
            self._taken = True
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it was given, and is not wanted any more
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            namespace, waiting = self._waiting.popitem(last=False)
            mine = waiting.popleft()
            if waiting:
                self._waiting[namespace] = waiting  # behind the others
            if not mine.done():
                mine.set_result(None)
                return
        self._taken = False
