"""Identity: when an observation repeats a fragment, when it echoes one, and an index that finds repeated fragments.

Rule 1. A repeat says the same words and brings nothing of its own: what a client gave with it is the same.
Rule 2. Hashes differ from process to process, so they are never stored: they find candidates, and `is_repeat` decides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Growing
from memstream_server.core.values import Fragment, FragmentKind, Metadata

Hashes = npt.NDArray[np.int64]
_RECENT_MAX = 4_096
"""Entries that wait in a dict before they are sorted among the others."""


def identity_hash(fragment: Fragment) -> int:
    """Equal for fragments of which one repeats the other."""
    return hash(_identity(fragment))


def is_repeat(new: Fragment, known: Fragment) -> bool:
    """Whether the observation `new` repeats `known`: counted there, nothing of it is lost."""
    if known.kind is not FragmentKind.OBSERVATION or _identity(new) != _identity(known):
        return False
    return not new.own_importance or (known.own_importance and new.importance == known.importance)


def _identity(fragment: Fragment) -> tuple[object, ...]:
    """All that a client gives but the importance, which a repeat may leave out. Without a time of its own an
    observation has that of its receipt, which is no difference."""
    return (
        fragment.content,
        fragment.speaker,
        fragment.session,
        fragment.external_id,
        fragment.structured,
        _typed(fragment.metadata) if fragment.metadata else (),
        fragment.ttl_us,
        fragment.expire_time_us if fragment.ttl_us is None else None,
        _given_time_us(fragment),
        fragment.own_vector,
        fragment.token_count,
    )


def is_echo(new: Fragment, recalled: Fragment) -> bool:
    """Whether the observation `new`, of the words of the `recalled` fragment, says nothing that it does not say.

    The speaker may differ: agents repeat what they recalled. Metadata and expiry may be missing.
    """
    return (
        new.content == recalled.content
        and not new.external_id
        and (new.structured is None or new.structured == recalled.structured)
        and set(_typed(new.metadata)) <= set(_typed(recalled.metadata))
        and (new.expire_time_us is None or _same_expiry(new, recalled))
        and (not new.own_importance or new.importance == recalled.importance)
        and (_given_time_us(new) is None or new.observe_time_us == recalled.observe_time_us)
    )


def _typed(metadata: Metadata) -> tuple[tuple[str, type, object], ...]:
    # True == 1 == 1.0 in Python, yet they are different values of the contract.
    return tuple((key, type(value), value) for key, value in metadata)


def _same_expiry(one: Fragment, other: Fragment) -> bool:
    """The same time to live or, where it was not given as one, the same time."""
    if one.ttl_us is not None or other.ttl_us is not None:
        return one.ttl_us == other.ttl_us
    return one.expire_time_us == other.expire_time_us


def _given_time_us(fragment: Fragment) -> int | None:
    return None if fragment.observe_time_us == fragment.create_time_us else fragment.observe_time_us


class IdentityIndex:
    """Slots by identity hash. Single owner.

    Sorted arrays of hashes and slots for most, a dict for the latest: 24 bytes a fragment where a dict of all takes
    100. What a slot is now decides, so an entry that is no longer true does no harm.
    """

    def __init__(self) -> None:
        self._current = Growing(np.int64)
        self._sorted: Hashes = np.empty(0, np.int64)
        self._slots: Hashes = np.empty(0, np.int64)
        self._recent: dict[int, list[int]] = {}
        self._recent_count = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, about."""
        return self._current.nbytes + self._sorted.nbytes + self._slots.nbytes + self._recent_count * 150

    def extend(self, hashes: list[int], later: bool = False) -> None:
        """Add the next slots. `later`: `settle` is called before anything is looked for."""
        first = len(self._current)
        self._current.extend(hashes)
        if not later:
            for slot, value in enumerate(hashes, first):
                self._remember(slot, value)

    def settle(self) -> None:
        """Sort all there is."""
        self._slots = np.argsort(self._current.view, kind="stable")
        self._sorted = self._current.view[self._slots]
        self._recent, self._recent_count = {}, 0

    def set(self, slot: int, value: int) -> None:
        """The slot's fragment is another one now."""
        if self._current.view[slot] != value:
            self._current.view[slot] = value
            self._remember(slot, value)

    def find(self, value: int) -> list[int]:
        """Slots with that hash, ascending; those of fragments that are gone are among them."""
        found = self._recent.get(value, [])
        low = int(self._sorted.searchsorted(value)) if len(self._sorted) else 0
        if low < len(self._sorted) and self._sorted[low] == value:
            high = int(self._sorted.searchsorted(value, "right"))
            found = found + self._slots[low:high].tolist()
        return sorted({slot for slot in found if self._current.view[slot] == value}) if found else []

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Only these slots stay, renumbered in that order."""
        self._current.keep(slots)
        self.settle()

    def _remember(self, slot: int, value: int) -> None:
        self._recent.setdefault(value, []).append(slot)
        self._recent_count += 1
        if self._recent_count > _RECENT_MAX:
            self._sort_in()

    def _sort_in(self) -> None:
        """What is recent goes among the sorted, which stay in order: a copy, where sorting a million takes 0.1 s."""
        values = np.fromiter(self._recent, np.int64, len(self._recent))
        hashes = np.repeat(values, [len(slots) for slots in self._recent.values()])
        slots = np.array([slot for slots in self._recent.values() for slot in slots], np.int64)
        order = np.argsort(hashes, kind="stable")
        places = self._sorted.searchsorted(hashes[order])
        self._sorted = np.insert(self._sorted, places, hashes[order])
        self._slots = np.insert(self._slots, places, slots[order])
        self._recent, self._recent_count = {}, 0
