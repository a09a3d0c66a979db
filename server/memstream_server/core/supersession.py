"""Supersession: which fragment a newer one corrects, and the chains that follow.

Rule 1. A superseded fragment keeps its tier, its place and its history. It no longer enhances others, and is not
enhanced.
Rule 2. A fragment is superseded by at most one other. Following `superseded_by` from any fragment of a chain leads to
the same current end; there are no cycles.
Rule 3. Superseding a fragment that is superseded already supersedes the current end of its chain: the latest
correction wins, whichever state its sender knew.
Rule 4. `superseded_by` never names a forgotten fragment, see core/departures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from memstream_server.core.enhancement import take_back
from memstream_server.core.events import EventType
from memstream_server.core.transition import Draft, Transition
from memstream_server.core.values import Fragment, State

Newer = Callable[[str], str]
"""From a fragment's id to that of the fragment that supersedes it; empty if none does."""

CHAIN_MAX = 20
"""Fragments of a chain that an answer shows."""


class SupersessionCycle(ValueError):
    """The fragment `older` is newer than the fragment that would supersede it, or the same."""

    def __init__(self, older: str) -> None:
        super().__init__(older)
        self.older = older


class Links:
    """Which fragments of a memory supersede which. Mutable, with a single owner; has linked fragments only."""

    def __init__(self) -> None:
        self._newer: dict[str, str] = {}
        self._older: dict[str, tuple[str, ...]] = {}
        self._named_by: dict[str, set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._newer or self._older)

    @property
    def superseded_count(self) -> int:
        """Number of superseded fragments."""
        return len(self._newer)

    def pack(self) -> dict[str, Any]:
        """The links as values that msgpack can hold."""
        return {"newer": self._newer, "older": self._older}

    def unpack(self, values: Mapping[str, Any]) -> None:
        """Become what was packed, from empty. Raises KeyError."""
        self._newer.update(values["newer"])
        for fragment_id, older in values["older"].items():
            self._set_older(fragment_id, tuple(older))

    def note(self, fragment: Fragment) -> None:
        """Record the links of a new or changed fragment."""
        id_ = fragment.id
        if fragment.superseded_by:
            self._newer[id_] = fragment.superseded_by
        else:
            self._newer.pop(id_, None)
        if fragment.supersedes != self._older.get(id_, ()):
            self._set_older(id_, fragment.supersedes)

    def remove(self, fragment_id: str) -> None:
        """Drop the links of a fragment that left the memory."""
        self._newer.pop(fragment_id, None)
        if fragment_id in self._older:
            self._set_older(fragment_id, ())

    def newer(self, fragment_id: str) -> str:
        """The fragment that supersedes it; empty if none does."""
        return self._newer.get(fragment_id, "")

    def older(self, fragment_id: str) -> tuple[str, ...]:
        """`Fragment.supersedes`: for a forgotten fragment, those that it superseded."""
        return self._older.get(fragment_id, ())

    def named_by(self, fragment_id: str) -> frozenset[str]:
        """The fragments whose `supersedes` has it: one that is live, and forgotten ones."""
        return frozenset(self._named_by.get(fragment_id, ()))

    def is_linked(self, fragment_id: str) -> bool:
        """Whether a fragment names it, or it names one."""
        return fragment_id in self._newer or fragment_id in self._older or fragment_id in self._named_by

    def connected(self, fragment_ids: Iterable[str]) -> set[str]:
        """These fragments, and all that links lead to from them, in either direction."""
        waiting = list(fragment_ids)
        found = set(waiting)
        while waiting:
            id_ = waiting.pop()
            for other in (self.newer(id_), *self.older(id_), *self._named_by.get(id_, ())):
                if other and other not in found:
                    found.add(other)
                    waiting.append(other)
        return found

    def chain(self, fragment_id: str) -> list[str]:
        """Ids of the current end of its chain and of all that it supersedes, directly or not: older before newer, at
        most CHAIN_MAX, the newest. Empty if the fragment has no links.
        """
        if fragment_id not in self._newer and fragment_id not in self._older:
            return []
        newest_first = [find_end(fragment_id, self.newer)]
        for id_ in newest_first:  # grows
            if len(newest_first) >= CHAIN_MAX:
                break
            newest_first += [each for each in reversed(self.older(id_)) if self.newer(each) == id_]
        return newest_first[:CHAIN_MAX][::-1] if len(newest_first) > 1 else []

    def _set_older(self, fragment_id: str, older: tuple[str, ...]) -> None:
        for each in self._older.pop(fragment_id, ()):
            self._named_by[each].discard(fragment_id)
            if not self._named_by[each]:
                del self._named_by[each]
        if older:
            self._older[fragment_id] = older
            for each in older:
                self._named_by.setdefault(each, set()).add(fragment_id)


