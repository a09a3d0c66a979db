"""The sessions of a memory as summaries, from the columns of its fragments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import mark_firsts
from memstream_server.core.columns import Columns, Mask

SPEAKERS_MAX = 10
"""Speakers that a summary names."""
_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """The fragments of one session."""

    session: str
    first_us: int
    """The earliest observation time."""
    last_us: int
    """The latest observation time."""
    fragments: int
    speakers: tuple[str, ...]
    """The speakers with most fragments, at most SPEAKERS_MAX; without fragments that name none."""
    speaker_count: int
    position: int
    """The position of the fragment that was received first: it orders sessions with equal `last_us`."""


@dataclass(frozen=True, slots=True)
class SessionQuery:
    """Selects sessions whose name begins with `prefix`, and whose observations overlap [from_us, until_us)."""

    prefix: str = ""
    from_us: int | None = None
    until_us: int | None = None
    after: tuple[int, int] | None = None
    """(last_us, position) of a session; the page begins with the one that follows it."""
    limit: int = 100


def summarize_sessions(columns: Columns, seen: Mask, query: SessionQuery) -> list[SessionSummary]:
    """The selected sessions of the fragments in `seen`, bool[n], the one with the latest observation first.

    Fragments without a session are left out. O(n) in the slots, O(s) in the sessions.
    """
    slots = np.flatnonzero(seen)
    codes, observed_us = columns.session[slots], columns.observe_us[slots]
    total = len(columns.sessions.names)
    counts = np.bincount(codes, minlength=total)
    first_us, last_us = _find_bounds(codes, observed_us, total)
    positions, _ = _find_bounds(codes, columns.position[slots], total)
    chosen = counts > 0
    chosen[columns.sessions.find_codes([""])] = False
    if query.from_us is not None:
        chosen &= last_us >= query.from_us
    if query.until_us is not None:
        chosen &= first_us < query.until_us
    if query.after is not None:
        at_us, position = query.after
        chosen &= (last_us < at_us) | ((last_us == at_us) & (positions > position))
    found = np.flatnonzero(chosen)
    if query.prefix:
        begins = [columns.sessions.names[code].startswith(query.prefix) for code in found.tolist()]
        found = found[np.array(begins, np.bool_)]
    page = found[np.lexsort((positions[found], -last_us[found]))][: query.limit]
    speakers = _list_speakers(columns, slots, codes, page)
    return [
        SessionSummary(
            columns.sessions.names[code],
            int(first_us[code]),
            int(last_us[code]),
            int(counts[code]),
            tuple(names[:SPEAKERS_MAX]),
            len(names),
            int(positions[code]),
        )
        for code, names in zip(page.tolist(), speakers, strict=True)
    ]


def _find_bounds(codes: npt.NDArray[np.int32], values: _Numbers, total: int) -> tuple[_Numbers, _Numbers]:
    """(least, greatest value of each code), int64[total]; of a code without values the extremes of int64."""
    limits = np.iinfo(np.int64)
    least, greatest = np.full(total, limits.max), np.full(total, limits.min)
    np.minimum.at(least, codes, values)
    np.maximum.at(greatest, codes, values)
    return least, greatest


def _list_speakers(
    columns: Columns, slots: _Numbers, codes: npt.NDArray[np.int32], page: _Numbers
) -> Sequence[list[str]]:
    """The speakers of each session of the page, the one with most fragments first."""
    places = np.full(len(columns.sessions.names), -1, np.int64)
    places[page] = np.arange(len(page))
    of_page = places[codes] >= 0
    total = len(columns.speakers.names)
    ordered = np.sort(places[codes[of_page]] * total + columns.speaker[slots[of_page]])
    starts = np.flatnonzero(mark_firsts(ordered))
    pairs, counts = ordered[starts], np.diff(starts, append=len(ordered))
    found: list[list[str]] = [[] for _ in page]
    for pair in pairs[np.argsort(-counts, kind="stable")].tolist():
        place, speaker = divmod(pair, total)
        if name := columns.speakers.names[speaker]:
            found[place].append(name)
    return found
