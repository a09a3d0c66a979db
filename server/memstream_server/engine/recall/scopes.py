"""Recalls over several memories: one ranking, by score times the weight of the scope.

Rule 1. Each memory is ranked as it is alone, by the same code. Only the statistics of words are those of all memories
together (core/lexical.py): a word has one weight, so scores of small and large memories compare. What chooses among the
ranked, as reranker, twins and budget, is asked once, of all together (recall.py); that of another server is its own.
Rule 2. The caller's rights are in `Rights`. What it may not recall is counted nowhere: neither among the memories that
a prefix or labels select, nor in the statistics of words.
Rule 3. A memory that does not answer degrades the answer by its name, if another one answers.
Rule 4. Only recollections of the whole answer are accesses. Other servers count theirs after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from msgspec.structs import replace

from memstream_server.core.lexical import WordStatistics
from memstream_server.core.values import Fragment
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
from memstream_server.engine.recall.answers import NOTHING, PartialAnswer, list_fragments
from memstream_server.engine.recall.recall import Shared, wait_until_visible
from memstream_server.engine.recall.standing_query import StandingQuery
from memstream_server.engine.requests import Change, Query, RecallAnswer, Recollection, Scope
from memstream_server.engine.runtime.turns import pause_if_due

if TYPE_CHECKING:
    from memstream_server.engine.recall.recall import Recaller
    from memstream_server.engine.recall.reinforcement import Reinforcement
    from memstream_server.engine.recall.standing_query import OpenQueries, OpenQuery
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
        self, asked: Sequence[Asked], time_s: float | None, shared: Shared | None = None, **changes: Any
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

    async def find_others(self, asked: Sequence[Asked]) -> Sequence[OtherOwner | None]:
        """The owner of each memory; None: this process. Raises EngineError."""

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


@dataclass(frozen=True, slots=True, eq=False)
class _Asking:
    """A memory of a recall, and the other server that owns it, if one does."""

    asked: Asked
    other: OtherOwner | None
    named: bool
    """Whether the answer names memories: not if there is only this one."""

    def label(self, part: PartialAnswer) -> PartialAnswer:
        """The part with the memory's name and weight."""
        return replaced(part, memory=self.asked.path, weight=self.asked.scope.weight) if self.named else part

    async def count_words_of_other(self) -> Words:
        """Raises EngineError."""
        assert self.other is not None
        return await self.other.count_words(self.asked.scope, self.asked.namespace, self.asked.name)

    async def ask_other(self, words: Words) -> PartialAnswer:
        """What the memory says, or why nothing."""
        assert self.other is not None
        quiet = replaced(self.asked.scope, query=replace(self.asked.scope.query, reinforce=False))
        try:
            answer = await self.other.recall(quiet, self.asked.namespace, self.asked.name, words)
        except (MemoryNotFound, *_UNANSWERED) as error:
            return self.label(PartialAnswer(NOTHING, (), error=error))
        return self.label(PartialAnswer(answer, _list_short_term(answer)))

    @property
    def wants_accesses(self) -> bool:
        """Whether another server counts accesses."""
        asked = self.asked
        query, policy = asked.scope.query, asked.record.policy.recall
        wanted = policy.reinforce if query.reinforce is None else query.reinforce
        return self.other is not None and wanted and query.as_of is None

    async def reinforce_other(self, words: Words, kept: Sequence[Recollection]) -> None:
        """Have the other server count accesses of these."""
        assert self.other is not None
        asked, ids = self.asked, [one.id for found in kept for one in list_fragments(found)]
        try:
            await self.other.reinforce(asked.scope, asked.namespace, asked.name, words, ids)
        except EngineError as error:  # the answer is good without
            log.info("accesses_not_counted", memory=asked.record.uid, error=error)


def _list_short_term(answer: RecallAnswer) -> list[Fragment]:
    """The working memory, in order, of which the recollections are a part."""
    known = {one.id: one for one in answer.working}
    known |= {one.id: one for each in answer.recollections for one in list_fragments(each)}
    return [known[id_] for id_ in answer.working_ids if id_ in known]


