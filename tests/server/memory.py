"""Runs scenarios through a real client of a real server: the same files as in the core's and the engine's tests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

import memstream
from memstream import AckLevel, EventType, Memory, Observation, Watch
from memstream import Structured as SaidStructured
from memstream_server.core import events as core
from memstream_server.core.values import Fragment, FragmentKind, Structured, Tier, Vector
from tests.server.listing import fragments
from tests.support.scenario import Change, Command, MemorySpec, Query, Said


class ClientMemory:
    """The Driver protocol over the SDK; each `create` creates a memory in `namespace`."""

    def __init__(self, client: memstream.Client, namespace: str, dimension: int) -> None:
        self.client = client
        self.namespace = namespace
        self.dimension = dimension
        self.memory: Memory
        self._watch: Watch | None = None
        self._numbers = itertools.count(1)
        self._sentinel: Sentinel | None = None

    async def close(self) -> None:
        if self._watch is not None:
            await self._watch.aclose()
        if self._sentinel is not None:
            await self._sentinel.close()

    async def create(self, spec: MemorySpec) -> None:
        if self._watch is not None:
            await self._watch.aclose()
        self.memory = await self.client.create_memory(
            f"{self.namespace}/m{next(self._numbers)}",
            kind=memstream.MemoryKind(spec.kind),
            policy={"profile": str(spec.profile)} | nested(spec.overrides),
        )
        self._watch = self.memory.watch("beginning")

    async def set_policy(self, overrides: Mapping[str, object]) -> None:
        await self.memory.update(policy=nested(overrides))

    async def observe(self, said: Said) -> str:
        structured = None if said.structured is None else SaidStructured(**_fields(said.structured))
        observation = Observation(
            body=said.content if structured is None else structured,
            speaker=said.speaker,
            session=said.session,
            importance=said.importance,
            external_id=said.external_id,
            embedding=self._padded(said.vector),
            metadata=dict(said.metadata),
            ttl=None if said.ttl_s is None else timedelta(seconds=said.ttl_s),
            observe_time=None if said.observe_time_s is None else datetime.fromtimestamp(said.observe_time_s, UTC),
            supersedes=said.supersedes,
        )
        result = await self.memory.observe_batch([observation], ack_level=AckLevel.STORED)
        return result.outcomes[0].fragment_id

    async def recall(self, query: Query) -> list[str]:
        options = memstream.RecallOptions()
        if query.limit is not None:
            options["limit"] = query.limit
        if (vector := self._padded(query.vector)) is not None:
            options["embedding"] = vector
        answer = await self.memory.recall_once(query.text, session=query.session, **options)
        await self._reinforced()
        return [found.fragment.id for found in answer]

    async def clear(self, tiers: Sequence[Tier]) -> None:
        await self.memory.clear([memstream.Tier(tier) for tier in tiers])

    async def forget(self, ids: Sequence[str]) -> None:
        await self.memory.forget_fragments(ids)

    async def restore(self, ids: Sequence[str]) -> None:
        await self.memory.restore_fragments(ids)

    async def supersede(self, olds: Sequence[str], new: str) -> str:
        try:
            return f"superseded {await self.memory.supersede(olds, newer_id=new)}"
        except memstream.InvalidRequest as error:
            return f"cycle {next(one for one in olds if repr(one) in str(error))}"

    async def erase(self, ids: Sequence[str]) -> None:
        raise ValueError("the server does not erase yet")

    async def update(self, change: Change) -> None:
        if change.vector is not None:
            raise ValueError("an update over the wire carries no vector")
        await self.memory.update_fragment(
            change.id, content=change.content, importance=change.importance, pinned=change.pinned
        )

    async def events(self) -> list[core.Event]:
        """Reads up to a change of the labels, which is an event of no fragment."""
        assert self._watch is not None
        mark = (await self.memory.update(labels={"mark": str(next(self._numbers))})).revision
        found: list[memstream.Event] = []
        while not found or found[-1].cursor.revision < mark:
            found.append(await asyncio.wait_for(anext(self._watch), 60))
        return [event_of(one) for one in found if one.fragment_id]

    async def fragments(self) -> list[Fragment]:
        """Positions are not on the wire; ids are in the same order."""
        listed = [*await fragments(self.memory), *await fragments(self.memory, forgotten=True)]
        ordered = sorted(listed, key=lambda one: one.id)
        return [fragment_of(one, position) for position, one in enumerate(ordered)]

    async def extra(self, command: Command) -> list[str]:
        if command.name != "merged":
            raise ValueError(f"the client driver does not know {command.name}")
        return [f"merged {id_}: {(await self.memory.get_fragment(id_)).merged_text}" for id_ in command.words]

    async def _reinforced(self) -> None:
        if self._sentinel is None:
            vector = np.eye(1, self.dimension, dtype=np.float32)[0]
            self._sentinel = await Sentinel.create(self.client, self.namespace, vector)
        await self._sentinel.wait()

    def _padded(self, vector: Vector | None) -> Vector | None:
        """The same direction in more dimensions: all cosines are unchanged."""
        return None if vector is None else np.concatenate([vector, np.zeros(self.dimension - len(vector), np.float32)])


class Sentinel:
    """A memory whose every recall reinforces: reinforcement is decided in order, so earlier recalls are decided as
    well."""

    def __init__(self, memory: Memory, vector: Vector) -> None:
        self._memory = memory
        self._vector = vector
        self._watch = memory.watch("beginning", types=[EventType.ENHANCED])
        self._numbers = itertools.count(1)

    @classmethod
    async def create(cls, client: memstream.Client, namespace: str, vector: Vector) -> Sentinel:
        policy = {"short_term": {"capacity": 1, "enhance_threshold": 1000}}
        sentinel = cls(await client.create_memory(f"{namespace}/sentinel", policy=policy), vector)
        await sentinel._observe()
        return sentinel

    async def wait(self) -> None:
        """Returns once all earlier recalls are decided."""
        held = await self._observe()
        await self._memory.recall_once(
            "anything", embedding=self._vector, filter=memstream.Filter(tiers=[memstream.Tier.LONG_TERM]), limit=1
        )
        while (await asyncio.wait_for(anext(self._watch), 60)).fragment_id != held:
            pass

    async def close(self) -> None:
        await self._watch.aclose()

    async def _observe(self) -> str:
        observation = Observation(f"watchword {next(self._numbers)}", embedding=self._vector)
        return (await self._memory.observe_batch([observation])).outcomes[0].fragment_id


def nested(overrides: Mapping[str, object]) -> dict[str, Any]:
    """Dotted policy fields as the SDK takes them: by message, durations without their unit."""
    policy: dict[str, Any] = {}
    for name, value in overrides.items():
        *path, leaf = name.split(".")
        into = policy
        for part in path:
            into = into.setdefault(part, {})
        into[leaf.removesuffix("_s")] = str(value) if isinstance(value, str) else value
    return policy


def event_of(event: memstream.Event) -> core.Event:
    """The core's event for an event of the SDK."""
    return core.Event(
        type=core.EventType(event.type),
        fragment=event.fragment_id,
        other=event.other_id,
        from_tier=Tier(event.from_tier) if event.from_tier else None,
        to_tier=Tier(event.to_tier) if event.to_tier else None,
        reason=core.Reason(event.reason) if event.reason else core.Reason.NONE,
        cosine=event.cosine,
        draw=event.draw,
        importance=event.importance,
        sources=event.sources,
        imported=None if event.imported is None else _imported_of(event.imported),
    )


