"""Turns: one long computation at a time, a few milliseconds each, with a turn of the event loop after every one.

Without them eight busy memories make a turn of the loop eight computations long, and a small call, which takes
several turns, waits for all of them each time. Namespaces are tenants: one that has much to do waits for itself, and
within it whoever asks takes turns with whoever writes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto

TURN_S = 0.0002
"""What one turn computes, about, for one or for several: a turn of the loop costs something by itself. A question takes
five turns of the loop: beside 500 observations a second 6.5 ms with turns of one millisecond, 3.8 with these."""
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
        """The number of the one that was begun last."""
        self._taken = False
        self._began_s = 0.0
        self._computing = 0
        """How many have this turn; 0 once they are done, or where it is nobody's."""
        self._each_s = TURN_S
        """What one of them takes, as a moving average."""
        self._look: asyncio.TimerHandle | None = None
        """When it is looked next whether a turn takes too long: one timer for many turns."""
        self.inside: set[asyncio.Task[object] | None] = set()
        """Who has a turn."""
        self._waiting: OrderedDict[str, OrderedDict[Lane, deque[asyncio.Future[int]]]] = OrderedDict()

    def of(self, namespace: str, lane: Lane = Lane.WRITE) -> AbstractAsyncContextManager[None]:
        """Wait for a turn, and have it."""
        return _Computing(self, namespace, lane)

    async def take(self, namespace: str, lane: Lane) -> int:
        """The turn's number, once it is begun."""
        if not self._taken:
            self._begin(1)
            return self._turn
        if not self._waiting and time.monotonic() - self._began_s + self._each_s < TURN_S:
            self._computing += 1
            return self._turn
        mine: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, OrderedDict()).setdefault(lane, deque()).append(mine)
        try:
            return await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it was given, and is not wanted any more
                self.done(mine.result())
            raise

    def done(self, turn: int, took_s: float | None = None) -> None:
        """One of those who had it needs it no more."""
        if took_s is not None:
            self._each_s += (min(took_s, TURN_MAX_S) - self._each_s) / 16
        if turn == self._turn and self._taken:  # else it was too late, and is passed on
            self._computing -= 1
            if not self._computing:
                asyncio.get_running_loop().call_soon(self._over, turn)  # others run before the next turn

    def _begin(self, computing: int) -> None:
        self._turn += 1
        self._taken = True
        self._computing = computing
        self._began_s = time.monotonic()
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(TURN_MAX_S, self._looked)

    def _looked(self) -> None:
        self._look = None
        if self._taken:
            left_s = self._began_s + TURN_MAX_S - time.monotonic()
            if left_s > 0:
                self._look = asyncio.get_running_loop().call_later(left_s, self._looked)
            else:
                self._pass_on(self._turn)

    def _over(self, turn: int) -> None:
        if not self._computing:  # nobody has joined since
            self._pass_on(turn)

    def _pass_on(self, turn: int) -> None:
        if turn != self._turn or not self._taken:
            return
        self._taken = False
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


class _Computing:
    """Of one who computes. A class, for every observation takes several, and as a generator each takes a µs more."""

    __slots__ = ("_began_s", "_lane", "_namespace", "_task", "_turn", "_turns")

    def __init__(self, turns: Turns, namespace: str, lane: Lane) -> None:
        self._turns = turns
        self._namespace = namespace
        self._lane = lane

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._turn = 0
        if self._task not in self._turns.inside:
            self._turn = await self._turns.take(self._namespace, self._lane)
            self._began_s = time.monotonic()
            self._turns.inside.add(self._task)

    async def __aexit__(self, *error: object) -> None:
        if self._turn:
            self._turns.inside.remove(self._task)
            self._turns.done(self._turn, time.monotonic() - self._began_s)
