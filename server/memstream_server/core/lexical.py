"""The two lexical legs: BM25 of the fragment, and BM25 of the fragment with its neighbours in the session.

BM25 as in Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), with the non-negative idf
log(1 + (N - df + 0.5) / (df + 0.5)). Both legs come from the same per-fragment postings: the window's term
frequency, length and document frequency are worked out when asked, so an append re-indexes nothing.

Rule 1. Statistics (N, df, mean length) are those of the live fragments of this memory.
Rule 2. Slots are 0, 1, 2 ... in order of append and never change, except by `keep`.
Rule 3. A value divided by `attainable` is on an absolute scale: 1 is the most the query could get anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memstream_server.core.neighbours import NOBODY, Neighbours, Slots
from memstream_server.core.postings import Hashes, Postings
from memstream_server.core.rendering import may_neighbour

Floats = npt.NDArray[np.float32]
Packed = bytes
"""Little-endian array: u64 term hashes, or u16 counts beside them."""
FRAGMENT_K1, FRAGMENT_B = 0.9, 0.4
CONTEXT_K1, CONTEXT_B = 1.2, 0.75
_Found = tuple[Slots | slice, npt.NDArray[np.number], int]
"""Where a term is (distinct slots, or all of them), how often, and in how many."""
_ALL = slice(None)
_GATHER_SHARE = 10
"""A term that at least one in so many fragments holds is gathered by all windows, not scattered into them."""
_SPARSE_SHARE = 16
"""Below one touched slot in so many, sorting the touched ones beats a pass over all."""


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """One leg's answer: `values` float32[n] by slot, and the most any fragment could attain."""

    values: Floats
    attainable: float

    def absolute(self) -> Floats:
        """Values in [0, 1]; all 0 for a query without terms."""
        return self.values / np.float32(self.attainable) if self.attainable > 0 else self.values


def idf(total: int, holding: int) -> float:
    """Inverse document frequency of a term that `holding` of `total` documents have."""
    return math.log1p((total - holding + 0.5) / (holding + 0.5))


def query_terms(hashes: Packed) -> Hashes:
    """Distinct term hashes, ascending, of packed little-endian u64."""
    return np.unique(np.frombuffer(hashes, "<u8"))


