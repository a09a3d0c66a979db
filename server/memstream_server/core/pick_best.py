"""Picks what shares most with each of several things, by arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]
_ITEM_BITS = 32
_ITEM = (1 << _ITEM_BITS) - 1


def expand_spans(starts: Ints, ends: Ints) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Every place of spans: parallel arrays (index of the span, place). A span is [start, end), with start <= end."""
    lengths = ends - starts
    which = np.repeat(np.arange(len(lengths)), lengths)
    firsts = np.cumsum(lengths) - lengths
    return which, np.arange(len(which)) + (starts - firsts)[which]


def sort_items(owners: Ints, items: Ints) -> npt.NDArray[np.int64]:
    """The items by owner, then ascending. Parallel arrays; items in [0, 2^32)."""
    pairs = _pair_up(owners, items)
    pairs.sort()
    return pairs & _ITEM


def pick_best(owners: Ints, items: Ints, weights: Floats, count: int, limit: int) -> list[list[int]]:
    """For each of `count` owners the `limit` items with the largest sums of weights.

    Of equal sums the larger item comes first. Parallel arrays; owners in [0, count), items in [0, 2^32). Weights are
    added in the order of the arrays.
    """
    pairs, place = np.unique(_pair_up(owners, items), return_inverse=True)
    sums = np.bincount(place, weights=weights, minlength=len(pairs))
    owner, item = pairs >> _ITEM_BITS, pairs & _ITEM
    item = item[np.lexsort((-item, -sums, owner))]
    ends = np.cumsum(np.bincount(owner, minlength=count)).tolist()
    starts = [0, *ends[:-1]]
    return [item[start : min(end, start + limit)].tolist() for start, end in zip(starts, ends, strict=True)]


def _pair_up(owners: Ints, items: Ints) -> npt.NDArray[np.int64]:
    pairs: npt.NDArray[np.int64] = (owners.astype(np.int64) << _ITEM_BITS) | items
    return pairs
