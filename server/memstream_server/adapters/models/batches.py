"""Combines the texts of concurrent calls into requests to an endpoint; a single call is sent immediately.

Rule 1. At most `concurrency` requests are in flight; later calls wait. A request takes one text of each waiting call
in turn until it is full, so that a call with one text does not wait for a call with a thousand.
Rule 2. A refused request is split in halves until the refused texts are isolated. Texts without an answer in a
request that has others go together into another one. Both go first.
Rule 3. A call that ends early withdraws its unsent texts. A request is cancelled if all its callers have left and the
last one was cancelled. A failure of one request cancels no other: that one may be the probe of a circuit breaker, and
the circuit would stay open for as long as each call has texts for several requests.
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
    """The texts of one caller."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.waiting = deque(range(len(texts)))
        """Indices of the texts that were not sent yet."""
        self.answers: list[T | None] = [None] * len(texts)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = len(texts)

    def set_answer(self, place: int, answer: T | None) -> None:
        self.answers[place] = answer
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)


_Batch = list[tuple[_Call[T], int]]
"""The texts of one request, as (call, index in the call)."""


class Batches(Generic[T]):
    """A batcher as the module describes. Use from one event loop."""

    def __init__(
        self,
        ask: Callable[[list[str]], Awaitable[Sequence[T | None]]],
        *,
        texts_max: int,
        characters_max: int,
        concurrency: int,
    ) -> None:
        """`ask` sends one request and returns an answer per text, None without one. It raises RefusedError if there is
        none at all and a text may be the reason.

        A text longer than `characters_max` gets its own request.
        """
        self._ask = ask
        self._texts_max = texts_max
        self._characters_max = characters_max
        self._concurrency = concurrency
        self._calls: deque[_Call[T]] = deque()
        """Calls with unsent texts."""
        self._halves: deque[_Batch[T]] = deque()
        self._under_way: dict[asyncio.Task[None], _Batch[T]] = {}

    async def fetch_answers(self, texts: Sequence[str]) -> list[T | None]:
        """The answers, in order; None for a refused text. Raises what `ask` raises, except RefusedError."""
        call: _Call[T] = _Call(texts)
        if texts:
            self._calls.append(call)
            self._start_requests()
            try:
                await call.done
            except asyncio.CancelledError:
                self._withdraw_texts(call)
                self._cancel_abandoned_requests()
                raise
            except Exception:
                self._withdraw_texts(call)
                raise
        return call.answers

    async def close(self) -> None:
        """Cancel all requests; waiting callers get ModelUnavailable."""
        closing = ModelUnavailable("the server is going away")
        _fail_calls(self._calls, closing)
        for batch in (*self._halves, *self._under_way.values()):
            _fail_calls((call for call, _ in batch), closing)
        self._calls.clear()
        self._halves.clear()
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _withdraw_texts(self, call: _Call[T]) -> None:
        """Withdraw the unsent texts of a call that is not complete."""
        if not call.done.cancel() and not call.done.cancelled():
            call.done.exception()  # mark as retrieved: a caller cancelled at the same moment never reads it
        if call in self._calls:
            self._calls.remove(call)

    def _cancel_abandoned_requests(self) -> None:
        for task, batch in self._under_way.items():
            if all(each.done.done() for each, _ in batch):
                task.cancel()

    def _start_requests(self) -> None:
        while len(self._under_way) < self._concurrency:
            batch = self._next_batch()
            if not batch:
                return
            task = asyncio.create_task(self._run_request(batch))
            self._under_way[task] = batch
            task.add_done_callback(self._end_request)

    def _end_request(self, task: asyncio.Task[None]) -> None:
        batch = self._under_way.pop(task)
        if task.cancelled():  # its callers have left, or from within `ask`
            _fail_calls((call for call, _ in batch), ModelUnavailable("the request was given up"))
        self._start_requests()

    def _next_batch(self) -> _Batch[T]:
        """The next request; empty if no texts wait."""
        while self._halves:
            half = [(call, place) for call, place in self._halves.popleft() if not call.done.done()]
            if half:
                return half
        return self._take_texts()

    def _take_texts(self) -> _Batch[T]:
        """One text of each waiting call, in turn, until the request is full."""
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

    async def _run_request(self, batch: _Batch[T]) -> None:
        try:
            answers = await self._ask([call.texts[place] for call, place in batch])
            self._set_answers(batch, answers)
        except RefusedError:
            self._set_answers(batch, [None] * len(batch))
        except Exception as error:  # passed to every caller with a text in the request
            _fail_calls((call for call, _ in batch), error)

    def _set_answers(self, batch: _Batch[T], answers: Sequence[T | None]) -> None:
        """Pass the answers on; texts without one are tried again with fewer others, and refused if they were alone."""
        again: _Batch[T] = []
        for (call, place), answer in zip(batch, answers, strict=True):
            if answer is not None or len(batch) == 1:
                call.set_answer(place, answer)
            else:
                again.append((call, place))
        if len(again) == len(batch):
            middle = len(batch) // 2
            self._halves.extend((batch[:middle], batch[middle:]))
        elif again:
            self._halves.append(again)


def _fail_calls(calls: Iterable[_Call[T]], error: Exception) -> None:
    for call in calls:
        if not call.done.done():
            call.done.set_exception(error)
