"""Decisions: what the core decided for one memory, and the journal commit that makes it true."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from memstream_server.core import lifecycle
from memstream_server.core.events import Event, EventType, ModelUse, Purpose, Reason
from memstream_server.core.policy import Policy
from memstream_server.core.retention import expired
from memstream_server.core.tiers import Newcomer, observe
from memstream_server.core.transition import Transition, anchors_changed, join_all
from memstream_server.core.values import Fragment, Held, State, Tier, Vector
from memstream_server.engine.batch_calls import completed
from memstream_server.engine.gather import Embedded, Gathered
from memstream_server.engine.known import Known
from memstream_server.ports.journal.records import Answer, IndexEntry, Job, MemoryRecord
from memstream_server.ports.journal.rows import Anchor, Row
from memstream_server.ports.journal.writing import Commit, Outcome, Outcomes
from memstream_server.ports.models import Account

if TYPE_CHECKING:
    from memstream_server.engine.dependencies import Dependencies
    from memstream_server.engine.embeddings import Embedding
    from memstream_server.engine.intake import Batch
    from memstream_server.engine.working_set import WorkingSet


TURN = 8
"""Observations decided in one turn: some 0.7 ms, which a small call waits for at each of its turns of the loop."""


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """One transition of one memory before it is committed. Fields left alone change nothing."""

    transition: Transition | None = None
    gathered: Mapping[str, Gathered] = field(default_factory=dict)
    """Terms and vectors of the fragments that are new or say something else now, by id."""
    batches: tuple[Batch, ...] = ()
    events: tuple[Event, ...] = ()
    """Events of the memory itself, after the transition's."""
    policy: Policy | None = None
    labels: tuple[tuple[str, str], ...] | None = None
    name: tuple[str, str] | None = None
    """(namespace, name) to go by from now on."""
    namespace_max: int = 0
    """Memories that namespace may hold with it, 0: no limit."""
    answer: Answer | None = None
    answers: tuple[Answer, ...] = ()
    """Of the calls whose batches are decided, and what is kept of those batches' outcomes: see Commit."""
    outcomes: tuple[Outcomes, ...] = ()
    erased: tuple[str, ...] = ()
    """Ids of which nothing they said before is to be kept, see Commit."""
    jobs: tuple[Job, ...] = ()
    finish_jobs: tuple[str, ...] = ()
    time_us: int | None = None
    """When it was decided, where the answer tells it; else it is the commit's own."""

    def with_gathered(self, more: Sequence[Gathered]) -> Decision:
        """The same with terms and vectors of merged texts; their fragments name the model of the new vector."""
        if self.transition is None:
            return self
        found = {part.fragment.id: part for part in more}
        puts = tuple(
            put.but(model=found[put.id].fragment.model) if put.id in found else put for put in self.transition.puts
        )
        return replace(self, transition=replace(self.transition, puts=puts), gathered={**self.gathered, **found})

    def costing(self, account: Account, purpose: Purpose) -> Decision:
        """The same with what asking an LLM for it took, if one was asked."""
        if not account.requests:
            return self
        use = ModelUse(purpose, account.model, account.requests, account.prompt_tokens, account.completion_tokens)
        return replace(self, events=(*self.events, Event(EventType.MODEL_ASKED, "", use=use)))


def account_of(record: MemoryRecord) -> Account:
    """A new account of what is asked on behalf of a memory."""
    return Account(record.namespace, record.uid)


def effective_policy(policy: Policy, dependencies: Dependencies) -> Policy:
    """The policy as the core is to follow it: without an LLM nothing asks for insights."""
    return policy if dependencies.insights is not None else _without_insights(policy)


@lru_cache(maxsize=64)
def _without_insights(policy: Policy) -> Policy:
    return replace(policy, reflection=replace(policy.reflection, threshold=0.0, insight_on_promotion=False))


async def decide_observations(
    working: WorkingSet,
    batches: tuple[Batch, ...],
    gathered: Sequence[Gathered],
    known: Known,
    dependencies: Dependencies,
) -> tuple[Decision, dict[int, Outcome]]:
    """What a group of receipts does to its memory, and what became of each observation by position.

    `known` is what of the memory these observations may concern.
    Lets others run between turns: nothing but the caller changes what is decided on, and nothing is shown meanwhile.
    """
    policy = effective_policy(working.record.policy, dependencies)
    gathered = [part.under(working.embedding.name) for part in gathered]
    steps: list[Transition] = []
    firsts: list[tuple[Fragment, Event]] = []
    parts = {part.fragment.id: part for part in gathered}
    state = working.state
    for start in range(0, len(gathered), TURN):
        async with dependencies.turns.of(working.record.namespace):
            for part in gathered[start : start + TURN]:
                step = _decide_one(working, state, part, policy, dependencies, known, parts)
                steps.append(step)
                state = step.state
                firsts.append((part.fragment, next(one for one in step.events if one.type is not EventType.ERASED)))
    if not steps:
        return Decision(batches=batches), {}
    transition = join_all(steps)
    kept = [parts[put.id] for put in transition.puts if put.id in parts]  # by the ids they go by in the memory
    outcomes = _outcomes(firsts, transition)
    decision = Decision(
        transition=transition,
        gathered=parts,
        batches=batches,
        answers=tuple(_answers(batches, outcomes, working.record.revision + 1)),
        outcomes=tuple(_kept(batches, outcomes)),
        jobs=jobs_of(working, transition, kept, dependencies),
    )
    return decision, outcomes


