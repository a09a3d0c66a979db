"""Changes of fragments by request: update, restore a version, forget, restore, supersede, clear.

Rule 1. Each is one decision in the memory's order. A decision reads the journal within that order, so nothing changes
between its read and its write. Models are called before it.
Rule 2. The answer to a request_id is committed with the change that it describes. A request for more than BATCH
fragments is split into several decisions, so that streams continue between them. Its answer is part of the last one,
and a repeat after a crash does the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from memstream_server.core import lifecycle
from memstream_server.core import lifecycle as core
from memstream_server.core.departures import restore_as_current
from memstream_server.core.events import EventType, Reason
from memstream_server.core.filters import Filter, make_test
from memstream_server.core.retention import is_expired
from memstream_server.core.supersession import SupersessionCycle, find_ends, supersede_fragments
from memstream_server.core.transition import Transition
from memstream_server.core.values import Fragment, Held, Metadata, Role, Structured, Tier, Vector
from memstream_server.engine.errors import (
    AlreadyAnswered,
    EtagMismatch,
    FieldViolation,
    FragmentNotFound,
    InvalidField,
    ModelDown,
)
from memstream_server.engine.memory.decide import jobs_of
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.memory.enrich import EnrichedFragment, compares_content, enhances_short_term
from memstream_server.engine.memory.superseding import cycle_error, unknown_error
from memstream_server.engine.recall.reinforcement import unpack_vector
from memstream_server.engine.requests import ChangeCount, Once, fragment_etag
from memstream_server.engine.runtime.turns import pause_if_due
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import FragmentVersion, MemoryRecord
from memstream_server.ports.models import ModelRefused, ModelUnavailable

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage


T = TypeVar("T")
Deciding = Callable[["Actor"], Awaitable[tuple[Decision | None, Callable[[int], T]]]]
"""Returns the decision (None: no change) and a function from the new revision to the call's result."""

BATCH = 256
"""Fragments changed per decision."""
PAGE = 1_000
"""Fragments read at once to apply a filter."""


@dataclass(frozen=True, slots=True, eq=False)
class FragmentChange:
    """A change of one fragment; None keeps a value."""

    id: str
    content: str | None = None
    structured: Structured | None = None
    """Its text is `content`. None with a content makes the fragment plain text."""
    speaker: str | None = None
    role: Role | None = None
    has_role: bool = False
    """Whether `role` is to be set; None then removes it."""
    importance: float | None = None
    metadata: Metadata | None = None
    expire_time_us: int | None = None
    never_expires: bool = False
    valid_from_us: int | None = None
    valid_until_us: int | None = None
    unbounded: frozenset[str] = frozenset()
    """Of "valid_from_us" and "valid_until_us", those to remove."""
    pinned: bool | None = None
    vector: Vector | None = None
    """The client's vector of the new content."""
    etag: str = ""


async def run_decision(actor: Actor, once: Once[T] | None, storage: Storage, decide: Deciding[T]) -> T:
    """Decide in the memory's order, and commit the answer for repeats with the decision.

    Raises AlreadyAnswered if a repeat overtook this call, which had lost its client.
    """
    made: list[T] = []

    async def decide_once(now: Actor) -> Decision | None:
        if once is not None and await storage.journal.get_answer(once.key) is not None:
            raise AlreadyAnswered(
                "a concurrent repeat of this request was answered; repeat it to get that answer", retry_after_s=0.1
            )
        decision, result_at = await decide(now)
        commits = decision is not None or once is not None
        made.append(result_at(now.revision + commits))
        if once is None or once.answer is None:
            return decision
        return replace(decision or Decision(), answer=once.answer(made[0]))

    await actor.run(decide_once)
    return made[0]


