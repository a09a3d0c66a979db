"""Queries with scopes: the rights for each memory, and the servers that own memories of theirs.

Rule 1. A memory that the caller may not recall is refused by its name, whether it exists or not; with `partial` it is
left out, as one that does not exist. What prefix and labels select is only what the caller may recall.
Rule 2. Rights are those of the moment: a standing query finds its memories again before each ranking.
Rule 3. Other servers are asked in the caller's name, by calls with one memory, which check its rights again.
Rule 4. A block's question is asked in the name of who set it, as if that principal called now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc.aio
from msgspec import structs

from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.fragment_pb2 import FragmentFilter
from memstream.v1.scope_pb2 import RecallScope
from memstream_server.core.lexical import WordStatistics
from memstream_server.engine.errors import EngineError
from memstream_server.engine.recall.recall import Shared
from memstream_server.engine.recall.scopes import Asked
from memstream_server.engine.requests import Query, RecallAnswer, Scope
from memstream_server.engine.runtime.call_context import PRINCIPAL
from memstream_server.ports.blocks import AskedMemory, MemoryName, StandingQuestion
from memstream_server.ports.journal.records import Labels
from memstream_server.rpc.access.caller import CALLER, Caller, Verb, caller_may
from memstream_server.rpc.calls import wait_limit_s
from memstream_server.rpc.errors import PermissionDenied
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.validation import Violations
from memstream_server.rpc.wire import queries, scopes

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.ports.processes import Owner
    from memstream_server.rpc.access.files import Watched
    from memstream_server.rpc.access.policy import AccessPolicy
    from memstream_server.rpc.forwarding import Forwarding

_Context = grpc.aio.ServicerContext[Any, Any]
_PATH = "/memstream.v1.StreamService/RecallOnce"
OTHERS_S = 30.0
"""How long another server may take to answer a block's question."""


class ScopeDenied(PermissionDenied):
    """A query names a memory that the caller may not recall; the stream stays open."""


class CallerRights:
    """Those of the current caller."""

    def may_recall(self, namespace: str, labels: Labels | None) -> bool:
        return caller_may(Verb.RECALL, namespace, labels or ())

    def may_recall_some(self, namespace: str) -> bool:
        return caller_may(Verb.RECALL, namespace, None)

    def refuse(self, namespace: str, name: str) -> EngineError:
        return _refuse("recall", namespace, name)


def _refuse(verb: str, namespace: str, name: str) -> ScopeDenied:
    who = PRINCIPAL.get()[:200]
    return ScopeDenied(f"{who!a} does not have the right {verb} for the memory {f'{namespace}/{name}'[:300]!a}")


@dataclass(frozen=True, slots=True, eq=False)
class _Other:
    """A server that owns a memory."""

    forwarding: Forwarding
    owner: Owner
    context: _Context
    session: str

    async def count_words(self, scope: Scope, namespace: str, name: str) -> tuple[WordStatistics, ...]:
        query = pb.RecallQuery.FromString(scope.message)
        query.count_words, query.reinforce = True, False
        response = await self._ask(namespace, name, query)
        found = queries.read_words(Violations(), "", response.done.word_statistics)
        return () if found is None else (found,)

    async def recall(self, scope: Scope, namespace: str, name: str, words: tuple[WordStatistics, ...]) -> RecallAnswer:
        query = pb.RecallQuery.FromString(queries.add_words(scope.message, words))
        if scope.query.reinforce is not None:
            query.reinforce = scope.query.reinforce
        return scopes.read_answer(await self._ask(namespace, name, query))

    async def reinforce(
        self, scope: Scope, namespace: str, name: str, words: tuple[WordStatistics, ...], kept: Sequence[str]
    ) -> None:
        """See OtherOwner: a recall of these alone, which reinforces."""
        query = pb.RecallQuery.FromString(queries.add_words(scope.message, words))
        these = FragmentFilter(none_of=[FragmentFilter(exclude_ids=kept)])
        query.filter.CopyFrom(FragmentFilter(all_of=[query.filter, these]))
        query.limit, query.min_relevance, query.reinforce = len(kept), 0, True
        query.near_misses, query.explain, query.receipt, query.omit_working_memory = 0, False, False, True
        await self._ask(namespace, name, query)

    async def _ask(self, namespace: str, name: str, query: pb.RecallQuery) -> pb.RecallOnceResponse:
        request = pb.RecallOnceRequest(namespace=namespace, memory=name, session=self.session, query=query)
        return pb.RecallOnceResponse.FromString(await self.forwarding.ask(_PATH, self.owner, request, self.context))


