"""Supersedes fragments by request: one decision in the memory's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from memstream_server.core.supersession import SupersessionCycle, find_ends, supersede_fragments
from memstream_server.core.values import Fragment
from memstream_server.engine.errors import FragmentNotFound
from memstream_server.engine.lifecycle import drop_expired, read_fragments, run_decision
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.memory.superseding import cycle_error, unknown_error
from memstream_server.engine.requests import Changed, Once

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import Runtime, Storage


async def supersede(
    actor: Actor,
    olds: Sequence[str],
    new: str,
    storage: Storage,
    runtime: Runtime,
    once: Once[Changed] | None = None,
) -> Changed:
    """Mark the fragments `olds` as superseded by `new`; all are ids or external ids.

    Raises FragmentNotFound for one that is not in the memory, InvalidField for one that `new` is an older state of.
    Then nothing has changed.
    """

    async def decide(now: Actor) -> tuple[Decision | None, Callable[[int], Changed]]:
        working, now_us = now.working, runtime.clock.now_us()
        ids = {key: working.find_id(key) for key in (*olds, new)}
        there = await _read_unexpired(now, list(ids.values()), storage, now_us)
        for key, id_ in ids.items():
            if id_ not in there:
                raise unknown_error(key)
        newer = there[ids[new]]
        if newer.forget_time_us is not None:
            raise FragmentNotFound(f"fragment {new!r} is forgotten: restore it first", id=new)
        try:
            ends = find_ends([ids[key] for key in olds], newer.id, working.links.newer)
        except SupersessionCycle as error:
            key = next(key for key in olds if ids[key] == error.older)
            raise cycle_error(key, "newer_id") from error
        if not ends:
            return None, lambda revision: Changed(0, revision)
        last = {one.id: one for one in await read_fragments(now, ends, storage)}
        step = supersede_fragments(working.state, [last[id_] for id_ in ends], newer, now_us)
        return Decision(transition=step), lambda revision: Changed(len(ends), revision)

    return await run_decision(actor, once, storage, decide)


async def _read_unexpired(actor: Actor, ids: Sequence[str], storage: Storage, now_us: int) -> dict[str, Fragment]:
    found = await read_fragments(actor, [id_ for id_ in ids if id_], storage)
    return {one.id: one for one in drop_expired(found, actor.working.record, now_us)}