def _decide_one(
    working: WorkingSet,
    state: State,
    part: Gathered,
    policy: Policy,
    dependencies: Dependencies,
    known: Known,
    parts: dict[str, Gathered],
) -> Transition:
    fragment = part.fragment
    existing = known.find_by_key(state, fragment.external_id)
    gone: Transition | None = None
    if existing is not None and expired(existing, fragment.create_time_us, policy.retention):
        gone = lifecycle.erase(state, [existing], Reason.EXPIRED)  # the id is free, whatever maintenance has come to
        known.follow(gone)
        state, existing = gone.state, None
    if existing is not None:
        changed = updated(existing, fragment)
        parts[existing.id] = replace(part, fragment=changed)
        step = _said_again(state, changed, part.content_vector, policy)
        known.follow(step)
        return step
    newcomer = Newcomer(
        fragment,
        part.content_vector if dependencies.enhances(working.record) else None,
        known.find_recalled(fragment),
        known.find_repeated(fragment, policy.retention),
        part.refused,
    )
    step = observe(state, newcomer, policy, working.embedding.model.similarity_min)
    known.follow(step)
    return step if gone is None else join_all((gone, step))


def _said_again(state: State, changed: Fragment, vector: Vector | None, policy: Policy) -> Transition:
    """An update by external_id. One that was forgotten is remembered again: its client has just said it."""
    step = lifecycle.update(state, changed, vector)
    if changed.forget_time_us is None:
        return step
    return join_all((step, lifecycle.restore(step.state, [Held(changed, vector)], policy)))


def updated(existing: Fragment, new: Fragment) -> Fragment:
    """The existing fragment with all that the new observation of the same external id gives, as if put in its place.

    Id, tier, lineage, counts, pin and time of creation stay.
    """
    return existing.but(
        content=new.content,
        structured=new.structured,
        speaker=new.speaker,
        session=new.session,
        importance=new.importance,
        observe_time_us=new.observe_time_us,
        metadata=new.metadata,
        expire_time_us=new.expire_time_us,
        token_count=new.token_count,
        own_vector=new.own_vector,
        own_importance=new.own_importance,
        ttl_us=new.ttl_us,
        model=new.model,
    )


def jobs_of(
    working: WorkingSet, transition: Transition, gathered: Iterable[Gathered], dependencies: Dependencies
) -> tuple[Job, ...]:
    """The background work a transition causes: insights, a reflection; vectors and importances to fill in."""
    gathered = list(gathered)
    wanted: list[tuple[str, object]] = [
        ("insight", {"anchor": request.anchor, "fragments": list(request.fragments)})
        for request in transition.insight_requests
    ]
    if transition.reflect:
        wanted.append(("reflection", {}))
    if any(part.missing for part in gathered):
        wanted.append(("backfill", {}))
    if unrated := [part.fragment.id for part in gathered if part.unrated]:
        default = working.record.policy.importance_default
        wanted.append(("rating", {"fragments": unrated, "importance": default}))
    now_us = dependencies.clock.now_us()
    return tuple(
        Job(dependencies.ids.next(), working.record.uid, type_, json.dumps(payload), now_us)
        for type_, payload in wanted
    )


def _outcomes(firsts: Sequence[tuple[Fragment, Event]], transition: Transition) -> dict[int, Outcome]:
    tiers: dict[str, Tier] = {put.id: put.tier for put in transition.puts}
    out = {}
    for fragment, event in firsts:
        counted = event.type in (EventType.REPEATED, EventType.ECHOED)
        out[fragment.position] = Outcome(
            sequence=0,  # the actor knows the number
            fragment=event.fragment if event.type is EventType.UPDATED else fragment.id,
            type=event.type,
            other=event.fragment if counted else "",
            tier=None if counted else tiers.get(event.fragment),
        )
    return out


def _answers(batches: Sequence[Batch], outcomes: Mapping[int, Outcome], revision: int) -> Iterator[Answer]:
    for batch in batches:
        if batch.receipt.answer is not None:
            answer = completed(batch.receipt, revision, _numbered(batch, outcomes))
            if answer is not None:
                yield answer


def _kept(batches: Sequence[Batch], outcomes: Mapping[int, Outcome]) -> Iterator[Outcomes]:
    for batch in batches:
        if batch.receipt.outcomes:
            yield Outcomes(batch.receipt.producer, batch.receipt.last_sequence, _numbered(batch, outcomes))


