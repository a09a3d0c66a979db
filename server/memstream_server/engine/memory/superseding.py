"""Supersession in the engine: checks what an observation names, finds it when it is decided, and settles chains.

Rule 1. An observation that names a fragment which is not in the memory, and does not wait to be stored, is rejected
before it is received. What leaves the memory between *received* and *stored* is left out: nothing acknowledged is lost.
Rule 2. Every commit settles the chains of the fragments that it removes, forgets or restores (core/departures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memstream_server.core.departures import find_linked, settle_links
from memstream_server.core.retention import is_expired
from memstream_server.core.supersession import SupersessionCycle, find_ends, supersede_fragments
from memstream_server.core.transition import Transition
from memstream_server.core.values import Fragment, State
from memstream_server.engine.errors import EngineError, FieldViolation, FragmentNotFound, InvalidField
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.requests import NewObservation, RejectedObservation

if TYPE_CHECKING:
    from memstream_server.engine.memory.known_fragments import KnownFragments
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.dependencies import Runtime, Storage

_CODES = {FragmentNotFound.reason: 5, InvalidField.reason: 3}
"""google.rpc.Code by reason: NOT_FOUND, INVALID_ARGUMENT."""


def unknown_error(key: str) -> FragmentNotFound:
    """The error for a superseded fragment that is not in the memory."""
    return FragmentNotFound(f"there is no fragment {key!r} in this memory to supersede", id=key)


def cycle_error(key: str, field: str) -> InvalidField:
    """The error for a fragment that cannot be superseded by an older state of itself."""
    text = f"{key!r} is the newer fragment itself, or supersedes it already: a chain must not close"
    return InvalidField(f"{field}: {text}", violations=(FieldViolation(field, text),))


# ---- before an observation is received


def refuse_unknown(
    items: Sequence[NewObservation | RejectedObservation],
    working: WorkingSet,
    list_waiting: Callable[[], Iterable[Fragment]],
    now_us: int,
) -> Sequence[NewObservation | RejectedObservation]:
    """`items` unchanged, or a new list in which those that cannot supersede what they name are refused.

    list_waiting: the observations that are submitted and not yet stored.
    """
    if not any(isinstance(item, NewObservation) and item.supersedes for item in items):
        return items
    checked = list(_check_items(items, working, list_waiting, now_us))
    return checked if any(one is not item for one, item in zip(checked, items, strict=True)) else items


def superseding_error(items: Sequence[NewObservation | RejectedObservation]) -> EngineError:
    """The first refusal of `refuse_unknown` as an error."""
    refused = next(item for item in items if isinstance(item, RejectedObservation) and item.reason in _CODES)
    if refused.reason == FragmentNotFound.reason:
        return FragmentNotFound(refused.message, id=refused.details["id"])
    return InvalidField(refused.message, violations=(FieldViolation("observations.supersedes", refused.message),))


def _check_items(
    items: Sequence[NewObservation | RejectedObservation],
    working: WorkingSet,
    list_waiting: Callable[[], Iterable[Fragment]],
    now_us: int,
) -> Iterator[NewObservation | RejectedObservation]:
    waiting: set[str] | None = None
    said: set[str] = set()
    for item in items:
        if isinstance(item, NewObservation) and item.supersedes:
            unknown = [key for key in item.supersedes if not _is_there(key, working, now_us) and key not in said]
            if unknown and waiting is None:
                waiting = {key for one in list_waiting() for key in (one.id, one.external_id)}
            error = _find_error(item, working, [key for key in unknown if key not in (waiting or ())])
            if error is not None:
                code = _CODES[error.reason]
                yield RejectedObservation(code, error.reason, error.message, item.digest, error.details)
                continue
        if isinstance(item, NewObservation) and item.external_id:
            said.add(item.external_id)
        yield item


def _is_there(key: str, working: WorkingSet, now_us: int) -> bool:
    id_ = working.find_id(key)
    if not id_:
        return False
    columns = working.columns
    slot = columns.slot(id_)
    return slot is not None and not columns.is_expired_at(slot, now_us, working.record.policy.retention.ttl_s)


def raise_if_refused(item: NewObservation, working: WorkingSet, now_us: int) -> None:
    """Raises the error for an observation that cannot supersede what it names."""
    checked = refuse_unknown([item], working, tuple, now_us)
    if checked[0] is not item:
        raise superseding_error(checked)


def _find_error(item: NewObservation, working: WorkingSet, unknown: Sequence[str]) -> EngineError | None:
    if unknown:
        return unknown_error(unknown[0])
    if not item.external_id:
        return None
    if item.external_id in item.supersedes:
        return cycle_error(item.external_id, "supersedes")
    if own := working.id_of(item.external_id):
        try:
            find_ends([id_ for key in item.supersedes if (id_ := working.find_id(key))], own, working.links.newer)
        except SupersessionCycle as error:
            return cycle_error(error.older, "supersedes")
    return None


# ---- when it is decided


def find_superseded(
    working: WorkingSet, state: State, known: KnownFragments, named: Sequence[str], fragment: Fragment, new_id: str
) -> tuple[Fragment, ...]:
    """The fragments to mark so that `new_id` supersedes all that `named` names, as far as they are in the memory."""
    retention = working.record.policy.retention

    def newer(id_: str) -> str:
        found = known.find(state, id_)
        further = working.links.newer(id_) if found is None else found.superseded_by
        return further if further and known.find(state, further) is not None else ""

    found: dict[str, Fragment] = {}
    for key in named:
        old = known.find(state, key)
        if old is None or is_expired(old, fragment.create_time_us, retention):
            continue
        try:
            ends = find_ends([old.id], new_id, newer)
        except SupersessionCycle:
            continue  # an earlier observation has superseded it meanwhile
        for end in ends:
            if (last := known.find(state, end)) is not None:
                found[end] = last
    return tuple(found.values())


def supersede_by_update(
    working: WorkingSet, state: State, known: KnownFragments, named: Sequence[str], id_: str, fragment: Fragment
) -> Transition:
    """What an observation that updated the fragment `id_` supersedes."""
    changed = known.find(state, id_)
    olds = find_superseded(working, state, known, named, fragment, id_)
    if changed is None or not olds:
        return Transition(state)
    return supersede_fragments(state, olds, changed, fragment.create_time_us)


# ---- when it is committed


async def settle_decision(working: WorkingSet, decision: Decision, storage: Storage, runtime: Runtime) -> Decision:
    """The decision, with what its departures and returns do to chains of supersession."""
    step = decision.transition
    if step is None:
        return decision
    linked = find_linked(step, working.links)
    known = {one.id: one for one in await _read_linked(working, linked, storage)} if linked else {}
    settled = settle_links(step, working.links, known, runtime.clock.now_us())
    return decision if settled is step else replace(decision, transition=settled)


async def _read_linked(working: WorkingSet, ids: Sequence[str], storage: Storage) -> list[Fragment]:
    held = {one.fragment.id: one.fragment for one in (*working.state.sensory, *working.state.short_term)}
    outside = [id_ for id_ in ids if id_ not in held]
    read = await storage.journal.get_fragments(working.record.uid, outside) if outside else []
    return [*read, *(held[id_] for id_ in ids if id_ in held)]