class LexicalIndex:
    """Postings and windows of one memory. Mutable, with a single owner; holds no text."""

    def __init__(self) -> None:
        self._postings = Postings()
        self._neighbours = Neighbours()
        self._dead = 0

    def __len__(self) -> int:
        return len(self._neighbours.alive)

    @property
    def live(self) -> int:
        """Fragments that count."""
        return len(self) - self._dead

    @property
    def bytes(self) -> int:
        """Memory held, about, for the bound on active memories."""
        return self._postings.nbytes + self._neighbours.nbytes

    def append(self, hashes: Packed, counts: Packed, session: int, characters: int) -> int:
        """Add a fragment: packed terms (u64 hashes distinct, u16 counts), session code, length of its content.

        Returns its slot.
        """
        return self.extend([(hashes, counts, session, characters)])

    def extend(self, rows: Sequence[tuple[Packed, Packed, int, int]]) -> int:
        """Add many at once, as `append` would one by one. Returns the slot of the first."""
        first = len(self)
        all_counts = np.frombuffer(b"".join(row[1] for row in rows), "<u2")
        sizes = np.array([len(row[1]) // 2 for row in rows], np.int64)
        upto, ends = np.append(0, np.cumsum(all_counts, dtype=np.int64)), np.cumsum(sizes)
        lengths: list[int] = (upto[ends] - upto[ends - sizes]).tolist()
        self._neighbours.extend([row[2] for row in rows], [may_neighbour(row[3]) for row in rows], lengths)
        all_hashes = np.frombuffer(b"".join(row[0] for row in rows), "<u8")
        self._postings.add(all_hashes, np.repeat(np.arange(first, first + len(rows)), sizes), all_counts)
        return first

    def replace(self, slot: int, hashes: Packed, counts: Packed, characters: int) -> None:
        """The fragment's text changed; its place in the session stays. O(postings)."""
        terms, numbers = np.frombuffer(hashes, "<u8"), np.frombuffer(counts, "<u2")
        self._postings.remove(slot)
        self._postings.add(terms, slot, numbers)
        self._neighbours.replace(slot, may_neighbour(characters), int(numbers.sum()))

    def remove(self, slot: int) -> None:
        """The fragment no longer counts, nor stands beside others. Repeats change nothing."""
        self._dead += bool(self._neighbours.alive[slot])
        self._neighbours.set_alive(slot, False)

    def restore(self, slot: int) -> None:
        """Undo `remove`."""
        self._dead -= not self._neighbours.alive[slot]
        self._neighbours.set_alive(slot, True)

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Only these slots (ascending) stay, renumbered 0, 1, 2 ..., to give back the room of the others."""
        new_slot = np.full(len(self), NOBODY, np.int32)
        new_slot[slots] = np.arange(len(slots), dtype=np.int32)
        self._postings.keep(new_slot)
        self._neighbours = self._neighbours.kept(slots)
        self._dead = int((~self._neighbours.alive).sum())

    def bm25(self, terms: Hashes) -> Leg:
        """The fragment alone (k1 0.9, b 0.4). `terms` distinct; the values of dead slots are 0."""
        lengths = self._neighbours.lengths
        total = (lengths[self._neighbours.alive] if self._dead else lengths).sum()
        found = ((slots, counts, len(slots)) for slots, counts in map(self._held, terms))
        return self._weigh(found, lengths, int(total), FRAGMENT_K1, FRAGMENT_B)

    def bm25_context(self, terms: Hashes) -> Leg:
        """The fragment with its two neighbours on each side (k1 1.2, b 0.75); window tf, length and df."""
        lengths = self._neighbours.window_lengths()
        lonely = self._neighbours.lonely()
        found = (self._in_windows(*self._held(term), lonely) for term in terms)
        return self._weigh(found, lengths, int(lengths.sum()), CONTEXT_K1, CONTEXT_B)

    def attainable(self, terms: Hashes) -> tuple[float, float]:
        """The most a fragment could get from (bm25, bm25_context): sum of idf x (k1 + 1), unseen terms at df 0."""
        return self.bm25(terms).attainable, self.bm25_context(terms).attainable

    def _held(self, term: np.uint64) -> tuple[Slots, npt.NDArray[np.uint16]]:
        slots, counts = self._postings.of(term)
        if not self._dead:
            return slots.astype(np.int64), counts
        live = self._neighbours.alive[slots]
        return slots[live].astype(np.int64), counts[live]

    def _weigh(self, found: Iterable[_Found], lengths: npt.NDArray[np.int64], total: int, k1: float, b: float) -> Leg:
        """BM25 over the terms found; `total` is the sum of `lengths` over the live."""
        mean = total / self.live if total else 1.0
        norms = (k1 * (1 - b) + (k1 * b / mean) * lengths).astype(np.float32)
        values = np.zeros(len(self), np.float32)
        attainable = 0.0
        for where, counts, holding in found:
            weight = idf(self.live, holding) * (k1 + 1)
            attainable += weight
            held = counts.astype(np.float32)
            values[where] += np.float32(weight) * held / (held + norms[where])
        return Leg(values, attainable)

    def _in_windows(self, slots: Slots, counts: npt.NDArray[np.uint16], lonely: Slots) -> _Found:
        """Spread a term's counts over the windows they are in."""
        windows = self._neighbours.windows()
        if len(slots) * _GATHER_SHARE > len(self):
            held = self._dense(slots, counts)
            near = held.take(windows, mode="wrap")
            sums = held[:-1] + near[:, 0] + near[:, 1] + near[:, 2] + near[:, 3]
            return _ALL, sums, int(np.count_nonzero(sums))
        near_slots = windows[slots]
        if len(lonely):  # a long fragment is in nobody's window, though others are in its
            near_slots[np.isin(slots, lonely)] = NOBODY
        targets = np.concatenate([slots[:, None], near_slots], axis=1).ravel()
        weights = np.repeat(counts, 5)
        if len(lonely):
            more, found = self._around(lonely, slots, counts)
            targets, weights = np.concatenate([targets, more]), np.concatenate([weights, found])
        somebody = targets >= 0
        return _summed(targets[somebody], weights[somebody], len(self))

    def _dense(self, slots: Slots, counts: npt.NDArray[np.uint16]) -> Floats:
        """Counts by slot, with a 0 at the end for NOBODY to read."""
        held = np.zeros(len(self) + 1, np.float32)
        held[slots] = counts
        return held

    def _around(self, lonely: Slots, slots: Slots, counts: npt.NDArray[np.uint16]) -> tuple[Slots, Floats]:
        """What the neighbours of each lonely slot hold: (lonely slots that get some, how much)."""
        sums = self._dense(slots, counts)[self._neighbours.windows()[lonely]].sum(axis=1)
        return lonely[sums > 0], sums[sums > 0]


def _summed(targets: Slots, weights: npt.NDArray[np.number], size: int) -> _Found:
    """The sum of the weights of each distinct target."""
    if len(targets) * _SPARSE_SHARE < size:
        touched, places = np.unique(targets, return_inverse=True)
        return touched, np.bincount(places, weights, len(touched)), len(touched)
    sums = np.bincount(targets, weights, size)
    return _ALL, sums, int(np.count_nonzero(sums))
