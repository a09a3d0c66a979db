"""Finds the fragments that a group of observations may contradict, before the group is decided.

Rule 1. Candidates come from the postings: fragments of the same speaker that share most of the rare words of a claim.
An observation without a claim looks nothing up.
Rule 2. It runs in the memory's order, and reads only the working set and the journal: the same observations on the same
memory give the same suspicions. They are committed with the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memstream_server.core.lexical import idf
from memstream_server.core.retention import is_expired
from memstream_server.core.suspicions import (
    CANDIDATES_MAX,
    COMMON_MIN,
    COMMON_SHARE,
    Claim,
    Suspicion,
    find_reason,
    is_newer,
    is_one_occasion,
)
from memstream_server.core.values import Fragment, FragmentKind

if TYPE_CHECKING:
    from memstream_server.engine.memory.enrich import EnrichedFragment
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.dependencies import Storage
    from memstream_server.ports.models import Analyzer

LATEST_PER_TERM = 64
"""Fragments looked at for each word: its latest, in order of receipt."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A fragment with its claims."""

    fragment: Fragment
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class _Near:
    """The candidates of a newcomer, best first, and the words of its group that are common in the memory."""

    ids: tuple[str, ...]
    common: frozenset[int]


async def find_suspicions(
    working: WorkingSet, gathered: Sequence[EnrichedFragment], storage: Storage, analyzer: Analyzer
) -> list[Suspicion]:
    """Suspicions between these observations and earlier ones; the caller drops those whose fragments are not kept."""
    record = working.record
    if not record.policy.conflicts.suspect:
        return []
    language, namespace = record.policy.language, record.namespace
    new = [
        _Read(part.fragment, claims)
        for part in gathered
        if may_be_suspected(part.fragment)
        and (claims := analyzer.claims(part.fragment.content, language, namespace, pointed=True))
    ]
    if not new:
        return []
    candidates = _find_candidates(working, new)
    known = await _read_candidates(working, {id_ for one in candidates for id_ in one.ids}, storage)

    def claims_of(fragment: Fragment) -> tuple[Claim, ...]:
        return working.claims.read(fragment, lambda: analyzer.claims(fragment.content, language, namespace))

    found: list[Suspicion] = []
    group = _Group(gathered)
    for one, near in zip(new, candidates, strict=True):
        others = [known[id_] for id_ in near.ids if id_ in known]
        now_us, retention = one.fragment.create_time_us, record.policy.retention
        for other in [*(each for each in others if not is_expired(each, now_us, retention)), *group.near_before(one)]:
            found += _compare(one, _Read(other, claims_of(other)), near.common)
    return found


class _Group:
    """The observations of a group by term, for comparisons within it."""

    def __init__(self, gathered: Sequence[EnrichedFragment]) -> None:
        self._fragments = [part.fragment for part in gathered]
        self._number = {fragment.id: number for number, fragment in enumerate(self._fragments)}
        self._having: dict[int, list[int]] = {}
        for number, part in enumerate(gathered):
            if may_be_suspected(part.fragment):
                for term in np.frombuffer(part.terms.hashes, "<u8").tolist():
                    self._having.setdefault(term, []).append(number)

    def near_before(self, one: _Read) -> list[Fragment]:
        """Those before it of the same speaker that share most terms with its claims, the latest first."""
        end, speaker = self._number[one.fragment.id], one.fragment.speaker
        shared: Counter[int] = Counter()
        for term in {term for claim in one.claims for term in claim.terms}:
            shared.update(number for number in self._having.get(term, ()) if number < end)
        mine = [number for number in shared if self._fragments[number].speaker == speaker]
        best = sorted(mine, key=lambda number: (-shared[number], -number))[:CANDIDATES_MAX]
        return [self._fragments[number] for number in best]


def _find_candidates(working: WorkingSet, new: Sequence[_Read]) -> list[_Near]:
    """Candidates of each, by the idf of the words that they share; one lookup for the whole group."""
    columns, lexical = working.columns, working.lexical
    wanted = [sorted({term for claim in one.claims for term in claim.terms}) for one in new]
    terms = np.array(sorted(set().union(*wanted)), np.uint64)
    which, slots = lexical.sharing(terms)
    order = np.lexsort((slots, which))
    which, slots = which[order], slots[order]
    having = np.bincount(which, minlength=len(terms))
    ends = np.cumsum(having)
    weight = idf(lexical.live, having)
    common = having > max(COMMON_MIN, COMMON_SHARE * lexical.live)
    found: list[_Near] = []
    for one, mine in zip(new, wanted, strict=True):
        codes = columns.speakers.find_codes([one.fragment.speaker])
        sums: dict[int, float] = {}
        for place in np.searchsorted(terms, np.array(mine, np.uint64)).tolist() if codes else ():
            for slot in slots[ends[place] - having[place] : ends[place]][-LATEST_PER_TERM:].tolist():
                sums[slot] = sums.get(slot, 0.0) + float(weight[place])
        same = [slot for slot in sums if columns.speaker[slot] == codes[0] and not columns.asks[slot]]
        best = sorted(same, key=lambda slot: (-sums[slot], -slot))[:CANDIDATES_MAX]
        shared = frozenset(terms[common].tolist())
        found.append(_Near(tuple(columns.ids[slot] for slot in best), shared))
    return found


async def _read_candidates(working: WorkingSet, ids: set[str], storage: Storage) -> dict[str, Fragment]:
    """Observations of these ids that are not forgotten."""
    if not ids:
        return {}
    known = working.fragment_cache.get_many(ids)
    missing = sorted(ids - known.keys())
    if missing:
        known |= {one.id: one for one in await storage.journal.get_fragments(working.record.uid, missing)}
    return {id_: one for id_, one in known.items() if may_be_suspected(one)}


def may_be_suspected(fragment: Fragment) -> bool:
    """Whether it is a statement whose truth its sender left open: not superseded, and without a validity."""
    return (
        fragment.kind is FragmentKind.OBSERVATION
        and fragment.structured is None
        and fragment.forget_time_us is None
        and not fragment.superseded_by
        and fragment.valid_from_us is None
        and fragment.valid_until_us is None
    )


def _compare(one: _Read, other: _Read, common: frozenset[int]) -> list[Suspicion]:
    newer, older = (one, other) if is_newer(one.fragment, other.fragment) else (other, one)
    if newer.fragment.id == older.fragment.id or newer.fragment.content == older.fragment.content:
        return []
    if is_one_occasion(newer.fragment, older.fragment) and not any(claim.changed for claim in newer.claims):
        return []
    reason = find_reason(newer.claims, older.claims, common)
    time_us = one.fragment.create_time_us
    return [] if reason is None else [Suspicion(newer.fragment.id, older.fragment.id, reason, time_us)]
