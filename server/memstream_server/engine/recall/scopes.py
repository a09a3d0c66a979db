"""Recalls over several memories: one ranking, by score times the weight of the scope.

Rule 1. Each memory is recalled as it is alone, by the same code. Only the statistics of words are those of all memories
together (core/lexical.py): a word has one weight, so scores of small and large memories compare.
Rule 2. The caller's rights are in `Rights`. What it may not recall is counted nowhere: neither among the memories that
a prefix or labels select, nor in the statistics of words.
Rule 3. A memory that does not answer degrades the answer by its name, if another one answers.
Rule 4. Only recollections of the whole answer are accesses. Other servers count theirs after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from msgspec.structs import replace

from memstream_server.core.filters import Unmatched
from memstream_server.core.lexical import WordStatistics
from memstream_server.core.ranking import NearMiss, Stage
from memstream_server.core.values import Fragment, Vector
from memstream_server.engine.errors import (
    EngineError,
    FieldViolation,
    InvalidField,
    JournalUnavailable,
    LeaseLost,
    MemoryNotFound,
    OwnedElsewhere,
    OwnerUnreachable,
    RevisionNotReached,
)
from memstream_server.engine.recall.answers import fit_answer
from memstream_server.engine.recall.recall import wait_until_visible
from memstream_server.engine.recall.standing_query import StandingQuery
from memstream_server.engine.requests import Change, MemoryAnswer, Query, RecallAnswer, Recollection, Scope
from memstream_server.engine.runtime.turns import pause_if_due

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.recall.open_queries import OpenQueries, OpenQuery
    from memstream_server.engine.recall.recall import Recaller
    from memstream_server.engine.recall.reinforcement import Reinforcement
    from memstream_server.engine.recall.watch import Watchers
    from memstream_server.engine.runtime.clock import Clock
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.journal.port import Journal
    from memstream_server.ports.journal.records import Labels, MemoryRecord

log = structlog.get_logger(__name__)

Words = tuple[WordStatistics, ...]
"""One for each set of terms that the memories' languages make of a query."""
MEMORIES_MAX = 1_000
"""Memories of one recall."""
NAMESPACES_MAX = 1_000
"""Namespaces in which labels, or the beginning of a namespace's name, are looked up."""
PAGE = 500
_UNANSWERED = (OwnedElsewhere, OwnerUnreachable, LeaseLost, JournalUnavailable)
"""Errors of one memory that leave the others' answers."""


class Rights(Protocol):
    """What the caller may do."""

    def may_recall(self, namespace: str, labels: Labels | None) -> bool:
        """Whether it may recall a memory; labels None: every memory of the namespace."""

    def may_recall_some(self, namespace: str) -> bool:
        """Whether it may recall any memory of the namespace, by its labels or without."""

    def refuse(self, namespace: str, name: str) -> EngineError:
        """The error for a memory that it may not recall; it says nothing else about the memory."""


class ScopedQuery(Protocol):
    """A query with scopes of one call or stream."""

    @property
    def selects(self) -> bool:
        """Whether prefix or labels select memories."""

    async def find_memories(self) -> list[Asked]:
        """The memories by the caller's present rights. Raises EngineError."""

    async def recall(
        self, asked: Sequence[Asked], time_s: float | None, together: Together | None = None, **changes: Any
    ) -> RecallAnswer:
        """The answer. changes: fields of the queries. Raises EngineError."""


class OtherOwner(Protocol):
    """Another process, which owns a memory."""

    async def count_words(self, scope: Scope, namespace: str, name: str) -> Words:
        """Raises EngineError."""

    async def recall(self, scope: Scope, namespace: str, name: str, words: Words) -> RecallAnswer:
        """The memory's answer, within the time of the call. Raises EngineError."""

    async def reinforce(self, scope: Scope, namespace: str, name: str, words: Words, kept: Sequence[str]) -> None:
        """Count an access of these of its recollections. Raises EngineError."""


