"""Put: one observation to its tier in a single decision, so that a precondition and the answer hold for just that.

An observation of a stream is received before it is decided; this one is acknowledged only as stored, and so needs no
receipt. It may overtake what streams have had received and not yet stored: no order between them was promised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from memstream_server.core.events import EventType, Purpose
from memstream_server.core.values import Fragment
from memstream_server.engine.errors import EtagMismatch
from memstream_server.engine.lifecycle import decided, drop_expired, some
from memstream_server.engine.memory.decide import decide_observations
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.memory.enrich import Gathered
from memstream_server.engine.memory.known_fragments import Known
from memstream_server.engine.memory.receipts import fragment_of
from memstream_server.engine.requests import NewObservation, Once, Put, fragment_etag
from memstream_server.ports.journal.writing import Outcome

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.ports.models import Account


async def put(
    actor: Actor,
    new: NewObservation,
    etag: str,
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[Put] | None = None,
) -> Put:
    """Observe, or update the fragment of `new.external_id`. Raises EtagMismatch when that one's etag is another,
    QuotaExceeded."""
    with actor.receiving.put(new):
        return await _put(actor, new, etag, storage, models, runtime, once)


async def _put(
    actor: Actor,
    new: NewObservation,
    etag: str,
    storage: Storage,
    models: EngineModels,
    runtime: Runtime,
    once: Once[Put] | None,
) -> Put:
    account = account_of(actor.working.record)
    part = await _gathered(actor, new, models, runtime, account)

    async def decide(now: Actor) -> tuple[Decision, Callable[[int], Put]]:
        existing = await some(now, [now.working.id_of(new.external_id)], storage)
        found = drop_expired(existing, now.working.record, runtime.clock.now_us())
        if etag and etag not in map(fragment_etag, found):
            current = fragment_etag(found[0]) if found else ""
            raise EtagMismatch(f"fragment {new.external_id!r} has changed since; read it again", etag=current)
        position = now.receiving.take_position()
        seen = part.under(now.working.embedding.name)
        placed = replace(seen, fragment=seen.fragment.but(position=position))
        known = Known(by_key={fragment.external_id: fragment for fragment in existing})
        decision, outcomes = await decide_observations(now.working, (), [placed], known, models, runtime)
        decision = decision.costing(account, Purpose.IMPORTANCE)
        return decision, lambda revision: _result(decision, outcomes[position], revision)

    return await decided(actor, once, storage, decide)


async def _gathered(
    actor: Actor, new: NewObservation, models: EngineModels, runtime: Runtime, account: Account
) -> Gathered:
    record = actor.working.record
    fragment = fragment_of(new, runtime.ids.next(), runtime.clock.now_us(), 0, record)
    own = {} if new.vector is None else {fragment.id: new.vector}
    space = actor.working.embedding
    return (await models.gatherer.gather([fragment], own, [new.importance], record, account, space))[0]


def _result(decision: Decision, outcome: Outcome, revision: int) -> Put:
    kept = None if outcome.other else _kept(decision, outcome.fragment)
    if kept is None:
        return Put(None, False, revision)
    return Put(kept.but(version=revision), outcome.type is not EventType.UPDATED, revision)


def _kept(decision: Decision, fragment_id: str) -> Fragment | None:
    puts = () if decision.transition is None else decision.transition.puts
    return next((fragment for fragment in puts if fragment.id == fragment_id), None)
