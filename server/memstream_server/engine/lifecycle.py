"""What happens to fragments by request: update, forget, restore, clear. Each is one decision in the memory's order.

Rule 1. Values a decision needs from the journal are read inside that order, so nothing can change between reading and
writing; what needs a model is asked before it.
Rule 2. The answer to a request_id is committed with the change it tells of. A request for more than BATCH fragments is
several decisions, so that streams go on between them; its answer is part of the last one, and a repeat after a crash in
between goes on with what is left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from memstream_server.core import lifecycle
from memstream_server.core.columns import GONE
from memstream_server.core.events import EventType, Reason
from memstream_server.core.filters import Filter, passes
from memstream_server.core.retention import is_expired
from memstream_server.core.transition import Transition
from memstream_server.core.values import Fragment, Held, Metadata, Structured, Tier, Vector
from memstream_server.engine.errors import AlreadyAnswered, EtagMismatch, FragmentNotFound, ModelDown
from memstream_server.engine.memory.decide import jobs_of
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.memory.enrich import Gathered, compares_content, enhances_short_term
from memstream_server.engine.recall.reinforcement import unpacked
from memstream_server.engine.requests import Changed, Once, fragment_etag
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.models import ModelRefused, ModelUnavailable

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage

T = TypeVar("T")
Deciding = Callable[["Actor"], Awaitable[tuple[Decision | None, Callable[[int], T]]]]
"""What changes (None: nothing), and the call's result at the revision that makes it true."""

BATCH = 256
"""Fragments changed by one decision."""
PAGE = 1_000
"""Fragments read at once while a filter is applied."""


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


async def decided(actor: Actor, once: Once[T] | None, storage: Storage, decide: Deciding[T]) -> T:
    """Decide in the memory's order; what repeats are to be answered is committed with it.

    Raises AlreadyAnswered when a repeat overtook this call (its first try was cut off, and went on without a client).
    """
    made: list[T] = []

    async def answering(now: Actor) -> Decision | None:
        if once is not None and await storage.journal.get_answer(once.key) is not None:
            raise AlreadyAnswered("this request was answered meanwhile; ask again for its answer", retry_after_s=0.1)
        decision, result_at = await decide(now)
        commits = decision is not None or once is not None
        made.append(result_at(now.revision + commits))
        return decision if once is None else replace(decision or Decision(), answer=once.answer(made[0]))

    await actor.run(answering)
    return made[0]


async def update(
    actor: Actor,
    change: FragmentChange,
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[tuple[Fragment, int]] | None = None,
) -> tuple[Fragment, int]:
    """(the fragment as changed, revision). Raises FragmentNotFound, EtagMismatch."""
    seen = await one(actor, change.id, storage, runtime)
    made = await _gathered(actor, seen, change, storage, models) if _says_else(change) else None

    async def decide(now: Actor) -> tuple[Decision, Callable[[int], tuple[Fragment, int]]]:
        current = await one(now, change.id, storage, runtime)
        if change.etag and change.etag != fragment_etag(current):
            raise EtagMismatch(f"fragment {change.id} has changed since; read it again", etag=fragment_etag(current))
        if made is not None and change.content is None and current.content != seen.content:
            raise EtagMismatch(f"fragment {change.id} has just changed; ask again", etag=fragment_etag(current))
        changed = _changed(current, change)
        part = None if made is None else made.under(now.working.embedding.name)
        if part is not None:
            changed = changed.but(model=part.fragment.model, own_vector=part.fragment.own_vector)
        state = now.working.state
        transition = lifecycle.update_fragment(state, changed, None if part is None else part.content_vector)
        gathered = {} if part is None else {change.id: part}
        jobs = jobs_of(now.working, transition, gathered.values(), runtime)
        decision = Decision(transition=transition, gathered=gathered, jobs=jobs)
        return decision, lambda revision: (changed.but(version=revision), revision)

    return await decided(actor, once, storage, decide)


def _says_else(change: FragmentChange) -> bool:
    """Whether the change touches the text that is embedded and indexed."""
    return change.content is not None or change.speaker is not None