class Wire(Protocol):
    """The call, and the way to other processes."""

    async def find_other(self, namespace: str, name: str) -> OtherOwner | None:
        """The owner of a memory; None: this process. Raises EngineError."""

    def add_words(self, message: bytes, words: Words) -> bytes:
        """The message of a query with these statistics, for a receipt."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One memory of a recall."""

    record: MemoryRecord
    scope: Scope

    @property
    def namespace(self) -> str:
        """The memory's."""
        return self.record.namespace

    @property
    def name(self) -> str:
        """The memory's."""
        return self.record.name

    @property
    def path(self) -> str:
        """ "namespace/name"."""
        return f"{self.namespace}/{self.name}"


@dataclass(slots=True, eq=False)
class Together:
    """What the recalls of several memories share."""

    vectors: dict[str, Vector] = field(default_factory=dict)
    """The query's, by embedding space."""
    actors: list[Actor] = field(default_factory=list)
    """That of the memory that has just answered: the caller reinforces."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The answer of one memory, or why it has none."""

    asked: Asked
    answer: RecallAnswer
    actor: Actor | None = None
    """None: another process reinforces, or the memory did not answer."""
    error: EngineError | None = None

    @property
    def degraded(self) -> str:
        """What the answer lacks."""
        return self.answer.degraded if self.error is None else self.error.message


NOTHING = RecallAnswer(0, (), (), (), 0, 0, 0.0, "", (), {}, 0, "")
"""An answer without anything."""
RecallOne = Callable[[str, str, Query, Together | None], Awaitable[RecallAnswer]]


