"""Put: decides one observation in a single decision, to which the etag check and the answer refer.

A stream's observation is received before it is decided. This one is only acknowledged as stored and needs no receipt.
It may overtake received observations of streams: the contract promises no order between them.
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
    with actor.ingest.admit_put(new):
        return await _put_observation(actor, new, etag, storage, models, runtime, once)


async def _put_observation(
    actor: Actor,
    new: NewObservation,
    etag: str | None,
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[Put] | None,
) -> Put:
    account = account_of(actor.working.record)
    part = await _enrich_observation(actor, new, models, runtime, account)

    async def decide(now: Actor) -> tuple[Decision, Callable[[int], Put]]:
        existing = await read_fragments(now, [now.working.id_of(new.external_id)], storage)
        found = drop_expired(existing, now.working.record, runtime.clock.now_us())
        _check_etag(new.external_id, etag, found)
        raise_if_refused(new, now.working, runtime.clock.now_us())
        position = now.ingest.take_position()
        seen = part.in_space(now.working.embedding.name)
        placed = replace(seen, fragment=seen.fragment.but(position=position))
        known = await read_known(now.working, [placed], storage) if new.supersedes else KnownFragments()
        known.by_key |= {fragment.external_id: fragment for fragment in existing}
        decision, outcomes = await decide_observations(now.working, (), [placed], known, models, runtime)
        decision = decision.with_cost(account, Purpose.IMPORTANCE)
        return decision, lambda revision: _put_result(decision, outcomes[position], revision)

    return await run_decision(actor, once, storage, decide)


def _check_etag(external_id: str, etag: str | None, found: Sequence[Fragment]) -> None:
    if etag is None:
        live = [one for one in found if one.forget_time_us is None]
        if live:
            raise EtagMismatch(f"there is a fragment {external_id!r}", etag=fragment_etag(live[0]))
    elif etag and etag not in map(fragment_etag, found):
        current = fragment_etag(found[0]) if found else ""
        raise EtagMismatch(f"fragment {external_id!r} has changed since; read it again", etag=current)


async def _enrich_observation(
    actor: Actor, new: NewObservation, models: EngineModels, runtime: Runtime, account: Account
) -> EnrichedFragment:
    record = actor.working.record
    fragment = fragment_of(new, runtime.ids.next_id(), runtime.clock.now_us(), 0, record)
    own = {} if new.vector is None else {fragment.id: new.vector}
    space = actor.working.embedding
    return (await models.enricher.enrich_fragments([fragment], own, [new.importance], record, account, space))[0]


def _put_result(decision: Decision, outcome: Outcome, revision: int) -> Put:
    kept = None if outcome.other else _kept_fragment(decision, outcome.fragment)
    if kept is None:
        return Put(None, False, revision)
    return Put(kept.but(version=revision), outcome.type is not EventType.UPDATED, revision)


def _kept_fragment(decision: Decision, fragment_id: str) -> Fragment | None:
    puts = () if decision.transition is None else decision.transition.puts
    return next((fragment for fragment in puts if fragment.id == fragment_id), None)
