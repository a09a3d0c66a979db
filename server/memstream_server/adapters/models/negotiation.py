"""Finds which optional parts of a request an endpoint accepts, once, with harmless requests.

Rule 1. Parts are dropped one by one until a request succeeds, beginning with those that the error names. Each dropped
part is then tried again, unless the last failed request rejected it as invalid (4xx): an outage (500) in between, or
the rejection of another part, drops no part permanently.
Rule 2. At most 1 + 2 x len(parts) requests. They contain no text of a memory, so that no tenant's words influence the
requests of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from memstream_server.adapters.models.openai_errors import StatusError
from memstream_server.ports.models import ModelUnavailable

Reply = TypeVar("Reply")
NEGOTIABLE = frozenset({400, 404, 405, 415, 422, 500, 501})
"""Statuses with which endpoints reject an unknown part."""


@dataclass(frozen=True, slots=True)
class RequestPart:
    """An optional part of a request, and the words that name it in errors."""

    name: str
    words: tuple[str, ...] = ()

    def named_in(self, error: StatusError) -> bool:
        """Whether the error is about this part."""
        said = error.excerpt if error.also is None else f"{error.excerpt} {error.also.excerpt}"
        return any(word in said.lower() for word in self.words)


Send = Callable[[frozenset[str]], Awaitable[Reply]]
"""Sends one request with the parts of these names."""


async def negotiate_parts(send: Send[Reply], parts: Sequence[RequestPart]) -> tuple[frozenset[str], Reply]:
    """The names of the parts that the endpoint accepts together, and its last reply.

    Raises the first StatusError if the endpoint rejects the request without any part, and whatever else `send` raises.
    """
    taken = {part.name: part for part in parts}
    left_out: list[tuple[RequestPart, StatusError]] = []
    while True:
        try:
            reply = await send(frozenset(taken))
        except StatusError as error:
            if error.status not in NEGOTIABLE or not taken:
                raise left_out[0][1] if left_out and error.status in NEGOTIABLE else error from None
            # Many endpoints name no part: then the first goes, which is tried again below if another one was the cause.
            part = next((one for one in taken.values() if one.named_in(error)), next(iter(taken.values())))
            left_out.append((part, error))
            del taken[part.name]
        else:
            break
    for place, (part, refusal) in enumerate(reversed(left_out)):
        if place == 0 and refusal.status < 500:  # all that changed until the success was this part: it was the cause
            continue
        try:
            reply = await send(frozenset({*taken, part.name}))
        except StatusError as again:
            if again.status not in NEGOTIABLE:
                raise
        else:
            taken[part.name] = part
    return frozenset(taken), reply


T = TypeVar("T")


class SingleFlight(Generic[T]):
    """One run at a time: callers during a run share its result or error. Use from one event loop."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._run: asyncio.Task[T] | None = None

    async def join_run(self) -> T:
        """The result of the current run, or of a new one. The cancellation of one caller does not affect the others."""
        if self._run is None:
            self._run = asyncio.create_task(self._run_work())
            self._run.add_done_callback(self._end_run)
        run = self._run
        await asyncio.wait({run})
        if run.cancelled():
            raise ModelUnavailable("the server is stopping")
        return run.result()

    async def close(self) -> None:
        """Cancel the current run."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    async def _run_work(self) -> T:
        return await self._work()

    def _end_run(self, run: asyncio.Task[T]) -> None:
        self._run = None
        if not run.cancelled():
            run.exception()  # mark as retrieved: all callers may have been cancelled
