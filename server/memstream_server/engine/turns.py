"""Turns: one long computation at a time, a few milliseconds each, with a turn of the event loop after every one.

Without them eight busy memories make a turn of the loop eight computations long, and a small call, which takes
several turns, waits for all of them each time. Namespaces are tenants: one that has much to do waits for itself.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TURN_MAX_S = 0.02
"""How long others wait for somebody who waits himself: for a disk, or for a database elsewhere."""


class Turns:
    """`async with turns.of(namespace):` around what is computed together.

    Namespaces that wait are served in turn; within one it is first come, first served. A short read of the journal may
    be a part of it: its thread needs the interpreter as well, and is quick where nobody else computes. One that takes
    longer than TURN_MAX_S goes on beside the next turn.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[int]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, namespace: str) -> AsyncIterator[None]:
        turn = await self._take(namespace)
        loop = asyncio.get_running_loop()
        late = loop.call_later(TURN_MAX_S, self._pass_on, turn)
        try:
            yield
        finally:
            late.cancel()
            loop.call_soon(self._pass_on, turn)  # others run before the next turn

    async def _take(self, namespace: str) -> int:
        if not self._taken:
            self._taken = True
            self._turn += 1
            return self._turn
        mine: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(mine)
        try:
            return await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it was given, and is not wanted any more
                self._pass_on(mine.result())
            raise

    def _pass_on(self, turn: int) -> None:
        if turn != self._turn:
            return  # it was too late, and is passed on
        while self._waiting:
            namespace, waiting = self._waiting.popitem(last=False)
            mine = waiting.popleft()
            if waiting:
                self._waiting[namespace] = waiting  # behind the others
            if not mine.done():
                self._turn += 1
                mine.set_result(self._turn)
                return
        self._taken = False
