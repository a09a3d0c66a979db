"""The operation "erase": fragments and what derives from them go for good, from every file of the embedded server.

Rule 1. What is named and all that derives from it leave in one commit for each part, so that a crash leaves no insight
whose origin can no longer be told; the ids are in the operation's payload, and a repeat finds what is left.
Rule 2. The files come last: one rewriting of the journal and one rebuild of the index serve all erasures that wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from memstream_server.core import lineage
from memstream_server.core.filters import Filter
from memstream_server.core.lineage import Erasure
from memstream_server.core.values import Fragment
from memstream_server.engine.errors import MemoryNotFound
from memstream_server.engine.lifecycle import matching, some, stored_vectors
from memstream_server.engine.memory.decide import jobs_of
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.memory.enrich import Gathered
from memstream_server.engine.operations.runner import AnswerOf, OperationRunner, Progress
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.background.indexer import Indexer
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.recall.reinforcement import Reinforcement
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

TYPE = "erase"
UNIT = "fragments"
AT_ONCE = 64
"""More than others, because most of them wait for the same files."""
BATCH = 1_000
"""Fragments named by one decision."""
PAGE = 1_000
LOOK_S = 0.5
"""How often a wait for what is not stored yet looks whether it is still wanted."""


class Erasing:
    """Starts and does it."""

    def __init__(
        self,
        runner: OperationRunner,
        storage: Storage,
        models: EngineModels,
        runtime: Runtime,
        registry: Registry,
        indexer: Indexer,
        reinforcement: Reinforcement,
    ) -> None:
        self._runner = runner
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._registry = registry
        self._indexer = indexer
        self._reinforcement = reinforcement
        self._scrubbing = asyncio.Lock()
        self._asked = self._scrubbed = 0
        runner.register(TYPE, UNIT, self._work, at_once=AT_ONCE, in_turn=False)

    async def start(
        self, namespace: str, name: str, which: Sequence[str] | Filter, answer: AnswerOf = None
    ) -> Operation:
        """By ids, unknown ones are passed over, or by filter, forgotten fragments included. Raises MemoryNotFound."""
        record = await self._registry.record(namespace, name)
        if isinstance(which, Filter):
            live = await matching(record.uid, which, False, self._storage)
            which = live + await matching(record.uid, which, True, self._storage)
        payload = json.dumps({"memory": record.uid, "ids": list(dict.fromkeys(which))})
        return await self._runner.start(TYPE, namespace, name, payload, answer)

    async def _work(self, operation: Operation, progress: Progress) -> None:
        asked = json.loads(operation.payload)
        ids: list[str] = asked["ids"]
        try:
            async with self._registry.use_uid(asked["memory"]) as actor:
                await self._fragments(actor, ids, progress)
        except MemoryNotFound:  # deleted, and all it held with it
            pass

        async def still(_done: int, _total: int) -> None:
            await progress.at(len(ids), len(ids))

        if self._storage.index.keeps_deleted:
            await self._indexer.rebuild(still)
        else:
            await self._indexer.caught_up(asked["memory"], lambda: still(0, 0))
        await self._scrub()
        await progress.at(len(ids), len(ids))

    async def _scrub(self) -> None:
        """Rewrite the journal's files, once for all who ask meanwhile."""
        self._asked += 1
        mine = self._asked
        async with self._scrubbing:
            if self._scrubbed < mine:
                serves = self._asked
                await self._storage.journal.scrub_files()
                self._scrubbed = serves

    # ---- fragments
    async def _fragments(self, actor: Actor, ids: Sequence[str], progress: Progress) -> None:
        named = set(ids)
        while actor.receiving.unstored(named):
            await progress.at(0, len(ids))
            with contextlib.suppress(TimeoutError):  # looked at anew: a model that is away may hold it up for hours
                async with asyncio.timeout(LOOK_S):
                    await actor.revision_reached(actor.revision + 1)
        while True:  # again, until nothing derives from them: streams and jobs go on meanwhile
            derived = await _derived(actor.uid, self._storage)
            found = False
            for start in range(0, len(ids), BATCH):
                found = await self._part(actor, ids[start : start + BATCH], derived) or found
                await progress.at(max(progress.operation.done, min(start + BATCH, len(ids))), len(ids))
            if not found:
                return

    async def _part(self, actor: Actor, named: Sequence[str], derived: Mapping[str, Collection[str]]) -> bool:
        """Erase these and what derives from them, in one commit. False when there was nothing to do."""
        closure = _closure(named, derived)
        known = {id_ for ids in derived.values() for id_ in ids}
        while (done := await self._try(actor, named, closure, known)) is None:
            continue
        return done

    async def _try(
        self, actor: Actor, named: Sequence[str], closure: Sequence[str], known: Collection[str]
    ) -> bool | None:
        """None when what is to be told anew has changed since its vectors were made."""
        fragments = await some(actor, closure, self._storage)
        gathered = await self._gathered(actor, self._followed(actor, named, fragments), fragments)
        done: list[bool] = []

        async def decide(now: Actor) -> Decision | None:
            newer = sorted(now.working.insights.difference(known))
            found = await some(now, [*closure, *newer], self._storage)
            decision = self._decide(now, named, found, gathered)
            if decision is None:
                return None
            done.append(decision.transition is not None and bool(decision.transition.events))
            return decision if done[0] else None

        await actor.run(decide)
        return done[0] if done else None

    def _followed(self, actor: Actor, named: Sequence[str], fragments: Sequence[Fragment]) -> Erasure:
        merges = actor.working.record.policy.short_term.merge_content
        return lineage.trace_erasure(named, fragments, merges=merges)

    async def _gathered(self, actor: Actor, erasure: Erasure, fragments: Sequence[Fragment]) -> dict[str, Gathered]:
        """Terms and vectors of new contents. The client's own vector is of the fragment's own words, which stay."""
        record, before = actor.working.record, {one.id: one.content for one in fragments}
        retold = [one for one in erasure.retold if one.content != before[one.id]]
        if not retold:
            return {}
        own = await stored_vectors(actor, [one.id for one in retold if one.own_vector], self._storage)
        parts = await self._models.gatherer.gather(
            retold, own, [one.importance for one in retold], record, account_of(record), actor.working.embedding
        )
        return {part.fragment.id: part for part in parts}

    def _decide(
        self, now: Actor, named: Sequence[str], fragments: Sequence[Fragment], gathered: Mapping[str, Gathered]
    ) -> Decision | None:
        before = {one.id: one for one in fragments}
        space = now.working.embedding.name
        gathered = {id_: part.under(space) for id_, part in gathered.items()}
        erasure = self._followed(now, named, fragments)
        retold: list[Fragment] = []
        for one in erasure.retold:
            if one.content == before[one.id].content:
                retold.append(one)
            elif one.id in gathered and gathered[one.id].fragment.content == one.content:
                retold.append(one.but(model=gathered[one.id].fragment.model))
            else:
                return None
        vectors = {id_: part.content_vector for id_, part in gathered.items() if part.content_vector is not None}
        transition = lineage.apply_erasure(now.working.state, Erasure(erasure.leaving, tuple(retold)), before, vectors)
        parts = {one.id: gathered[one.id] for one in retold if one.content != before[one.id].content}
        erased = (*transition.removed, *parts)
        self._reinforcement.forget(set(erased))
        jobs = jobs_of(now.working, transition, parts.values(), self._runtime)
        return Decision(transition=transition, gathered=parts, erased=erased, jobs=jobs)


def _closure(named: Sequence[str], derived: Mapping[str, Collection[str]]) -> list[str]:
    """The named ids, and those of all that derives from them."""
    found = dict.fromkeys(named)
    waiting = list(found)
    while waiting:
        new = [id_ for id_ in derived.get(waiting.pop(), ()) if id_ not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return list(found)


async def _derived(uid: str, storage: Storage) -> dict[str, list[str]]:
    """Ids of the fragments that name it as a source, by id of that source; forgotten fragments too."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for forgotten in (False, True):
        after = -1
        while page := await storage.journal.list_fragments(
            uid, FragmentQuery(forgotten=forgotten, after=after, limit=PAGE)
        ):
            for fragment in page:
                for source in fragment.sources:
                    found[source].append(fragment.id)
            after = page[-1].position
    return found
