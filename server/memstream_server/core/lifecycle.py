"""Decisions about fragments that no newcomer causes: by request, by age, by reflection.

The caller passes long-term and forgotten fragments as values, because the state does not hold them. A fragment that
leaves, restorable or not, no longer enhances others: its enhancements of held fragments are undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memstream_server.core.enhancement import compute_cosine, take_back
from memstream_server.core.events import EventType, Reason
from memstream_server.core.policy import Policy
from memstream_server.core.tiers import TIERS, consolidate, insert_fragment
from memstream_server.core.transition import Draft, Transition
from memstream_server.core.values import Fragment, Held, State, Tier, Vector


def clear_fragments(state: State, fragments: Iterable[Fragment], *, resets: bool) -> Transition:
    """Remove fragments permanently, in whichever tier they are.

    `resets` the reflection aggregate, too: long-term is cleared.
    """
    draft = Draft(state)
    leaving = _unique_fragments(fragments)
    for fragment in leaving:
        draft.record_event(EventType.DROPPED, fragment.id, from_tier=fragment.tier, reason=Reason.CLEARED)
        draft.remove_fragment(fragment.id)
    _release_held(draft, {fragment.id for fragment in leaving})
    if resets:
        draft.aggregate = 0.0
    return draft.finish_transition()


def forget_fragments(state: State, fragments: Iterable[Fragment], time_us: int, reason: Reason) -> Transition:
    """Take fragments out of recall, restorable. Only REQUESTED forgets pinned fragments.

    Skips fragments that are already forgotten. A held fragment loses its enhancements and keeps its duplicate count.
    """
    draft = Draft(state)
    held = {one.fragment.id: one.fragment for one in (*draft.sensory, *draft.short_term)}
    leaving = [
        fragment
        for fragment in (held.get(given.id, given) for given in _unique_fragments(fragments))
        if fragment.forget_time_us is None and (reason is Reason.REQUESTED or not fragment.pinned)
    ]
    for fragment in leaving:
        draft.record_event(EventType.FORGOTTEN, fragment.id, from_tier=fragment.tier, reason=reason)
        kept = fragment.enhancement_count if fragment.tier is Tier.LONG_TERM else fragment.duplicate_count
        draft.put_fragment(fragment.but(forget_time_us=time_us, enhancement_count=kept))
    _release_held(draft, {fragment.id for fragment in leaving})
    return draft.finish_transition()


def restore_fragments(state: State, forgotten: Iterable[Held], policy: Policy) -> Transition:
    """Restore forgotten fragments to the tier they left, in order of receipt, if it has room.

    Without room they go to long-term; in a kind without long-term they stay forgotten, without a RESTORED event.
    Vectors are of the content alone, as for a newcomer.
    """
    draft = Draft(state)
    for held in {held.fragment.id: held for held in forgotten}.values():
        tier = _tier_with_room(draft, held.fragment.tier, policy)
        if held.fragment.forget_time_us is None or tier is None:
            continue
        draft.record_event(EventType.RESTORED, held.fragment.id, from_tier=held.fragment.tier, to_tier=tier)
        fragment = held.fragment.but(forget_time_us=None, tier=tier)
        draft.put_fragment(fragment)
        if tier is not Tier.LONG_TERM:
            insert_fragment(draft.sensory if tier is Tier.SENSORY else draft.short_term, Held(fragment, held.vector))
        elif held.fragment.tier is not Tier.LONG_TERM:
            consolidate(draft, policy, fragment)
    return draft.finish_transition()


def erase_fragments(state: State, fragments: Iterable[Fragment], reason: Reason = Reason.REQUESTED) -> Transition:
    """Remove fragments permanently, with content and vectors. Derived contents are lineage.py's concern."""
    draft = Draft(state)
    leaving = _unique_fragments(fragments)
    for fragment in leaving:
        draft.record_event(EventType.ERASED, fragment.id, from_tier=fragment.tier, reason=reason)
        draft.remove_fragment(fragment.id)
    _release_held(draft, {fragment.id for fragment in leaving})
    return draft.finish_transition()


def update_fragment(state: State, fragment: Fragment, vector: Vector | None = None, *, restores: int = 0) -> Transition:
    """Replace a fragment by its changed value (same id and tier). `vector`: of the new content, if it changed.
    `restores`: the version that the change brings back.
    """
    draft = Draft(state)
    draft.record_event(EventType.UPDATED, fragment.id, importance=fragment.importance, version=restores)
    draft.put_fragment(fragment)
    for tier in (draft.sensory, draft.short_term):
        for place, held in enumerate(tier):
            if held.fragment.id == fragment.id:
                same = held.fragment.content == fragment.content
                tier[place] = replace(held, fragment=fragment, vector=held.vector if same else vector)
            elif any(done.id == fragment.id and done.text != fragment.content for done in held.enhancements):
                tier[place] = _with_changed_text(held, fragment)
    return draft.finish_transition()


