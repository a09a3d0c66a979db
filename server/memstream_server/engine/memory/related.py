"""Earlier statements that are near to a new or changed one: named in its outcome, or suspected for the LLM to decide.

Rule 1. It runs in the memory's order and reads only the working set and the journal: the same observations on the same
memory give the same result.
Rule 2. Only fragments that may have twins (core/twins.py) are compared, those of one speaker. They are near by the
share of words and, in outcomes, plus the cosine of a measured model: people describe a change in other words.
Rule 3. With `conflicts.ask_llm` an observation is compared in its own commit, and a fragment again in the commit that
changes its text or restores it. A pair is suspected again only if a text has changed, or if it ended undecided.
Rule 4. A known pair ends, by an event, in the commit that changes the text of one, removes it, or makes it one that may
not be suspected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from memstream_server.core.events import Event, EventType
from memstream_server.core.lexical import idf, query_terms
from memstream_server.core.retention import is_expired
from memstream_server.core.suspicions import Suspicion, may_be_suspected
from memstream_server.core.transition import Transition
from memstream_server.core.twins import SHARE_MIN, KnownWords, Words, may_have_twins, share_of
from memstream_server.core.values import Fragment, Vector
from memstream_server.engine.memory.decide import jobs_of
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.requests import RELATED_MAX
from memstream_server.ports.journal.writing import Related

if TYPE_CHECKING:
    from memstream_server.engine.memory.enrich import EnrichedFragment
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.ports.journal.records import MemoryRecord
    from memstream_server.ports.models import Analyzer

CANDIDATES_MAX = RELATED_MAX
"""Fragments that one is compared with: those that share its rarest words, and as many before it in its group."""
SUSPECTED_MAX = 3
"""Suspicions that one observation or change can bring: each is a question for the LLM."""
WORDS_MAX = 512
"""Fragments of a memory whose words are kept, about a kilobyte each: to analyze ten takes a tenth of a recall."""
NO_VECTORS: Mapping[str, Vector | None] = {}
_COMPARED = frozenset({EventType.OBSERVED, EventType.UPDATED, EventType.RESTORED})


class _Near(NamedTuple):
    fragment: Fragment
    share: float
    cosine: float
    """0 if cosines do not count."""


def read_words(record: MemoryRecord, analyzer: Analyzer, known: KnownWords) -> Callable[[Fragment], Words]:
    """A function that returns the words of a fragment as twins.py compares them, and keeps them in `known`."""

    def words_of(fragment: Fragment) -> Words:
        found = known.get(fragment.id)
        if found is None or found[0] != fragment.version:
            terms = analyzer.terms(fragment.content, record.policy.language, record.namespace)
            if len(known) >= WORDS_MAX:
                known.clear()
            found = known[fragment.id] = fragment.version, frozenset(query_terms(terms.hashes).tolist())
        return found[1]

    return words_of


async def find_related(
    working: WorkingSet,
    fragments: Sequence[Fragment],
    gathered: Sequence[EnrichedFragment],
    storage: Storage,
    analyzer: Analyzer,
) -> dict[str, tuple[Related, ...]]:
    """By id of a new fragment: the earlier statements of its speaker that are near to it, the nearest first."""
    dense, space, vectors = working.dense, working.embedding, dict[str, Vector | None]()
    if space.model.fitted.related_min is not None and dense is not None and not dense.large:
        vectors = {part.fragment.id: part.in_space(space.name).content_vector for part in gathered}
    near = await _find_near(working, fragments, storage, read_words(working.record, analyzer, {}), vectors)
    observed = {one.id: one.last_observed for one in fragments}
    return {
        id_: tuple(
            Related(each.fragment.id, each.share) for each in found if each.fragment.last_observed < observed[id_]
        )
        for id_, found in near.items()
    }


async def settle_suspicions(
    working: WorkingSet, decision: Decision, storage: Storage, models: EngineModels, runtime: Runtime
) -> Decision:
    """The decision with the pairs that it ends and the suspicions that it brings, an event for each, and a job for each
    that the LLM is to decide."""
    if decision.transition is None:
        return decision
    ended = _find_ended(working, decision)
    policy = working.record.policy.conflicts
    found: list[Suspicion] = []
    if policy.suspect and policy.ask_llm:
        found = await _find_suspicions(working, decision, ended, storage, models.analyzer)
    if not ended and not found:
        return decision
    jobs = jobs_of(working, Transition(working.state), (), runtime, found if models.judge is not None else ())
    events = (
        *(Event(EventType.CONFLICT_ENDED, newer, older) for newer, older in ended),
        *(Event(EventType.CONFLICT_SUSPECTED, one.newer, one.older, conflict_reason=one.reason) for one in found),
    )
    return replace(
        decision,
        events=(*decision.events, *events),
        suspicions=(*decision.suspicions, *found),
        jobs=(*decision.jobs, *jobs),
    )


def _find_ended(working: WorkingSet, decision: Decision) -> dict[tuple[str, str], None]:
    """The known pairs that the decision ends, except those that it decides."""
    known, transition = working.suspicions, decision.transition
    if not known or transition is None:
        return {}
    changed = [put.id for put in transition.puts if put.id in decision.gathered]
    over = [put.id for put in transition.puts if not may_be_suspected(put)]
    found = [one for id_ in (*transition.removed, *changed) for one in known.all_of(id_)]
    found += [one for id_ in over for one in known.of(id_)]
    decided = {(one.newer, one.older) for one in decision.resolutions}
    return dict.fromkeys(pair for one in found if (pair := (one.newer, one.older)) not in decided)


async def _find_suspicions(
    working: WorkingSet, decision: Decision, ended: Iterable[tuple[str, str]], storage: Storage, analyzer: Analyzer
) -> list[Suspicion]:
    transition = decision.transition
    if transition is None:
        return []
    said = {event.fragment for event in transition.events if event.type in _COMPARED}
    puts = {put.id: put for put in transition.puts}
    near = await _find_near(
        working, [put for id_, put in puts.items() if id_ in said], storage, read_words(working.record, analyzer, {})
    )
    gone, over = set(transition.removed), set(ended)
    found: dict[tuple[str, str], Suspicion] = {}
    for id_, others in near.items():
        twins = [puts.get(one.fragment.id, one.fragment) for one in others if one.share >= SHARE_MIN]
        for other in [one for one in twins if one.id not in gone and may_have_twins(one)][:SUSPECTED_MAX]:
            older, newer = sorted((puts[id_], other), key=lambda one: one.last_observed)
            pair = newer.id, older.id
            if pair in over or not (working.suspicions.are_known(*pair) or await _is_decided(working, pair, storage)):
                found[pair] = Suspicion(*pair, time_us=puts[id_].create_time_us)
    return list(found.values())


async def _is_decided(working: WorkingSet, pair: tuple[str, str], storage: Storage) -> bool:
    known = await storage.journal.get_conflict(working.record.uid, *pair)
    return known is not None and known.decision is not None


async def _find_near(
    working: WorkingSet,
    fragments: Sequence[Fragment],
    storage: Storage,
    words_of: Callable[[Fragment], Words],
    vectors: Mapping[str, Vector | None] = NO_VECTORS,
) -> dict[str, list[_Near]]:
    """By id of each of `fragments` that may have twins: statements of its speaker that are near to it and not the same,
    the nearest first, of equally near ones the latest. Of the group, only those before it.

    vectors: of `fragments`, if their cosines count."""
    stated = [one for one in fragments if may_have_twins(one)]
    candidates = {one.id: _find_candidates(working, one, words_of(one), vectors.get(one.id)) for one in stated}
    known = await _read_fragments(working, {id_ for ids in candidates.values() for id_ in ids}, storage)
    retention, near = working.record.policy.retention, dict[str, list[_Near]]()
    changed = {each.id for each in fragments}
    for place, one in enumerate(stated):
        before = [each for each in stated[:place] if each.speaker == one.speaker][-CANDIDATES_MAX:]
        cosines = {each.id: _cosine(vectors.get(one.id), vectors.get(each.id)) for each in before}
        cosines |= {id_: cosine for id_, cosine in candidates[one.id].items() if id_ in known and id_ not in changed}
        found = [
            _Near(each, share_of(words_of(one), words_of(each)), cosines[each.id])
            for each in (*map(known.__getitem__, cosines.keys() & known.keys()), *before)
            if _are_two(one, each) and may_have_twins(each) and not is_expired(each, one.create_time_us, retention)
        ]
        near[one.id] = sorted(
            (each for each in found if each.share or each.cosine),
            key=lambda each: (each.share + each.cosine, each.fragment.last_observed),
        )[::-1]
    return near


def _are_two(one: Fragment, other: Fragment) -> bool:
    """Whether they are two fragments and not one or the same words."""
    same_key = bool(one.external_id) and one.external_id == other.external_id
    return one.id != other.id and one.content != other.content and not same_key


def _find_candidates(working: WorkingSet, fragment: Fragment, words: Words, vector: Vector | None) -> dict[str, float]:
    """Fragments of its speaker by id, with the cosine: those that share its rarest words, and with a vector those that
    are nearest to it."""
    columns, lexical, dense = working.columns, working.lexical, working.dense
    speaker = columns.speakers.find_codes([fragment.speaker])
    if not speaker:
        return {}
    which, slots = lexical.sharing(np.array(sorted(words), np.uint64))
    weights = idf(lexical.live, np.bincount(which, minlength=len(words)))
    sharing = np.bincount(slots, weights[which], len(columns))
    cosines = np.zeros(len(columns), np.float32)
    if vector is not None and dense is not None:
        cosines = np.nan_to_num(dense.cosines(vector))
    mine = columns.speaker == speaker[0]
    best = (slot for scores in (sharing, cosines) for slot in _find_best(scores * mine))
    return {columns.ids[slot]: float(cosines[slot]) for slot in best}


def _cosine(one: Vector | None, other: Vector | None) -> float:
    """0 without one of the two."""
    return 0.0 if one is None or other is None else float(one @ other)


def _find_best(scores: npt.NDArray[np.floating]) -> list[int]:
    """The slots with the greatest positive scores, of equal ones the latest."""
    positive = np.flatnonzero(scores > 0)
    best: list[int] = positive[np.lexsort((-positive, -scores[positive]))][:CANDIDATES_MAX].tolist()
    return best


async def _read_fragments(working: WorkingSet, ids: set[str], storage: Storage) -> dict[str, Fragment]:
    known = working.fragment_cache.get_many(ids)
    if missing := sorted(ids - known.keys()):
        known |= {one.id: one for one in await storage.journal.get_fragments(working.record.uid, missing)}
    return known
