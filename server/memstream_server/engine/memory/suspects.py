"""Finds the fragments that a group of observations may contradict, before the group is decided.

Rule 1. Candidates come from the postings: fragments of the same speaker that share most of the rare words of a claim.
An observation without a claim looks nothing up.
Rule 2. It runs in the memory's order, and reads only the working set and the journal: the same observations on the same
memory give the same suspicions. They are committed with the group.
"""

from __future__ import annotations

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
)
from memstream_server.core.values import Fragment, FragmentKind

if TYPE_CHECKING:
    from memstream_server.engine.memory.enrich import EnrichedFragment
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.dependencies import Storage
    from memstream_server.ports.models import Analyzer


@dataclass(frozen=True, slots=True)
class _Read:
    """A fragment with its claims."""

    fragment: Fragment
    claims: tuple[Claim, ...]
    common: frozenset[int] = frozenset()
    candidates: tuple[str, ...] = ()


async def find_suspicions(
    working: WorkingSet, gathered: Sequence[EnrichedFragment], storage: Storage, analyzer: Analyzer
) -> list[Suspicion]:
    """Suspicions between these observations and earlier ones; the caller drops those whose fragments are not kept."""
    record = working.record
    if not record.policy.conflicts.suspect:
        return []
    language, namespace = record.policy.language, record.namespace
    new: list[_Read] = []
    for part in gathered:
        if part.fragment.structured is None and (claims := analyzer.claims(part.fragment.content, language, namespace)):
            new.append(_find_candidates(working, part.fragment, claims))
    known = await _read_candidates(working, {id_ for one in new for id_ in one.candidates}, storage)
    found: list[Suspicion] = []
    for number, one in enumerate(new):
        for id_ in one.candidates:
            other = known.get(id_)
            if other is not None and not is_expired(other, one.fragment.create_time_us, record.policy.retention):
                found += _compare(one, _Read(other, analyzer.claims(other.content, language, namespace)))
        for before in new[:number]:
            if before.fragment.speaker == one.fragment.speaker:
                found += _compare(one, before)
    return found


def _find_candidates(working: WorkingSet, fragment: Fragment, claims: tuple[Claim, ...]) -> _Read:
    """The best candidates by the idf of the words that they share; words that are common in the memory are left out."""
    columns = working.columns
    codes = columns.speakers.find_codes([fragment.speaker])
    terms = np.array(sorted({term for claim in claims for term in claim.terms}), np.uint64)
    if not codes or not len(terms):
        return _Read(fragment, claims)
    which, slots = working.lexical.sharing(terms)
    having = np.bincount(which, minlength=len(terms))
    common = having > max(COMMON_MIN, COMMON_SHARE * working.lexical.live)
    mine = columns.speaker[slots] == codes[0]
    near, places = np.unique(slots[mine], return_inverse=True)
    weights = np.bincount(places, idf(working.lexical.live, having)[which[mine]], len(near))
    best = near[np.lexsort((-near, -weights))[:CANDIDATES_MAX]]
    ids = tuple(columns.ids[slot] for slot in best.tolist())
    return _Read(fragment, claims, frozenset(terms[common].tolist()), ids)


async def _read_candidates(working: WorkingSet, ids: set[str], storage: Storage) -> dict[str, Fragment]:
    """Observations of these ids that are not forgotten."""
    if not ids:
        return {}
    known = working.fragment_cache.get_many(ids)
    missing = sorted(ids - known.keys())
    if missing:
        known |= {one.id: one for one in await storage.journal.get_fragments(working.record.uid, missing)}
    return {
        id_: one
        for id_, one in known.items()
        if one.kind is FragmentKind.OBSERVATION
        and one.forget_time_us is None
        and one.structured is None
        and not one.superseded_by
    }


def _compare(one: _Read, other: _Read) -> list[Suspicion]:
    newer, older = (one, other) if is_newer(one.fragment, other.fragment) else (other, one)
    if newer.fragment.id == older.fragment.id or newer.fragment.content == older.fragment.content:
        return []
    reason = find_reason(newer.claims, older.claims, one.common)
    time_us = one.fragment.create_time_us
    return [] if reason is None else [Suspicion(newer.fragment.id, older.fragment.id, reason, time_us)]