async def update(
    actor: Actor,
    change: FragmentChange,
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[tuple[Fragment, int]] | None = None,
) -> tuple[Fragment, int]:
    """(the changed fragment, revision). Raises FragmentNotFound, EtagMismatch, InvalidField."""
    seen = await read_fragment(actor, change.id, storage, runtime)
    made = await _enrich_change(actor, seen, change, storage, models) if _changes_text(change) else None

    async def decide(now: Actor) -> tuple[Decision, Callable[[int], tuple[Fragment, int]]]:
        current = await read_fragment(now, change.id, storage, runtime)
        if change.etag and change.etag != fragment_etag(current):
            raise EtagMismatch(f"fragment {change.id} has changed since; read it again", etag=fragment_etag(current))
        if made is not None and change.content is None and current.content != seen.content:
            raise EtagMismatch(
                f"fragment {change.id} was changed during this call; try again", etag=fragment_etag(current)
            )
        changed = apply_change(current, change)
        part = None if made is None else made.in_space(now.working.embedding.name)
        if part is not None:
            changed = changed.but(model=part.fragment.model, own_vector=part.fragment.own_vector)
        state = now.working.state
        transition = lifecycle.update_fragment(state, changed, None if part is None else part.content_vector)
        gathered = {} if part is None else {change.id: part}
        jobs = jobs_of(now.working, transition, gathered.values(), runtime)
        decision = Decision(transition=transition, gathered=gathered, jobs=jobs)
        return decision, lambda revision: (changed.but(version=revision), revision)

    return await run_decision(actor, once, storage, decide)


def _changes_text(change: FragmentChange) -> bool:
    """Whether the change affects the text that is embedded and indexed."""
    return change.content is not None or change.speaker is not None


def apply_change(fragment: Fragment, change: FragmentChange) -> Fragment:
    """The fragment with the changed values. Raises InvalidField if its validity would not end after it begins."""
    if change.content is not None:
        own = change.vector is not None
        fragment = fragment.but(content=change.content, structured=change.structured, token_count=0, own_vector=own)
    wanted: Mapping[str, object] = {
        "speaker": change.speaker,
        "importance": change.importance,
        "metadata": change.metadata,
        "pinned": change.pinned,
        "expire_time_us": change.expire_time_us,
        "valid_from_us": change.valid_from_us,
        "valid_until_us": change.valid_until_us,
    }
    for name, value in wanted.items():
        if value is not None:
            fragment = fragment.but(**{name: value})
    if change.has_role:
        fragment = fragment.but(role=change.role)
    for name in change.unbounded:
        fragment = fragment.but(**{name: None})
    begin_us, end_us = fragment.valid_from_us, fragment.valid_until_us
    if begin_us is not None and end_us is not None and end_us <= begin_us:
        field, text = "fragment.valid_until", "must be after valid_from"
        raise InvalidField(f"{field}: {text}", violations=(FieldViolation(field, text),))
    if change.importance is not None:
        fragment = fragment.but(own_importance=True)
    if change.never_expires:
        return fragment.but(expire_time_us=None, ttl_us=None)
    return fragment if change.expire_time_us is None else fragment.but(ttl_us=None)


async def _enrich_change(
    actor: Actor, seen: Fragment, change: FragmentChange, storage: Storage, models: EngineModels
) -> EnrichedFragment:
    record, fragment = actor.working.record, apply_change(seen, change)
    own = {} if change.vector is None else {fragment.id: change.vector}
    if change.content is None and seen.own_vector:  # the server cannot embed in the client's space
        own |= await stored_vectors(actor, [seen.id], storage)
    known, space = [fragment.importance], actor.working.embedding
    return (await models.enricher.enrich_fragments([fragment], own, known, record, account_of(record), space))[0]


async def forget(
    actor: Actor, ids: Sequence[str], storage: Storage, runtime: Runtime, once: Once[ChangeCount] | None = None
) -> ChangeCount:
    """Remove fragments from recall; can be undone during the policy's grace period. Skips unknown and forgotten ids."""

    async def decide(now: Actor, part: Sequence[str]) -> Transition:
        now_us = runtime.clock.now_us()
        fragments = drop_expired(await read_fragments(now, part, storage), now.working.record, now_us)
        return lifecycle.forget_fragments(now.working.state, fragments, now_us, Reason.REQUESTED)

    return await _in_batches(actor, ids, (EventType.FORGOTTEN,), storage, once, decide)


