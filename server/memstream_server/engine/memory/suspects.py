"""Finds the fragments that a group of observations may contradict, before the group is decided.

Rule 1. Candidates come from the postings: fragments of the same speaker that share most of the rare words of a claim.
An observation without a claim looks nothing up.
Rule 2. It runs in the memory's order, and reads only the working set and the journal: the same observations on the same
memory give the same suspicions. They are committed with the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from memstream_server.core.lexical import idf
from memstream_server.core.pick_best import expand_spans, pick_best, sort_items
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
"""Fragments compared for each word: its latest, in order of receipt."""
HASH_BYTES = 8
NOBODY = -1
"""Code of a speaker who has no fragment."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A fragment with its claims."""

    fragment: Fragment
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The words of the claims of newcomers: parallel arrays of distinct pairs, by newcomer and then by word."""

    newcomers: npt.NDArray[np.int64]
    terms: npt.NDArray[np.uint64]


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
    wanted = _list_wanted(new)
    candidates, common = _find_candidates(working, new, wanted)
    known = await _read_candidates(working, {id_ for ids in candidates for id_ in ids}, storage)

    def claims_of(fragment: Fragment) -> tuple[Claim, ...]:
        return working.claims.read(fragment, lambda: analyzer.claims(fragment.content, language, namespace))

    for one in new:  # as candidates of later ones
        working.claims.read(one.fragment, partial(_claims_of, one))
    found: list[Suspicion] = []
    for one, ids, before in zip(new, candidates, _find_in_group(gathered, new, wanted), strict=True):
        others = [known[id_] for id_ in ids if id_ in known]
        now_us, retention = one.fragment.create_time_us, record.policy.retention
        for other in [*(each for each in others if not is_expired(each, now_us, retention)), *before]:
            found += _compare(one, other, claims_of, common)
    return found


def _claims_of(one: _Read) -> tuple[Claim, ...]:
    return one.claims


def _list_wanted(new: Sequence[_Read]) -> _Wanted:
    words = [sorted({term for claim in one.claims for term in claim.terms}) for one in new]
    newcomers = np.repeat(np.arange(len(new)), [len(mine) for mine in words])
    return _Wanted(newcomers, np.array([term for mine in words for term in mine], np.uint64))


def _find_candidates(
    working: WorkingSet, new: Sequence[_Read], wanted: _Wanted
) -> tuple[list[tuple[str, ...]], frozenset[int]]:
    """Candidates of each, best first by the idf of the words that they share, and the words that are common in the
    memory; one lookup for the whole group.
    """
    columns, lexical = working.columns, working.lexical
    terms, place = np.unique(wanted.terms, return_inverse=True)
    which, slots = lexical.sharing(terms)
    slots = sort_items(which, slots)
    having = np.bincount(which, minlength=len(terms))
    weight = idf(lexical.live, having)
    common = having > max(COMMON_MIN, COMMON_SHARE * lexical.live)
    ends = np.cumsum(having)[place]
    pair, at = expand_spans(ends - np.minimum(having[place], LATEST_PER_TERM), ends)
    codes = [columns.speakers.find_codes([one.fragment.speaker]) for one in new]
    speakers = np.array([found[0] if found else NOBODY for found in codes])
    newcomers, sharing = wanted.newcomers[pair], slots[at]
    mine = (columns.speaker[sharing] == speakers[newcomers]) & ~columns.asks[sharing]
    best = pick_best(newcomers[mine], sharing[mine], weight[place[pair[mine]]], len(new), CANDIDATES_MAX)
    return [tuple(columns.ids[slot] for slot in each) for each in best], frozenset(terms[common].tolist())


def _find_in_group(gathered: Sequence[EnrichedFragment], new: Sequence[_Read], wanted: _Wanted) -> list[list[Fragment]]:
    """For each newcomer, those before it in its group, of the same speaker, that share most words with its claims; of
    equal ones the latest first.
    """
    if len(gathered) == 1:
        return [[]]
    number = {part.fragment.id: place for place, part in enumerate(gathered)}
    codes: dict[str, int] = {}
    speaker = np.array([codes.setdefault(part.fragment.speaker, len(codes)) for part in gathered])
    hashes = [part.terms.hashes if may_be_suspected(part.fragment) else b"" for part in gathered]
    having = np.repeat(np.arange(len(gathered)), [len(each) // HASH_BYTES for each in hashes])
    terms = np.frombuffer(b"".join(hashes), "<u8")
    order = np.argsort(terms, kind="stable")
    terms, having = terms[order], having[order]
    pair, at = expand_spans(np.searchsorted(terms, wanted.terms), np.searchsorted(terms, wanted.terms, side="right"))
    newcomers, sharing = wanted.newcomers[pair], having[at]
    own = np.array([number[one.fragment.id] for one in new])[newcomers]
    mine = (sharing < own) & (speaker[sharing] == speaker[own])
    best = pick_best(newcomers[mine], sharing[mine], np.ones(np.count_nonzero(mine)), len(new), CANDIDATES_MAX)
    return [[gathered[place].fragment for place in each] for each in best]


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


def _compare(
    one: _Read, other: Fragment, claims_of: Callable[[Fragment], tuple[Claim, ...]], common: frozenset[int]
) -> list[Suspicion]:
    own = one.fragment
    if own.id == other.id or own.content == other.content:
        return []
    later = is_newer(own, other)
    listed = is_one_occasion(own, other)
    if listed and later and not any(claim.changed for claim in one.claims):
        return []
    read = claims_of(other)
    if listed and not later and not any(claim.changed for claim in read):
        return []
    newer, older = (own, other) if later else (other, own)
    reason = find_reason(one.claims, read, common) if later else find_reason(read, one.claims, common)
    return [] if reason is None else [Suspicion(newer.id, older.id, reason, own.create_time_us)]