def _imported_of(had: memstream.ImportedFragment) -> core.Imported:
    return core.Imported(
        kind=FragmentKind(had.kind or FragmentKind.OBSERVATION),
        enhancements=had.enhancers,
        enhancement_count=had.enhancement_count,
        duplicate_count=had.duplicate_count,
        forgotten=had.forgotten,
    )


def fragment_of(fragment: memstream.Fragment, position: int = 0) -> Fragment:
    """The core's fragment for a fragment of the SDK, as far as the wire has its fields."""
    structured = None if fragment.structured is None else Structured(**_fields(fragment.structured))
    assert fragment.tier is not None
    return Fragment(
        id=fragment.id,
        content=fragment.content if structured is None else structured.text(),
        structured=structured,
        tier=Tier(fragment.tier),
        kind=FragmentKind(fragment.kind),
        speaker=fragment.speaker,
        session=fragment.session,
        importance=round(fragment.importance, 6),
        observe_time_us=_us(fragment.observe_time),
        create_time_us=_us(fragment.create_time),
        access_time_us=_us(fragment.access_time),
        access_count=fragment.access_count,
        enhancement_count=fragment.enhancement_count,
        duplicate_count=fragment.duplicate_count,
        sources=fragment.sources,
        pinned=fragment.pinned,
        external_id=fragment.external_id,
        forget_time_us=None if fragment.forget_time is None else _us(fragment.forget_time),
        superseded_by=fragment.superseded_by,
        supersedes=fragment.supersedes,
        position=position,
    )


def _us(time: datetime | None) -> int:
    return 0 if time is None else int(time.timestamp() * 1e6)


def _fields(structured: Structured | SaidStructured) -> dict[str, str]:
    names = ("question", "thought", "phase", "action_intention", "action_reason", "action", "action_input")
    return {name: getattr(structured, name) for name in (*names, "observation")}
