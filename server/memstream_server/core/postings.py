"""The postings of a memory as flat numpy arrays: which fragments contain a term, and how often.

A sorted base (vocabulary, offsets, slots, counts) and a small unsorted tail, which is merged when it exceeds a
sixteenth of the base. No Python object per posting: a million tuples cost 57 ms of garbage collection.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Growing, Parts, allocated_bytes, sort_distinct

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
_TAIL_MIN = 2_048
_TAIL_MAX = 32_768
_TAIL_SHARE = 16


class Postings:
    """Term hash to (slots, counts). Mutable, with a single owner."""

    def __init__(self) -> None:
        self._vocabulary: Hashes = np.empty(0, np.uint64)
        self._offsets = np.zeros(1, np.int64)
        self._slots = np.empty(0, np.int32)
        self._counts = np.empty(0, np.uint16)
        self._tail_hashes = Growing(np.uint64)
        self._tail_slots = Growing(np.int32)
        self._tail_counts = Growing(np.uint16)

    def __len__(self) -> int:
        return len(self._slots) + len(self._tail_slots)

    @property
    def nbytes(self) -> int:
        """Allocated bytes, spare capacity included."""
        base = (self._vocabulary, self._offsets, self._slots, self._counts)
        tail = (self._tail_hashes, self._tail_slots, self._tail_counts)
        return sum([each.nbytes for each in base]) + allocated_bytes(tail)

    def add(self, hashes: Hashes, slots: Places, counts: npt.NDArray[np.uint16], later: bool = False) -> None:
        """Add parallel arrays of postings; each (term, slot) pair must be new.

        `later`: the caller calls `settle` after the last batch.
        """
        self._tail_hashes.extend(hashes)
        self._tail_slots.extend(slots)
        self._tail_counts.extend(counts)
        if not later:
            self.settle()

    def settle(self) -> None:
        """Merge the tail if it exceeds its share."""
        if len(self._tail_slots) > min(max(_TAIL_MIN, len(self._slots) // _TAIL_SHARE), _TAIL_MAX):
            self._merge_tail()

    def remove(self, slot: int) -> None:
        """Blank every posting of a slot (count 0); `keep` releases the memory."""
        self._counts[self._slots == slot] = 0
        self._tail_counts.view[self._tail_slots.view == slot] = 0

    def of(self, terms: Hashes) -> tuple[Places, npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
        """Postings of the distinct `terms`, without blanked ones: parallel (indices in `terms`, slots, counts).

        Each (term, slot) pair occurs once; the order is unspecified.
        """
        tail = self._tail_hashes.view
        # A sixth of the time of nonzero() of the matrix, and the same order.
        places, recent = np.divmod(np.flatnonzero(tail == terms[:, None]), len(tail) or 1)
        which, slots, counts = places, self._tail_slots.view[recent], self._tail_counts.view[recent]
        if len(self._vocabulary) and len(terms):
            base = self._find_in_base(terms)
            which, slots = np.concatenate([base[0], which]), np.concatenate([base[1], slots])
            counts = np.concatenate([base[2], counts])
        held = counts > 0
        return (which, slots, counts) if held.all() else (which[held], slots[held], counts[held])

    def _find_in_base(self, terms: Hashes) -> tuple[Places, npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
        found = np.searchsorted(self._vocabulary, terms)
        found[found == len(self._vocabulary)] = 0
        known = self._vocabulary[found] == terms
        starts, ends = self._offsets[found], np.where(known, self._offsets[found + 1], self._offsets[found])
        spans = [slice(*span) for span in zip(starts.tolist(), ends.tolist(), strict=True)]
        slots, counts = [self._slots[span] for span in spans], [self._counts[span] for span in spans]
        return np.repeat(np.arange(len(terms)), ends - starts), np.concatenate(slots), np.concatenate(counts)

    def pack(self) -> Parts:
        """All postings, without blanked ones, after this call the base."""
        self._merge_tail()
        if not self._counts.all():
            slots_max = int(self._slots.max(initial=-1)) + 1
            self.keep(np.arange(slots_max, dtype=np.int32))
        arrays: dict[str, npt.NDArray[Any]] = {"vocabulary": self._vocabulary, "offsets": self._offsets}
        return Parts(arrays | {"slots": self._slots, "counts": self._counts}, {})

    def unpack(self, parts: Parts) -> None:
        """Become what was packed, from empty. Raises KeyError."""
        self._vocabulary, self._offsets = parts.own_array("vocabulary"), parts.own_array("offsets")
        self._slots, self._counts = parts.own_array("slots"), parts.own_array("counts")

    def keep(self, new_slot: npt.NDArray[np.int32]) -> None:
        """Renumber slot s to new_slot[s], or remove it if that is negative. Releases memory."""
        self._merge_tail()
        terms = np.repeat(np.arange(len(self._vocabulary)), np.diff(self._offsets))
        renumbered = new_slot[self._slots]
        held = (renumbered >= 0) & (self._counts > 0)
        self._slots, self._counts = renumbered[held], self._counts[held]
        sizes = np.bincount(terms[held], minlength=len(self._vocabulary))
        self._vocabulary = self._vocabulary[sizes > 0]
        self._offsets = np.concatenate([[0], np.cumsum(sizes[sizes > 0])]).astype(np.int64)

    def _merge_tail(self) -> None:
        if not len(self._tail_slots):
            return
        self._insert_sorted(self._tail_hashes.view, self._tail_slots.view, self._tail_counts.view)
        large = len(self._tail_slots) > 2 * _TAIL_MAX  # a bulk load: release this much capacity
        for tail in (self._tail_hashes, self._tail_slots, self._tail_counts):
            tail.clear(release=large)

    def _insert_sorted(self, hashes: Hashes, slots: npt.NDArray[np.int32], counts: npt.NDArray[np.uint16]) -> None:
        """Sort the new postings and insert them after equal terms of the base, in time linear in the base."""
        order = np.argsort(hashes)
        hashes = hashes[order]
        first = np.flatnonzero(np.diff(hashes, prepend=~hashes[:1]))
        added, sizes = hashes[first], np.diff(first, append=len(hashes))
        if not len(self._vocabulary):
            self._vocabulary, self._offsets = added, np.append(first, len(hashes))
            self._slots, self._counts = slots[order], counts[order]
            return
        places = self._offsets[np.searchsorted(self._vocabulary, hashes, side="right")]
        self._slots = np.insert(self._slots, places, slots[order])
        self._counts = np.insert(self._counts, places, counts[order])
        vocabulary = sort_distinct(self._vocabulary, added)
        totals = np.zeros(len(vocabulary), np.int64)
        totals[np.searchsorted(vocabulary, self._vocabulary)] += np.diff(self._offsets)
        totals[np.searchsorted(vocabulary, added)] += sizes
        self._vocabulary = vocabulary
        self._offsets = np.concatenate([[0], np.cumsum(totals)]).astype(np.int64)
