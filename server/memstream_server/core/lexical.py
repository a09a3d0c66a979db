"""The two lexical legs: BM25 of the fragment, and BM25 of the fragment with its neighbours in the session.

BM25 as in Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), with the non-negative idf
log(1 + (N - df + 0.5) / (df + 0.5)). Both legs come from the same per-fragment postings: the window's term
frequency, length and document frequency are worked out when asked, so an append re-indexes nothing.

Rule 1. Statistics (N, df, mean length) are those of the live fragments of this memory.
Rule 2. Slots are 0, 1, 2 ... in order of append and never change, except by `keep`.
Rule 3. A value divided by `attainable` is on an absolute scale: 1 is the most the query could get anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memstream_server.core.neighbours import NOBODY, SHARES, Neighbours, Slots
from memstream_server.core.postings import Hashes, Postings
from memstream_server.core.rendering import may_neighbour

Floats = npt.NDArray[np.float32]
Packed = bytes
"""Little-endian array: u64 term hashes, or u16 counts beside them."""
FRAGMENT_K1, FRAGMENT_B = 0.9, 0.4
CONTEXT_K1, CONTEXT_B = 1.2, 0.75
_Found = tuple[Slots, npt.NDArray[np.integer], Floats]
"""Parallel: which term (its place in the query), where (slot), how often; each pair of the first two once."""
_Weighed = tuple[npt.NDArray[np.floating], float]
"""By slot the sum of idf x saturated tf, and the sum of the idfs, which is the most it could be."""
_WINDOW_SHARES = np.concatenate([np.ones(1, np.float32), SHARES])
_GATHER_SHARE = 10
"""A term that at least one in so many fragments holds is gathered by all windows, not scattered into them,"""
_GATHER_MIN = 1_024
"""and in a memory so small every term, because calls cost more than numbers there."""


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """One leg's answer: `shares` float32[n] by slot of `attainable`, the most any fragment could get.

    Shares are on the absolute scale: within [0, 1], all 0 for a query without terms. BM25 itself is their product.
    """

    shares: Floats
    attainable: float

    @property
    def values(self) -> Floats:
        """BM25 by slot."""
        return self.shares * np.float32(self.attainable)

    def absolute(self) -> Floats:
        return self.shares


def idf(total: int, holding: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Inverse document frequency of terms that `holding` of `total` documents have."""
    return np.log1p((total - holding + 0.5) / (holding + 0.5))


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

    def legs(self, terms: Hashes) -> tuple[Leg, Leg]:
        """`bm25` and `bm25_context` from one look at the postings."""
        found = self._held(terms)
        return self._alone(found, len(terms)), self._around(found, len(terms))

    def bm25(self, terms: Hashes) -> Leg:
        """The fragment alone (k1 0.9, b 0.4). `terms` distinct; the values of dead slots are 0."""
        return self._alone(self._held(terms), len(terms))

    def bm25_context(self, terms: Hashes) -> Leg:
        """The fragment with its neighbours (k1 1.2, b 0.75); tf and length of its window, df by windows."""
        return self._around(self._held(terms), len(terms))

    def _held(self, terms: Hashes) -> _Found:
        which, slots, counts = self._postings.of(terms)
        if self._dead:
            live = self._neighbours.alive[slots]
            which, slots, counts = which[live], slots[live], counts[live]
        return which, slots, counts.astype(np.float32)

    def _alone(self, found: _Found, terms: int) -> Leg:
        lengths = self._neighbours.lengths
        total = (lengths[self._neighbours.alive] if self._dead else lengths).sum()
        norms = self._norms(lengths, float(total), FRAGMENT_K1, FRAGMENT_B)
        return self._leg([self._weigh(found, terms, norms)], FRAGMENT_K1)

    def _around(self, found: _Found, terms: int) -> Leg:
        lengths = self._neighbours.window_lengths()
        norms = self._norms(lengths, float(lengths.sum()), CONTEXT_K1, CONTEXT_B)
        holding = np.bincount(found[0], minlength=terms)
        often = holding * _GATHER_SHARE + _GATHER_MIN > len(self)
        weighed = []
        if often.any():
            weighed.append(self._weigh_gathered(*_only(found, often), norms))
        if not often.all():
            rare = _only(found, ~often)
            weighed.append(self._weigh(self._scattered(*rare), rare[1], norms))
        return self._leg(weighed, CONTEXT_K1)

    def _norms(self, lengths: npt.NDArray[np.number], total: float, k1: float, b: float) -> Floats:
        """What BM25 adds to each slot's tf below the line; `total` is the sum of `lengths` over the live."""
        mean = total / self.live if total else 1.0
        return (k1 * (1 - b) + (k1 * b / mean) * lengths).astype(np.float32)

    def _weigh(self, found: _Found, terms: int, norms: Floats) -> _Weighed:
        which, slots, counts = found
        idfs = idf(self.live, np.bincount(which, minlength=terms))
        saturated = counts / (counts + norms[slots])
        return np.bincount(slots, idfs.astype(np.float32)[which] * saturated, len(self)), float(idfs.sum())

    def _weigh_gathered(self, found: _Found, terms: int, norms: Floats) -> _Weighed:
        """The same of what windows hold: each of them looks its neighbours up."""
        which, slots, counts = found
        held = self._by_slot(found, terms)
        inside = held[:, :-1] + held.take(self._neighbours.windows(), axis=1, mode="wrap") @ SHARES
        idfs = idf(self.live, np.count_nonzero(inside, axis=1))
        inside /= inside + norms
        return idfs.astype(np.float32) @ inside, float(idfs.sum())

    def _leg(self, weighed: Sequence[_Weighed], k1: float) -> Leg:
        most = sum(idfs for _, idfs in weighed)
        if not most:
            return Leg(np.zeros(len(self), np.float32), 0.0)
        return Leg((sum(values for values, _ in weighed) / most).astype(np.float32), most * (k1 + 1))

    def _by_slot(self, found: _Found, terms: int) -> Floats:
        """(terms, n + 1) counts, with a 0 at the end for NOBODY to read."""
        which, slots, counts = found
        held = np.zeros((terms, len(self) + 1), np.float32)
        held[which, slots] = counts
        return held

    def _scattered(self, found: _Found, terms: int) -> _Found:
        """What windows hold: each count goes to the windows that it is in."""
        which, slots, counts = found
        windows, stride = self._neighbours.windows(), len(self) + 1  # a cell for NOBODY before those of the slots
        near = windows[slots].astype(np.int64)
        lonely = self._neighbours.lonely()
        if len(lonely):  # a long fragment is in nobody's window, though others are in its
            near[~self._neighbours.eligible[slots]] = NOBODY
        cells = (which * stride + 1)[:, None] + np.concatenate([slots[:, None], near], axis=1)
        weights = counts[:, None] * _WINDOW_SHARES
        if len(lonely):
            sums = self._by_slot(found, terms)[:, windows[lonely]] @ SHARES
            places, those = np.nonzero(sums)
            cells = np.append(cells, places * stride + 1 + lonely[those])
            weights = np.append(weights, sums[places, those])
        touched, within = np.unique(cells.ravel(), return_inverse=True)
        sums = np.bincount(within, weights.ravel(), len(touched))
        which, slots = np.divmod(touched, stride)
        somebody = slots > 0
        return which[somebody], slots[somebody] - 1, sums[somebody].astype(np.float32)


def _only(found: _Found, chosen: npt.NDArray[np.bool_]) -> tuple[_Found, int]:
    """What was found of the chosen terms, numbered anew, and how many these are."""
    which, slots, counts = found
    number = int(chosen.sum())
    if number == len(chosen):
        return found, number
    those = chosen[which]
    return ((np.cumsum(chosen) - 1)[which[those]], slots[those], counts[those]), number
