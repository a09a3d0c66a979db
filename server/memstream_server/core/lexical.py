"""The two lexical legs: BM25 of a fragment, and BM25 of a fragment with its context window in the session.

A neighbour's words are weighted by distance (neighbours.NEARNESS).

BM25 as in Robertson and Zaragoza, The Probabilistic Relevance Framework (2009), with the non-negative idf
log(1 + (N - df + 0.5) / (df + 0.5)). Both legs use the same per-fragment postings; the term frequency, length and
document frequency of windows are computed per query, so an append re-indexes nothing.

The fragment's leg has k1 0.9 and b 0.4 where its context counts fully (dialogue.py), and k1 1.2 and b 0.75 where it
does not count; between, the length norm is interpolated.

Rule 1. Statistics (N, df, mean length) cover the live fragments of this memory; in a recall over several memories,
those of all of them (WordStatistics), so that their scores are on one scale.
Rule 2. Slots are 0, 1, 2 ... in order of append and never change, except by `keep`.
Rule 3. Leg values are on an absolute scale: shares of the highest score that any document could get for the query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Parts
from memstream_server.core.columns import Slots
from memstream_server.core.dialogue import Dialogue
from memstream_server.core.neighbours import NOBODY, SHARES, Neighbours
from memstream_server.core.postings import Hashes, Postings
from memstream_server.core.rendering import may_neighbour

Floats = npt.NDArray[np.float32]
Packed = bytes
"""Little-endian array: u64 term hashes, or the u16 counts parallel to them."""
FRAGMENT_K1, FRAGMENT_B = 0.9, 0.4
"""Of a fragment whose context counts."""
CONTEXT_K1, CONTEXT_B = 1.2, 0.75
"""Of a context window, and of a fragment that stands alone."""
_Found = tuple[Slots, npt.NDArray[np.integer], Floats]
"""Parallel arrays: term (index in the query), slot, count; a (term, slot) pair occurs once."""
_Weighed = tuple[Floats, float]
"""The sum of idf x saturated tf by slot, and the sum of the idfs, which bounds it."""
_GATHER_MAX = 1_024
"""Smaller memories gather all terms of all windows in one step, because numpy call overhead dominates."""
_SPARSE_SHARE = 16
"""A term that touches fewer than one window in this many is rare."""
_SCATTERED_AT_ONCE = 8_192
"""Postings per step: their windows stay in the processor's cache."""
_CELLS_MAX = 1 << 18
"""Terms x fragments of a gathering; bounds the RAM of long queries."""


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """One leg's result: `shares` float32[n] by slot, of `attainable`, the highest score any fragment could get.

    Shares are in [0, 1]; all are 0 for a query without terms. shares x attainable is the BM25 score.
    """

    shares: Floats
    attainable: float

    @property
    def values(self) -> Floats:
        """BM25 by slot."""
        return self.shares * np.float32(self.attainable)


