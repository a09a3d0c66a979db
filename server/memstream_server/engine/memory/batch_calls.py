"""ObserveBatch: one batch up to the requested acknowledgement level; a repeated request_id gets the first answer.

Rule 1. The answer of an unnumbered batch is written in the transaction that makes it true: with its receipt if the
client waits for *received*, else with the commit that stores the batch. A batch that is received but not stored has an
empty answer, so that a repeat after a crash waits for the batch and does not send it again.
Rule 2. A numbered batch is safe to repeat because of its numbers; its answer is written when it is complete.
Rule 3. A call goes the way of a stream's batch: the journal finds a repeat of an unnumbered one when it stores the
answer, and only then its first answer is read. A numbered one is read first: its answer comes last.
Rule 4. Repeats of a running request_id wait for the running call. A call whose batch is submitted runs to its end even
if all callers have left; before that it is cancelled with its last caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memstream_server.engine.errors import EngineError, JournalUnavailable, RequestIdConflict, map_write_errors
from memstream_server.engine.memory.producers import ObserveSession
from memstream_server.engine.memory.receipts import decode_progress, encode_progress
from memstream_server.engine.requests import AckLevel, NewBatch, Progress
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Answer, batch_request

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import Runtime, Storage


@dataclass(slots=True, eq=False)
class _Call:
    """A running call with a request_id."""

    digest: bytes
    task: asyncio.Task[Progress] | None = None
    callers: int = 0
    submitted: bool = False


class BatchCalls:
    """The ObserveBatch calls of this process."""

    def __init__(self, storage: Storage, runtime: Runtime, ask_index: Callable[[ObserveSession], None]) -> None:
        self._journal = storage.journal
        self._clock = runtime.clock
        self._ask_index = ask_index
        self._running: dict[tuple[str, str], _Call] = {}
        """Running calls by memory and request_id."""

    async def observe_batch(self, actor: Actor, batch: NewBatch) -> Progress:
        """Raises the errors that refuse the batch; RequestIdConflict."""
        if not batch.request_id:
            return await self._send_batch(actor, batch)
        key = actor.uid, batch.request_id
        call = self._running.get(key)
        if call is None:
            call = self._running[key] = _Call(batch.digest)
            call.task = asyncio.create_task(self._answer_call(actor, batch, call))
            call.task.add_done_callback(lambda _: self._finish_call(key, call))
        _check_same(call.digest, batch)
        assert call.task is not None
        call.callers += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.callers -= 1
            if not (call.callers or call.submitted or call.task.done()):
                self._forget_call(key, call)
                call.task.cancel()

    def _finish_call(self, key: tuple[str, str], call: _Call) -> None:
        self._forget_call(key, call)
        if call.task is not None and not call.task.cancelled():
            call.task.exception()  # marks it as retrieved: all callers may have left

    def _forget_call(self, key: tuple[str, str], call: _Call) -> None:
        if self._running.get(key) is call:
            del self._running[key]

    async def _answer_call(self, actor: Actor, batch: NewBatch, call: _Call) -> Progress:
        request = batch_request(actor.working.record.namespace, actor.uid, batch.request_id)
        answer = Answer(request, batch.digest, b"", self._clock.now_us())
        with actor.keep_active():
            if batch.producer:
                first = await self._find_first(actor, batch, request)
                return first or await self._send_numbered(actor, batch, answer, call)
            try:
                return await self._send_unnumbered(actor, batch, answer, call)
            except EngineError:  # a repeat, which may also be refused for what its first call has changed
                first = await self._find_first(actor, batch, request)
                if first is None:
                    raise
                return first

    async def _find_first(self, actor: Actor, batch: NewBatch, request: str) -> Progress | None:
        """The first answer to the request, if it is a repeat. Raises RequestIdConflict."""
        stored = await self._read_answer(request)
        if stored is not None:
            if stored.digest:  # else an erasure removed the digest
                _check_same(stored.digest, batch)
            if not stored.response:  # an earlier process received the batch
                await actor.ingest.wait_for_answer(request)
                stored = await self._read_answer(request)
        if stored is None or not stored.response:
            return None
        return await self._wait_until_indexed(actor, batch, decode_progress(stored.response))

    async def _send_unnumbered(self, actor: Actor, batch: NewBatch, answer: Answer, call: _Call) -> Progress:
        if batch.level is AckLevel.RECEIVED:
            progress = Progress(len(batch.items), 0, 0, 0)
            await self._send_batch(actor, batch, replace(answer, response=encode_progress(progress)), call)
            return progress
        progress = await self._send_batch(actor, batch, answer, call)
        return progress if batch.level is AckLevel.INDEXED else replace(progress, indexed=0)

    async def _send_numbered(self, actor: Actor, batch: NewBatch, answer: Answer, call: _Call) -> Progress:
        progress = await self._send_batch(actor, batch, call=call)
        await map_write_errors(self._journal.put_answer(replace(answer, response=encode_progress(progress))))
        return progress

    async def _read_answer(self, request: str) -> Answer | None:
        try:
            return await self._journal.get_answer(request)
        except JournalError as error:
            raise JournalUnavailable(f"the journal could not be read: {error}", retry_after_s=0.5) from error

    async def _wait_until_indexed(self, actor: Actor, batch: NewBatch, answer: Progress) -> Progress:
        """A stored answer. For a call that waits for the index, returns once the index has the batch."""
        if batch.level is not AckLevel.INDEXED or answer.indexed >= answer.stored:
            return answer
        session = actor.ingest.open_anonymous(stored=answer.stored)
        try:
            self._ask_index(session)
            return replace(answer, indexed=(await session.wait_for_level(AckLevel.INDEXED, answer.stored)).indexed)
        finally:
            session.close()

    async def _send_batch(
        self, actor: Actor, batch: NewBatch, answer: Answer | None = None, call: _Call | None = None
    ) -> Progress:
        first = batch.first_sequence if batch.producer else 1
        last = first + len(batch.items) - 1
        if batch.producer:
            session = await map_write_errors(actor.ingest.open_session(batch.producer, outcomes=True))
        else:
            session = actor.ingest.open_anonymous()
        session.name_related(batch.related)
        try:
            self._ask_index(session)
            full = await session.find_full()
            received = session.submit(first, batch.items, batch.level, answer, full)
            if call is not None:
                call.submitted = True
            await received
            progress = await session.wait_for_level(batch.level, last)
            return await _complete_progress(session, progress, first, last) if batch.producer else progress
        finally:
            session.close()


async def _complete_progress(session: ObserveSession, progress: Progress, first: int, last: int) -> Progress:
    """Restrict the progress to this batch, and add the kept outcomes of an earlier call with the same numbers."""
    rejected = {one.sequence: one for one in progress.rejected if first <= one.sequence <= last}
    outcomes = {one.sequence: one for one in progress.outcomes if first <= one.sequence <= last}
    if first <= session.opened.stored:
        async with aclosing((await session.resume(first - 1)).pages) as pages:
            async for page in pages:
                outcomes |= {one.sequence: one for one in page.outcomes if one.sequence <= last}
                if page.upto >= last:
                    break
    in_order = tuple(rejected[number] for number in sorted(rejected))
    return replace(progress, rejected=in_order, outcomes=tuple(outcomes[number] for number in sorted(outcomes)))


def _check_same(digest: bytes, batch: NewBatch) -> None:
    if digest != batch.digest:
        raise RequestIdConflict("this request_id was used with another request; use a new one for each request")
