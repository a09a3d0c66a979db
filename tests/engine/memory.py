"""Drives the scenario files, which core shares, on the engine: through journal, actor and recall."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence

import numpy as np

from memstream_server.core.events import Event
from memstream_server.core.filters import Listing
from memstream_server.core.values import Fragment, Structured, Tier, Vector
from memstream_server.engine.errors import InvalidField
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import AckLevel, MemoryChange, NewMemory, NewObservation, Query
from tests.engine.engine_parts import PartsEngine
from tests.support import scenario
from tests.support.scenario import Change, Command, MemorySpec, Said, override_policy

NAMESPACE = "scenarios"


class SettableClock:
    """The real time plus `offset_us`."""

    def __init__(self) -> None:
        self.offset_us = 0

    def now_us(self) -> int:
        return time.time_ns() // 1000 + self.offset_us


def padded(vector: Vector | None, dimension: int) -> Vector | None:
    """The same direction in more dimensions: cosines do not change."""
    return None if vector is None else np.concatenate([vector, np.zeros(dimension - len(vector), np.float32)])


def observation(
    content: str, structured: Structured | None = None, vector: Vector | None = None, **fields: object
) -> NewObservation:
    """An observation as the rpc validates it."""
    digest = hashlib.blake2b(repr((content, structured, sorted(fields.items()))).encode(), digest_size=16).digest()
    return NewObservation(content=content, structured=structured, vector=vector, digest=digest, **fields)  # type: ignore[arg-type]  # tests name real fields


class EngineMemory:
    """The Driver protocol on one engine; each `create` makes a new memory."""

    def __init__(self, engine: PartsEngine, clock: SettableClock) -> None:
        self.engine = engine
        self.clock = clock
        self.history: list[Event] = []
        self._count = 0
        self._revision = 0

    @property
    def name(self) -> str:
        return f"memory-{self._count}"

    async def create(self, spec: MemorySpec) -> None:
        self._count += 1
        await self.engine.memories.create(NewMemory(NAMESPACE, self.name, spec.kind, spec.policy()))
        self._revision = 0
        self.history = []

    async def set_policy(self, overrides: Mapping[str, object]) -> None:
        record = await self.engine.memories.get(NAMESPACE, self.name)
        change = MemoryChange(policy=override_policy(record.policy, overrides))
        await self.engine.memories.update(NAMESPACE, self.name, change)

    async def observe(self, said: Said) -> str:
        new = observation(
            said.content,
            said.structured,
            padded(said.vector, self.engine.dimension),
            speaker=said.speaker,
            session=said.session,
            importance=said.importance,
            external_id=said.external_id,
            metadata=said.metadata,
            ttl_us=None if said.ttl_s is None else int(said.ttl_s * 1e6),
            observe_time_us=None if said.observe_time_s is None else int(said.observe_time_s * 1e6),
            supersedes=said.supersedes,
        )
        done = await self.engine.observe_batch(NAMESPACE, self.name, "", 1, [new], AckLevel.STORED)
        return done.outcomes[0].fragment

    async def recall(self, query: scenario.Query) -> list[str]:
        asked = Query(
            text=query.text,
            session=query.session,
            limit=query.limit,
            vector=padded(query.vector, self.engine.dimension),
        )
        answer = await self.engine.recall(NAMESPACE, self.name, asked)
        await self.engine.wait_for_reinforcement()
        return [found.fragment.id for found in answer.recollections]

    async def clear(self, tiers: Sequence[Tier]) -> None:
        await self.engine.fragments.clear(NAMESPACE, self.name, tiers)

    async def forget(self, ids: Sequence[str]) -> None:
        await self.engine.fragments.forget(NAMESPACE, self.name, ids)

    async def restore(self, ids: Sequence[str]) -> None:
        await self.engine.fragments.restore(NAMESPACE, self.name, ids)

    async def supersede(self, olds: Sequence[str], new: str) -> str:
        try:
            done = await self.engine.fragments.supersede(NAMESPACE, self.name, olds, new)
        except InvalidField as error:
            key = next(one for one in olds if repr(one) in error.message)
            return f"cycle {key}"
        return f"superseded {done.count}"

    async def erase(self, ids: Sequence[str]) -> None:
        raise ValueError("the engine does not erase yet")

    async def update(self, change: Change) -> None:
        wanted = FragmentChange(
            id=change.id,
            content=change.content,
            importance=change.importance,
            pinned=change.pinned,
            vector=padded(change.vector, self.engine.dimension),
        )
        await self.engine.fragments.update(NAMESPACE, self.name, wanted)

    async def events(self) -> list[Event]:
        """All events since the last call."""
        found: list[Event] = []
        watch = self.engine.watch(NAMESPACE, self.name, "", self._revision, 0)
        try:
            current = (await self.engine.memories.get(NAMESPACE, self.name)).revision
            while self._revision < current:
                _, self._revision, _, events = await anext(watch)
                found += events
        finally:
            await watch.aclose()
        self.history += found
        return found

    async def fragments(self) -> list[Fragment]:
        live, _, _, _ = await self.engine.fragments.list_page(NAMESPACE, self.name, Listing(), -1, 1_000)
        forgotten, _, _, _ = await self.engine.fragments.list_page(
            NAMESPACE, self.name, Listing(forgotten=True), -1, 1_000
        )
        return sorted([*live, *forgotten], key=lambda fragment: fragment.position)

    async def extra(self, command: Command) -> list[str]:
        if command.name == "merged":
            lines = []
            for id_ in command.words:
                _, merged, _ = await self.engine.fragments.get(NAMESPACE, self.name, id=id_)
                lines.append(f"merged {id_}: {merged}")
            return lines
        if command.name == "advance":
            self.clock.offset_us += int(command.words[0]) * 1_000_000
            return []
        if command.name == "recollect":
            await self.engine.reinforce_fragments(NAMESPACE, self.name, command.words)
            return []
        raise ValueError(f"the engine driver does not know {command.name}")
