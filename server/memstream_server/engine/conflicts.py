"""Suspicions: listed from the journal, decided in the memory's order by a request or by the job of the LLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memstream_server.core.events import Event, EventType
from memstream_server.core.supersession import SupersessionCycle, find_ends, supersede_fragments
from memstream_server.core.suspicions import ConflictDecision, Suspicion
from memstream_server.core.transition import Transition
from memstream_server.core.values import Fragment
from memstream_server.engine.errors import EtagMismatch, FragmentNotFound
from memstream_server.engine.lifecycle import read_fragments, run_decision
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.requests import Once, fragment_etag
from memstream_server.ports.journal.reading import StoredConflict
from memstream_server.ports.journal.writing import Resolution

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

Resolved = tuple[StoredConflict, int]
"""The suspicion with its decision, and the memory's revision."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a client or the LLM decides about a suspicion."""

    newer: str
    older: str
    decision: ConflictDecision
    note: str = ""


class Conflicts:
    """The suspicions of all memories; a part of the engine."""

    def __init__(self, storage: Storage, runtime: Runtime, registry: Registry) -> None:
        self._storage = storage
        self._runtime = runtime
        self._registry = registry

    async def list_page(
        self, namespace: str, name: str, decided: bool, after: tuple[str, str], limit: int
    ) -> tuple[list[StoredConflict], bool, str]:
        """(suspicions by (newer, older) after `after`, whether there are more, memory uid)."""
        record = await self._registry.read_record(namespace, name)
        found = await self._storage.journal.list_conflicts(record.uid, decided, after, limit + 1)
        return found[:limit], len(found) > limit, record.uid

    async def resolve(self, namespace: str, name: str, verdict: Verdict, once: Once[Resolved] | None) -> Resolved:
        """Decide about two statements, suspected or not. Raises FragmentNotFound as `decide_suspicion` does."""

        async def decide(now: Actor) -> tuple[Decision, Callable[[int], Resolved]]:
            decision, done = await decide_suspicion(now, verdict, self._storage, self._runtime)
            return decision, lambda revision: (done, revision)

        async with self._registry.use(namespace, name) as actor:
            return await run_decision(actor, once, self._storage, decide)


async def decide_suspicion(
    now: Actor, verdict: Verdict, storage: Storage, runtime: Runtime
) -> tuple[Decision, StoredConflict]:
    """What a verdict does, in the memory's order, and the pair with its decision.

    Raises FragmentNotFound if a fragment is not in the memory or is forgotten, or if the pair is not suspected and the
    first was not observed after the second; EtagMismatch if the loser supersedes the winner already.
    """
    time_us = runtime.clock.now_us()
    known = await storage.journal.get_conflict(now.uid, verdict.newer, verdict.older)
    suspicions: tuple[Suspicion, ...] = ()
    if known is None:
        await _check_order(now, verdict, storage)
        suspicions = (Suspicion(verdict.newer, verdict.older, time_us=time_us),)
        known = StoredConflict(suspicions[0])
    event = Event(EventType.CONFLICT_RESOLVED, verdict.newer, verdict.older, conflict_decision=verdict.decision)
    decision = Decision(
        transition=await _supersede_loser(now, verdict, storage, time_us),
        events=(event,),
        suspicions=suspicions,
        resolutions=(Resolution(verdict.newer, verdict.older, verdict.decision, verdict.note, time_us),),
        time_us=time_us,
    )
    return decision, replace(known, decision=verdict.decision, note=verdict.note, decide_time_us=time_us)


async def _check_order(now: Actor, verdict: Verdict, storage: Storage) -> None:
    """Raises FragmentNotFound unless both are in the memory and `newer` was observed after `older`."""
    found = {one.id: one for one in await read_fragments(now, (verdict.newer, verdict.older), storage)}
    for id_ in (verdict.newer, verdict.older):
        if id_ not in found or found[id_].forget_time_us is not None:
            raise FragmentNotFound(f"fragment {id_} is not in the memory, or is forgotten: restore it", id=id_)
    if found[verdict.newer].last_observed <= found[verdict.older].last_observed:
        text = f"{verdict.newer} was not observed after {verdict.older}: name the later one first"
        raise FragmentNotFound(text, id=verdict.newer)


async def _supersede_loser(now: Actor, verdict: Verdict, storage: Storage, time_us: int) -> Transition | None:
    """What a decision for one of the two does: the other one, or the current end of its chain, is superseded.

    Raises FragmentNotFound if one of them is forgotten.
    """
    if verdict.decision not in (ConflictDecision.NEWER, ConflictDecision.OLDER):
        return None
    pair = (verdict.newer, verdict.older)
    winner, loser = pair if verdict.decision is ConflictDecision.NEWER else pair[::-1]
    known = await _read_chains(now, pair, storage)
    for id_ in pair:
        if id_ not in known or known[id_].forget_time_us is not None:
            raise FragmentNotFound(f"fragment {id_} is not in the memory, or is forgotten: restore it", id=id_)
    try:
        ends = find_ends([loser], winner, lambda id_: known[id_].superseded_by)
    except SupersessionCycle:
        text = f"{loser} supersedes {winner} already: restore {winner} first"
        raise EtagMismatch(text, etag=fragment_etag(known[winner])) from None
    return supersede_fragments(now.working.state, [known[id_] for id_ in ends], known[winner], time_us)


async def _read_chains(now: Actor, ids: Sequence[str], storage: Storage) -> dict[str, Fragment]:
    """These fragments and all that supersede them, directly or not."""
    known: dict[str, Fragment] = {}
    while missing := [id_ for id_ in ids if id_ and id_ not in known]:
        found = await read_fragments(now, missing, storage)
        known |= {one.id: one for one in found}
        if not found:
            break
        ids = [one.superseded_by for one in found]
    return known
