"""Decides what observations do to their memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from memstream_server.core import lifecycle
from memstream_server.core.events import Event, EventType, Reason
from memstream_server.core.policy import Policy
from memstream_server.core.retention import is_expired
from memstream_server.core.suspicions import Suspicion
from memstream_server.core.tiers import Newcomer, observe
from memstream_server.core.transition import Transition, join_all, join_transitions
from memstream_server.core.values import Fragment, Held, State, Tier, Vector
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.memory.enrich import EnrichedFragment, enhances_short_term
from memstream_server.engine.memory.known_fragments import KnownFragments
from memstream_server.engine.memory.receipts import complete_answer
from memstream_server.engine.memory.superseding import find_superseded, supersede_by_update
from memstream_server.engine.runtime.turns import pause_if_due
from memstream_server.ports.journal.records import Answer, Job
from memstream_server.ports.journal.writing import Outcome, Outcomes, Related

if TYPE_CHECKING:
    from memstream_server.engine.memory.producers import Batch
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime

NOTHING_RELATED: Mapping[str, tuple[Related, ...]] = {}
OBSERVATIONS_PER_SLICE = 8
"""Observations decided per slice, about 0.7 ms; a small call waits that long at each of its event-loop iterations."""


def effective_policy(policy: Policy, models: EngineModels) -> Policy:
    """The policy that the core follows: without an LLM it requests no insights."""
    return policy if models.insights is not None else _without_insights(policy)


@lru_cache(maxsize=64)
def _without_insights(policy: Policy) -> Policy:
    return replace(policy, reflection=replace(policy.reflection, threshold=0.0, insight_on_promotion=False))


async def decide_observations(
    working: WorkingSet,
    batches: tuple[Batch, ...],
    gathered: Sequence[EnrichedFragment],
    known: KnownFragments,
    models: EngineModels,
    runtime: Runtime,
    related: Mapping[str, tuple[Related, ...]] = NOTHING_RELATED,
) -> tuple[Decision, dict[int, Outcome]]:
    """The decision on a group of receipts, and the outcome of each observation by position.

    `known` holds the fragments that these observations may repeat, echo or update; `related` the statements that the
    outcomes name, by id of the observation. Other tasks run between slices: only
    the caller changes the memory, and recalls see nothing before the commit.
    """
    policy = effective_policy(working.record.policy, models)
    gathered = [part.in_space(working.embedding.name) for part in gathered]
    steps: list[Transition] = []
    firsts: list[tuple[Fragment, Event]] = []
    parts = {part.fragment.id: part for part in gathered}
    state = working.state
    for number, part in enumerate(gathered):
        if number and number % OBSERVATIONS_PER_SLICE == 0:
            await pause_if_due()
        step = _decide_one(working, state, part, policy, known, parts)
        steps.append(step)
        state = step.state
        first = step.events[0]
        if first.type is EventType.ERASED:
            first = next(one for one in step.events if one.type is not EventType.ERASED)
        firsts.append((part.fragment, first))
    if not steps:
        return Decision(batches=batches), {}
    transition = join_all(steps)
    kept = [parts[put.id] for put in transition.puts if put.id in parts]  # by their ids in the memory
    outcomes = _collect_outcomes(firsts, transition, related)
    decision = Decision(
        transition=transition,
        gathered=parts,
        batches=batches,
        answers=tuple(_complete_answers(batches, outcomes, working.record.revision + 1)),
        outcomes=tuple(_kept_outcomes(batches, outcomes)),
        jobs=jobs_of(working, transition, kept, runtime),
    )
    return decision, outcomes


def _decide_one(
    working: WorkingSet,
    state: State,
    part: EnrichedFragment,
    policy: Policy,
    known: KnownFragments,
    parts: dict[str, EnrichedFragment],
) -> Transition:
    fragment = part.fragment
    named, fragment = fragment.supersedes, fragment.but(supersedes=()) if fragment.supersedes else fragment
    existing = known.find_by_key(state, fragment.external_id)
    gone: Transition | None = None
    if existing is not None and is_expired(existing, fragment.create_time_us, policy.retention):
        # the external_id is free, even if maintenance has not removed the fragment yet
        gone = lifecycle.erase_fragments(state, [existing], Reason.EXPIRED)
        known.apply_step(gone)
        state, existing = gone.state, None
    if existing is not None:
        changed = apply_update(existing, fragment)
        parts[existing.id] = replace(part, fragment=changed)
        step = _update_existing(state, changed, part.content_vector, policy)
        known.apply_step(step)
        if named:
            step = join_transitions(step, supersede_by_update(working, step.state, known, named, existing.id, fragment))
            known.apply_step(step)
        return step
    newcomer = Newcomer(
        fragment,
        part.embedded.content_vector if enhances_short_term(working.record.kind, working.record.policy) else None,
        known.find_recalled(fragment),
        known.find_repeated(fragment, policy.retention),
        part.embedded.refused,
        bool(named),
        find_superseded(working, state, known, named, fragment, fragment.id) if named else (),
    )
    step = observe(state, newcomer, policy, working.embedding.model.fitted.similarity_min)
    known.apply_step(step)
    return step if gone is None else join_all((gone, step))


def _update_existing(state: State, changed: Fragment, vector: Vector | None, policy: Policy) -> Transition:
    """Update the fragment of an external_id. A forgotten one is restored, because its client has just sent it."""
    step = lifecycle.update_fragment(state, changed, vector)
    if changed.forget_time_us is None:
        return step
    return join_all((step, lifecycle.restore_fragments(step.state, [Held(changed, vector)], policy)))


def apply_update(existing: Fragment, new: Fragment) -> Fragment:
    """The existing fragment with every value of the new observation of the same external id.

    Keeps id, tier, lineage, counts, pin and create time.
    """
    return existing.but(
        content=new.content,
        structured=new.structured,
        speaker=new.speaker,
        role=new.role,
        session=new.session,
        importance=new.importance,
        observe_time_us=new.observe_time_us,
        repeat_time_us=0,
        repeat_position=0,
        metadata=new.metadata,
        expire_time_us=new.expire_time_us,
        token_count=new.token_count,
        own_vector=new.own_vector,
        own_importance=new.own_importance,
        ttl_us=new.ttl_us,
        valid_from_us=new.valid_from_us,
        valid_until_us=new.valid_until_us,
        model=new.model,
    )


def jobs_of(
    working: WorkingSet,
    transition: Transition,
    gathered: Iterable[EnrichedFragment],
    runtime: Runtime,
    suspicions: Iterable[Suspicion] = (),
) -> tuple[Job, ...]:
    """The background jobs of a transition: insights, reflection, missing vectors and importances, decisions about
    suspicions."""
    wanted: list[tuple[str, object]] = []
    for request in transition.insight_requests:
        wanted.append(("insight", {"anchor": request.anchor, "fragments": list(request.fragments)}))
    if transition.reflect:
        wanted.append(("reflection", {}))
    unrated, is_missing = list[str](), False
    for part in gathered:
        is_missing |= part.embedded.missing
        if part.unrated:
            unrated.append(part.fragment.id)
    if is_missing:
        wanted.append(("backfill", {}))
    if unrated:
        default = working.record.policy.importance_default
        wanted.append(("rating", {"fragments": unrated, "importance": default}))
    for one in suspicions:
        wanted.append(("conflict", {"newer": one.newer, "older": one.older}))
    if not wanted:
        return ()
    now_us = runtime.clock.now_us()
    return tuple(
        Job(runtime.ids.next_id(), working.record.uid, type_, json.dumps(payload), now_us) for type_, payload in wanted
    )


def _collect_outcomes(
    firsts: Sequence[tuple[Fragment, Event]], transition: Transition, related: Mapping[str, tuple[Related, ...]]
) -> dict[int, Outcome]:
    tiers: dict[str, Tier] = {put.id: put.tier for put in transition.puts}
    out = {}
    for fragment, event in firsts:
        counted = event.type in (EventType.REPEATED, EventType.ECHOED)
        out[fragment.position] = Outcome(
            sequence=0,  # the actor fills in the number
            fragment=event.fragment if event.type is EventType.UPDATED else fragment.id,
            type=event.type,
            other=event.fragment if counted else "",
            tier=None if counted else tiers.get(event.fragment),
            related=related.get(fragment.id, ()) if not counted and event.fragment in tiers else (),
        )
    return out


def _complete_answers(batches: Sequence[Batch], outcomes: Mapping[int, Outcome], revision: int) -> Iterator[Answer]:
    for batch in batches:
        if batch.receipt.answer is not None:
            answer = complete_answer(batch.receipt, revision, _number_outcomes(batch, outcomes))
            if answer is not None:
                yield answer


def _kept_outcomes(batches: Sequence[Batch], outcomes: Mapping[int, Outcome]) -> Iterator[Outcomes]:
    for batch in batches:
        if batch.receipt.outcomes:
            yield Outcomes(batch.receipt.producer, batch.receipt.last_sequence, _number_outcomes(batch, outcomes))


def _number_outcomes(batch: Batch, outcomes: Mapping[int, Outcome]) -> tuple[Outcome, ...]:
    numbered = zip(batch.receipt.sequences, batch.receipt.fragments, strict=True)
    return tuple(outcomes[part.position].for_batch(number, batch.receipt.related) for number, part in numbered)