@dataclass(frozen=True, slots=True, eq=False)
class WordStatistics:
    """How often the words of a query occur in one memory, or in several together."""

    terms: Packed
    """The query's."""
    fragments: int
    words: int
    window_words: float
    """Of the context windows."""
    holding: npt.NDArray[np.int64]
    """Fragments with the term, by index in the query's terms."""
    windows: npt.NDArray[np.int64]
    """Windows with the term."""

    def __add__(self, other: WordStatistics) -> WordStatistics:
        return WordStatistics(
            self.terms,
            self.fragments + other.fragments,
            self.words + other.words,
            self.window_words + other.window_words,
            self.holding + other.holding,
            self.windows + other.windows,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Legs:
    """Both legs of a query, and which fragments follow which. Valid until the next change of the index."""

    alone: Leg
    """Of each fragment alone."""
    around: Leg
    """Of each fragment with its context window."""
    previous: npt.NDArray[np.int32]
    """The nearest earlier fragment in each window, NOBODY for none."""
    found: tuple[Slots, npt.NDArray[np.integer]]
    """Parallel arrays: index in the query's terms, slot that has the term."""
    dialogue: Dialogue | None = None
    """None: the context of every fragment counts fully, and no fragment is a reply."""

    def terms_of(self, slots: Sequence[int]) -> npt.NDArray[np.integer]:
        """Indices of the query's terms that one of these fragments has; one that several have comes several times."""
        which, holding = self.found
        has = np.zeros(len(holding), np.bool_)
        for slot in slots:  # one or two
            has |= holding == slot
        return which[has]

    def after_questions(self, slots: Slots, asks: npt.NDArray[np.bool_]) -> tuple[Slots, npt.NDArray[np.int32]]:
        """Which of `slots` (indices) follow a question, and the slots of these questions. `asks`: by slot."""
        before = self.previous[slots]
        follows = np.flatnonzero(asks[before] & (before != NOBODY))
        return follows, before[follows]


def idf(total: int, holding: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Inverse document frequency of terms that occur in `holding` of `total` documents."""
    return np.log1p((total - holding + 0.5) / (holding + 0.5))


def query_terms(hashes: Packed) -> Hashes:
    """The term hashes of packed little-endian u64, which are distinct and ascending (ports.models.Analyzer)."""
    return np.frombuffer(hashes, "<u8")


class LexicalIndex:
    """Postings and context windows of a memory. Mutable, with a single owner; holds no text."""

    def __init__(self) -> None:
        self._postings = Postings()
        self._neighbours = Neighbours()
        self._dead = 0
        self._norms: list[Floats] = []
        """Length norms of both legs; cleared by every change."""
        self._norms_of: Dialogue | None = None
        self._counted: tuple[Packed, _Found, Floats | None] | None = None
        """Terms that were counted for a query over several memories, which ranks by them next: what has them, and their
        counts in the windows if the memory is small."""

    def __len__(self) -> int:
        return len(self._neighbours)

    @property
    def live(self) -> int:
        """Number of live fragments."""
        return len(self._neighbours) - self._dead

    @property
    def bytes(self) -> int:
        """Approximate RAM in bytes, for the limit on active memories."""
        return self._postings.nbytes + self._neighbours.nbytes + sum(each.nbytes for each in self._norms)

    def append(self, hashes: Packed, counts: Packed, session: int, characters: int) -> int:
        """Add a fragment: packed terms (distinct u64 hashes, u16 counts), session code, characters of content.

        Returns its slot.
        """
        terms, numbers = np.frombuffer(hashes, "<u8"), np.frombuffer(counts, "<u2")
        return self.extend(terms, numbers, np.array([len(terms)]), [session], [characters])

    def extend(
        self,
        hashes: Hashes,
        counts: npt.NDArray[np.uint16],
        sizes: npt.NDArray[np.int64],
        sessions: Sequence[int],
        characters: Sequence[int],
        later: bool = False,
    ) -> int:
        """Append many fragments; return the slot of the first.

        `hashes` and `counts` are concatenated; `sizes` has the number of terms of each fragment. `later`: the caller
        calls `settle` after the last batch.
        """
        first = len(self)
        owners = np.repeat(np.arange(len(sizes)), sizes)
        lengths: list[int] = np.bincount(owners, counts, len(sizes)).astype(np.int64).tolist()
        self._neighbours.extend(sessions, [may_neighbour(each) for each in characters], lengths)
        self._postings.add(hashes, owners + first, counts, later)
        self._clear_cached()
        return first

    def replace(self, slot: int, hashes: Packed, counts: Packed, characters: int) -> None:
        """Index a fragment's changed text; it keeps its place in the session. O(postings)."""
        terms, numbers = np.frombuffer(hashes, "<u8"), np.frombuffer(counts, "<u2")
        self._postings.remove(slot)
        self._postings.add(terms, np.full(len(terms), slot), numbers)
        self._neighbours.replace(slot, may_neighbour(characters), int(numbers.sum()))
        self._clear_cached()

    def move(self, slot: int, session: int) -> None:
        """Move a fragment to another session."""
        if int(self._neighbours.session_of[slot]) != session:
            self._neighbours.move(slot, session)
            self._clear_cached()

    def remove(self, slot: int) -> None:
        """Exclude a fragment from statistics, results and context windows. Idempotent."""
        self._dead += bool(self._neighbours.alive[slot])
        self._neighbours.set_alive(slot, False)
        self._clear_cached()

    def restore(self, slot: int) -> None:
        """Undo `remove`."""
        self._dead -= not self._neighbours.alive[slot]
        self._neighbours.set_alive(slot, True)
        self._clear_cached()

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Keep only these slots (ascending), renumbered 0, 1, 2 ...; release the memory of the others."""
        new_slot = np.full(len(self), NOBODY, np.int32)
        new_slot[slots] = np.arange(len(slots), dtype=np.int32)
        self._postings.keep(new_slot)
        self._neighbours = self._neighbours.kept(slots)
        self._dead = int((~self._neighbours.alive).sum())
        self._clear_cached()

    def pack(self) -> Parts:
        """The postings, and the lengths of fragments. Sessions and what is alive are columns."""
        arrays = dict(self._postings.pack().arrays)
        return Parts(arrays | dict(self._neighbours.pack().arrays), {})

    def unpack(self, parts: Parts, sessions: npt.NDArray[np.int32], alive: npt.NDArray[np.bool_]) -> None:
        """Become what was packed, from empty; `sessions` and `alive` by slot. Raises KeyError and ValueError."""
        self._postings.unpack(parts)
        self._neighbours.unpack(parts, sessions, alive)
        self._dead = int((~alive).sum())

    def _clear_cached(self) -> None:
        self._norms.clear()
        self._counted = None

    def settle(self) -> None:
        """Do the deferred work that the next query would otherwise wait for."""
        self._postings.settle()
        self._neighbours.settle()

    def sharing(self, terms: Hashes) -> tuple[Slots, npt.NDArray[np.integer]]:
        """Live fragments with one of the distinct `terms`: parallel arrays (index in `terms`, slot), each pair once."""
        which, slots, _ = self._find_postings(terms)
        return which, slots

    @property
    def neighbours(self) -> Neighbours:
        """The context windows."""
        return self._neighbours

    def legs(self, terms: Hashes, dialogue: Dialogue | None = None, of_several: WordStatistics | None = None) -> Legs:
        """`bm25` and `bm25_context` from a single postings lookup. dialogue: of this memory as it is."""
        counted, self._counted = self._counted, None
        known = counted is not None and of_several is not None and counted[0] == of_several.terms
        found, inside = counted[1:] if known and counted is not None else (self._find_postings(terms), None)
        norms = self._length_norms(dialogue, of_several)
        alone = _make_leg(self._weigh_terms(found, len(terms), norms[0], of_several), FRAGMENT_K1)
        if dialogue is not None and not dialogue.context.any():
            around = Leg(np.zeros(len(self), np.float32), 0.0)
        else:
            around = _make_leg(self._weigh_windows(found, len(terms), norms[1], of_several, inside), CONTEXT_K1)
        return Legs(alone, around, self._neighbours.previous(), found[:2], dialogue)

    def count_words(self, terms: Hashes, dialogue: Dialogue | None = None) -> WordStatistics:
        """The statistics of this memory for the distinct `terms`."""
        found, inside = self._find_postings(terms), None
        holding = np.bincount(found[0], minlength=len(terms))
        if dialogue is not None and not dialogue.context.any():
            windows = holding  # no fragment has a context that counts
        elif len(self) < _GATHER_MAX and len(terms) * len(self) <= _CELLS_MAX:
            inside = self._gather_counts(found, len(terms))
            windows = np.count_nonzero(inside, axis=1)
        else:
            windows = np.array([len(touched) for _, touched, _ in self._list_touched(found, len(terms))], np.int64)
        lengths, around = self._sum_lengths()
        self._counted = terms.tobytes(), found, inside
        return WordStatistics(terms.tobytes(), self.live, lengths, around, holding, windows)

    def bm25(self, terms: Hashes) -> Leg:
        """BM25 of the fragment alone (k1 0.9, b 0.4). `terms` distinct; dead slots get 0."""
        norms = self._length_norms()[0]
        return _make_leg(self._weigh_terms(self._find_postings(terms), len(terms), norms), FRAGMENT_K1)

    def bm25_context(self, terms: Hashes) -> Leg:
        """BM25 of the context window (k1 1.2, b 0.75): tf and length of the window; df counts windows."""
        norms = self._length_norms()[1]
        return _make_leg(self._weigh_windows(self._find_postings(terms), len(terms), norms), CONTEXT_K1)

    def _find_postings(self, terms: Hashes) -> _Found:
        which, slots, counts = self._postings.of(terms)
        if self._dead:
            live = self._neighbours.alive[slots]
            which, slots, counts = which[live], slots[live], counts[live]
        return which, slots, counts.astype(np.float32)

    def _length_norms(self, dialogue: Dialogue | None = None, of_several: WordStatistics | None = None) -> list[Floats]:
        """BM25's length norm, k1 x (1 - b + b x length / mean length), by slot, for each of the two legs."""
        if of_several is None and self._norms and self._norms_of is dialogue:
            return self._norms
        lengths, windows = self._neighbours.lengths, self._neighbours.window_lengths()
        if of_several is None:
            live, (words, around) = self.live, self._sum_lengths()
        else:
            live, words, around = of_several.fragments, of_several.words, of_several.window_words
        mean = words / live if live else 0.0
        own = _length_norm(lengths, mean, FRAGMENT_K1, FRAGMENT_B)
        if dialogue is not None:
            own += (1 - dialogue.context) * (_length_norm(lengths, mean, CONTEXT_K1, CONTEXT_B) - own)
        norms = [own, _length_norm(windows, around / live if live else 0.0, CONTEXT_K1, CONTEXT_B)]
        if of_several is None:
            self._norms, self._norms_of = norms, dialogue
        return norms

    def _sum_lengths(self) -> tuple[int, float]:
        """Words of the live fragments, and of their windows."""
        lengths = self._neighbours.lengths
        own = (lengths[self._neighbours.alive] if self._dead else lengths).sum()
        return int(own), float(self._neighbours.window_lengths().sum())

    def _weigh_windows(
        self,
        found: _Found,
        terms: int,
        norms: Floats,
        of_several: WordStatistics | None = None,
        inside: Floats | None = None,
    ) -> _Weighed:
        size = len(self)
        if size >= _GATHER_MAX or terms * size > _CELLS_MAX:
            return self._scatter_terms(found, terms, norms, of_several)
        return self._gather_windows(self._gather_counts(found, terms) if inside is None else inside, norms, of_several)

    def _weigh_terms(
        self, found: _Found, terms: int, norms: Floats, of_several: WordStatistics | None = None
    ) -> _Weighed:
        which, slots, counts = found
        if of_several is None:
            idfs = idf(self.live, np.bincount(which, minlength=terms))
        else:
            idfs = idf(of_several.fragments, of_several.holding)
        saturated = counts / (counts + norms[slots])
        sums = np.bincount(slots, idfs.astype(np.float32)[which] * saturated, len(self))
        return sums.astype(np.float32), float(idfs.sum())

    def _gather_windows(self, inside: Floats, norms: Floats, of_several: WordStatistics | None) -> _Weighed:
        """`inside` is overwritten."""
        if of_several is None:
            idfs = idf(self.live, np.count_nonzero(inside, axis=1))
        else:
            idfs = idf(of_several.fragments, of_several.windows)
        inside /= inside + norms
        return idfs.astype(np.float32) @ inside, float(idfs.sum())

    def _gather_counts(self, found: _Found, terms: int) -> Floats:
        """(terms, n) counts in the windows."""
        which, slots, alone = found
        held = np.zeros((terms, len(self) + 1), np.float32)  # the last column is 0, for NOBODY
        held[which, slots] = alone
        counts: Floats = held[:, :-1] + held.take(self._neighbours.windows(), axis=1, mode="wrap") @ SHARES
        return counts

    def _scatter_terms(self, found: _Found, terms: int, norms: Floats, of_several: WordStatistics | None) -> _Weighed:
        """Term by term, in the windows that it touches."""
        values, most = np.zeros(len(self), np.float32), 0.0
        for term, (held, touched, inside) in enumerate(self._list_touched(found, terms)):
            if of_several is None:
                value = np.float32(idf(self.live, np.array([len(touched)]))[0])
            else:
                value = np.float32(idf(of_several.fragments, of_several.windows[term : term + 1])[0])
            at = touched if len(touched) < len(self) // 2 else slice(len(self))  # then gathering costs more than a pass
            here = inside[at]
            most_here = here + norms[at]
            is_rare = held * len(SHARES) * _SPARSE_SHARE < len(self)  # rounds in another order
            values[at] += value * here / most_here if is_rare else here / most_here * value
            most += float(value)
        return values, most

    def _list_touched(self, found: _Found, terms: int) -> Iterator[tuple[int, Slots, Floats]]:
        """Of each term: in how many fragments it is, the windows that it is in, and its counts in all windows, which
        are valid until the next term."""
        which, slots, counts = found
        order = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=terms))
        inside = np.zeros(len(self) + 1, np.float32)  # the last one is for NOBODY
        for places in np.split(order, ends[:-1]) if terms else ():
            self._count_in_windows(slots[places], counts[places], inside)
            yield len(places), np.flatnonzero(inside[:-1] != 0), inside
            inside[:] = 0

    def _count_in_windows(self, slots: npt.NDArray[np.integer], counts: Floats, inside: Floats) -> None:
        """Add the count of each fragment that has a term to the windows that it is in; `inside` is 0 before."""
        windows = self._neighbours.windows()
        inside[slots] = counts
        lonely = self._neighbours.lonely()  # they are in no other window, but have neighbours in their own
        around = inside[windows[lonely]] @ SHARES
        for start in range(0, len(slots), _SCATTERED_AT_ONCE):
            some = slots[start : start + _SCATTERED_AT_ONCE]
            near = windows.take(some, axis=0).astype(np.intp)  # a sixth of the time of windows[some]
            if len(lonely):
                near[~self._neighbours.eligible[some]] = NOBODY
            shares = counts[start : start + _SCATTERED_AT_ONCE, None] * SHARES
            np.add.at(inside, near.ravel(), shares.ravel())
        inside[lonely] += around


def _length_norm(lengths: npt.NDArray[np.number], mean: float, k1: float, b: float) -> Floats:
    """`mean`: that of `lengths` over the live slots."""
    return (k1 * (1 - b) + (k1 * b / (mean or 1.0)) * lengths).astype(np.float32)


def _make_leg(weighed: _Weighed, k1: float) -> Leg:
    values, most = weighed
    if most:
        values /= np.float32(most)
    return Leg(values, most * (k1 + 1))
