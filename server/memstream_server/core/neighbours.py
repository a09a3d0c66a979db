"""Context windows: up to four fragments on each side in the same session, in order of append; the outer two count half.

Rule 1. A fragment that is not eligible (too long, or removed) is in no other window; a long one has its own window.
A fragment without a session (NOBODY in place of its code) has an empty window and is in none.
Rule 2. An append links in constant time. A removal only marks the session dirty; the next read relinks it.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Growing, Parts, add_places, allocated_bytes, mark_firsts
from memstream_server.core.columns import Slots

NOBODY = -1
NEARNESS = (1.0, 1.0, 0.5, 0.5)
"""Weight of a neighbour's words in a window, by distance, nearest first. The fragment's own words have weight 1."""
SHARES = np.array([*reversed(NEARNESS), *NEARNESS], np.float32)
"""The same by window column, from the farthest before the fragment to the farthest after it."""
_REACH = len(NEARNESS)
_NEW_MIN = 16
"""Smaller batches are linked one by one, which costs less than relinking their session."""


@dataclass(slots=True)
class _Session:
    slots: array[int] = field(default_factory=lambda: array("q"))
    tail: list[tuple[int, int]] = field(default_factory=list)
    """(slot, length) of the last eligible fragments, latest first."""
    open: list[tuple[int, int]] = field(default_factory=list)
    """(slot, followers linked so far) of fragments whose window has room for followers."""
    last: int = NOBODY
    """The last live slot, of any length."""


class Neighbours:
    """Windows by slot. Mutable, with a single owner; slots are assigned in order, 0, 1, 2 ..."""

    def __init__(self) -> None:
        self._windows = Growing(np.int32, 2 * _REACH)
        self._before = Growing(np.int32)
        self._lengths = Growing(np.int64)
        self._window_lengths = Growing(np.float64)
        self._eligible = Growing(np.bool_)
        self._alive = Growing(np.bool_)
        self._session_of = Growing(np.int32)
        self._growing = tuple([each for each in vars(self).values() if isinstance(each, Growing)])
        self._sessions: dict[int, _Session] = {}
        self._dirty: set[int] = set()
        self._long = 0

    def __len__(self) -> int:
        return len(self._alive.view)

    @property
    def nbytes(self) -> int:
        """Approximate RAM in bytes."""
        return allocated_bytes(self._growing) + len(self._alive.view) * 8 + len(self._sessions) * 600

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """Live slots, bool[n]."""
        return self._alive.view

    @property
    def eligible(self) -> npt.NDArray[np.bool_]:
        """Slots that may be in other windows, dead ones included, bool[n]."""
        return self._eligible.view

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Terms per fragment, int64[n], dead ones included."""
        return self._lengths.view

    @property
    def session_of(self) -> npt.NDArray[np.int32]:
        """The session code of each slot."""
        return self._session_of.view

    def windows(self) -> npt.NDArray[np.int32]:
        """int32[n, 8]: four before, four after, the columns of SHARES; -1 for none. Rows of dead slots are empty."""
        if self._dirty:
            self.settle()
        return self._windows.view

    def previous(self) -> npt.NDArray[np.int32]:
        """The nearest earlier fragment in each window, NOBODY for none: a column of `windows`, not a copy."""
        return self.windows()[:, _REACH - 1]

    def before(self) -> npt.NDArray[np.int32]:
        """The live fragment before each in its session, of any length, NOBODY for none; NOBODY for dead slots."""
        if self._dirty:
            self.settle()
        return self._before.view

    def window_lengths(self) -> npt.NDArray[np.float64]:
        """Weighted terms per window, the fragment's own included, float64[n]; 0 for dead slots."""
        if self._dirty:
            self.settle()
        return self._window_lengths.view

    def lonely(self) -> Slots:
        """Live slots that are in no other window but have their own: the long fragments."""
        return np.flatnonzero(self._alive.view & ~self._eligible.view) if self._long else np.empty(0, np.int64)

    def append(self, session: int, eligible: bool, length: int) -> None:
        """Add the next slot at the end of `session`."""
        self.extend([session], [eligible], [length])

    def extend(self, sessions: Sequence[int], eligible: Sequence[bool], lengths: Sequence[int]) -> None:
        """Append many slots, each at the end of its session."""
        first = len(self._alive)
        self._add_slots(sessions, eligible, lengths)
        self._long += len(eligible) - sum(eligible)
        if len(sessions) >= _NEW_MIN:
            self._mark_grown(sessions)
            if self._dirty.issuperset(session for session in sessions if session != NOBODY):
                self._append_unlinked(np.asarray(sessions), first)
                return
        for slot, (session, may, length) in enumerate(zip(sessions, eligible, lengths, strict=True), first):
            if session == NOBODY:
                continue
            held = self._open_session(session)
            held.slots.append(slot)
            if session not in self._dirty:
                self._link_slot(held, slot, may, length)

    def _add_slots(
        self, sessions: Sequence[int] | npt.NDArray[np.int32], eligible: npt.ArrayLike, lengths: npt.ArrayLike
    ) -> None:
        """Add live slots with empty windows."""
        first = len(self._alive)
        add_places(self._growing, len(sessions))
        values = (NOBODY, NOBODY, lengths, lengths, eligible, True, sessions)
        for column, value in zip(self._growing, values, strict=True):
            column.view[first:] = value

    def _open_session(self, session: int) -> _Session:
        held = self._sessions.get(session)
        if held is None:
            held = self._sessions[session] = _Session()
        return held

    def _append_unlinked(self, sessions: npt.NDArray[np.int64], first: int) -> None:
        """Append slots from `first` on, one per entry of `sessions`, without linking them."""
        order = np.argsort(sessions, kind="stable")
        order = order[int((sessions == NOBODY).sum()) :]
        if not len(order):
            return  # numpy splits nothing into one part
        ordered = sessions[order]
        starts = np.flatnonzero(mark_firsts(ordered))
        for session, slots in zip(ordered[starts].tolist(), np.split(order + first, starts[1:]), strict=True):
            self._open_session(session).slots.frombytes(slots.tobytes())

    def set_alive(self, slot: int, alive: bool) -> None:
        """Remove a fragment from all windows, or bring it back."""
        if bool(self._alive.view[slot]) != alive:
            self._alive.view[slot] = alive
            self._mark_changed(slot)

    def replace(self, slot: int, eligible: bool, length: int) -> None:
        """Set length and eligibility after a change of the text."""
        self._long += int(self._eligible.view[slot]) - eligible
        self._lengths.view[slot] = length
        self._eligible.view[slot] = eligible
        self._mark_changed(slot)

    def _mark_changed(self, slot: int) -> None:
        session = int(self._session_of.view[slot])
        if session == NOBODY:
            self._clear_window(slot)
        else:
            self._dirty.add(session)

    def _clear_window(self, slot: int) -> None:
        self._windows.view[slot] = self._before.view[slot] = NOBODY
        self._window_lengths.view[slot] = self._lengths.view[slot] if self._alive.view[slot] else 0

    def move(self, slot: int, session: int) -> None:
        """Move a fragment to another session, in slot order."""
        former = int(self._session_of.view[slot])
        if former == session:
            return
        self._session_of.view[slot] = session
        if former != NOBODY:
            left = self._sessions[former]
            left.slots.remove(slot)
            self._dirty.add(former)
            if not left.slots:
                del self._sessions[former]
                self._dirty.discard(former)
        if session != NOBODY:
            entered = self._open_session(session)
            entered.slots.insert(bisect(entered.slots, slot), slot)
        self._mark_changed(slot)

    def _mark_grown(self, sessions: Sequence[int]) -> None:
        """Mark the sessions that at least double, by _NEW_MIN or more fragments, for relinking on the next read."""
        for session, count in Counter(sessions).items():
            held = self._sessions.get(session)
            if session != NOBODY and count >= _NEW_MIN and (held is None or count >= len(held.slots)):
                self._dirty.add(session)

    def _link_slot(self, held: _Session, slot: int, eligible: bool, length: int) -> None:
        windows, window_lengths = self._windows.view, self._window_lengths.view
        self._before.view[slot], held.last = held.last, slot
        around = float(length)
        for place, (other, others_length) in enumerate(held.tail):
            windows[slot, _REACH - 1 - place] = other
            around += others_length * NEARNESS[place]
        window_lengths[slot] = around
        if eligible:
            for other, linked in held.open:
                windows[other, _REACH + linked] = slot
                window_lengths[other] += length * NEARNESS[linked]
            held.open = [(other, linked + 1) for other, linked in held.open if linked + 1 < _REACH]
            held.tail = [(slot, length), *held.tail[: _REACH - 1]]
        held.open.append((slot, 0))

    def settle(self) -> None:
        """Relink the sessions that are marked. Reads call it if there are any; an idle caller may call it earlier."""
        if self._dirty:
            self._relink_sessions([self._sessions[session] for session in self._dirty])
            self._dirty.clear()

    def _relink_sessions(self, sessions: Sequence[_Session]) -> None:
        """Link all sessions in one pass over one array, with gaps of NOBODY before, between and after them."""
        slots = np.concatenate([np.frombuffer(held.slots, np.int64) for held in sessions])
        sizes = [len(held.slots) for held in sessions]
        gaps = np.repeat(np.arange(len(sessions)) * _REACH, sizes)  # gap cells before each slot, less the first gap
        alive = self._alive.view[slots]
        members = alive & self._eligible.view[slots]
        before: Slots = np.cumsum(members) - members + gaps  # index in that array, less the first gap
        line = np.full(members.sum() + (len(sessions) + 1) * _REACH, NOBODY, np.int64)
        line[before[members] + _REACH] = slots[members]
        reach = np.arange(_REACH)
        places = np.concatenate([before[:, None] + reach, (before + members)[:, None] + _REACH + reach], axis=1)
        found = np.where(alive[:, None], line[places], NOBODY)
        lengths = np.append(self._lengths.view, 0)  # NOBODY indexes the last entry, 0
        self._windows.view[slots] = found
        self._before.view[slots] = NOBODY
        living, owner = slots[alive], gaps[alive]
        follows = np.flatnonzero(owner[1:] == owner[:-1])
        self._before.view[living[follows + 1]] = living[follows]
        self._window_lengths.view[slots] = np.where(alive, lengths[slots] + lengths[found] @ SHARES, 0)
        for held in sessions:
            self._set_ends(held)

    def _set_ends(self, held: _Session) -> None:
        """Set `tail` and `open`, to which the next fragment of the session is linked."""
        held.tail, held.open, held.last = [], [], NOBODY
        for slot in reversed(held.slots):
            if len(held.tail) == _REACH:
                break
            if self._alive.view[slot]:
                held.last = max(held.last, slot)
                held.open.append((slot, len(held.tail)))
                if self._eligible.view[slot]:
                    held.tail.append((slot, int(self._lengths.view[slot])))

    def kept(self, slots: Slots) -> Neighbours:
        """A new instance with only these slots, renumbered in that order."""
        made = Neighbours()
        made._fill(self._session_of.view[slots], self._eligible.view[slots], self._lengths.view[slots])
        made._alive.view[:] = self._alive.view[slots]
        made._window_lengths.view[~made._alive.view] = 0
        return made

    def _fill(
        self, sessions: npt.NDArray[np.int32], eligible: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]
    ) -> None:
        """Append slots to a new instance, to be linked in one pass on the next read."""
        self._add_slots(sessions, eligible, lengths)
        self._long = int((~eligible).sum())
        if len(sessions):
            self._append_unlinked(sessions.astype(np.int64), 0)
        self._dirty = set(self._sessions)

    def pack(self) -> Parts:
        """Windows, lengths and eligibility. Sessions and what is alive are columns."""
        self.settle()
        arrays = {"lengths": self._lengths.view, "eligible": self._eligible.view, "before": self._before.view}
        return Parts(arrays | {"windows": self._windows.view, "window_lengths": self._window_lengths.view}, {})

    def unpack(self, parts: Parts, sessions: npt.NDArray[np.int32], alive: npt.NDArray[np.bool_]) -> None:
        """Become what was packed, from empty. Raises KeyError and ValueError."""
        self._fill(sessions, parts.arrays["eligible"], parts.arrays["lengths"])
        self._alive.view[:] = alive
        self._windows.view[:] = parts.arrays["windows"]
        self._before.view[:] = parts.arrays["before"]
        self._window_lengths.view[:] = parts.arrays["window_lengths"]
        self._dirty.clear()
        for held in self._sessions.values():
            self._set_ends(held)