async def restore(
    actor: Actor,
    ids: Sequence[str],
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[ChangeCount] | None = None,
    *,
    only_forgotten: bool = False,
) -> ChangeCount:
    """Bring forgotten fragments back, and make superseded ones current unless they are `only_forgotten`. Skips other
    ids, and those that have expired. Raises ModelDown.
    """
    vectors: dict[str, tuple[str, Vector]] = {}
    space = actor.working.embedding
    for part in _split_ids(ids):
        vectors |= await _content_vectors(actor, await read_fragments(actor, part, storage), storage, models)

    async def decide(now: Actor, part: Sequence[str]) -> Transition:
        usable = vectors if now.working.embedding is space else {}
        there = drop_expired(await read_fragments(now, part, storage), now.working.record, runtime.clock.now_us())
        held = [Held(found, _vector_of_content(found, usable)) for found in there]
        policy = now.working.record.policy
        if only_forgotten:
            return lifecycle.restore_fragments(now.working.state, held, policy)
        newer = await read_fragments(now, [one.superseded_by for one in there if one.superseded_by], storage)
        return restore_as_current(now.working.state, held, newer, policy)

    return await _in_batches(actor, ids, (EventType.RESTORED, EventType.SUPERSESSION_UNDONE), storage, once, decide)


async def clear(
    actor: Actor, tiers: Sequence[Tier], storage: Storage, once: Once[ChangeCount] | None = None
) -> ChangeCount:
    """Remove all fragments of these tiers permanently, including forgotten ones; fragments that arrive meanwhile stay.
    No tiers means all.
    """
    wanted = frozenset(tiers or Tier)

    async def list_ids(now: Actor) -> tuple[Decision | None, Callable[[int], list[str]]]:
        ids = now.working.columns.list_ids(wanted)
        return None, lambda _revision: ids

    leaving = await run_decision(actor, None, storage, list_ids)
    first = leaving[:1]

    async def decide(now: Actor, part: Sequence[str]) -> Transition:
        tier_of = now.working.columns.tier_of
        there = [Fragment(id=id_, content="", tier=tier) for id_ in part if (tier := tier_of(id_)) is not None]
        resets = Tier.LONG_TERM in wanted and part[:1] == first
        return lifecycle.clear_fragments(now.working.state, there, resets=resets)

    return await _in_batches(actor, leaving, (EventType.DROPPED,), storage, once, decide)


async def list_matching(uid: str, chosen: Filter, forgotten: bool, storage: Storage) -> list[str]:
    """Ids of the fragments that pass the filter, in order of receipt; `forgotten` selects among the forgotten ones."""
    found, matches = list[str](), make_test(chosen)
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
        for fragment in page:
            await pause_if_due()
            if matches(fragment):
                found.append(fragment.id)
        if len(page) < PAGE:
            return found
        query = replace(query, after=page[-1].position)


async def _in_batches(
    actor: Actor,
    ids: Sequence[str],
    counted: Collection[EventType],
    storage: Storage,
    once: Once[ChangeCount] | None,
    decide: Callable[[Actor, Sequence[str]], Awaitable[Transition]],
) -> ChangeCount:
    """Run the decisions of a request; the last one commits the answer. Counts the fragments with an event of the types
    `counted`.
    """
    parts = _split_ids(ids)
    changed = ChangeCount(0, actor.revision)
    for number, part in enumerate(parts, 1):
        step = _count_events(part, counted, changed.count, decide)
        changed = await run_decision(actor, once if number == len(parts) else None, storage, step)
    return changed


def _count_events(
    part: Sequence[str],
    counted: Collection[EventType],
    before: int,
    decide: Callable[[Actor, Sequence[str]], Awaitable[Transition]],
) -> Deciding[ChangeCount]:
    async def decide_part(now: Actor) -> tuple[Decision | None, Callable[[int], ChangeCount]]:
        transition = await decide(now, part)
        count = before + len({event.fragment for event in transition.events if event.type in counted})
        return Decision(transition=transition) if transition.events else None, lambda at: ChangeCount(count, at)

    return decide_part


def _split_ids(ids: Sequence[str]) -> list[Sequence[str]]:
    """At least one part, which may be empty: the answer is stored even if nothing changes."""
    return [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)] or [()]


