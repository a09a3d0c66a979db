"""Transitions: the outcome of a decision, and how consecutive ones join into one revision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

import numpy as np

from memstream_server.core.events import Event, EventType, Reason
from memstream_server.core.values import Fragment, Held, MemoryKind, State, Tier


@dataclass(frozen=True, slots=True)
class InsightRequest:
    """A request for an insight about a fragment that enhancement promoted."""

    anchor: str
    fragments: tuple[str, ...]
    """Source ids of the insight: the anchor, then its enhancers in order."""
    texts: tuple[str, ...]
    """The text of each of `fragments`."""


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """The outcome of a decision. The engine commits all of it atomically, then `state` is the memory's state."""

    state: State
    """After the transition."""
    events: tuple[Event, ...] = ()
    """In order."""
    puts: tuple[Fragment, ...] = ()
    """Every new or changed fragment, once, in its final form; the engine sets `version`."""
    removed: tuple[str, ...] = ()
    """Ids removed permanently. A fragment that was created and removed is in `removed` only."""
    insight_requests: tuple[InsightRequest, ...] = ()
    reflect: bool = False
    """Enough importance reached long-term: start a reflection. `state.reflection_aggregate` is reset."""
    merged: tuple[str, ...] = ()
    """Ids in `puts` whose content became the merged text: they need a new indexed vector."""


def join_transitions(first: Transition, second: Transition) -> Transition:
    """Two consecutive transitions as one; `second` was decided on `first.state`. Associative."""
    return join_all((first, second))


def join_all(transitions: Sequence[Transition]) -> Transition:
    """Consecutive transitions (at least one) as one, in linear time.

    The last put of a fragment wins; a removal overrides every put.
    """
    if len(transitions) == 1:
        return transitions[0]
    removed = _unique_ids(id_ for step in transitions for id_ in step.removed)
    gone = set(removed)
    puts = {fragment.id: fragment for step in transitions for fragment in step.puts if fragment.id not in gone}
    merged = _unique_ids(id_ for step in transitions for id_ in step.merged)
    return Transition(
        state=transitions[-1].state,
        events=tuple(event for step in transitions for event in step.events),
        puts=tuple(puts.values()),
        removed=removed,
        insight_requests=tuple(request for step in transitions for request in step.insight_requests),
        reflect=any(step.reflect for step in transitions),
        merged=tuple(id_ for id_ in merged if id_ not in gone),
    )


def _unique_ids(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ids))


def anchors_changed(before: State, after: State) -> tuple[list[tuple[Held, Held | None]], list[Held]]:
    """What a commit writes of the tiers: fragments whose vector or enhancements changed, each with what was held of it
    before, and what is no longer held.

    A fragment that only moved from sensory to short-term is unchanged.
    """
    old = {held.fragment.id: held for held in (*before.sensory, *before.short_term)}
    new = {held.fragment.id: held for held in (*after.sensory, *after.short_term)}
    changed = [
        (held, was)
        for id_, held in new.items()
        if (was := old.get(id_)) is not held and (was is None or _is_changed(was, held))
    ]
    return changed, [held for id_, held in old.items() if id_ not in new]


def _is_changed(one: Held, other: Held) -> bool:
    if one.enhancements != other.enhancements:
        return True
    if one.vector is None or other.vector is None:
        return one.vector is not other.vector
    return one.vector is not other.vector and not np.array_equal(one.vector, other.vector)


class _Fields(TypedDict, total=False):
    other: str
    from_tier: Tier | None
    to_tier: Tier | None
    reason: Reason
    cosine: float | None
    draw: float | None
    importance: float | None
    sources: tuple[str, ...]
    version: int
    expire_time_us: int | None
    merges: bool | None
    last_repeat: tuple[int, int] | None


class Draft:
    """The builder of a transition: local to one decision, never stored.

    Mutable, because passing a frozen state through every step would copy each tier at each step.
    """

    def __init__(self, state: State) -> None:
        self.kind: MemoryKind = state.kind
        self.sensory: list[Held] = list(state.sensory)
        self.short_term: list[Held] = list(state.short_term)
        self.aggregate = state.reflection_aggregate
        self.requests: list[InsightRequest] = []
        self.reflect = False
        self.merged: list[str] = []
        self._before = state
        self._events: list[Event] = []
        self._puts: dict[str, Fragment] = {}
        self._removed: dict[str, None] = {}

    @property
    def seed(self) -> bytes:
        return self._before.seed

    def record_event(self, type_: EventType, fragment: str, **fields: Unpack[_Fields]) -> None:
        self._events.append(Event(type_, fragment, **fields))

    def put_fragment(self, fragment: Fragment) -> None:
        self._puts[fragment.id] = fragment

    def remove_fragment(self, fragment_id: str) -> None:
        self._removed[fragment_id] = None

    def replace_held(self, fragment: Fragment) -> None:
        """Replace the value of a fragment in the tier that holds it, if one does."""
        for tier in (self.sensory, self.short_term):
            for place, held in enumerate(tier):
                if held.fragment.id == fragment.id:
                    tier[place] = replace(held, fragment=fragment)

    def is_removed(self, fragment_id: str) -> bool:
        return fragment_id in self._removed

    def finish_transition(self) -> Transition:
        state = State(
            kind=self.kind,
            seed=self.seed,
            sensory=tuple(self.sensory),
            short_term=tuple(self.short_term),
            reflection_aggregate=self.aggregate,
        )
        return Transition(
            state=state,
            events=tuple(self._events),
            puts=tuple([fragment for id_, fragment in self._puts.items() if id_ not in self._removed]),
            removed=tuple(self._removed),
            insight_requests=tuple(self.requests),
            reflect=self.reflect,
            merged=tuple([id_ for id_ in self.merged if id_ not in self._removed]),
        )
