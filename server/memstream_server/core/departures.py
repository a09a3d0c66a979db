"""Departures: what a fragment that leaves, or returns, does to the chains of supersession that it is part of.

Rule 1. If a superseded fragment is forgotten or removed, what it superseded is superseded by the next one.
Rule 2. If a current one is forgotten or removed, what it superseded is current again. If retention or capacity forgets
it, its older states are forgotten with it: fading must not make an outdated fragment current. Pinned ones stay.
Rule 3. A forgotten fragment keeps `supersedes`. When it is restored, it supersedes again those that are still current,
and those that its own successor took over.
Rule 4. No `supersedes` names a removed fragment, and no `superseded_by` a forgotten or removed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memstream_server.core import lifecycle
from memstream_server.core.enhancement import take_back
from memstream_server.core.events import EventType, Reason
from memstream_server.core.policy import Policy
from memstream_server.core.supersession import Links, find_end, undo_supersessions
from memstream_server.core.transition import Draft, Transition, join_all, join_transitions
from memstream_server.core.values import Fragment, Held, State

_FADES = (Reason.RETENTION, Reason.CAPACITY)


def find_linked(step: Transition, links: Links) -> list[str]:
    """Ids of the fragments that `settle_links` reads: those that one of a departed or returned fragment's links names.

    `links`: those of the memory before the step.
    """
    if not links and not _supersedes_any(step):
        return []
    newer = _newer_in(step)
    gone = {*step.removed, *(put.id for put in step.puts if put.forget_time_us is not None)}
    found: dict[str, None] = {}
    for id_ in gone:
        found |= dict.fromkeys((*links.older(id_), *links.named_by(id_)))
        at = newer.get(id_) or links.newer(id_)
        while at in gone:
            at = newer.get(at) or links.newer(at)
        found |= dict.fromkeys([at] if at else ())
    waiting = list(_faded(step))
    for id_ in waiting:  # grows
        more = [each for each in links.older(id_) if each not in waiting]
        found |= dict.fromkeys(more)
        waiting += more
    returned = {event.fragment for event in step.events if event.type is EventType.RESTORED}
    for put in step.puts:
        if put.id in returned and put.supersedes:
            found |= dict.fromkeys((*put.supersedes, put.superseded_by))
    found.pop("", None)
    return list(found)


def restore_as_current(state: State, there: Sequence[Held], newer: Iterable[Fragment], policy: Policy) -> Transition:
    """Restore the forgotten ones of these fragments, and make the superseded ones current again.

    `newer`: the fragments that supersede them. Vectors are of the content alone.
    """
    restored = lifecycle.restore_fragments(state, there, policy)
    now = {put.id: put for put in restored.puts}
    olds = [now.get(one.fragment.id, one.fragment) for one in there]
    live = [old for old in olds if old.forget_time_us is None]
    undone = undo_supersessions(restored.state, live, [now.get(one.id, one) for one in newer])
    return join_transitions(restored, undone)


def _supersedes_any(step: Transition) -> bool:
    return EventType.SUPERSEDED in [event.type for event in step.events]


def _newer_in(step: Transition) -> dict[str, str]:
    """By id, the last fragment that the step's events say supersedes it; empty if none does any more."""
    newer: dict[str, str] = {}
    for event in step.events:
        if event.type is EventType.SUPERSEDED:
            newer[event.fragment] = event.other
        elif event.type is EventType.SUPERSESSION_UNDONE:
            newer[event.fragment] = ""
    return newer


def _faded(step: Transition) -> dict[str, Reason]:
    return {
        event.fragment: event.reason
        for event in step.events
        if event.type is EventType.FORGOTTEN and event.reason in _FADES
    }


def settle_links(step: Transition, links: Links, known: Mapping[str, Fragment], time_us: int) -> Transition:
    """The step, followed by what its departures and returns do to their chains.

    `known`: the fragments of `find_linked` before the step, as far as the memory has them.
    """
    if not known and not _supersedes_any(step):
        return step
    return _Settling(step, links, known, time_us).run()


