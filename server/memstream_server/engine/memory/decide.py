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
from memstream_server.core.tiers import Newcomer, observe
from memstream_server.core.transition import Transition, join_all
from memstream_server.core.values import Fragment, Held, State, Tier, Vector
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.memory.enrich import Gathered, enhances_short_term
from memstream_server.engine.memory.known_fragments import Known
from memstream_server.engine.memory.receipts import complete_answer
from memstream_server.ports.journal.records import Answer, Job
from memstream_server.ports.journal.writing import Outcome, Outcomes

if TYPE_CHECKING:
    from memstream_server.engine.memory.receipts import Batch
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime

TURN = 8
"""Observations decided in one turn: some 0.7 ms, which a small call waits for at each of its turns of the loop."""


def effective_policy(policy: Policy, models: EngineModels) -> Policy:
    """The policy as the core is to follow it: without an LLM nothing asks for insights."""
    return policy if models.insights is not None else _without_insights(policy)


@lru_cache(maxsize=64)
def _without_insights(policy: Policy) -> Policy:
    return replace(policy, reflection=replace(policy.reflection, threshold=0.0, insight_on_promotion=False))


async def decide_observations(
    working: WorkingSet,
    batches: tuple[Batch, ...],
    gathered: Sequence[Gathered],
    known: Known,
    models: EngineModels,
    runtime: Runtime,
) -> tuple[Decision, dict[int, Outcome]]:
    """What a group of receipts does to its memory, and what became of each observation by position.

    `known` is what of the memory these observations may concern.
    Lets others run between turns: nothing but the caller changes what is decided on, and nothing is shown meanwhile.
    """
    policy = effective_policy(working.record.policy, models)
    gathered = [part.under(working.embedding.name) for part in gathered]
    steps: list[Transition] = []
    firsts: list[tuple[Fragment, Event]] = []
    parts = {part.fragment.id: part for part in gathered}
    state = working.state
    for start in range(0, len(gathered), TURN):
        async with runtime.turns.of(working.record.namespace):
            for part in gathered[start : start + TURN]:
                step = _decide_one(working, state, part, policy, known, parts)
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
        jobs=jobs_of(working, transition, kept, runtime),
    )
    return decision, outcomes


def _decide_one(
    working: WorkingSet,
    state: State,
    part: Gathered,
    policy: Policy,
    known: Known,
    parts: dict[str, Gathered],
) -> Transition:
    fragment = part.fragment
    existing = known.find_by_key(state, fragment.external_id)
    gone: Transition | None = None
    if existing is not None and is_expired(existing, fragment.create_time_us, policy.retention):
        gone = lifecycle.erase_fragments(
            state, [existing], Reason.EXPIRED
        )  # the id is free, whatever maintenance has come to
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
        part.content_vector if enhances_short_term(working.record.kind, working.record.policy) else None,
        known.find_recalled(fragment),
        known.find_repeated(fragment, policy.retention),
        part.refused,
    )
    step = observe(state, newcomer, policy, working.embedding.model.similarity_min)
    known.follow(step)
    return step if gone is None else join_all((gone, step))


def _said_again(state: State, changed: Fragment, vector: Vector | None, policy: Policy) -> Transition:
    """An update by external_id. One that was forgotten is remembered again: its client has just said it."""
    step = lifecycle.update_fragment(state, changed, vector)
    if changed.forget_time_us is None:
        return step
    return join_all((step, lifecycle.restore_fragments(step.state, [Held(changed, vector)], policy)))


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
    working: WorkingSet, transition: Transition, gathered: Iterable[Gathered], runtime: Runtime
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
    now_us = runtime.clock.now_us()
    return tuple(
        Job(runtime.ids.next(), working.record.uid, type_, json.dumps(payload), now_us) for type_, payload in wanted
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
            answer = complete_answer(batch.receipt, revision, _numbered(batch, outcomes))
            if answer is not None:
                yield answer


def _kept(batches: Sequence[Batch], outcomes: Mapping[int, Outcome]) -> Iterator[Outcomes]:
    for batch in batches:
        if batch.receipt.outcomes:
            yield Outcomes(batch.receipt.producer, batch.receipt.last_sequence, _numbered(batch, outcomes))


def _numbered(batch: Batch, outcomes: Mapping[int, Outcome]) -> tuple[Outcome, ...]:
    numbered = zip(batch.receipt.sequences, batch.receipt.fragments, strict=True)
    return tuple(outcomes[part.position].with_sequence(number) for number, part in numbered)
