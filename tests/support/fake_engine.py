"""An engine in RAM with the facade's contract, scripted by tests: gates, failures, long answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from memstream_server.core.events import Event, EventType
from memstream_server.core.filters import Filter, passes
from memstream_server.core.ranking import NearMiss, Scored, Stage
from memstream_server.core.values import Fragment, Tier
from memstream_server.engine.clock import encode_ulid
from memstream_server.engine.engine import Info
from memstream_server.engine.errors import (
    CursorVoid,
    EngineError,
    EtagMismatch,
    FragmentNotFound,
    MemoryExists,
    MemoryNotFound,
    ProducerSuperseded,
    SequenceConflict,
    SequenceGap,
)
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import (
    AckLevel,
    AnswerOf,
    Changed,
    MemoryChange,
    Missed,
    NewMemory,
    NewObservation,
    Once,
    Opened,
    Progress,
    Put,
    Query,
    RecallAnswer,
    Recollection,
    Refusal,
    Statistics,
    fragment_etag,
    memory_etag,
)
from memstream_server.engine.resuming import Resumption
from memstream_server.ports.journal.records import Answer, Counts, MemoryRecord
from memstream_server.ports.journal.writing import Outcome, Rejection
from memstream_server.ports.models import EmbeddingModel

T = TypeVar("T")
DIMENSION = 4
Step = tuple[str, int, int, tuple[Event, ...]]


@dataclass
class Script:
    """What a test controls. Gates are open until a test clears them."""

    receiving: asyncio.Event = field(default_factory=asyncio.Event)
    storing: asyncio.Event = field(default_factory=asyncio.Event)
    indexing: asyncio.Event = field(default_factory=asyncio.Event)
    recalling: asyncio.Event = field(default_factory=asyncio.Event)
    """Holds queries whose text begins with "wait"."""
    refuse_submits: list[EngineError] = field(default_factory=list)
    """Raised by the next submissions, one each."""
    fail_recalls: list[BaseException] = field(default_factory=list)
    cancelled_recalls: int = 0
    sessions_closed: int = 0
    queries: list[Query] = field(default_factory=list)
    items: list[NewObservation | Refusal] = field(default_factory=list)

    def __post_init__(self) -> None:
        for gate in (self.receiving, self.storing, self.indexing, self.recalling):
            gate.set()


@dataclass
class _Producer:
    epoch: int = 0
    received: int = 0
    stored: int = 0
    known: dict[int, tuple[bytes, Rejection | None]] = field(default_factory=dict)
    session: FakeSession | None = None


@dataclass
class _Memory:
    record: MemoryRecord
    fragments: list[Fragment] = field(default_factory=list)
    history: list[Step] = field(default_factory=list)
    producers: dict[str, _Producer] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def commit(self, *events: Event) -> int:
        self.record = replace(self.record, revision=self.record.revision + 1)
        self.history.append((self.record.uid, self.record.revision, self.record.revision * 1_000_000, events))
        self.changed.set()
        self.changed = asyncio.Event()
        return self.record.revision


class FakeSession:
    """A producer's stream."""

    def __init__(self, engine: FakeEngine, memory: _Memory, producer: _Producer) -> None:
        self._engine, self._memory, self._producer = engine, memory, producer
        producer.epoch += 1
        if producer.session is not None:
            producer.session.fail(ProducerSuperseded("a newer stream of this producer was opened"))
        producer.session = self
        self.opened = Opened(
            producer.received, producer.stored, producer.epoch, memory.record.uid, memory.record.revision
        )
        self.news = asyncio.Event()
        self._error: EngineError | None = None
        self._rejected: list[Rejection] = []
        self._outcomes: list[Outcome] = []
        self._submitted = producer.received
        self._receiving: asyncio.Future[None] | None = None
        self._storing: asyncio.Future[None] | None = None

    def turn(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def resume(self, known: int) -> Resumption:
        return Resumption(self.opened.received, known + 1, 0, self._missed(known))

    async def _missed(self, known: int) -> AsyncGenerator[Missed, None]:
        told = [refusal for number, (_, refusal) in self._producer.known.items() if number > known]
        for refusal in filter(None, told):
            yield Missed(refusal.sequence, (refusal,))
        yield Missed(self.opened.received)

    def submit(
        self,
        first_sequence: int,
        items: Sequence[NewObservation | Refusal],
        _awaited: AckLevel = AckLevel.RECEIVED,
    ) -> asyncio.Future[None]:
        if self._error is not None:
            raise self._error
        if self._engine.script.refuse_submits:
            raise self._engine.script.refuse_submits.pop(0)
        expected = self._submitted + 1
        if first_sequence > expected:
            raise SequenceGap(f"expected {expected}", expected_sequence=expected)
        for number, item in enumerate(items, first_sequence):
            known = self._producer.known.get(number)
            if known is not None and known[0] != item.digest:
                raise SequenceConflict(f"number {number} came before with other content", sequence=number)
        self._submitted = max(self._submitted, first_sequence + len(items) - 1)
        self._receiving = asyncio.ensure_future(self._receive(self._receiving, first_sequence, list(items)))
        return self._receiving

    async def _receive(
        self, before: asyncio.Future[None] | None, first: int, items: list[NewObservation | Refusal]
    ) -> None:
        if before is not None:
            await before
        script, producer = self._engine.script, self._producer
        await script.receiving.wait()
        fresh = []
        for number, item in enumerate(items, first):
            known = producer.known.get(number)
            if known is not None:
                if known[1] is not None:
                    self._rejected.append(known[1])
                continue
            script.items.append(item)
            rejection = None
            if isinstance(item, Refusal):
                rejection = Rejection(number, item.code, item.reason, item.message)
                self._rejected.append(rejection)
            else:
                fresh.append((number, item))
            producer.known[number] = (item.digest, rejection)
            producer.received = max(producer.received, number)
        self.news.set()
        self._storing = asyncio.ensure_future(self._store(self._storing, fresh, first + len(items) - 1))

    async def _store(
        self, before: asyncio.Future[None] | None, fresh: list[tuple[int, NewObservation]], last: int
    ) -> None:
        if before is not None:
            await before
        await self._engine.script.storing.wait()
        for number, item in fresh:
            self._outcomes.append(self._engine.store(self._memory, number, item))
        self._producer.stored = max(self._producer.stored, last)
        self.news.set()

    def progress(self) -> Progress:
        if self._error is not None:
            raise self._error
        return self._progress()

    async def reached(self, level: AckLevel, sequence: int) -> Progress:
        while (self._producer.received if level is AckLevel.RECEIVED else self._producer.stored) < sequence:
            await self.news.wait()
            self.news.clear()
        return self._progress()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self.news.set()

    def close(self) -> None:
        self._engine.script.sessions_closed += 1
        if self._producer.session is self:
            self._producer.session = None

    def _progress(self) -> Progress:
        rejected, self._rejected = tuple(self._rejected), []
        outcomes, self._outcomes = tuple(self._outcomes), []
        stored = self._producer.stored
        indexed = stored if self._engine.script.indexing.is_set() else 0
        return Progress(self._producer.received, stored, indexed, self._memory.record.revision, rejected, outcomes)


class FakeMemories:
    """Memories as resources."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def create(self, new: NewMemory, answer: AnswerOf | None = None) -> tuple[MemoryRecord, bool]:
        if (new.namespace, new.name) in self._engine.held:
            if new.exist_ok:
                return self._engine.find(new.namespace, new.name).record, False
            raise MemoryExists(f"memory {new.namespace}/{new.name} exists", namespace=new.namespace, memory=new.name)
        self._engine.made += 1
        record = MemoryRecord(
            encode_ulid(self._engine.made), new.namespace, new.name, new.kind, new.policy, b"seed", new.labels
        )
        memory = self._engine.held[new.namespace, new.name] = _Memory(record)
        memory.commit(Event(EventType.MEMORY_CREATED, ""))
        self._engine.keep(None if answer is None else answer(memory.record))
        return memory.record, True

    async def clone(
        self, namespace: str, name: str, new_namespace: str, new_name: str, answer: AnswerOf | None = None
    ) -> MemoryRecord:
        source = self._engine.find(namespace, name).record
        new = NewMemory(new_namespace, new_name, source.kind, source.policy, source.labels)
        return (await self.create(new, answer))[0]

    async def get(self, namespace: str, name: str) -> MemoryRecord:
        return self._engine.find(namespace, name).record

    async def page(self, namespace: str, after: str, limit: int, prefix: str = "") -> list[MemoryRecord]:
        here = [name for space, name in self._engine.held if space == namespace and name.startswith(prefix)]
        names = sorted(name for name in here if name > after)
        return [self._engine.held[namespace, name].record for name in names[:limit]]

    async def namespaces(self, after: str, limit: int) -> list[tuple[str, int]]:
        spaces = [space for space, _ in self._engine.held]
        return [(space, spaces.count(space)) for space in sorted(set(spaces)) if space > after][:limit]

    async def update(
        self, namespace: str, name: str, change: MemoryChange, answer: AnswerOf | None = None
    ) -> MemoryRecord:
        memory = self._engine.find(namespace, name)
        if change.etag and change.etag != memory_etag(memory.record):
            raise EtagMismatch("it has changed since")
        memory.record = replace(
            memory.record,
            policy=change.policy or memory.record.policy,
            labels=memory.record.labels if change.labels is None else change.labels,
            update_time_us=memory.record.update_time_us + 1,
        )
        memory.commit(Event(EventType.MEMORY_UPDATED, ""))
        self._engine.keep(None if answer is None else answer(memory.record))
        return memory.record

    async def delete(self, namespace: str, name: str, etag: str = "", answer: Answer | None = None) -> None:
        memory = self._engine.find(namespace, name)
        if etag and etag != memory_etag(memory.record):
            raise EtagMismatch("it has changed since")
        del self._engine.held[namespace, name]
        self._engine.keep(answer)

    async def statistics(self, namespace: str, name: str) -> Statistics:
        memory = self._engine.find(namespace, name)
        return Statistics(memory.record.revision, Counts(long_term=len(memory.fragments)), True, 1)


class FakeFragments:
    """Fragments as resources."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def get(self, namespace: str, name: str, id: str = "", external_id: str = "") -> tuple[Fragment, str, int]:
        memory = self._engine.find(namespace, name)
        for fragment in memory.fragments:
            if fragment.id == id or (external_id and fragment.external_id == external_id):
                return fragment, "", memory.record.revision
        raise FragmentNotFound(f"there is no fragment {id or external_id}", id=id or external_id)

    async def read(self, namespace: str, name: str, ids: Sequence[str]) -> list[Fragment]:
        return [fragment for fragment in self._engine.find(namespace, name).fragments if fragment.id in ids]

    async def page(
        self, namespace: str, name: str, chosen: Filter, forgotten: bool, after: int, limit: int
    ) -> tuple[list[Fragment], int | None, int, str]:
        memory = self._engine.find(namespace, name)
        found = [each for each in memory.fragments if each.position > after and passes(each, chosen)]
        following = found[limit - 1].position if len(found) > limit else None
        return found[:limit], following, memory.record.revision, memory.record.uid

    async def put(
        self, namespace: str, name: str, new: NewObservation, etag: str = "", once: Once[Put] | None = None
    ) -> Put:
        memory = self._engine.find(namespace, name)
        known = [each for each in memory.fragments if each.external_id == new.external_id]
        if etag and etag not in map(fragment_etag, known):
            raise EtagMismatch("it has changed since")
        if known:
            changed = self._change(memory, known[0].but(content=new.content, structured=new.structured))
            return self._once(once, Put(changed, False, memory.record.revision))
        self._engine.store(memory, 1, new)
        return self._once(once, Put(memory.fragments[-1], True, memory.record.revision))

    async def update(
        self, namespace: str, name: str, change: FragmentChange, once: Once[tuple[Fragment, int]] | None = None
    ) -> tuple[Fragment, int]:
        fragment, _, _ = await self.get(namespace, name, id=change.id)
        if change.etag and change.etag != fragment_etag(fragment):
            raise EtagMismatch("it has changed since")
        memory = self._engine.find(namespace, name)
        changed = self._change(memory, fragment.but(content=change.content or fragment.content))
        return self._once(once, (changed, memory.record.revision))

    async def forget(
        self, namespace: str, name: str, which: Sequence[str] | Filter, once: Once[Changed] | None = None
    ) -> Changed:
        return self._turn(self._engine.find(namespace, name), which, once, None, 1)

    async def restore(
        self, namespace: str, name: str, which: Sequence[str] | Filter, once: Once[Changed] | None = None
    ) -> Changed:
        return self._turn(self._engine.find(namespace, name), which, once, 1, None)

    def _turn(
        self,
        memory: _Memory,
        which: Sequence[str] | Filter,
        once: Once[Changed] | None,
        before_us: int | None,
        after_us: int | None,
    ) -> Changed:
        meant = [
            each
            for each in memory.fragments
            if each.forget_time_us == before_us
            and (passes(each, which) if isinstance(which, Filter) else each.id in which)
        ]
        for each in meant:
            self._change(memory, each.but(forget_time_us=after_us))
        return self._once(once, Changed(len(meant), memory.record.revision))

    async def clear(
        self, namespace: str, name: str, tiers: Sequence[Tier], once: Once[Changed] | None = None
    ) -> Changed:
        memory = self._engine.find(namespace, name)
        kept = [each for each in memory.fragments if tiers and each.tier not in tiers]
        count = len(memory.fragments) - len(kept)
        memory.fragments[:] = kept
        return self._once(once, Changed(count, memory.commit()))

    def _change(self, memory: _Memory, changed: Fragment) -> Fragment:
        changed = changed.but(version=memory.commit(Event(EventType.UPDATED, changed.id)))
        memory.fragments[:] = [changed if each.id == changed.id else each for each in memory.fragments]
        return changed

    def _once(self, once: Once[T] | None, result: T) -> T:
        self._engine.keep(None if once is None else once.answer(result))
        return result


class FakeEngine:
    """See the module."""

    dimension = DIMENSION

    def __init__(self) -> None:
        self.script = Script()
        self.held: dict[tuple[str, str], _Memory] = {}
        self._answers: dict[str, Answer] = {}
        self.made = 0
        self.memories = FakeMemories(self)
        self.fragments = FakeFragments(self)

    def info(self) -> Info:
        return Info(EmbeddingModel("fake", DIMENSION), "", "", "fake index", "fake journal", "")

    def find(self, namespace: str, name: str) -> _Memory:
        if (namespace, name) not in self.held:
            raise MemoryNotFound(f"there is no memory {namespace}/{name}", namespace=namespace, memory=name)
        return self.held[namespace, name]

    def keep(self, answer: Answer | None) -> None:
        if answer is not None:
            self._answers[answer.request] = answer

    async def stored_answer(self, request: str) -> Answer | None:
        return self._answers.get(request)

    async def open_observe(self, namespace: str, name: str, producer: str, outcomes: bool = False) -> FakeSession:
        memory = self.find(namespace, name)
        return FakeSession(self, memory, memory.producers.setdefault(producer, _Producer()))

    async def observe_batch(
        self,
        namespace: str,
        name: str,
        producer: str,
        first_sequence: int,
        items: Sequence[NewObservation | Refusal],
        level: AckLevel,
        request_id: str = "",
        digest: bytes = b"",
    ) -> Progress:
        memory = self.find(namespace, name)
        state = memory.producers.setdefault(producer, _Producer()) if producer else _Producer()
        session = FakeSession(self, memory, state)
        await session.submit(first_sequence, items)
        return await session.reached(level, first_sequence + len(items) - 1)

    def store(self, memory: _Memory, number: int, item: NewObservation) -> Outcome:
        """Store one observation directly in long-term."""
        self.made += 1
        fragment = Fragment(
            encode_ulid(self.made),
            item.content,
            Tier.LONG_TERM,
            structured=item.structured,
            speaker=item.speaker,
            session=item.session,
            observe_time_us=item.observe_time_us or 1,
            create_time_us=1,
            metadata=item.metadata,
            external_id=item.external_id,
            position=len(memory.fragments),
            version=memory.record.revision + 1,
        )
        memory.fragments.append(fragment)
        memory.commit(
            Event(EventType.OBSERVED, fragment.id, to_tier=Tier.SENSORY),
            Event(EventType.PROMOTED, fragment.id, from_tier=Tier.SENSORY, to_tier=Tier.LONG_TERM),
        )
        return Outcome(number, fragment.id, EventType.OBSERVED, "", Tier.LONG_TERM)

    async def recall(self, namespace: str, name: str, query: Query) -> RecallAnswer:
        memory = self.find(namespace, name)
        self.script.queries.append(query)
        try:
            if query.text.startswith("wait"):
                await self.script.recalling.wait()
            while memory.record.revision < query.min_revision:
                await memory.changed.wait()
        except asyncio.CancelledError:
            self.script.cancelled_recalls += 1
            raise
        if self.script.fail_recalls:
            raise self.script.fail_recalls.pop(0)
        found = [each for each in memory.fragments if passes(each, query.filter)][: query.limit or 10]
        scored = [Scored(at, each.id, 0.5, 0.5, None, *_PARTS) for at, each in enumerate(found)]
        return RecallAnswer(
            revision=memory.record.revision,
            recollections=tuple(Recollection(each, score) for each, score in zip(found, scored, strict=True)),
            working_ids=(),
            working=(),
            eligible=len(memory.fragments),
            considered=len(found),
            best_relevance=0.5 if found else 0.0,
            degraded="",
            near_misses=tuple(NearMiss(each, Stage.LIMIT) for each in scored[: query.near_misses]),
            timings_s={"score": 0.001},
            tokens=7,
            formula="fake/1",
        )

    async def watch(
        self, namespace: str, name: str, uid: str, revision: int, ordinal: int
    ) -> AsyncGenerator[Step, None]:
        memory = self.find(namespace, name)
        if uid != memory.record.uid:
            raise CursorVoid("the memory was made anew since")
        seen = revision
        while True:
            changed = memory.changed
            for step in [each for each in memory.history if each[1] > seen]:
                seen = step[1]
                yield step
            await changed.wait()


_PARTS = ("dense",), (0.5,), (1.0,)