class SeveralMemories:
    """Recalls over several memories; a part of the engine."""

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        registry: Registry,
        recaller: Recaller,
        reinforcement: Reinforcement,
        open_queries: OpenQueries,
        watchers: Watchers,
        recall_one: RecallOne,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._registry = registry
        self._recaller = recaller
        self._reinforcement = reinforcement
        self._open_queries = open_queries
        self._watchers = watchers
        self._recall_one = recall_one
        self._reinforcing: set[asyncio.Task[None]] = set()
        """Accesses that other servers count, after the answer: nobody waits for them."""

    # ---- which memories
    async def find(self, scopes: Sequence[Scope], rights: Rights, partial: bool) -> list[Asked]:
        """The memories of the scopes: first the named ones, then those that are selected, each once.

        Raises MemoryNotFound and the refusal of `rights` unless `partial`; TooManyMemories.
        """
        found: dict[tuple[str, str], Asked] = {}
        for scope in scopes:
            if scope.memory is not None and (named := await self._find_named(scope, rights, partial)) is not None:
                found[scope.memory] = named
        for scope in scopes:
            if scope.memory is None:
                await self._select(scope, rights, found)
        if len(found) > MEMORIES_MAX:
            raise _refuse_scopes(f"selects more than {MEMORIES_MAX} memories")
        return list(found.values())

    async def _find_named(self, scope: Scope, rights: Rights, partial: bool) -> Asked | None:
        assert scope.memory is not None
        namespace, name = scope.memory
        try:
            record = await self._registry.read_record(namespace, name)
        except MemoryNotFound:
            if partial:
                return None
            if not rights.may_recall(namespace, None):
                raise rights.refuse(namespace, name) from None
            raise
        if rights.may_recall(namespace, record.labels):
            return Asked(record, scope)
        if partial:
            return None
        raise rights.refuse(namespace, name)

    async def _select(self, scope: Scope, rights: Rights, found: dict[tuple[str, str], Asked]) -> None:
        namespace, slash, name = scope.prefix.partition("/")
        if slash:
            namespaces = [namespace]
        elif scope.namespace:
            namespaces = [scope.namespace]
        else:
            namespaces = await self._list_namespaces(namespace, rights)
        for each in namespaces:
            if not rights.may_recall_some(each):
                continue
            after = ""
            while True:
                page = await self._journal.list_memories(each, after, PAGE, name, scope.labels)
                for record in page:
                    if rights.may_recall(each, record.labels):
                        found.setdefault((each, record.name), Asked(record, scope))
                if len(found) > MEMORIES_MAX:
                    raise _refuse_scopes(f"selects more than {MEMORIES_MAX} memories")
                if len(page) < PAGE:
                    break
                after = page[-1].name

    async def _list_namespaces(self, prefix: str, rights: Rights) -> list[str]:
        """Those that begin with `prefix`, of which the caller may recall something."""
        found: list[str] = []
        # Names are ASCII and "~" is their greatest character: less than the first that begins with the prefix.
        after = f"{prefix[:-1]}{chr(ord(prefix[-1]) - 1)}~" if prefix else ""
        while True:
            page = [each for each, _ in await self._journal.list_namespaces(after, PAGE)]
            found += [each for each in page if each.startswith(prefix) and rights.may_recall_some(each)]
            if len(found) > NAMESPACES_MAX:
                raise _refuse_scopes(f"selects memories of more than {NAMESPACES_MAX} namespaces: name a namespace")
            if len(page) < PAGE or (prefix and not page[-1].startswith(prefix) and page[-1] > prefix):
                return found
            after = page[-1]

    # ---- their answers
    async def recall(
        self,
        asked: Sequence[Asked],
        whole: Query,
        wire: Wire,
        partial: bool,
        alone: bool,
        together: Together | None = None,
    ) -> RecallAnswer:
        """One answer of these memories. whole: what is asked of all together; alone: the scopes name one memory, whose
        own answer is wanted.

        Raises EngineError if one fails for another reason than that it does not answer, or if none answers.
        """
        if alone:
            return await self._recall_alone(asked, wire)
        together = together or Together()
        others = await asyncio.gather(*[wire.find_other(each.namespace, each.name) for each in asked])
        here = [each for each, other in zip(asked, others, strict=True) if other is None]
        await asyncio.gather(*[self._wait_for_revision(each) for each in here if each.scope.query.min_revision])
        words = await self.count_words_of_all(asked, others)
        asking = [
            None if other is None else asyncio.create_task(_ask_other(each, other, words))
            for each, other in zip(asked, others, strict=True)
        ]
        try:
            parts = []
            for each, task in zip(asked, asking, strict=True):
                part = await (self._ask_here(each, words, wire, together) if task is None else task)
                if not isinstance(part.error, MemoryNotFound):
                    parts.append(part)
                elif not partial:  # deleted meanwhile
                    raise part.error
        finally:
            for task in asking:
                if task is not None:
                    task.cancel()
        errors = [part.error for part in parts if part.error is not None]
        if errors and len(errors) == len(parts):
            raise errors[0]
        limit = (
            max((each.record.policy.recall.limit for each in asked), default=0) if whole.limit is None else whole.limit
        )
        answer = merge_answers(parts, whole, limit)
        for part in parts:
            if part.actor is not None:
                shown = tuple([one for one in answer.recollections if one.memory == part.asked.path])
                kept = replace(part.answer, recollections=shown)
                self._reinforcement.queue_answer(part.actor, part.asked.scope.query, kept)
        owners = {each.path: other for each, other in zip(asked, others, strict=True) if other is not None}
        for accessing in _reinforce_others(parts, owners, words, answer):
            later = asyncio.create_task(accessing)
            self._reinforcing.add(later)
            later.add_done_callback(self._reinforcing.discard)
        return answer

    async def stop(self) -> None:
        """Other servers are no longer asked to count accesses."""
        for task in self._reinforcing:
            task.cancel()
        await asyncio.gather(*self._reinforcing, return_exceptions=True)

    async def follow(
        self, scoped: ScopedQuery, again: Callable[[], Awaitable[None]], listed: OpenQuery
    ) -> AsyncGenerator[Change, None]:
        """The answer, then each change of it; see standing_query.py. The caller closes the generator.

        `again` and `listed` as in Engine.follow_query.
        """
        standing = StandingQuery(self._watchers, self._clock, scoped.selects)
        asked = await scoped.find_memories()
        changes: dict[str, Any] = {"reinforce": False, "working_memory": False}
        with standing, self._open_queries.keep([each.record.uid for each in asked], listed):
            while True:
                standing.waiting.news.clear()
                standing.watch([each.record for each in asked])
                answer = await scoped.recall(asked, None, Together(standing.vectors), **changes)
                change = standing.next_change(answer)
                if change is not None:
                    listed.change_us, listed.recollections = self._clock.now_us(), len(change.ids)
                    yield change
                changes |= {"min_revision": 0, "preferred": standing.ids}
                with suppress(MemoryNotFound):  # the next look says so, unless it may leave it out
                    await standing.wait_until_due()
                await again()
                asked = await scoped.find_memories()

    async def _recall_alone(self, asked: Sequence[Asked], wire: Wire) -> RecallAnswer:
        if not asked:  # left out
            return replace(NOTHING, weak=True)
        (each,) = asked
        if (other := await wire.find_other(each.namespace, each.name)) is not None:
            return await other.recall(each.scope, each.namespace, each.name, ())
        return await self._recall_one(each.namespace, each.name, each.scope.query, None)

    async def _wait_for_revision(self, asked: Asked) -> None:
        """Wait for all memories at once."""
        with suppress(MemoryNotFound, *_UNANSWERED):  # the recall says so
            async with self._registry.use(asked.namespace, asked.name) as actor:
                try:
                    await wait_until_visible(actor, asked.scope.query)
                except RevisionNotReached as error:
                    error.message = f"{asked.path}: {error.message}"
                    raise

    async def count_words(self, namespace: str, name: str, query: Query) -> WordStatistics:
        """How often the words of a query occur in one memory."""
        async with self._registry.use(namespace, name) as actor:
            return await self._recaller.count_words(actor, query)

    async def count_words_of_all(self, asked: Sequence[Asked], others: Sequence[OtherOwner | None]) -> Words:
        """The statistics of all memories, for each set of terms: languages differ in them."""
        remote = [
            asyncio.create_task(other.count_words(each.scope, each.namespace, each.name))
            for each, other in zip(asked, others, strict=True)
            if other is not None
        ]
        counted: list[WordStatistics] = []
        try:
            for each, other in zip(asked, others, strict=True):
                if other is None:
                    with suppress(MemoryNotFound, *_UNANSWERED):  # the recall says so
                        counted.append(await self.count_words(each.namespace, each.name, each.scope.query))
                    await pause_if_due()
            for one in await asyncio.gather(*remote, return_exceptions=True):
                counted += one if isinstance(one, tuple) else ()
        finally:
            for task in remote:
                task.cancel()
        found: dict[bytes, WordStatistics] = {}
        for each_counted in counted:
            known = found.get(each_counted.terms)
            found[each_counted.terms] = each_counted if known is None else known + each_counted
        return tuple(found.values())

    async def _ask_here(self, asked: Asked, words: Words, wire: Wire, together: Together) -> Part:
        query = replace(asked.scope.query, words=words)
        if query.receipt:
            query = replace(query, receipt=wire.add_words(query.receipt, words))
        try:
            answer = await self._recall_one(asked.namespace, asked.name, query, together)
        except (MemoryNotFound, *_UNANSWERED) as error:
            return Part(asked, NOTHING, None, error)
        await pause_if_due()
        return Part(asked, answer, together.actors.pop() if together.actors else None)


