"""The history of a fragment: its versions, and the restoring of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memstream_server.core import lifecycle as core
from memstream_server.core.values import Fragment
from memstream_server.engine.errors import EtagMismatch, FragmentNotFound
from memstream_server.engine.lifecycle import read_fragment, run_decision
from memstream_server.engine.memory.decide import jobs_of
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.memory.enrich import EnrichedFragment
from memstream_server.engine.recall.reinforcement import unpack_vector
from memstream_server.engine.requests import Once, fragment_etag
from memstream_server.ports.journal.records import Version

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage


async def restore_version(
    actor: Actor,
    fragment_id: str,
    replaced: int,
    etag: str,
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[tuple[Fragment, int]] | None = None,
) -> tuple[Fragment, int]:
    """(the fragment with the content of the version that `replaced` names, revision). Raises FragmentNotFound,
    EtagMismatch."""
    seen = await read_fragment(actor, fragment_id, storage, runtime)
    version = await _read_version(actor, fragment_id, replaced, storage)
    made = await _enrich_version(actor, seen, version, models)

    async def decide(now: Actor) -> tuple[Decision, Callable[[int], tuple[Fragment, int]]]:
        current = await read_fragment(now, fragment_id, storage, runtime)
        if etag and etag != fragment_etag(current):
            raise EtagMismatch(f"fragment {fragment_id} has changed since; read it again", etag=fragment_etag(current))
        await _read_version(now, fragment_id, replaced, storage)  # an erasure may have removed it during the call
        part = made.in_space(now.working.embedding.name)
        changed = _with_version(current, version.fragment).but(
            model=part.fragment.model, own_vector=part.fragment.own_vector
        )
        transition = core.update_fragment(now.working.state, changed, part.content_vector, restores=replaced)
        jobs = jobs_of(now.working, transition, [part], runtime)
        decision = Decision(transition=transition, gathered={fragment_id: part}, jobs=jobs)
        return decision, lambda revision: (changed.but(version=revision), revision)

    return await run_decision(actor, once, storage, decide)


async def _read_version(actor: Actor, fragment_id: str, replaced: int, storage: Storage) -> Version:
    found = await storage.journal.get_versions(actor.uid, {fragment_id: replaced})
    if fragment_id not in found:
        raise FragmentNotFound(f"fragment {fragment_id!r} has no version {replaced}", id=fragment_id)
    return found[fragment_id]


async def _enrich_version(actor: Actor, seen: Fragment, version: Version, models: EngineModels) -> EnrichedFragment:
    """Terms and vectors of the version's content; a vector that the client gave is taken from the version."""
    record, space = actor.working.record, actor.working.embedding
    given = unpack_vector(version.vector) if version.fragment.own_vector and version.model == space.name else None
    wanted = _with_version(seen, version.fragment).but(own_vector=given is not None)
    own = {} if given is None else {wanted.id: given}
    parts = await models.enricher.enrich_fragments(
        [wanted], own, [wanted.importance], record, account_of(record), space
    )
    return parts[0]


def _with_version(fragment: Fragment, version: Fragment) -> Fragment:
    """The fragment with what the version says; where it is, how long it stays and what it derives from are kept."""
    return fragment.but(
        content=version.content,
        structured=version.structured,
        speaker=version.speaker,
        role=version.role,
        session=version.session,
        importance=version.importance,
        observe_time_us=version.observe_time_us,
        metadata=version.metadata,
        token_count=version.token_count,
        own_importance=version.own_importance,
    )