def fill_vectors(state: State, filled: Iterable[Held]) -> Transition:
    """Set vectors that were missing; each fragment names its model. Past decisions are not repeated."""
    draft = Draft(state)
    vectors = {held.fragment.id: held for held in filled}
    for held in vectors.values():
        draft.record_event(EventType.VECTORED, held.fragment.id)
        draft.put_fragment(held.fragment)
    for tier in (draft.sensory, draft.short_term):
        tier[:] = [
            replace(held, fragment=vectors[held.fragment.id].fragment, vector=vectors[held.fragment.id].vector)
            if held.fragment.id in vectors
            else held
            for held in tier
        ]
    return draft.finish_transition()


def set_importances(state: State, rated: Iterable[Fragment]) -> Transition:
    """Set importances that were missing. Past decisions are not repeated."""
    draft = Draft(state)
    by_id = {fragment.id: fragment for fragment in rated}
    for fragment in by_id.values():
        draft.record_event(EventType.RATED, fragment.id, importance=fragment.importance)
        draft.put_fragment(fragment)
    for tier in (draft.sensory, draft.short_term):
        tier[:] = [replace(held, fragment=by_id.get(held.fragment.id, held.fragment)) for held in tier]
    return draft.finish_transition()


def insert_insight(state: State, insight: Held, others: Sequence[Held], policy: Policy) -> Transition:
    """Add an insight with its sources to long-term, or merge it into the closest of `others`.

    `others` are the memory's insights with vectors of the same model. Within `reflection.merge_cosine` the older
    insight is kept, because others may cite it; it takes the union of the sources (without itself) and the higher
    importance. The memory's kind must have a long-term tier.
    """
    draft = Draft(state)
    fragment = insight.fragment.but(tier=Tier.LONG_TERM)
    draft.record_event(
        EventType.REFLECTED,
        fragment.id,
        to_tier=Tier.LONG_TERM,
        importance=fragment.importance,
        sources=fragment.sources,
    )
    value, nearest = _find_nearest(insight, others)
    if nearest is None or value < policy.reflection.merge_cosine:
        draft.put_fragment(fragment)
        return draft.finish_transition()
    kept = nearest.but(
        sources=tuple(dict.fromkeys(each for each in (*nearest.sources, *fragment.sources) if each != nearest.id)),
        importance=max(nearest.importance, fragment.importance),
    )
    draft.record_event(
        EventType.MERGED, fragment.id, other=kept.id, cosine=value, importance=kept.importance, sources=kept.sources
    )
    draft.put_fragment(kept)
    draft.remove_fragment(fragment.id)
    return draft.finish_transition()


def _find_nearest(insight: Held, others: Sequence[Held]) -> tuple[float, Fragment | None]:
    best: tuple[float, Fragment | None] = (-2.0, None)
    for other in others:
        if insight.vector is not None and other.vector is not None and other.fragment.model == insight.fragment.model:
            value = compute_cosine(insight.vector, other.vector)
            best = (value, other.fragment) if value > best[0] else best
    return best


def _unique_fragments(fragments: Iterable[Fragment]) -> list[Fragment]:
    """The fragments without duplicates."""
    return list({fragment.id: fragment for fragment in fragments}.values())


def _release_held(draft: Draft, gone: set[str]) -> None:
    draft.sensory = [held for held in draft.sensory if held.fragment.id not in gone]
    draft.short_term = [held for held in draft.short_term if held.fragment.id not in gone]
    take_back(draft, gone)


def _tier_with_room(draft: Draft, tier: Tier, policy: Policy) -> Tier | None:
    if tier is Tier.SENSORY and len(draft.sensory) < policy.sensory.capacity:
        return tier
    if tier is Tier.SHORT_TERM and len(draft.short_term) < policy.short_term.capacity:
        return tier
    return Tier.LONG_TERM if Tier.LONG_TERM in TIERS[draft.kind] else None


def _with_changed_text(held: Held, fragment: Fragment) -> Held:
    """The held fragment with the changed text of one of its enhancers."""
    told = (replace(done, text=fragment.content) if done.id == fragment.id else done for done in held.enhancements)
    return replace(held, enhancements=tuple(told))