def _changed(fragment: Fragment, change: FragmentChange) -> Fragment:
    if change.content is not None:
        own = change.vector is not None
        fragment = fragment.but(content=change.content, structured=change.structured, token_count=0, own_vector=own)
    wanted: Mapping[str, object] = {
        "speaker": change.speaker,
        "importance": change.importance,
        "metadata": change.metadata,
        "pinned": change.pinned,
        "expire_time_us": change.expire_time_us,
    }
    for name, value in wanted.items():
        if value is not None:
            fragment = fragment.but(**{name: value})
    if change.importance is not None:
        fragment = fragment.but(own_importance=True)
    if change.never_expires:
        return fragment.but(expire_time_us=None, ttl_us=None)
    return fragment if change.expire_time_us is None else fragment.but(ttl_us=None)


async def _gathered(
    actor: Actor, seen: Fragment, change: FragmentChange, storage: Storage, models: EngineModels
) -> Gathered:
    record, fragment = actor.working.record, _changed(seen, change)
    own = {} if change.vector is None else {fragment.id: change.vector}
    if change.content is None and seen.own_vector:  # nobody here can embed in the client's space
        own |= await stored_vectors(actor, [seen.id], storage)
    known, space = [fragment.importance], actor.working.embedding
    return (await models.gatherer.gather([fragment], own, known, record, account_of(record), space))[0]


async def forget(
    actor: Actor, ids: Sequence[str], storage: Storage, runtime: Runtime, once: Once[Changed] | None = None
) -> Changed:
    """Out of recall, restorable within the policy's grace. Ids that are not there or forgotten are passed over."""

    async def decide(now: Actor, part: Sequence[str]) -> Transition:
        now_us = runtime.clock.now_us()
        fragments = drop_expired(await some(now, part, storage), now.working.record, now_us)
        return lifecycle.forget_fragments(now.working.state, fragments, now_us, Reason.REQUESTED)

    return await _in_batches(actor, ids, EventType.FORGOTTEN, storage, once, decide)


async def restore(
    actor: Actor,
    ids: Sequence[str],
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[Changed] | None = None,
) -> Changed:
    """Back into recall. Ids that are not forgotten, or that have expired, are passed over. Raises ModelDown."""
    vectors: dict[str, tuple[str, Vector]] = {}
    space = actor.working.embedding
    for part in _parts(ids):
        vectors |= await _content_vectors(actor, await some(actor, part, storage), storage, models)

    async def decide(now: Actor, part: Sequence[str]) -> Transition:
        usable = vectors if now.working.embedding is space else {}
        there = drop_expired(await some(now, part, storage), now.working.record, runtime.clock.now_us())
        held = [Held(found, _of_content(found, usable)) for found in there]
        return lifecycle.restore_fragments(now.working.state, held, now.working.record.policy)

    return await _in_batches(actor, ids, EventType.RESTORED, storage, once, decide)


async def clear(actor: Actor, tiers: Sequence[Tier], storage: Storage, once: Once[Changed] | None = None) -> Changed:
    """Empty these tiers for good, forgotten fragments of them included; no tiers are all. All of it or nothing."""
    wanted = frozenset(tiers or Tier)

    async def decide(now: Actor) -> tuple[Decision | None, Callable[[int], Changed]]:
        columns, held = now.working.columns, now.working.held_ids()
        outside = [
            Fragment(id=id_, content="", tier=columns.get_tier(slot))
            for slot, id_ in enumerate(columns.ids)
            if id_ != GONE and id_ not in held
        ]
        transition = lifecycle.clear_tiers(now.working.state, outside, wanted)
        return _decision(transition), lambda revision: Changed(len(transition.removed), revision)

    return await decided(actor, once, storage, decide)


async def matching(uid: str, chosen: Filter, forgotten: bool, storage: Storage) -> list[str]:
    """Ids of the fragments (of the forgotten ones) that pass, in order of receipt."""
    found: list[str] = []
    query = FragmentQuery(
        tiers=chosen.tiers,
        sessions=chosen.sessions,
        speakers=chosen.speakers,
        kinds=tuple(kind.value for kind in chosen.kinds),
        forgotten=forgotten,
        limit=PAGE,
    )
    while True:
        page = await storage.journal.list_fragments(uid, query)
        found += [fragment.id for fragment in page if passes(fragment, chosen)]
        if len(page) < PAGE:
            return found
        query = replace(query, after=page[-1].position)


