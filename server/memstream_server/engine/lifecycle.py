"""What happens to fragments by request: update, forget, restore, clear. Each is one decision in the memory's order.

Values a decision needs from the journal are read inside that order, so nothing can change between reading and writing;
what needs a model is asked before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memstream_server.core import lifecycle
from memstream_server.core.columns import GONE
from memstream_server.core.events import Reason
from memstream_server.core.transition import Transition
from memstream_server.core.values import Fragment, Held, Metadata, Structured, Tier, Vector
from memstream_server.engine.decision import Decision
from memstream_server.engine.errors import EtagMismatch, FragmentNotFound
from memstream_server.engine.gather import Gathered, compares_content
from memstream_server.engine.requests import fragment_etag

if TYPE_CHECKING:
    from memstream_server.engine.actor import Actor
    from memstream_server.engine.dependencies import Dependencies


@dataclass(frozen=True, slots=True, eq=False)
class FragmentChange:
    """Asks for other values of one fragment; None keeps."""

    id: str
    content: str | None = None
    structured: Structured | None = None
    """Given with its text as `content`; None with a content makes the fragment plain text."""
    speaker: str | None = None
    importance: float | None = None
    metadata: Metadata | None = None
    expire_time_us: int | None = None
    never_expires: bool = False
    pinned: bool | None = None
    vector: Vector | None = None
    """The client's own vector of the new content."""
    etag: str = ""


async def update(actor: Actor, change: FragmentChange, dependencies: Dependencies) -> Fragment:
    """The fragment as changed. Raises FragmentNotFound, EtagMismatch."""
    seen = await _one(actor, change.id, dependencies)
    part = await _gathered(actor, _changed(seen, change), change, dependencies) if _says_else(change) else None

    async def decide(now: Actor) -> Decision:
        current = await _one(now, change.id, dependencies)
        if change.etag and change.etag != fragment_etag(current):
            raise EtagMismatch(f"fragment {change.id} has changed since; read it again", etag=fragment_etag(current))
        changed = _changed(current, change)
        if part is None:
            return Decision(transition=lifecycle.update(now.working.state, changed))
        changed = replace(changed, model=part.fragment.model)
        transition = lifecycle.update(now.working.state, changed, part.content_vector)
        return Decision(transition=transition, gathered={change.id: part})

    await actor.run(decide)
    return await _one(actor, change.id, dependencies)


def _says_else(change: FragmentChange) -> bool:
    """Whether the change touches the text that is embedded and indexed."""
    return change.content is not None or change.speaker is not None


def _changed(fragment: Fragment, change: FragmentChange) -> Fragment:
    if change.content is not None:
        own = change.vector is not None
        fragment = replace(
            fragment, content=change.content, structured=change.structured, token_count=0, own_vector=own
        )
    wanted: Mapping[str, object] = {
        "speaker": change.speaker,
        "importance": change.importance,
        "metadata": change.metadata,
        "pinned": change.pinned,
        "expire_time_us": change.expire_time_us,
    }
    for name, value in wanted.items():
        if value is not None:
            fragment = replace(fragment, **{name: value})  # type: ignore[arg-type]  # names and types as declared above
    return replace(fragment, expire_time_us=None) if change.never_expires else fragment


async def _gathered(actor: Actor, fragment: Fragment, change: FragmentChange, dependencies: Dependencies) -> Gathered:
    record = actor.working.record
    own = {} if change.vector is None else {fragment.id: change.vector}
    return (await dependencies.gatherer.gather([fragment], own, [fragment.importance], record.kind, record.policy))[0]


async def forget(actor: Actor, ids: Sequence[str], dependencies: Dependencies) -> int:
    """Out of recall, restorable within the policy's grace. Returns how many; ids that are not there are passed over."""
    count = 0

    async def decide(now: Actor) -> Decision | None:
        nonlocal count
        fragments = await _some(now, ids, dependencies)
        transition = lifecycle.forget(now.working.state, fragments, dependencies.clock.now_us(), Reason.REQUESTED)
        count = len(transition.events)
        return _decision(transition)

    await actor.run(decide)
    return count


async def restore(actor: Actor, ids: Sequence[str], dependencies: Dependencies) -> int:
    """Back into recall. Returns how many; ids that are not forgotten are passed over."""
    count = 0

    async def decide(now: Actor) -> Decision | None:
        nonlocal count
        forgotten = [one for one in await _some(now, ids, dependencies) if one.forget_time_us is not None]
        vectors: Sequence[Vector | None] = [None] * len(forgotten)
        record = now.working.record
        if forgotten and compares_content(record.kind, record.policy):
            vectors = list(await dependencies.gatherer.content_vectors([one.content for one in forgotten]))
        held = [Held(one, vector) for one, vector in zip(forgotten, vectors, strict=True)]
        transition = lifecycle.restore(now.working.state, held, record.policy)
        count = len(transition.puts)
        return _decision(transition)

    await actor.run(decide)
    return count


async def clear(actor: Actor, tiers: Sequence[Tier], dependencies: Dependencies) -> int:
    """Empty these tiers for good, forgotten fragments of them included; no tiers are all. Returns how many left."""
    count = 0
    wanted = frozenset(tiers or Tier)

    def decide(now: Actor) -> Decision | None:
        nonlocal count
        columns, held = now.working.columns, now.working.held_ids()
        outside = [
            Fragment(id=id_, content="", tier=columns.tier(slot))
            for slot, id_ in enumerate(columns.ids)
            if id_ != GONE and id_ not in held
        ]
        transition = lifecycle.clear(now.working.state, outside, wanted)
        count = len(transition.removed)
        return _decision(transition)

    await actor.run(decide)
    return count


def _decision(transition: Transition) -> Decision | None:
    return Decision(transition=transition) if transition.events else None


async def _some(actor: Actor, ids: Sequence[str], dependencies: Dependencies) -> list[Fragment]:
    """The fragments as they are now: the held ones from RAM, whose counts are ahead of none."""
    held = {one.fragment.id: one.fragment for one in (*actor.working.state.sensory, *actor.working.state.short_term)}
    outside = [id_ for id_ in dict.fromkeys(ids) if id_ not in held]
    read = {one.id: one for one in await dependencies.journal.fragments(actor.uid, outside)} if outside else {}
    found = {**read, **held}
    return [found[id_] for id_ in dict.fromkeys(ids) if id_ in found]


async def _one(actor: Actor, fragment_id: str, dependencies: Dependencies) -> Fragment:
    found = await _some(actor, [fragment_id], dependencies)
    if not found:
        raise FragmentNotFound(f"there is no fragment {fragment_id!r} in this memory", id=fragment_id)
    return found[0]
