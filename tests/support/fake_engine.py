"""An engine in RAM with the facade's contract, scripted by tests: gates, failures, long answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from memstream_server.core.events import Event, EventType
from memstream_server.core.filters import passes
from memstream_server.core.ranking import NearMiss, Stage
from memstream_server.core.scores import Scored
from memstream_server.core.values import Fragment, Tier
from memstream_server.engine.errors import (
    AlreadyAnswered,
    CursorVoid,
    EngineError,
    MemoryNotFound,
    ProducerSuperseded,
    SequenceConflict,
    SequenceGap,
)
from memstream_server.engine.memory.producers import Resumption
from memstream_server.engine.requests import (
    AckLevel,
    Missed,
    NewObservation,
    Opened,
    ProducerProgress,
    Query,
    RecallAnswer,
    Recollection,
    RejectedObservation,
)
from memstream_server.engine.runtime.clock import Clock, encode_ulid
from memstream_server.engine.status import Info, MemoryStats, WriteStatus
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.journal.writing import Outcome, Rejection
from memstream_server.ports.models import EmbeddingModel
from tests.support.fake_resources import (
    FakeConflicts,
    FakeFragments,
    FakeMemories,
    FakeOpenQueries,
    FakePast,
    FakeReceipts,
)
from tests.support.fake_state import DIMENSION, FakeMemory, FakeProducer, Script, Step


class FakeScopes:
    """Of recalls over several memories: the scripted engine finds none."""

    async def find(self, *_asked: object) -> list[object]:
        raise MemoryNotFound("the scripted engine has no scopes")

    async def count_words(self, *_asked: object) -> object:
        raise MemoryNotFound("the scripted engine counts no words")


class FakeSession:
    """A producer's stream."""

    def __init__(self, engine: FakeEngine, memory: FakeMemory, producer: FakeProducer) -> None:
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

    def take_slot(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def resume(self, known: int) -> Resumption:
        return Resumption(self.opened.received, known + 1, 0, self._missed(known))

    async def _missed(self, known: int) -> AsyncGenerator[Missed, None]:
        told = [refusal for number, (_, refusal) in self._producer.known.items() if number > known]
        for refusal in filter(None, told):
            yield Missed(refusal.sequence, (refusal,))
        yield Missed(self.opened.received)

    async def find_full(self) -> None:
        """The scripted engine has no quota of bytes."""

    def submit(
        self,
        first_sequence: int,
        items: Sequence[NewObservation | RejectedObservation],
        _awaited: AckLevel = AckLevel.RECEIVED,
        full: None = None,
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
        self, before: asyncio.Future[None] | None, first: int, items: list[NewObservation | RejectedObservation]
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
            if isinstance(item, RejectedObservation):
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

    def take_progress(self) -> ProducerProgress:
        if self._error is not None:
            raise self._error
        return self._progress()

    async def wait_for_level(self, level: AckLevel, sequence: int) -> ProducerProgress:
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

    def _progress(self) -> ProducerProgress:
        rejected, self._rejected = tuple(self._rejected), []
        outcomes, self._outcomes = tuple(self._outcomes), []
        stored = self._producer.stored
        indexed = stored if self._engine.script.indexing.is_set() else 0
        return ProducerProgress(
            self._producer.received, stored, indexed, self._memory.record.revision, rejected, outcomes
        )


class FakeStandingBlocks:
    """Asks nothing: it has no blocks."""

    asking: object = None


class FakeEngine:
    """See the module."""

    dimension = DIMENSION

    def __init__(self) -> None:
        self.script = Script()
        self.clock = Clock()
        self.writing = WriteStatus()
        self.held: dict[tuple[str, str], FakeMemory] = {}
        self._answers: dict[str, Answer] = {}
        self.made = 0
        self.memories = FakeMemories(self)
        self.fragments = FakeFragments(self)
        self.past = FakePast(self)
        self.conflicts = FakeConflicts(self)
        self.open_queries = FakeOpenQueries(self)
        self.scopes = FakeScopes()
        self.recall_receipts = FakeReceipts(self)
        self.standing_blocks = FakeStandingBlocks()

    def info(self) -> Info:
        return Info(EmbeddingModel("fake", DIMENSION), "", "", "fake index", "fake journal", "")

    def memory_stats(self) -> MemoryStats:
        return MemoryStats(len(self.held), 0, 0, 0, 0, 0, len(self.held))

    def find(self, namespace: str, name: str) -> FakeMemory:
        if (namespace, name) not in self.held:
            raise MemoryNotFound(f"there is no memory {namespace}/{name}", namespace=namespace, memory=name)
        return self.held[namespace, name]

    def keep(self, answer: Answer | None) -> None:
        if answer is not None:
            self._answers[answer.request] = answer

    def keep_first(self, answer: Answer | None) -> None:
        """As `keep`; a request that has an answer is refused, as by the journal."""
        if answer is not None and answer.request in self._answers:
            raise AlreadyAnswered("this request has an answer", retry_after_s=0.1)
        self.keep(answer)

    async def stored_answer(self, request: str) -> Answer | None:
        return self._answers.get(request)

    async def open_observe(
        self, namespace: str, name: str, producer: str, outcomes: bool = False, related: int = 0
    ) -> FakeSession:
        memory = self.find(namespace, name)
        return FakeSession(self, memory, memory.producers.setdefault(producer, FakeProducer()))

    async def observe_batch(
        self,
        namespace: str,
        name: str,
        producer: str,
        first_sequence: int,
        items: Sequence[NewObservation | RejectedObservation],
        level: AckLevel,
        request_id: str = "",
        digest: bytes = b"",
        related: int = 0,
    ) -> ProducerProgress:
        memory = self.find(namespace, name)
        state = memory.producers.setdefault(producer, FakeProducer()) if producer else FakeProducer()
        session = FakeSession(self, memory, state)
        await session.submit(first_sequence, items)
        return await session.wait_for_level(level, first_sequence + len(items) - 1)

    def store(self, memory: FakeMemory, number: int, item: NewObservation) -> Outcome:
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
            raise CursorVoid("the memory was recreated")
        seen = revision
        while True:
            changed = memory.changed
            for step in [each for each in memory.history if each[1] > seen]:
                seen = step[1]
                yield step
            await changed.wait()


_PARTS = ("dense",), (0.5,), (1.0,)