def _reinforce_others(
    parts: Sequence[Part], owners: Mapping[str, OtherOwner], words: Words, answer: RecallAnswer
) -> Iterator[Coroutine[Any, Any, None]]:
    """Have other servers count what the whole answer has: before, they cannot know."""
    for part in parts:
        asked, query = part.asked, part.asked.scope.query
        wanted = asked.record.policy.recall.reinforce if query.reinforce is None else query.reinforce
        kept = [one.id for found in answer.recollections if found.memory == asked.path for one in _fragments_of(found)]
        if asked.path in owners and wanted and kept and query.as_of is None and part.error is None:
            yield _reinforce_other(asked, owners[asked.path], words, kept)


async def _reinforce_other(asked: Asked, owner: OtherOwner, words: Words, kept: Sequence[str]) -> None:
    try:
        await owner.reinforce(asked.scope, asked.namespace, asked.name, words, kept)
    except EngineError as error:  # the answer is good without
        log.info("accesses_not_counted", memory=asked.record.uid, error=error)


async def _ask_other(asked: Asked, other: OtherOwner, words: Words) -> Part:
    quiet = replaced(asked.scope, query=replace(asked.scope.query, reinforce=False))
    try:
        return Part(asked, await other.recall(quiet, asked.namespace, asked.name, words))
    except (MemoryNotFound, *_UNANSWERED) as error:
        return Part(asked, NOTHING, None, error)


def _refuse_scopes(text: str) -> InvalidField:
    return InvalidField(f"query.scopes: {text}", violations=(FieldViolation("query.scopes", text),))


