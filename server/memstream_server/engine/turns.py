"""Turns: one long computation at a time, a few milliseconds each, with a turn of the event loop after every one.

Without them eight busy memories make a turn of the loop eight computations long, and a small call, which takes
several turns, waits for all of them each time. Namespaces are tenants: one that has much to do waits for itself, and
within it whoever asks takes turns with whoever writes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum, auto

TURN_S = 0.001
"""What one turn computes, about, for one or for several: a turn of the loop costs something by itself."""
TURN_MAX_S = 0.02
"""How long others wait for somebody who waits himself: for a disk, or for a database elsewhere."""


class Lane(Enum):
    """What is computed for."""

    WRITE = auto()
    READ = auto()


class Turns:
    """`async with turns.of(namespace):` around what is computed together.

    Namespaces that wait are served in turn, within one its lanes are, and in a lane it is first come, first served. As
    many as together take some TURN_S share a turn, and who asks again in his own goes on in it. A short read of the
    journal may be a part of it: its thread needs the interpreter as well, and is quick where nobody else computes. A
    turn that takes longer than TURN_MAX_S goes on beside the next one.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._began_s = 0.0
        self._computing = 0
        """How many have this turn; 0 once they are done, or where it is nobody's."""
        self._each_s = TURN_S
        """What one of them takes, as a moving average."""
        self._late: asyncio.TimerHandle | None = None
        self._inside: set[asyncio.Task[object] | None] = set()
        self._waiting: OrderedDict[str, OrderedDict[Lane, deque[asyncio.Future[int]]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, namespace: str, lane: Lane = Lane.WRITE) -> AsyncIterator[None]:
        task, now_s = asyncio.current_task(), asyncio.get_running_loop().time
        if task in self._inside:
            yield
            return
        turn = await self._take(namespace, lane)
        began_s = now_s()
        self._inside.add(task)
        try:
            yield
        finally:
            self._inside.remove(task)
            self._each_s += (min(now_s() - began_s, TURN_MAX_S) - self._each_s) / 16
            self._done(turn)

    async def _take(self, namespace: str, lane: Lane) -> int:
        loop = asyncio.get_running_loop()
        if self._late is None:
            self._begin(1)
            return self._turn
        if not self._waiting and loop.time() - self._began_s + self._each_s < TURN_S:
            self._computing += 1
            return self._turn
        mine: asyncio.Future[int] = loop.create_future()
        self._waiting.setdefault(namespace, OrderedDict()).setdefault(lane, deque()).append(mine)
        try:
            return await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it was given, and is not wanted any more
                self._done(mine.result())
            raise

    def _begin(self, computing: int) -> None:
        loop = asyncio.get_running_loop()
        self._turn += 1
        self._computing = computing
        self._began_s = loop.time()
        self._late = loop.call_later(TURN_MAX_S, self._pass_on, self._turn)

    def _done(self, turn: int) -> None:
        if turn == self._turn:  # else it was too late, and is passed on
            self._computing -= 1
            if not self._computing:
                asyncio.get_running_loop().call_soon(self._over, turn)  # others run before the next turn

    def _over(self, turn: int) -> None:
        if not self._computing:  # nobody has joined since
            self._pass_on(turn)

    def _pass_on(self, turn: int) -> None:
        if turn != self._turn or self._late is None:
            return
        self._late.cancel()
        self._late = None
        given: list[asyncio.Future[int]] = []
        while self._waiting and (not given or len(given) * self._each_s < TURN_S):
            mine = self._next()
            if not mine.done():
                given.append(mine)
        if given:
            self._begin(len(given))
            for mine in given:
                mine.set_result(self._turn)

    def _next(self) -> asyncio.Future[int]:
        namespace, lanes = self._waiting.popitem(last=False)
        lane, waiting = lanes.popitem(last=False)
        mine = waiting.popleft()
        if waiting:
            lanes[lane] = waiting  # behind the other one
        if lanes:
            self._waiting[namespace] = lanes  # behind the others
        return mine