def find_end(fragment_id: str, newer: Newer) -> str:
    """The current end of a fragment's chain."""
    while further := newer(fragment_id):
        fragment_id = further
    return fragment_id


def find_ends(older: Iterable[str], new: str, newer: Newer) -> list[str]:
    """The fragments to mark so that `new` supersedes all of `older`: the current ends of their chains.

    Skips fragments that `new` supersedes already, directly or not. Raises SupersessionCycle.
    """
    found: dict[str, None] = {}
    for id_ in older:
        at = newer(id_)
        while at and at != new:
            at = newer(at)
        if at == new and id_ != new:
            continue
        end = find_end(id_, newer)
        if end == find_end(new, newer):
            raise SupersessionCycle(id_)
        found[end] = None
    return list(found)


def supersede_fragments(state: State, olds: Sequence[Fragment], new: Fragment, time_us: int) -> Transition:
    """Mark fragments, each the current end of a chain (`find_ends`), as superseded by another of the memory."""
    draft = Draft(state)
    changed = mark_superseded(draft, olds, new, time_us)
    if changed is not new:
        draft.put_fragment(changed)
        draft.replace_held(changed)
    return draft.finish_transition()


def mark_superseded(draft: Draft, olds: Sequence[Fragment], new: Fragment, time_us: int) -> Fragment:
    """As `supersede_fragments`, in a draft; returns the newer fragment, which the caller stores."""
    held = {one.fragment.id: one.fragment for one in (*draft.sensory, *draft.short_term)}
    for old in olds:
        draft.record_event(EventType.SUPERSEDED, old.id, other=new.id)
        now = held.get(old.id, old).but(superseded_by=new.id, supersede_time_us=time_us)
        draft.put_fragment(now)
        draft.replace_held(now)
    if not olds:
        return new
    take_back(draft, [old.id for old in olds])
    # One of them may have enhanced the newer fragment.
    new = next((one.fragment for one in (*draft.sensory, *draft.short_term) if one.fragment.id == new.id), new)
    return new.but(supersedes=tuple(dict.fromkeys((*new.supersedes, *(old.id for old in olds)))))


def undo_supersessions(state: State, olds: Iterable[Fragment], newer: Iterable[Fragment]) -> Transition:
    """Make superseded fragments current again; skips others. `newer`: the fragments that supersede them."""
    draft = Draft(state)
    held = {one.fragment.id: one.fragment for one in (*draft.sensory, *draft.short_term)}
    named = {one.id: held.get(one.id, one) for one in newer}
    for old in {one.id: held.get(one.id, one) for one in olds if one.superseded_by}.values():
        draft.record_event(EventType.SUPERSESSION_UNDONE, old.id, other=old.superseded_by)
        current = named.get(old.id, old).but(superseded_by="", supersede_time_us=None)
        changed = [current]
        if (over := named.get(old.superseded_by)) is not None:
            changed.append(over.but(supersedes=tuple(id_ for id_ in over.supersedes if id_ != old.id)))
        for one in changed:
            if one.id in named:
                named[one.id] = one
            draft.put_fragment(one)
            draft.replace_held(one)
    return draft.finish_transition()
