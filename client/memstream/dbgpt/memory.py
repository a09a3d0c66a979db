"""DB-GPT's Memory interface on a server's memory: every object is a handle; the content is on the server.

Rule 1. A structure clone is a handle to the same memory: DB-GPT makes one whenever it builds an agent.
Rule 2. DB-GPT calls `write_batch` with the conversation's history on every build. It writes only fragments newer than
        the last one that the memory knows, so fragments dropped or erased since are not written again. A memory that
        knows none of them, because it was cleared, receives the whole history again.
Rule 3. The server drops fragments by its own policy, so no write returns discarded fragments. The server also computes
        importances (unless the agent has a scorer), insights and long-term memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from hashlib import blake2b
from typing import ClassVar, Self, TypeVar

from dbgpt.agent.core.memory.agent_memory import AgentMemoryFragment
from dbgpt.agent.core.memory.base import DiscardedMemoryFragments, Memory, WriteOperation

from memstream.answer_values import Answer
from memstream.any_loop import run_on_loop
from memstream.arguments import check_constructor
from memstream.channel import memory_path
from memstream.dbgpt.fragments import IMPORTANCE_SCALE, fragment_from, importance_of, key_of, observation_of
from memstream.errors import FragmentNotFound, MemoryExists
from memstream.kinds import kind_of
from memstream.memory import Memory as Handle
from memstream.policy import PolicyLike, Profile
from memstream.sync import Client
from memstream.values import Fragment, MemoryKind, Observation, Weights
from memstream.wiretypes import invalid_field

T = TypeVar("T")
BATCH_MAX = 256
"""Observations in one call."""
_NAME_CHARS_MAX = 40


class Scope(StrEnum):
    """The scope of a memory: shared by all who use its name, or one per session (conversation, role and name)."""

    MEMORY = "memory"
    SESSION = "session"


@check_constructor
class RemoteMemory(Memory):
    """A memory `namespace/name` of a server, created on first use if it does not exist.

    `policy` overrides fields of the profile (default: DBGPT). An existing memory is used if it has this kind, and the
    profile and policy fields passed; else the first call raises MemoryExists, which names the differences. With the
    scope
    SESSION every session has its own memory, named after `path` and the session.
    """

    kind: ClassVar[MemoryKind]

    def __init__(
        self,
        client: Client,
        path: str,
        *,
        scope: Scope | str = Scope.MEMORY,
        profile: Profile | None = None,
        policy: PolicyLike | None = None,
    ) -> None:
        memory_path(path)
        kind_of(Scope).check("scope", scope)
        self.path = path
        self.scope = Scope(scope)
        self._client = client
        self._profile = profile
        self._policy = policy
        self._made: dict[str, Handle] = {}

    def structure_clone(self, now: datetime | None = None) -> Self:
        """Another handle to the same memory. `now` is ignored: the server has a clock."""
        clone = type(self)(self._client, self.path, scope=self.scope, profile=self._profile, policy=self._policy)
        clone._copy_from(self)
        return clone

    async def write(
        self,
        memory_fragment: AgentMemoryFragment,
        now: datetime | None = None,
        op: WriteOperation = WriteOperation.ADD,
    ) -> DiscardedMemoryFragments | None:
        """Observes the fragment; it is stored when this returns, so every later read of any process sees it.

        A RETRIEVAL is not written: the server itself adds recalled fragments to short-term memory.
        """
        if op is WriteOperation.ADD:
            await run_on_loop(self._observe([await self._observation(memory_fragment, now)]))
        return None

    async def write_batch(
        self, memory_fragments: Sequence[AgentMemoryFragment], now: datetime | None = None
    ) -> DiscardedMemoryFragments | None:
        """Observes the part of a history (oldest first) that is newer than the last fragment the memory knows."""
        new = await run_on_loop(self._unknown_fragments(memory_fragments))
        await run_on_loop(self._observe([await self._observation(fragment, now) for fragment in new]))
        return None

    async def read(
        self, observation: str, alpha: float | None = None, beta: float | None = None, gamma: float | None = None
    ) -> list[AgentMemoryFragment]:
        """Recalled long-term fragments, best first, then all of short-term memory in order.

        alpha, beta and gamma weigh recency, relevance and importance; None means the policy's.
        """
        answer = await run_on_loop(self._recall(observation, Weights(alpha, beta, gamma)))
        working_ids = {fragment.id for fragment in answer.working_memory}
        recalled = [one for hit in answer for one in hit.fragments if one.id not in working_ids]
        return self._to_dbgpt([*recalled, *answer.working_memory])

    async def clear(self) -> list[AgentMemoryFragment]:
        """Permanently empties the memory (of the session, if session-scoped) and returns its content."""
        return self._to_dbgpt(await run_on_loop(self._clear()))

    async def _observation(self, fragment: AgentMemoryFragment, now: datetime | None) -> Observation:
        importance = importance_of(fragment.importance)
        if importance is None and self.importance_scorer is not None:
            score = await self.importance_scorer.score_importance(fragment, self.llm_client)
            importance = score / IMPORTANCE_SCALE if score > 0 else None  # 0: DB-GPT could not read the reply
        return observation_of(fragment, now, importance, self.name or "")

    def _to_dbgpt(self, fragments: Sequence[Fragment]) -> list[AgentMemoryFragment]:
        make = self._real_memory_fragment_class or AgentMemoryFragment
        return [fragment_from(fragment, make) for fragment in fragments]

    # ---- runs on the SDK's event loop, whichever loop the agent runs in

    async def _memory(self) -> Handle:
        path = self._scoped_path()
        if path not in self._made:
            self._made[path] = await self._make(path)
        return self._made[path]

    async def _make(self, path: str) -> Handle:
        client = self._client.asynchronous
        try:
            profile = self._profile or Profile.DBGPT
            return await client.create_memory(path, kind=self.kind, profile=profile, policy=self._policy)
        except MemoryExists:
            return await client.create_memory(
                path, kind=self.kind, profile=self._profile, policy=self._policy, exist_ok=True
            )

    def _scoped_path(self) -> str:
        if self.scope is Scope.MEMORY:
            return self.path
        if not self.session_id:
            raise invalid_field(
                "session_id", "is needed by a memory of scope 'session'; build the agent, or initialize() it"
            )
        kind_of(str).check("session_id", self.session_id)
        readable = re.sub(r"[^A-Za-z0-9_-]+", "-", self.session_id)[:_NAME_CHARS_MAX]
        return f"{self.path}.{readable}-{blake2b(self.session_id.encode(), digest_size=6).hexdigest()}"

    async def _observe(self, observations: Sequence[Observation]) -> None:
        memory = await self._memory()
        for start in range(0, len(observations), BATCH_MAX):
            await memory.observe_batch(observations[start : start + BATCH_MAX], session=self.session_id or "")

    async def _unknown_fragments(self, fragments: Sequence[AgentMemoryFragment]) -> list[AgentMemoryFragment]:
        memory = await self._memory()
        new: list[AgentMemoryFragment] = []
        for fragment in reversed(fragments):
            try:
                await memory.get_fragment(external_id=key_of(fragment))
            except FragmentNotFound:
                new.append(fragment)
            else:
                break
        return new[::-1]

    async def _recall(self, question: str, weights: Weights) -> Answer:
        return await (await self._memory()).recall_once(question, session=self.session_id or "", weights=weights)

    async def _clear(self) -> list[Fragment]:
        memory = await self._memory()
        fragments = [fragment async for fragment in memory.list_fragments()]
        await memory.clear()
        return fragments


class RemoteSensoryMemory(RemoteMemory):
    """Replaces DB-GPT's SensoryMemory; its buffer_size is the policy's sensory.capacity."""

    kind = MemoryKind.SENSORY


class RemoteShortTermMemory(RemoteMemory):
    """Replaces DB-GPT's ShortTermMemory; its buffer_size is the policy's short_term.capacity."""

    kind = MemoryKind.SHORT_TERM


class RemoteEnhancedShortTermMemory(RemoteMemory):
    """Replaces DB-GPT's EnhancedShortTermMemory."""

    kind = MemoryKind.ENHANCED_SHORT_TERM


class RemoteLongTermMemory(RemoteMemory):
    """Replaces DB-GPT's LongTermMemory; its _default_importance is the policy's importance_default."""

    kind = MemoryKind.LONG_TERM


class RemoteHybridMemory(RemoteMemory):
    """Replaces DB-GPT's HybridMemory."""

    kind = MemoryKind.HYBRID
