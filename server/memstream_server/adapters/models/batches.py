"""Texts of all who wait for an endpoint share its requests: one alone goes at once, many at a time go together.

Rule 1. At most `concurrency` requests are under way. Whoever comes meanwhile waits. A request takes one text of each
that waits, in turn, until it is full: one text beside a thousand need not wait for them.
Rule 2. What is refused is halved until the refused texts stand alone. The halves go before everything else.
Rule 3. Who leaves takes along what was not asked yet; a request that nobody waits for any longer is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

from memstream_server.adapters.models.openai_errors import RefusedError
from memstream_server.ports.models import ModelUnavailable

T = TypeVar("T")


class _Call(Generic[T]):
    """One caller's texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.waiting = deque(range(len(texts)))
        """Places of what was not asked yet."""
        self.answers: list[T | None] = [None] * len(texts)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = len(texts)

    def answer(self, place: int, answer: T | None) -> None:
        self.answers[place] = answer
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)


_Batch = list[tuple[_Call[T], int]]
"""Texts of one request: whose, and their places there."""


class Batches(Generic[T]):
    """See the module. Use from one event loop."""

    def __init__(
        self,
        ask: Callable[[list[str]], Awaitable[Sequence[T | None]]],
        *,
        texts_max: int,
        characters_max: int,
        concurrency: int,
    ) -> None:
        """`ask` makes one request of texts, an answer for each. It raises RefusedError where one of them may be why.

        A text longer than `characters_max` has a request of its own.
        """
        self._ask = ask
        self._texts_max = texts_max
        self._characters_max = characters_max
        self._concurrency = concurrency
        self._calls: deque[_Call[T]] = deque()
        """Those with texts that were not asked yet."""
        self._halves: deque[_Batch[T]] = deque()
        self._under_way: dict[asyncio.Task[None], _Batch[T]] = {}

    async def answers(self, texts: Sequence[str]) -> list[T | None]:
        """One each, None of those that are refused. Raises what `ask` raises but RefusedError."""
        call: _Call[T] = _Call(texts)
        if texts:
            self._calls.append(call)
            self._begin()
            try:
                await call.done
            except BaseException:
                self._leave(call)
                raise
        return call.answers

    async def close(self) -> None:
        """Give up what is under way: who waits gets ModelUnavailable."""
        closing = ModelUnavailable("the server is going away")
        _fail(self._calls, closing)
        for batch in (*self._halves, *self._under_way.values()):
            _fail((call for call, _ in batch), closing)
        self._calls.clear()
        self._halves.clear()
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _leave(self, call: _Call[T]) -> None:
        """Before all is answered."""
        if not call.done.cancel() and not call.done.cancelled():
            call.done.exception()  # looked at, though who waited may have been cancelled in the same moment
        if call in self._calls:
            self._calls.remove(call)
        for task, batch in self._under_way.items():
            if all(each.done.done() for each, _ in batch):
                task.cancel()

    def _begin(self) -> None:
        while len(self._under_way) < self._concurrency:
            batch = self._next()
            if not batch:
                return
            task = asyncio.create_task(self._request(batch))
            self._under_way[task] = batch
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        batch = self._under_way.pop(task)
        if task.cancelled():  # for want of anybody who waits, or by what it asked
            _fail((call for call, _ in batch), ModelUnavailable("the request was given up"))
        self._begin()

    def _next(self) -> _Batch[T]:
        """What is asked next; empty when nobody waits."""
        while self._halves:
            half = [(call, place) for call, place in self._halves.popleft() if not call.done.done()]
            if half:
                return half
        return self._taken()

    def _taken(self) -> _Batch[T]:
        """One of each that waits, in turn, until the request is full."""
        batch: _Batch[T] = []
        room = self._characters_max
        while self._calls and len(batch) < self._texts_max:
            call = self._calls[0]
            room -= len(call.texts[call.waiting[0]])
            if batch and room < 0:
                break
            batch.append((self._calls.popleft(), call.waiting.popleft()))
            if call.waiting:
                self._calls.append(call)
        return batch

    async def _request(self, batch: _Batch[T]) -> None:
        try:
            answers = await self._ask([call.texts[place] for call, place in batch])
            for (call, place), answer in zip(batch, answers, strict=True):
                call.answer(place, answer)
        except RefusedError:
            middle = len(batch) // 2
            if middle:
                self._halves.extend((batch[:middle], batch[middle:]))
            else:
                for call, place in batch:
                    call.answer(place, None)
        except Exception as error:  # theirs to handle: of each whose text it was
            _fail((call for call, _ in batch), error)


def _fail(calls: Iterable[_Call[T]], error: Exception) -> None:
    for call in calls:
        if not call.done.done():
            call.done.set_exception(error)
