"""ObserveBatch: one batch up to the requested acknowledgement level; a repeated request_id gets the first answer.

Rule 1. The answer of a batch is written in the transaction that makes it true: with its receipt if the client waits for
*received*, else with the commit that stores the batch. A batch that is received but not stored has an empty answer, so
that a repeat after a crash waits for the batch and does not send it again.
Rule 2. A call goes the way of a stream's batch: the journal finds a repeat when it stores the answer, and only then its
first answer is read.
Rule 3. A numbered batch that repeats numbers is safe because of them: its first answer is read before, and its answer
is written when it is complete. So is the answer of a numbered batch that waits for *received*: it has the levels of its
producer.
Rule 4. Repeats of a running request_id wait for the running call. A call whose batch is submitted runs to its end even
if its caller has left; before that it ends with its caller, and one of the repeats takes its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from memstream_server.engine.errors import EngineError, JournalUnavailable, RequestIdConflict, map_write_errors
from memstream_server.engine.memory.ingest import ObserveSession, open_anonymous, open_session
from memstream_server.engine.memory.receipts import decode_progress, encode_progress
from memstream_server.engine.requests import AckLevel, NewBatch, ProducerProgress
from memstream_server.engine.runtime.call_context import complete
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Answer, batch_request

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import Runtime, Storage


class _KnownNumbers(Exception):
    """A numbered batch repeats numbers, at least in part."""


@dataclass(slots=True, eq=False)
class _Call:
    """A running call with a request_id."""

    digest: bytes
    done: asyncio.Future[ProducerProgress | None]
    """The answer; None if the caller left without one."""
    going: asyncio.Future[Any] | None = None
    """What runs to its end without the caller."""


class BatchCalls:
    """The ObserveBatch calls of this process."""

    def __init__(self, storage: Storage, runtime: Runtime, ask_index: Callable[[ObserveSession], None]) -> None:
        self._journal = storage.journal
        self._clock = runtime.clock
        self._ask_index = ask_index
        self._running: dict[tuple[str, str], _Call] = {}
        """Running calls by memory and request_id."""

    async def observe_batch(self, actor: Actor, batch: NewBatch) -> ProducerProgress:
        """Raises the errors that refuse the batch; RequestIdConflict."""
        if not batch.request_id:
            return await self._send_batch(actor, batch)
        key = actor.uid, batch.request_id
        while (running := self._running.get(key)) is not None:
            _check_same(running.digest, batch)
            first = await asyncio.shield(running.done)
            if first is not None:
                return first
        call = self._running[key] = _Call(batch.digest, asyncio.get_running_loop().create_future())
        try:
            answer = await self._answer_call(actor, batch, call)
        except asyncio.CancelledError:
            if call.going is None or call.going.done():
                self._end_call(key, call)
            else:
                call.going.add_done_callback(lambda _: self._end_call(key, call))
            raise
        except Exception as error:
            del self._running[key]
            call.done.set_exception(error)
            call.done.exception()  # marks it as retrieved: there may be no repeats
            raise
        self._end_call(key, call, answer)
        return answer

    def _end_call(self, key: tuple[str, str], call: _Call, answer: ProducerProgress | None = None) -> None:
        del self._running[key]
        call.done.set_result(answer)

    async def _answer_call(self, actor: Actor, batch: NewBatch, call: _Call) -> ProducerProgress:
        request = batch_request(actor.working.record.namespace, actor.uid, batch.request_id)
        answer = Answer(request, batch.digest, b"", self._clock.now_us())
        if batch.producer and not _may_be_fresh(actor, batch):
            return await self._answer_known(actor, batch, answer, call)
        try:
            return await self._send_fresh(actor, batch, answer, call)
        except _KnownNumbers:
            return await self._answer_known(actor, batch, answer, call)
        except EngineError:  # a repeat, which may also be refused for what its first call has changed
            first = await self._find_first(actor, batch, request)
            if first is None:
                raise
            return first

    async def _answer_known(self, actor: Actor, batch: NewBatch, answer: Answer, call: _Call) -> ProducerProgress:
        """Answer a numbered batch whose answer is written last; the caller may leave."""

        async def work() -> ProducerProgress:
            with actor.keep_active():
                first = await self._find_first(actor, batch, answer.request)
                return first or await self._send_known(actor, batch, answer)

        call.going = asyncio.create_task(work())
        return cast("ProducerProgress", await complete(call.going))

    async def _find_first(self, actor: Actor, batch: NewBatch, request: str) -> ProducerProgress | None:
        """The first answer to the request, if it is a repeat. Raises RequestIdConflict."""
        stored = await self._read_answer(request)
        if stored is not None:
            if stored.digest:  # else an erasure removed the digest
                _check_same(stored.digest, batch)
            if not stored.response:  # an earlier process received the batch
                actor.raise_if_failed()
                await actor.producers.wait_for_answer(request)
                stored = await self._read_answer(request)
        if stored is None or not stored.response:
            return None
        return await self._wait_until_indexed(actor, batch, decode_progress(stored.response))

    async def _send_fresh(self, actor: Actor, batch: NewBatch, answer: Answer, call: _Call) -> ProducerProgress:
        """Send a batch whose answer is stored with it. Raises _KnownNumbers if it repeats numbers."""
        if batch.level is AckLevel.RECEIVED:
            progress = ProducerProgress(len(batch.items), 0, 0, 0)
            await self._send_batch(actor, batch, replace(answer, response=encode_progress(progress)), call)
            return progress
        progress = await self._send_batch(actor, batch, answer, call)
        return progress if batch.level is AckLevel.INDEXED else replace(progress, indexed=0)

    async def _send_known(self, actor: Actor, batch: NewBatch, answer: Answer) -> ProducerProgress:
        progress = await self._send_batch(actor, batch)
        await map_write_errors(self._journal.put_answer(replace(answer, response=encode_progress(progress))))
        return progress

    async def _read_answer(self, request: str) -> Answer | None:
        try:
            return await self._journal.get_answer(request)
        except JournalError as error:
            raise JournalUnavailable(f"the journal could not be read: {error}", retry_after_s=0.5) from error

    async def _wait_until_indexed(self, actor: Actor, batch: NewBatch, answer: ProducerProgress) -> ProducerProgress:
        """A stored answer. For a call that waits for the index, returns once the index has the batch."""
        if batch.level is not AckLevel.INDEXED or answer.indexed >= answer.stored:
            return answer
        session = open_anonymous(actor, answer.stored)
        try:
            self._ask_index(session)
            return replace(answer, indexed=(await session.wait_for_level(AckLevel.INDEXED, answer.stored)).indexed)
        finally:
            session.close()

    async def _send_batch(
        self, actor: Actor, batch: NewBatch, answer: Answer | None = None, call: _Call | None = None
    ) -> ProducerProgress:
        first = batch.first_sequence if batch.producer else 1
        last = first + len(batch.items) - 1
        if batch.producer:
            session = await map_write_errors(open_session(actor, batch.producer, outcomes=True))
        else:
            session = open_anonymous(actor)
        session.name_related(batch.related)
        try:
            if answer is not None and batch.producer and first <= session.opened.received:
                raise _KnownNumbers
            self._ask_index(session)
            full = await session.find_full()
            received = session.submit(first, batch.items, batch.level, answer, full)
            if call is not None:
                call.going = received
                await complete(received)
            else:
                await received
            progress = await session.wait_for_level(batch.level, last)
            return await _complete_progress(session, progress, first, last) if batch.producer else progress
        finally:
            session.close()


async def _complete_progress(
    session: ObserveSession, progress: ProducerProgress, first: int, last: int
) -> ProducerProgress:
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


def _may_be_fresh(actor: Actor, batch: NewBatch) -> bool:
    """Whether a numbered batch may have new numbers only. A repeat must not end an open session of its producer."""
    received = actor.producers.received_of(batch.producer)
    return batch.level is not AckLevel.RECEIVED and (received is None or batch.first_sequence > received)


def _check_same(digest: bytes, batch: NewBatch) -> None:
    if digest != batch.digest:
        raise RequestIdConflict("this request_id was used with another request; use a new one for each request")
