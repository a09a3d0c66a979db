"""Put: decides observations in a single decision, to which the etag checks and the answer refer.

A stream's observation is received before it is decided. These are only acknowledged as stored and need no receipt.
They may overtake received observations of streams: the contract promises no order between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memstream_server.core.events import EventType, Purpose
from memstream_server.core.values import Fragment
from memstream_server.engine.errors import EtagMismatch
from memstream_server.engine.lifecycle import drop_expired, read_fragments, run_decision
from memstream_server.engine.memory.decide import decide_observations
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.memory.enrich import EnrichedFragment
from memstream_server.engine.memory.known_fragments import KnownFragments, read_known
from memstream_server.engine.memory.receipts import fragment_of
from memstream_server.engine.memory.superseding import raise_if_refused
from memstream_server.engine.requests import NewObservation, Once, Put, fragment_etag
from memstream_server.ports.conversation_records import JointWrites
from memstream_server.ports.journal.writing import Outcome

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.ports.models import Account


async def put(
    actor: Actor,
    new: NewObservation,
    etag: str | None,
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[Put] | None = None,
) -> Put:
    """Observe, or update the fragment with `new.external_id`. Raises EtagMismatch, QuotaExceeded.

    etag: of the fragment that is there; None: there is none, but a forgotten or expired one; empty: any.
    """
    puts = await put_together(
        actor,
        [(new, etag)],
        storage,
        models,
        runtime,
        _once_of_first(once),
    )
    return puts[0]


async def put_together(
    actor: Actor,
    given: Sequence[tuple[NewObservation, str | None]],
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[Sequence[Put]] | None = None,
    join: Callable[[Sequence[Put]], JointWrites] | None = None,
) -> Sequence[Put]:
    """As `put` for several (observation, etag) with different external ids, in one decision.

    join: makes the writes to conversations that are committed with it; then also raises PreconditionFailed.
    """
    account = account_of(actor.working.record)
    with actor.ingest.admit_puts([new for new, _ in given]):
        parts = await _enrich_observations(actor, [new for new, _ in given], models, runtime, account)

        async def decide(now: Actor) -> tuple[Decision, Callable[[int], Sequence[Put]]]:
            existing = await read_fragments(now, [now.working.id_of(new.external_id) for new, _ in given], storage)
            found = drop_expired(existing, now.working.record, runtime.clock.now_us())
            for new, etag in given:
                _check_etag(new.external_id, etag, [one for one in found if one.external_id == new.external_id])
                raise_if_refused(new, now.working, runtime.clock.now_us())
            seen = [part.in_space(now.working.embedding.name) for part in parts]
            placed = [replace(one, fragment=one.fragment.but(position=now.ingest.take_position())) for one in seen]
            superseding = any(new.supersedes for new, _ in given)
            known = await read_known(now.working, placed, storage) if superseding else KnownFragments()
            known.by_key |= {fragment.external_id: fragment for fragment in existing}
            decision, outcomes = await decide_observations(now.working, (), placed, known, models, runtime)
            decision = decision.with_cost(account, Purpose.IMPORTANCE)

            def puts_at(revision: int) -> Sequence[Put]:
                return [_put_result(decision, outcomes[one.fragment.position], revision) for one in placed]

            if join is None:
                return decision, puts_at
            return replace(decision, joint=join(puts_at(now.revision + 1))), puts_at

        return await run_decision(actor, once, storage, decide)


def _once_of_first(once: Once[Put] | None) -> Once[Sequence[Put]] | None:
    if once is None or once.answer is None:
        return None
    answer = once.answer
    return Once(once.key, lambda puts: answer(puts[0]))


def _check_etag(external_id: str, etag: str | None, found: Sequence[Fragment]) -> None:
    if etag is None:
        live = [one for one in found if one.forget_time_us is None]
        if live:
            raise EtagMismatch(f"there is a fragment {external_id!r}", etag=fragment_etag(live[0]))
    elif etag and etag not in map(fragment_etag, found):
        current = fragment_etag(found[0]) if found else ""
        raise EtagMismatch(f"fragment {external_id!r} has changed since; read it again", etag=current)


async def _enrich_observations(
    actor: Actor, given: Sequence[NewObservation], models: EngineModels, runtime: Runtime, account: Account
) -> Sequence[EnrichedFragment]:
    record, now_us = actor.working.record, runtime.clock.now_us()
    fragments = [fragment_of(new, runtime.ids.next_id(), now_us, 0, record) for new in given]
    own = {fragment.id: new.vector for fragment, new in zip(fragments, given, strict=True) if new.vector is not None}
    importances, space = [new.importance for new in given], actor.working.embedding
    return await models.enricher.enrich_fragments(fragments, own, importances, record, account, space)


def _put_result(decision: Decision, outcome: Outcome, revision: int) -> Put:
    kept = None if outcome.other else _kept_fragment(decision, outcome.fragment)
    if kept is None:
        return Put(None, False, revision)
    return Put(kept.but(version=revision), outcome.type is not EventType.UPDATED, revision)


def _kept_fragment(decision: Decision, fragment_id: str) -> Fragment | None:
    puts = () if decision.transition is None else decision.transition.puts
    return next((fragment for fragment in puts if fragment.id == fragment_id), None)