async def _in_batches(
    actor: Actor,
    ids: Sequence[str],
    told: EventType,
    storage: Storage,
    once: Once[Changed] | None,
    decide: Callable[[Actor, Sequence[str]], Awaitable[Transition]],
) -> Changed:
    """The decisions of a request, the last one with its answer; counts the events of type `told`."""
    parts = _parts(ids)
    changed = Changed(0, actor.revision)
    for number, part in enumerate(parts, 1):
        step = _counting(part, told, changed.count, decide)
        changed = await decided(actor, once if number == len(parts) else None, storage, step)
    return changed


def _counting(
    part: Sequence[str],
    told: EventType,
    before: int,
    decide: Callable[[Actor, Sequence[str]], Awaitable[Transition]],
) -> Deciding[Changed]:
    async def step(now: Actor) -> tuple[Decision | None, Callable[[int], Changed]]:
        transition = await decide(now, part)
        count = before + sum(event.type is told for event in transition.events)
        return _decision(transition), lambda revision: Changed(count, revision)

    return step


def _parts(ids: Sequence[str]) -> list[Sequence[str]]:
    """At least one, which may be empty: an answer is stored also where nothing changes."""
    return [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)] or [()]


def _decision(transition: Transition) -> Decision | None:
    return Decision(transition=transition) if transition.events else None


async def _content_vectors(
    actor: Actor, fragments: Sequence[Fragment], storage: Storage, models: EngineModels
) -> dict[str, tuple[str, Vector]]:
    """(content, vector to compare it by) of those that are forgotten, where short-term compares."""
    record = actor.working.record
    gone = [found for found in fragments if found.forget_time_us is not None and found.tier is not Tier.LONG_TERM]
    if not gone or not enhances_short_term(record.kind, record.policy):
        return {}
    by_content = compares_content(record.kind, record.policy)
    stored = [found.id for found in gone if found.own_vector or not by_content]
    embedded = [found for found in gone if by_content and not found.own_vector]
    vectors = await stored_vectors(actor, stored, storage)
    if embedded:
        try:
            texts = [found.content for found in embedded]
            rows = await models.gatherer.content_vectors(texts, record, actor.working.embedding)
        except ModelUnavailable as error:
            raise ModelDown(f"the embedding model does not answer: {error.summary}", retry_after_s=1.0) from error
        except ModelRefused:  # then they had none before either, and are compared with nobody
            return {found.id: (found.content, vectors[found.id]) for found in gone if found.id in vectors}
        vectors |= {found.id: row for found, row in zip(embedded, rows, strict=True)}
    return {found.id: (found.content, vectors[found.id]) for found in gone if found.id in vectors}


def _of_content(fragment: Fragment, vectors: Mapping[str, tuple[str, Vector]]) -> Vector | None:
    """The vector made of what the fragment says now; None when it was changed meanwhile."""
    content, vector = vectors.get(fragment.id, ("", None))
    return vector if content == fragment.content else None


async def stored_vectors(actor: Actor, ids: Sequence[str], storage: Storage) -> dict[str, Vector]:
    """The indexed vectors of these fragments, of those that have one."""
    packed = await storage.journal.get_vectors(actor.uid, actor.working.embedding.name, ids) if ids else {}
    found = {id_: unpacked(raw) for id_, raw in packed.items()}
    return {id_: vector for id_, vector in found.items() if vector is not None}


async def some(actor: Actor, ids: Sequence[str], storage: Storage) -> list[Fragment]:
    """The fragments as they are now: the held ones from RAM, whose counts are ahead of none."""
    held = {held.fragment.id: held.fragment for held in (*actor.working.state.sensory, *actor.working.state.short_term)}
    outside = [id_ for id_ in dict.fromkeys(ids) if id_ not in held]
    read = {found.id: found for found in await storage.journal.get_fragments(actor.uid, outside)} if outside else {}
    known = {**read, **held}
    return [known[id_] for id_ in dict.fromkeys(ids) if id_ in known]


def drop_expired(fragments: Iterable[Fragment], record: MemoryRecord, now_us: int) -> list[Fragment]:
    """Those that have not expired: the others are not found, also before maintenance has come to them."""
    return [one for one in fragments if not is_expired(one, now_us, record.policy.retention)]


async def one(actor: Actor, fragment_id: str, storage: Storage, runtime: Runtime) -> Fragment:
    """The fragment as it is now. Raises FragmentNotFound."""
    there = await some(actor, [fragment_id], storage)
    found = drop_expired(there, actor.working.record, runtime.clock.now_us())
    if not found:
        raise FragmentNotFound(f"there is no fragment {fragment_id!r} in this memory", id=fragment_id)
    return found[0]