class _Settling:
    def __init__(self, step: Transition, links: Links, known: Mapping[str, Fragment], time_us: int) -> None:
        self._step = step
        self._links = links
        self._time_us = time_us
        self._removed = set(step.removed)
        self._now = {**known, **{put.id: put for put in step.puts}}
        self._newer = _newer_in(step)
        self._draft = Draft(step.state)
        self._fading: dict[str, Reason] = {}
        self._again: list[str] = []
        """Held fragments that may be superseded again: their enhancements are taken back."""

    def run(self) -> Transition:
        gone = self._removed | {put.id for put in self._step.puts if put.forget_time_us is not None}
        faded = _faded(self._step)
        # A fragment that fades with its successor leaves dependents of its own: until none is left.
        while dependents := self._dependents(gone):
            for id_, left in dependents:
                self._relink(id_, left, gone, faded)
            gone |= self._fading.keys()
            faded |= self._fading
        self._drop_removed()
        for event in self._step.events:
            if event.type is EventType.RESTORED and event.fragment not in gone:
                self._supersede_again(event.fragment)
        take_back(self._draft, self._again)
        after = self._draft.finish_transition()
        if not after.puts:
            return self._step
        steps = [self._step, after]
        for reason in _FADES:
            ids = [id_ for id_, why in self._fading.items() if why is reason]
            if ids:
                steps.append(lifecycle.forget_fragments(steps[-1].state, self._values(ids), self._time_us, reason))
        return join_all(steps)

    def _values(self, ids: Iterable[str]) -> list[Fragment]:
        return [self._now[id_] for id_ in ids]

    def _newer_of(self, id_: str) -> str:
        if (fragment := self._now.get(id_)) is not None and id_ not in self._removed:
            return fragment.superseded_by
        return self._newer.get(id_) or self._links.newer(id_)

    def _dependents(self, gone: set[str]) -> list[tuple[str, str]]:
        """(id, the fragment that left) of the fragments that one of `gone` superseded."""
        return [
            (id_, fragment.superseded_by)
            for id_, fragment in self._now.items()
            if fragment.superseded_by in gone and id_ not in self._removed
        ]

    def _relink(self, id_: str, left: str, gone: set[str], faded: Mapping[str, Reason]) -> None:
        newer, why = left, faded.get(left)
        while newer in gone:
            why = faded.get(newer)
            newer = self._newer_of(newer)
        old = self._now[id_]
        if newer:
            self._supersede(old, newer, old.supersede_time_us or self._time_us)
            return
        self._draft.record_event(EventType.SUPERSESSION_UNDONE, id_, other=left)
        self._put(old.but(superseded_by="", supersede_time_us=None))
        if why is not None and not old.pinned and old.forget_time_us is None:
            self._fading[id_] = why

    def _supersede(self, old: Fragment, newer: str, time_us: int) -> None:
        self._draft.record_event(EventType.SUPERSEDED, old.id, other=newer)
        self._put(old.but(superseded_by=newer, supersede_time_us=time_us))
        over = self._now[newer]
        self._put(over.but(supersedes=tuple(dict.fromkeys((*over.supersedes, old.id)))))

    def _drop_removed(self) -> None:
        for id_, fragment in list(self._now.items()):
            if id_ not in self._removed and not self._removed.isdisjoint(fragment.supersedes):
                kept = tuple(each for each in fragment.supersedes if each not in self._removed)
                self._put(fragment.but(supersedes=kept))

    def _supersede_again(self, id_: str) -> None:
        back = self._now[id_]
        for each in back.supersedes:
            old = self._now.get(each)
            taken = "" if old is None else old.superseded_by
            # The end of the chain above it may be the old one by now: a link from there would close a circle.
            may = old is not None and taken in ("", back.superseded_by) and find_end(id_, self._newer_of) != each
            if old is None or not (may or taken == id_):
                back = self._now[id_]
                self._put(back.but(supersedes=tuple(one for one in back.supersedes if one != each)))
            elif may and taken != id_:
                if taken:
                    over = self._now[taken]
                    self._put(over.but(supersedes=tuple(one for one in over.supersedes if one != each)))
                self._supersede(old, id_, self._time_us)
                self._again.append(each)

    def _put(self, fragment: Fragment) -> None:
        self._now[fragment.id] = fragment
        self._draft.put_fragment(fragment)
        self._draft.replace_held(fragment)