async def _content_vectors(
    actor: Actor, fragments: Sequence[Fragment], storage: Storage, models: EngineModels
) -> dict[str, tuple[str, Vector]]:
    """(content, vector for comparisons) of forgotten short-term fragments, if short-term compares."""
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
            rows = await models.enricher.embed_contents(texts, record, actor.working.embedding)
        except ModelUnavailable as error:
            raise ModelDown(f"the embedding model does not answer: {error.summary}", retry_after_s=1.0) from error
        except ModelRefused:  # without vectors they are compared with no other fragment
            return {found.id: (found.content, vectors[found.id]) for found in gone if found.id in vectors}
        vectors |= {found.id: row for found, row in zip(embedded, rows, strict=True)}
    return {found.id: (found.content, vectors[found.id]) for found in gone if found.id in vectors}


def _vector_of_content(fragment: Fragment, vectors: Mapping[str, tuple[str, Vector]]) -> Vector | None:
    """The vector of the fragment's current content; None if the content has changed since."""
    content, vector = vectors.get(fragment.id, ("", None))
    return vector if content == fragment.content else None


async def stored_vectors(actor: Actor, ids: Sequence[str], storage: Storage) -> dict[str, Vector]:
    """The indexed vectors of those fragments that have one."""
    packed = await storage.journal.get_vectors(actor.uid, actor.working.embedding.name, ids) if ids else {}
    found = {id_: unpack_vector(raw) for id_, raw in packed.items()}
    return {id_: vector for id_, vector in found.items() if vector is not None}


async def read_fragments(actor: Actor, ids: Sequence[str], storage: Storage) -> list[Fragment]:
    """The current fragments: held ones from RAM, where the counts are up to date, others from the journal."""
    held = {held.fragment.id: held.fragment for held in (*actor.working.state.sensory, *actor.working.state.short_term)}
    outside = [id_ for id_ in dict.fromkeys(ids) if id_ not in held]
    read = {found.id: found for found in await storage.journal.get_fragments(actor.uid, outside)} if outside else {}
    known = {**read, **held}
    return [known[id_] for id_ in dict.fromkeys(ids) if id_ in known]


def drop_expired(fragments: Iterable[Fragment], record: MemoryRecord, now_us: int) -> list[Fragment]:
    """Those that have not expired. Expired ones count as absent even before maintenance removes them."""
    return [one for one in fragments if not is_expired(one, now_us, record.policy.retention)]


async def read_fragment(actor: Actor, fragment_id: str, storage: Storage, runtime: Runtime) -> Fragment:
    """The current fragment. Raises FragmentNotFound."""
    there = await read_fragments(actor, [fragment_id], storage)
    found = drop_expired(there, actor.working.record, runtime.clock.now_us())
    if not found:
        raise FragmentNotFound(f"there is no fragment {fragment_id!r} in this memory", id=fragment_id)
    return found[0]


async def supersede(
    actor: Actor,
    olds: Sequence[str],
    new: str,
    storage: Storage,
    runtime: Runtime,
    once: Once[ChangeCount] | None = None,
) -> ChangeCount:
    """Mark the fragments `olds` as superseded by `new`; all are ids or external ids.

    Raises FragmentNotFound for one that is not in the memory, InvalidField for one that `new` is an older state of.
    Then nothing has changed.
    """

    async def decide(now: Actor) -> tuple[Decision | None, Callable[[int], ChangeCount]]:
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
            return None, lambda revision: ChangeCount(0, revision)
        last = {one.id: one for one in await read_fragments(now, ends, storage)}
        step = supersede_fragments(working.state, [last[id_] for id_ in ends], newer, now_us)
        return Decision(transition=step), lambda revision: ChangeCount(len(ends), revision)

    return await run_decision(actor, once, storage, decide)


async def _read_unexpired(actor: Actor, ids: Sequence[str], storage: Storage, now_us: int) -> dict[str, Fragment]:
    found = await read_fragments(actor, [id_ for id_ in ids if id_], storage)
    return {one.id: one for one in drop_expired(found, actor.working.record, now_us)}


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


async def _read_version(actor: Actor, fragment_id: str, replaced: int, storage: Storage) -> FragmentVersion:
    found = await storage.journal.get_versions(actor.uid, {fragment_id: replaced})
    if fragment_id not in found:
        raise FragmentNotFound(f"fragment {fragment_id!r} has no version {replaced}", id=fragment_id)
    return found[fragment_id]


async def _enrich_version(
    actor: Actor, seen: Fragment, version: FragmentVersion, models: EngineModels
) -> EnrichedFragment:
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
