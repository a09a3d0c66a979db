"""The operation "erase": removes fragments, and those derived from them, from every file of the embedded server.

Rule 1. Each batch of fragments leaves with all that derives from it in one commit, so that a crash leaves no insight
without its lineage. The operation's payload has the ids, and a repeat does the rest.
Rule 2. The files come last: the journal zeroes what it deletes, so its log is emptied; the index rewrites the files
that hold deleted vectors. Waiting erasures share both. Neither costs more for what others store.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from memstream_server.core import lineage
from memstream_server.core.filters import Filter
from memstream_server.core.lineage import Erasure
from memstream_server.core.values import Fragment
from memstream_server.engine.errors import MemoryNotFound
from memstream_server.engine.lifecycle import list_matching, read_fragments, stored_vectors
from memstream_server.engine.memory.decide import jobs_of
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.memory.enrich import EnrichedFragment
from memstream_server.engine.operations.runner import AnswerOf, OperationRunner, Progress
from memstream_server.engine.runtime.turns import in_slices
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
"""More than other types, because most of them wait for the same files."""
BATCH = 1_000
"""Fragments per decision."""
POLL_INTERVAL_S = 0.5
"""How often a wait for unstored fragments checks for cancellation."""


class Erasing:
    """Starts and runs erasures."""

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
        runner.register_type(TYPE, UNIT, self._run_erase, at_once=AT_ONCE, in_turn=False)

    async def start(
        self, namespace: str, name: str, which: Sequence[str] | Filter, answer: AnswerOf = None
    ) -> Operation:
        """Erase by ids (unknown ones are skipped) or by filter, including forgotten fragments. Raises
        MemoryNotFound.
        """
        record = await self._registry.read_record(namespace, name)
        if isinstance(which, Filter):
            live = await list_matching(record.uid, which, False, self._storage)
            which = live + await list_matching(record.uid, which, True, self._storage)
        payload = json.dumps({"memory": record.uid, "ids": list(dict.fromkeys(which))})
        return await self._runner.start(TYPE, namespace, name, payload, answer)

    async def _run_erase(self, operation: Operation, progress: Progress) -> None:
        asked = json.loads(operation.payload)
        ids: list[str] = asked["ids"]
        try:
            async with self._registry.use_uid(asked["memory"]) as actor:
                await self._erase_fragments(actor, ids, progress)
        except MemoryNotFound:  # the memory was deleted with all its content
            pass

        async def check_cancelled(_done: int = 0, _total: int = 0) -> None:
            await progress.report_done(len(ids), len(ids))

        await self._erase_index(asked["memory"], check_cancelled)
        await self._storage.images.remove(asked["memory"], durable=True)
        await self._storage.journal.scrub_files()
        await progress.report_done(len(ids), len(ids))

    async def _erase_index(self, uid: str, at: Callable[..., Awaitable[None]]) -> None:
        """Return when no file of the index has the memory's deleted vectors. An idle index has no files."""
        index = self._storage.index
        if index.is_idle:
            return
        await self._indexer.wait_for_memory(uid, at)
        if index.keeps_deleted and not await self._indexer.erase_deleted(at):
            await self._indexer.rebuild_index(at)

    # ---- fragments
    async def _erase_fragments(self, actor: Actor, ids: Sequence[str], progress: Progress) -> None:
        named = set(ids)
        while actor.producers.has_unstored(named):
            await progress.report_done(0, len(ids))
            # checks for cancellation: a model that is down may delay it for hours
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_S):
                    await actor.wait_for_revision(actor.revision + 1)
        while True:  # repeats until nothing derives from them: streams and jobs add fragments meanwhile
            before, commits = actor.revision, 0
            cited = await self._storage.journal.list_citing(actor.uid)
            derived = await _invert(cited)
            for start in range(0, len(ids), BATCH):
                commits += await self._erase_part(actor, ids[start : start + BATCH], derived, cited.keys())
                await progress.report_done(max(progress.operation.done, min(start + BATCH, len(ids))), len(ids))
            if not commits or actor.revision == before + commits:  # nobody else has changed the memory meanwhile
                return

    async def _erase_part(
        self, actor: Actor, named: Sequence[str], derived: Mapping[str, Collection[str]], known: Collection[str]
    ) -> bool:
        """Erase these fragments and all that derives from them in one commit. False if there was nothing to do.

        known: the fragments that cite any.
        """
        closure = _collect_closure(named, derived)
        while (done := await self._try_erase(actor, named, closure, known)) is None:
            continue
        return done

    async def _try_erase(
        self, actor: Actor, named: Sequence[str], closure: Sequence[str], known: Collection[str]
    ) -> bool | None:
        """One attempt; None if a fragment to rewrite has changed since its vectors were made."""
        fragments = await read_fragments(actor, closure, self._storage)
        gathered = await self._enrich_rewritten(actor, self._follow_lineage(actor, named, fragments), fragments)
        done: list[bool] = []

        async def decide(now: Actor) -> Decision | None:
            newer = sorted(now.working.insights.difference(known))
            found = await read_fragments(now, [*closure, *newer], self._storage)
            decision = self._decide_erase(now, named, found, gathered)
            if decision is None:
                return None
            done.append(decision.transition is not None and bool(decision.transition.events))
            return decision if done[0] else None

        await actor.run(decide)
        return done[0] if done else None

    def _follow_lineage(self, actor: Actor, named: Sequence[str], fragments: Sequence[Fragment]) -> Erasure:
        merges = actor.working.record.policy.short_term.merge_content
        return lineage.trace_erasure(named, fragments, merges=merges)

    async def _enrich_rewritten(
        self, actor: Actor, erasure: Erasure, fragments: Sequence[Fragment]
    ) -> dict[str, EnrichedFragment]:
        """Terms and vectors of rewritten contents. A client's vector belongs to the fragment's own text, which
        stays.
        """
        record, before = actor.working.record, {one.id: one.content for one in fragments}
        retold = [one for one in erasure.retold if one.content != before[one.id]]
        if not retold:
            return {}
        own = await stored_vectors(actor, [one.id for one in retold if one.own_vector], self._storage)
        parts = await self._models.enricher.enrich_fragments(
            retold, own, [one.importance for one in retold], record, account_of(record), actor.working.embedding
        )
        return {part.fragment.id: part for part in parts}

    def _decide_erase(
        self, now: Actor, named: Sequence[str], fragments: Sequence[Fragment], gathered: Mapping[str, EnrichedFragment]
    ) -> Decision | None:
        before = {one.id: one for one in fragments}
        space = now.working.embedding.name
        gathered = {id_: part.in_space(space) for id_, part in gathered.items()}
        erasure = self._follow_lineage(now, named, fragments)
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
        self._reinforcement.forget_vectors(set(erased))
        jobs = jobs_of(now.working, transition, parts.values(), self._runtime)
        changed = tuple(put.id for put in transition.puts)
        return Decision(transition=transition, gathered=parts, erased=erased, forgotten_versions=changed, jobs=jobs)


def _collect_closure(named: Sequence[str], derived: Mapping[str, Collection[str]]) -> list[str]:
    """The given ids and those of all fragments that derive from them."""
    found = dict.fromkeys(named)
    waiting = list(found)
    while waiting:
        new = [id_ for id_ in derived.get(waiting.pop(), ()) if id_ not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return list(found)


async def _invert(cited: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Ids of the fragments that cite a source, by source."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    async for some in in_slices(list(cited.items()), 64):
        for id_, sources in some:
            for source in sources:
                found[source].append(id_)
    return found