def merge_answers(parts: Sequence[Part], whole: Query, limit: int) -> RecallAnswer:
    """One answer: recollections by score times weight, each memory's in its own order; within the budget of tokens."""
    if not parts:
        return replace(NOTHING, weak=True)
    ranked = _merge_rankings(parts)
    missed = [NearMiss(one.scored, Stage.LIMIT, memory=one.memory) for one in ranked[limit:]]
    others = [replaced(miss, memory=part.asked.path) for part in parts for miss in part.answer.near_misses]
    others.sort(key=lambda miss: -miss.scored.score)
    short_term = _list_short_term(parts)
    shown = tuple(ranked[:limit])
    answers = [part.answer for part in parts]
    kept = {one.id for found in shown for one in _fragments_of(found)}
    answer = RecallAnswer(
        revision=0,
        recollections=shown,
        working_ids=tuple(short_term),
        working=tuple([one for one in short_term.values() if one.id not in kept]),
        eligible=sum(each.eligible for each in answers),
        considered=sum(each.considered for each in answers),
        best_relevance=max(each.best_relevance for each in answers),
        degraded="; ".join(f"{part.asked.path}: {text}" for part in parts if (text := part.degraded)),
        near_misses=tuple((missed + others)[: whole.near_misses]),
        timings_s=_sum_timings(answers),
        tokens=0,
        formula=", ".join(dict.fromkeys(filter(None, (each.formula for each in answers)))),
        weak=all(part.answer.weak for part in parts if part.error is None),
        validity_change_us=min((at for each in answers if (at := each.validity_change_us) is not None), default=None),
        interpreted=next((each.interpreted for each in answers if each.interpreted), ()),
        unmatched=_find_unmatched([part.answer for part in parts if part.error is None]),
    )
    if whole.token_budget > 0:
        answer = fit_answer(answer, list(short_term.values()), whole)
    return replace(answer, memories=tuple(_describe_part(part, answer) for part in parts))


def _merge_rankings(parts: Sequence[Part]) -> list[Recollection]:
    """All recollections, best first; of a fragment that several memories hold, the first."""
    keyed: list[tuple[float, int, int, Recollection]] = []
    for number, part in enumerate(parts):
        found = part.answer.recollections
        # An earlier statement follows its later twin even with a greater score: the twin takes the place of both.
        best = [*accumulate((one.scored.score for one in reversed(found)), max)][::-1]
        keyed += [
            (-score * part.asked.scope.weight, number, place, replace(one, memory=part.asked.path))
            for place, (one, score) in enumerate(zip(found, best, strict=True))
        ]
    keyed.sort(key=lambda entry: entry[:3])
    seen: dict[str, Recollection] = {}
    for *_, one in keyed:
        seen.setdefault(one.fragment.id, one)
    return list(seen.values())


def _fragments_of(one: Recollection) -> list[Fragment]:
    return [one.fragment] if one.companion is None else [one.fragment, one.companion.fragment]


def _list_short_term(parts: Sequence[Part]) -> dict[str, Fragment]:
    """The working memory of all, by id: of each in its order, one memory after the other."""
    found: dict[str, Fragment] = {}
    for part in parts:
        known = {one.id: one for one in part.answer.working}
        known |= {one.id: one for each in part.answer.recollections for one in _fragments_of(each)}
        found |= {id_: known[id_] for id_ in part.answer.working_ids if id_ not in found}
    return found


def _sum_timings(answers: Sequence[RecallAnswer]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in answers:
        for step, took_s in each.timings_s.items():
            found[step] = found.get(step, 0.0) + took_s
    return found


def _find_unmatched(answers: Sequence[RecallAnswer]) -> tuple[Unmatched, ...]:
    """What of the filter nothing in any memory can match."""
    return tuple([one for one in answers[0].unmatched if all(one in each.unmatched for each in answers)])


def _describe_part(part: Part, answer: RecallAnswer) -> MemoryAnswer:
    path = part.asked.path
    own = replace(part.answer, degraded=part.degraded)
    count = sum(one.memory == path for one in answer.recollections)
    return MemoryAnswer(path, own, count, tuple([id_ for id_ in answer.working_ids if id_ in part.answer.working_ids]))