class ScopedCall:
    """A query with scopes, of one call or on a stream."""

    def __init__(
        self,
        engine: Engine,
        forwarding: Forwarding | None,
        limits: RequestLimits,
        message: pb.RecallQuery,
        session: str,
        context: _Context,
        prefix: str = "query.",
    ) -> None:
        """prefix: of the fields that an error names. Raises InvalidField."""
        self._engine = engine
        self._forwarding = forwarding
        self._session = session
        self._context = context
        self._partial = message.partial
        self._alone = scopes.only_memory(message) is not None
        self.whole, self._scopes = scopes.read_scopes(message, session, limits, engine.dimension, prefix)

    @property
    def selects(self) -> bool:
        """Whether prefix or labels select memories."""
        return any(scope.memory is None for scope in self._scopes)

    async def find_memories(self) -> list[Asked]:
        """The memories, by the caller's present rights. Raises PermissionDenied, MemoryNotFound, InvalidField."""
        asked = await self._engine.scopes.find(self._scopes, CallerRights(), self._partial)
        return [self._without_observing(each) for each in asked]

    def _without_observing(self, asked: Asked) -> Asked:
        """A caller that may not observe in a memory changes nothing in it."""
        query = asked.scope.query
        if caller_may(Verb.OBSERVE, asked.namespace, asked.record.labels):
            return asked
        if query.reinforce and not self._partial:
            raise _refuse("observe, which query.reinforce needs,", asked.namespace, asked.name)
        quiet = structs.replace(query, reinforce=False, session="")
        return replace(asked, scope=replace(asked.scope, query=quiet))

    async def recall(
        self, asked: Sequence[Asked], time_s: float | None, shared: Shared | None = None, **changes: Any
    ) -> RecallAnswer:
        """The answer, within `time_s`; changes: fields of the queries. Raises EngineError."""
        if time_s is not None:
            changes |= {"time_s": time_s, "wait_s": min(wait_limit_s(time_s), self.whole.wait_s)}
        whole: Query = structs.replace(self.whole, **changes)
        changed = [
            replace(each, scope=replace(each.scope, query=structs.replace(each.scope.query, **changes)))
            for each in asked
        ]
        return await self._engine.scopes.recall(changed, whole, self, self._partial, self._alone, shared)

    # ---- Wire
    async def find_others(self, asked: Sequence[Asked]) -> Sequence[_Other | None]:
        """The server that owns each memory; None: this one."""
        forwarding = self._forwarding
        if forwarding is None:
            return [None] * len(asked)
        finding = [forwarding.find_owner(each.namespace, each.name) for each in asked]
        owners = [await finding[0]] if len(finding) == 1 else await asyncio.gather(*finding)  # which makes tasks
        return [None if owner is None else _Other(forwarding, owner, self._context, self._session) for owner in owners]

    def add_words(self, message: bytes, words: Sequence[WordStatistics]) -> bytes:
        """See Wire."""
        return queries.add_words(message, words)


class BlockQuestions:
    """Asks the questions of blocks; see Asking in engine/background/standing_blocks.py."""

    def __init__(
        self, engine: Engine, forwarding: Forwarding | None, limits: RequestLimits, policy: Watched[AccessPolicy] | None
    ) -> None:
        """policy: None without authentication."""
        self._engine = engine
        self._forwarding = forwarding
        self._limits = limits
        self._policy = policy

    @property
    def rights(self) -> object:
        return None if self._policy is None else self._policy.read_current()

    @contextmanager
    def ask_as(self, principal: str, question: StandingQuestion, asked: Sequence[AskedMemory]) -> Iterator[ScopedCall]:
        policy = self._policy

        def may(verb: Verb, namespace: str, labels: Labels | None) -> bool:
            assert policy is not None
            return policy.read_current().may(principal, verb, namespace, labels)

        caller = CALLER.set(None if policy is None else Caller(principal, may, _recheck_nothing))
        named = PRINCIPAL.set(principal)
        try:
            message = _make_query(question, {one.memory: one.revision for one in asked})
            yield ScopedCall(self._engine, self._forwarding, self._limits, message, "", _NoCall())  # type: ignore[arg-type]  # all that is read of it
        finally:
            PRINCIPAL.reset(named)
            CALLER.reset(caller)


def _make_query(question: StandingQuestion, revisions: Mapping[MemoryName, int]) -> pb.RecallQuery:
    scopes = [RecallScope.FromString(one.message) for one in question.scopes]
    for one, scope in zip(question.scopes, scopes, strict=True):
        scope.min_revision = max(0, revisions.get(one.memory, 0))
    return pb.RecallQuery(
        text=question.text,
        limit=question.limit,
        min_relevance=question.min_relevance,
        reinforce=False,
        omit_working_memory=True,
        scopes=scopes,
        partial=True,
        filter=FragmentFilter.FromString(question.filter_message) if question.filter_message else None,
    )


async def _recheck_nothing() -> None:
    """There is no stream to end."""


class _NoCall:
    """In the place of a call's context, for other servers."""

    def time_remaining(self) -> float:
        return OTHERS_S

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def cancelled(self) -> bool:
        return False