RankOne = Callable[[str, str, Query, Shared], Awaitable[PartialAnswer]]


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
        rank_one: RankOne,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._registry = registry
        self._recaller = recaller
        self._reinforcement = reinforcement
        self._open_queries = open_queries
        self._watchers = watchers
        self._rank_one = rank_one
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
        shared: Shared | None = None,
    ) -> RecallAnswer:
        """One answer of these memories. whole: what is asked of all together; alone: the scopes name one memory, whose
        own answer is wanted.

        Raises EngineError if one fails for another reason than that it does not answer, or if none answers.
        """
        if not asked:  # left out, or none selected
            return replace(NOTHING, weak=True)
        shared = shared or Shared()
        others = await wire.find_others(asked)
        if alone and (only := others[0]) is not None:
            return await only.recall(asked[0].scope, asked[0].namespace, asked[0].name, ())
        asking = [_Asking(each, other, not alone) for each, other in zip(asked, others, strict=True)]
        if not alone:
            await self._wait_for_revisions(asking)
        words = () if alone else await self.count_words_of_all(asking, shared)
        found = await self._rank_all(asking, words, wire, partial, shared)
        errors = [part.error for _, part in found if part.error is not None]
        if errors and len(errors) == len(found):
            raise errors[0]
        if not found:  # deleted meanwhile
            return replace(NOTHING, weak=True)
        limit = None
        if not alone:
            limit = max(each.record.policy.recall.limit for each in asked) if whole.limit is None else whole.limit
        answer = await self._recaller.complete([part for _, part in found], whole, limit)
        self._count_accesses(found, words, answer)
        return answer

    async def _rank_all(
        self, asking: Sequence[_Asking], words: Words, wire: Wire, partial: bool, shared: Shared
    ) -> list[tuple[_Asking, PartialAnswer]]:
        """What each memory says; those of other servers are asked meanwhile."""
        tasks = {each: asyncio.create_task(each.ask_other(words)) for each in asking if each.other is not None}
        found = []
        try:
            for each in asking:
                part = await (self._rank_here(each, words, wire, shared) if each.other is None else tasks[each])
                if not isinstance(part.error, MemoryNotFound):
                    found.append((each, part))
                elif not partial:  # deleted meanwhile
                    raise part.error
        finally:
            for task in tasks.values():
                task.cancel()
        return found

    def _count_accesses(
        self, found: Sequence[tuple[_Asking, PartialAnswer]], words: Words, answer: RecallAnswer
    ) -> None:
        """Of what the whole answer has. Other servers, which cannot know before, are asked in the background."""
        shown: dict[str, list[Recollection]] = {}
        for one in answer.recollections:
            shown.setdefault(one.memory, []).append(one)
        for each, part in found:
            kept = shown.get(part.memory, ())
            if kept and part.actor is not None:
                mine = replace(part.answer, recollections=tuple(kept))
                self._reinforcement.queue_answer(part.actor, each.asked.scope.query, mine)
            elif kept and each.wants_accesses:
                later = asyncio.create_task(each.reinforce_other(words, kept))
                self._reinforcing.add(later)
                later.add_done_callback(self._reinforcing.discard)

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
                answer = await scoped.recall(asked, None, Shared(standing.vectors), **changes)
                change = standing.next_change(answer)
                if change is not None:
                    listed.change_us, listed.recollections = self._clock.now_us(), len(change.ids)
                    yield change
                changes |= {"min_revision": 0, "preferred": standing.ids}
                with suppress(MemoryNotFound):  # the next look says so, unless it may leave it out
                    await standing.wait_until_due()
                await again()
                asked = await scoped.find_memories()

    async def _wait_for_revisions(self, asking: Sequence[_Asking]) -> None:
        """Wait for all memories at once."""
        waited = [each.asked for each in asking if each.other is None and each.asked.scope.query.min_revision]
        if waited:
            await asyncio.gather(*map(self._wait_for_revision, waited))

    async def _wait_for_revision(self, asked: Asked) -> None:
        with suppress(MemoryNotFound, *_UNANSWERED):  # the recall says so
            async with self._registry.use(asked.namespace, asked.name) as actor:
                try:
                    await wait_until_visible(actor, asked.scope.query)
                except RevisionNotReached as error:
                    error.message = f"{asked.path}: {error.message}"
                    raise

    async def count_words(
        self, namespace: str, name: str, query: Query, shared: Shared | None = None
    ) -> WordStatistics:
        """How often the words of a query occur in one memory."""
        async with self._registry.use(namespace, name) as actor:
            return await self._recaller.count_words(actor, query, shared or Shared())

    async def count_words_of_all(self, asking: Sequence[_Asking], shared: Shared) -> Words:
        """The statistics of all memories, for each set of terms: languages differ in them."""
        tasks = [asyncio.create_task(each.count_words_of_other()) for each in asking if each.other is not None]
        counted: list[WordStatistics] = []
        try:
            for each in asking:
                if each.other is None:
                    one = each.asked
                    with suppress(MemoryNotFound, *_UNANSWERED):  # the recall says so
                        counted.append(await self.count_words(one.namespace, one.name, one.scope.query, shared))
                    await pause_if_due()
            for task in tasks:
                with suppress(Exception):  # the recall says so
                    counted += await task
        finally:
            for task in tasks:
                task.cancel()
        found: dict[bytes, WordStatistics] = {}
        for each_counted in counted:
            known = found.get(each_counted.terms)
            found[each_counted.terms] = each_counted if known is None else known + each_counted
        return tuple(found.values())

    async def _rank_here(self, each: _Asking, words: Words, wire: Wire, shared: Shared) -> PartialAnswer:
        query = each.asked.scope.query
        if words:
            query = replace(query, words=words, receipt=query.receipt and wire.add_words(query.receipt, words))
        try:
            part = await self._rank_one(each.asked.namespace, each.asked.name, query, shared)
        except (MemoryNotFound, *_UNANSWERED) as error:
            part = PartialAnswer(NOTHING, (), error=error)
        await pause_if_due()
        return each.label(part)


def _refuse_scopes(text: str) -> InvalidField:
    return InvalidField(f"query.scopes: {text}", violations=(FieldViolation("query.scopes", text),))