def _numbered(batch: Batch, outcomes: Mapping[int, Outcome]) -> tuple[Outcome, ...]:
    numbered = zip(batch.receipt.sequences, batch.receipt.fragments, strict=True)
    return tuple(outcomes[part.position].of(number) for number, part in numbered)


def commit_of(working: WorkingSet, decision: Decision, dependencies: Dependencies) -> Commit:
    """The journal transaction of a decision on the memory's present RAM state."""
    record, transition = working.record, decision.transition
    before = working.state
    after = transition.state if transition is not None else before
    other = dependencies.embeddings.beside(working.embedding.name)
    held, released = anchors_changed(before, after) if transition is not None else ((), ())
    waited = [batch for batch in decision.batches if not batch.at_once]
    return Commit(
        memory=record.uid,
        epoch=record.epoch,
        revision=record.revision,
        time_us=dependencies.clock.now_us() if decision.time_us is None else decision.time_us,
        events=(transition.events if transition is not None else ()) + decision.events,
        rows=tuple(_rows(working, decision, record.revision + 1, other)),
        removed=transition.removed if transition is not None else (),
        anchors=tuple(_anchor(working, decision, one, other) for one in held if _has_anchor(one)),
        released=_released(before, released),
        receipts=tuple(batch.receipt for batch in decision.batches if batch.at_once),
        stored_positions=tuple(batch.receipt.position for batch in waited),
        producers=tuple(_stored(waited).items()),
        index=tuple(_index(working, decision)),
        jobs=decision.jobs,
        finish_jobs=decision.finish_jobs,
        reflection_aggregate=after.reflection_aggregate,
        policy=decision.policy,
        labels=decision.labels,
        name=decision.name,
        namespace_max=decision.namespace_max,
        answer=decision.answer,
        answers=decision.answers,
        outcomes=decision.outcomes,
        erased=decision.erased,
    )


def _rows(working: WorkingSet, decision: Decision, version: int, other: Embedding | None) -> Iterator[Row]:
    if decision.transition is None:
        return
    for put in decision.transition.puts:
        part = decision.gathered.get(put.id)
        fragment = put.but(version=version)
        if part is None:
            yield Row(fragment)
        else:
            vector = None if part.vector is None else packed(part.vector)
            seen = _beside(part, other)
            beside = None if seen is None or seen.vector is None else (seen.space, packed(seen.vector))
            yield Row(fragment, part.terms, vector, beside, replaces=working.tier_of(put.id) is not None)


def _beside(part: Gathered, other: Embedding | None) -> Embedded | None:
    """What was made in the other space, if that is still kept: it may have been given up since."""
    kept = part.beside is not None and other is not None and part.beside.space == other.name
    return part.beside if kept else None


def _index(working: WorkingSet, decision: Decision) -> Iterator[IndexEntry]:
    """Long-term fragments whose vector is new to the index, and those that left it."""
    if decision.transition is None:
        return
    uid = working.record.uid
    for put in decision.transition.puts:
        if put.tier is Tier.LONG_TERM and put.model:
            new = working.tier_of(put.id) is not Tier.LONG_TERM
            if put.forget_time_us is not None:
                yield IndexEntry(uid, put.id, delete=True)
            elif new or put.id in decision.gathered or working.forgotten(put.id):
                yield IndexEntry(uid, put.id)
        elif put.id in decision.gathered and working.tier_of(put.id) is Tier.LONG_TERM:
            yield IndexEntry(uid, put.id, delete=True)  # what it says now has no vector yet
    for id_ in decision.transition.removed:
        if working.tier_of(id_) is Tier.LONG_TERM:
            yield IndexEntry(uid, id_, delete=True)


def _stored(batches: Sequence[Batch]) -> dict[str, int]:
    """The last number of each producer that these batches bring to stored."""
    out: dict[str, int] = {}
    for batch in batches:
        if batch.receipt.producer:
            out[batch.receipt.producer] = max(out.get(batch.receipt.producer, 0), batch.receipt.last_sequence)
    return out


def _has_anchor(held: Held) -> bool:
    return held.vector is not None or bool(held.enhancements)


def _anchor(working: WorkingSet, decision: Decision, held: Held, other: Embedding | None) -> Anchor:
    vector = None if held.vector is None else packed(held.vector)
    part = decision.gathered.get(held.fragment.id)
    beside: tuple[str, bytes | None] | None = None
    if part is not None:  # its content is new, so what is kept of it in another space is not of this content
        seen = _beside(part, other)
        given = None if seen is None or seen.content_vector is None else packed(seen.content_vector)
        beside = ("" if seen is None else seen.space, given)
    return Anchor(held.fragment.id, vector, held.enhancements, working.embedding.name, beside)


def _released(before: State, released: Sequence[str]) -> tuple[str, ...]:
    had = {held.fragment.id for held in (*before.sensory, *before.short_term) if _has_anchor(held)}
    return tuple(id_ for id_ in released if id_ in had)


def packed(vector: Vector) -> bytes:
    """A vector as the journal keeps it: float32, little-endian."""
    return np.ascontiguousarray(vector, dtype="<f4").tobytes()
