"""Watch: a memory's committed transitions as typed events, with cursors that resume between any two of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memstream.v1 import event_pb2, fragment_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.core.events import Event, EventType
from memstream_server.core.printable import number_text
from memstream_server.engine.errors import CursorVoid
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import WatcherStalled
from memstream_server.rpc.limits import Limits
from memstream_server.rpc.validation import Violations, memory_name, not_negative
from memstream_server.rpc.wire import fragments, scalars

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine

PROGRESS_DEFAULT_S = 10.0
PROGRESS_MIN_S = 0.1
EVENTS_MAX = 256
"""Maximum number of events in one message; a sixteenth of it if fragments are included."""
_Step = tuple[str, int, int, tuple[Event, ...]]


@dataclass(frozen=True, slots=True)
class Watching:
    """A validated request. `uid` is empty if the watch starts from now."""

    namespace: str
    memory: str
    uid: str
    revision: int
    ordinal: int
    types: frozenset[EventType]
    progress_s: float
    include_fragments: bool


def read_request(request: pb.WatchRequest, limits: Limits) -> Watching:
    """Raises InvalidField."""
    found = Violations()
    namespace, memory = memory_name(found, request.namespace, request.memory, limits)
    cursor = request.cursor
    if request.HasField("cursor") and not cursor.memory_uid:
        found.add("cursor.memory_uid", "is required")
    if 0 in request.types:
        found.add("types", "has EVENT_TYPE_UNSPECIFIED")
    progress_s = PROGRESS_DEFAULT_S
    if request.HasField("progress_interval"):
        progress_s = scalars.duration_us(found, "progress_interval", request.progress_interval) / 1e6
    watching = Watching(
        namespace,
        memory,
        cursor.memory_uid,
        not_negative(found, "cursor.revision", cursor.revision),
        not_negative(found, "cursor.ordinal", cursor.ordinal),
        frozenset(fragments.EVENT_TYPES.read_all(found, "types", request.types)),
        max(progress_s, PROGRESS_MIN_S),
        request.include_fragments,
    )
    found.check()
    return watching


class WatchStream:
    """One open watch. `responses` runs once."""

    def __init__(self, engine: Engine, watching: Watching, drain: Drain) -> None:
        self._engine = engine
        self._watching = watching
        self._drain = drain
        self._drained = asyncio.Event()
        self._sent_s = asyncio.get_running_loop().time()
        self._sent = False

    async def responses(self) -> AsyncGenerator[pb.WatchResponse, None]:
        """Yields events and progress marks until the client or the server ends the stream."""
        cursor = await self._find_start()
        steps = self._engine.watch(
            self._watching.namespace, self._watching.memory, cursor.memory_uid, cursor.revision, 0
        )
        draining = asyncio.create_task(self._drained.wait())
        step = asyncio.create_task(_next_or_none(steps))
        try:
            with self._drain.notify_on_drain(self._drained.set):
                while not draining.done():
                    mark_due = False
                    if await self._wait_for_task({step, draining}) and step.done():
                        if (told := step.result()) is None:
                            return
                        step = asyncio.create_task(_next_or_none(steps))
                        async for response in self._build_messages(cursor, *told):
                            yield response
                            self._mark_sent()
                        if told[3]:
                            cursor = event_pb2.Cursor(memory_uid=told[0], revision=told[1])
                        elif not self._sent:  # the client learns at once that the watch is open, and its cursor
                            mark_due = True
                    if mark_due or self._silence_s() >= self._watching.progress_s:
                        yield pb.WatchResponse(
                            progress=pb.WatchProgress(
                                cursor=cursor, time=scalars.timestamp_message(time.time_ns() // 1_000)
                            )
                        )
                        self._mark_sent()
            yield pb.WatchResponse(going_away=self._drain.going_away_message())
            raise self._drain.shutdown_error()
        finally:
            step.cancel()
            draining.cancel()
            await asyncio.gather(step, draining, return_exceptions=True)
            await steps.aclose()

    async def _find_start(self) -> event_pb2.Cursor:
        """The start cursor. The engine refuses a void or compacted cursor."""
        watching = self._watching
        record = await self._engine.memories.get(watching.namespace, watching.memory)
        if not watching.uid:
            return event_pb2.Cursor(memory_uid=record.uid, revision=record.revision)
        if watching.uid == record.uid and watching.revision > record.revision:
            raise CursorVoid(
                f"the cursor is at revision {watching.revision}, the memory at {record.revision}: list it and "
                "watch from there"
            )
        return event_pb2.Cursor(memory_uid=watching.uid, revision=watching.revision, ordinal=watching.ordinal)

    async def _wait_for_task(self, tasks: set[asyncio.Task[Any]]) -> bool:
        """Waits until a task is done or a progress mark is due; returns whether a task is done."""
        timeout = max(0.0, self._watching.progress_s - self._silence_s())
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def _silence_s(self) -> float:
        return asyncio.get_running_loop().time() - self._sent_s

    def _mark_sent(self) -> None:
        self._sent = True
        self._sent_s = asyncio.get_running_loop().time()

    async def _build_messages(
        self, seen: event_pb2.Cursor, uid: str, revision: int, time_us: int, events: Sequence[Event]
    ) -> AsyncIterator[pb.WatchResponse]:
        """The wanted events of one transition after the cursor, each with the cursor that follows it."""
        skipped = seen.ordinal if revision == seen.revision + 1 else 0
        chosen = [number for number, event in enumerate(events) if number >= skipped and self._is_wanted(event)]
        size = EVENTS_MAX // 16 if self._watching.include_fragments else EVENTS_MAX
        for start in range(0, len(chosen), size):
            part = [
                fragments.event_message(events[number], uid, *_cursor_after(number, len(events), revision), time_us)
                for number in chosen[start : start + size]
            ]
            yield pb.WatchResponse(events=pb.WatchEvents(events=part, fragments=await self._read_fragments(part)))

    def _is_wanted(self, event: Event) -> bool:
        return event.type in fragments.EVENT_TYPES and (not self._watching.types or event.type in self._watching.types)

    async def _read_fragments(self, events: Sequence[event_pb2.Event]) -> list[fragment_pb2.Fragment]:
        if not self._watching.include_fragments:
            return []
        ids = list(dict.fromkeys(event.fragment_id for event in events if event.fragment_id))
        found = (
            await self._engine.fragments.read_many(self._watching.namespace, self._watching.memory, ids) if ids else []
        )
        return [fragments.fragment_message(fragment) for fragment in found]


def stalled_error(response: pb.WatchResponse, limit_s: float) -> WatcherStalled:
    """The error of a watch whose client does not read `response`, with the cursor to resume from."""
    cursor = response.events.events[-1].cursor if response.HasField("events") else response.progress.cursor
    return WatcherStalled(
        "what was sent is not read: read on to the end, and watch again from the last cursor",
        quota="watch_stalled_max_s",
        limit=number_text(limit_s),
        memory_uid=cursor.memory_uid,
        revision=cursor.revision,
        ordinal=cursor.ordinal,
    )


def _cursor_after(number: int, count: int, revision: int) -> tuple[int, int]:
    """(revision, ordinal) after event `number` of the `count` of a revision: the last one completes it."""
    return (revision, 0) if number == count - 1 else (revision - 1, number + 1)


async def _next_or_none(steps: AsyncGenerator[_Step, None]) -> _Step | None:
    return await anext(steps, None)
