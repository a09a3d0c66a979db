"""Who stands beside whom: two fragments on each side in the same session, in order of append.

Rule 1. A fragment that may not neighbour (too long, or gone) is in nobody's window; a long one has a window of its own.
Rule 2. Appends link in constant time. Removal only marks the session; it is linked anew when next asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Growing

Slots = npt.NDArray[np.int64]
NOBODY = -1
_REACH = 2


@dataclass(slots=True)
class _Session:
    slots: array[int] = field(default_factory=lambda: array("q"))
    tail: tuple[int, int] = (NOBODY, NOBODY)
    """The last two that may neighbour, latest first."""
    open: list[tuple[int, int]] = field(default_factory=list)
    """(slot, followers linked so far) of fragments whose window still lacks followers."""


class Neighbours:
    """Windows by slot. Single owner; slots are given in order, 0, 1, 2 ..."""

    def __init__(self) -> None:
        self._windows = Growing(np.int64, 2 * _REACH)
        self._lengths = Growing(np.int64)
        self._window_lengths = Growing(np.int64)
        self._eligible = Growing(np.bool_)
        self._alive = Growing(np.bool_)
        self._session_of = Growing(np.int32)
        self._sessions: dict[int, _Session] = {}
        self._dirty: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes held, about."""
        arrays = (self._windows, self._lengths, self._window_lengths, self._eligible, self._alive, self._session_of)
        return sum(each.nbytes for each in arrays) + len(self._alive) * 8 + len(self._sessions) * 400

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """Which slots count, bool[n]."""
        return self._alive.view

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Terms in each fragment, int64[n], the dead included."""
        return self._lengths.view

    @property
    def session_of(self) -> npt.NDArray[np.int32]:
        """The session code of each slot."""
        return self._session_of.view

    def windows(self) -> Slots:
        """int64[n, 4]: two before, two after; -1 for nobody. Empty rows for the dead."""
        self._settle()
        return self._windows.view

    def window_lengths(self) -> npt.NDArray[np.int64]:
        """Terms in each fragment's window, its own included, int64[n]; 0 for the dead."""
        self._settle()
        return self._window_lengths.view

    def lonely(self) -> Slots:
        """Live slots that are in nobody's window but have one (the long ones)."""
        return np.flatnonzero(self._alive.view & ~self._eligible.view)

    def append(self, session: int, eligible: bool, length: int) -> None:
        """Add the next slot at the end of `session`."""
        self.extend([session], [eligible], [length])

    def extend(self, sessions: Sequence[int], eligible: Sequence[bool], lengths: Sequence[int]) -> None:
        """Add many, each at the end of its session."""
        first = len(self._alive)
        self._windows.extend(np.full((len(sessions), 2 * _REACH), NOBODY))
        self._lengths.extend(lengths)
        self._window_lengths.extend(lengths)
        self._eligible.extend(eligible)
        self._alive.extend(np.ones(len(sessions), np.bool_))
        self._session_of.extend(sessions)
        for slot, (session, may, length) in enumerate(zip(sessions, eligible, lengths, strict=True), first):
            held = self._sessions.get(session)
            if held is None:
                held = self._sessions[session] = _Session()
            held.slots.append(slot)
            if session not in self._dirty:
                self._link(held, slot, may, length)

    def set_alive(self, slot: int, alive: bool) -> None:
        """Take a fragment out of all windows, or bring it back."""
        if bool(self._alive.view[slot]) != alive:
            self._alive.view[slot] = alive
            self._dirty.add(int(self._session_of.view[slot]))

    def replace(self, slot: int, eligible: bool, length: int) -> None:
        """The fragment's text changed: another length, perhaps another eligibility."""
        self._lengths.view[slot] = length
        self._eligible.view[slot] = eligible
        self._dirty.add(int(self._session_of.view[slot]))

    def _link(self, held: _Session, slot: int, eligible: bool, length: int) -> None:
        windows, lengths, window_lengths = self._windows.view, self._lengths.view, self._window_lengths.view
        for place, other in enumerate(held.tail):
            if other != NOBODY:
                windows[slot, _REACH - 1 - place] = other
                window_lengths[slot] += lengths[other]
        if eligible:
            for other, linked in held.open:
                windows[other, _REACH + linked] = slot
                window_lengths[other] += length
            held.open = [(other, linked + 1) for other, linked in held.open if linked + 1 < _REACH]
            held.tail = (slot, held.tail[0])
        held.open.append((slot, 0))

    def _settle(self) -> None:
        lengths = np.append(self._lengths.view, 0) if self._dirty else self._lengths.view  # NOBODY reads the last, 0
        for session in self._dirty:
            self._relink(self._sessions[session], lengths)
        self._dirty.clear()

    def _relink(self, held: _Session, lengths: npt.NDArray[np.int64]) -> None:
        slots = np.array(held.slots, np.int64)
        alive = self._alive.view[slots]
        members = alive & self._eligible.view[slots]
        line = np.full(members.sum() + 2 * _REACH, NOBODY, np.int64)
        line[_REACH : len(line) - _REACH] = slots[members]
        before: Slots = np.cumsum(members) - members  # members strictly before each slot
        after = before + members
        places = np.stack([before, before + 1, after + _REACH, after + _REACH + 1], axis=1)
        found = np.where(alive[:, None], line[places], NOBODY)
        self._windows.view[slots] = found
        self._window_lengths.view[slots] = np.where(alive, lengths[slots] + lengths[found].sum(axis=1), 0)
        held.tail = (int(line[-_REACH - 1]), int(line[-_REACH - 2]))
        lacking = np.flatnonzero(alive & (found[:, -1] == NOBODY))
        held.open = [(int(slots[i]), int(found[i, _REACH] != NOBODY)) for i in lacking]

    def kept(self, slots: Slots) -> Neighbours:
        """A new one with only these slots, renumbered in that order."""
        made = Neighbours()
        sessions = self._session_of.view[slots]
        made._dirty = set(np.unique(sessions).tolist())  # linked whole when next read, not one by one
        made.extend(sessions.tolist(), self._eligible.view[slots].tolist(), self._lengths.view[slots].tolist())
        made._alive.view[:] = self._alive.view[slots]
        return made
