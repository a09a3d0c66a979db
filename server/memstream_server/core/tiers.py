"""The tiers: what happens to an observation or a recollection, in each kind of memory and both profiles.

Rule 1. A fragment is in exactly one tier, or removed with an event that says why.
Rule 2. Tiers keep the order of receipt; fragments that leave sensory together enter short-term in that order. A
repeat is the last receipt of the fragment that counts it.
Rule 3. Short-term first compares, then promotes, then appends, then evicts.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import Struct

from memstream_server.core.enhancement import (
    enhance_anchors,
    may_hit,
    merged_content,
    select_enhancements,
    strengthen_anchor,
    take_back,
)
from memstream_server.core.events import EventType, Reason
from memstream_server.core.identity import given_time_us, is_echo, is_repeat
from memstream_server.core.policy import Overflow, Policy, ShortTermKind
from memstream_server.core.retention import is_expired
from memstream_server.core.supersession import mark_superseded
from memstream_server.core.transition import Draft, InsightRequest, Transition
from memstream_server.core.values import (
    Enhancement,
    Fragment,
    FragmentKind,
    Held,
    MemoryKind,
    State,
    Structured,
    Tier,
    Vector,
)

TIERS: dict[MemoryKind, tuple[Tier, ...]] = {
    MemoryKind.SENSORY: (Tier.SENSORY,),
    MemoryKind.SHORT_TERM: (Tier.SHORT_TERM,),
    MemoryKind.ENHANCED_SHORT_TERM: (Tier.SHORT_TERM,),
    MemoryKind.LONG_TERM: (Tier.LONG_TERM,),
    MemoryKind.HYBRID: (Tier.SENSORY, Tier.SHORT_TERM, Tier.LONG_TERM),
}
"""The tiers of each kind, in the order in which a fragment passes them."""


@dataclass(frozen=True, slots=True, eq=False)
class Newcomer:
    """A received observation with the inputs of its decision."""

    fragment: Fragment
    """Its `tier` is ignored; the decision sets it."""
    vector: Vector | None = None
    """Of the content alone, unit length; None without a model."""
    recalled: Fragment | None = None
    """A fragment with the same words that this session recalled within `short_term.echo_window_s`."""
    known: Fragment | None = None
    """The live long-term fragment that it repeats."""
    refused: bool = False
    """The embedding model refused the text permanently; False if the vector only waits for the model."""
    corrects: bool = False
    """The client named fragments that it supersedes: it is neither a repeat nor an echo."""
    supersedes: tuple[Fragment, ...] = ()
    """Those of them that are in the memory, each the current end of its chain."""


class Recollected(Struct, frozen=True, gc=False, eq=False):
    """A recalled fragment offered to short-term: it may enhance fragments and is never appended."""

    id: str
    text: str
    vector: Vector | None = None
    """Of the content alone, unit length."""
    structured: Structured | None = None


class _Rules(Struct, frozen=True):
    """The inputs of a decision other than the state."""

    policy: Policy
    similarity_min: float
    """The embedding model's, for policies without one."""
    first: Tier
    """The tier that an observation enters."""
    enhanced: bool
    goes_on: bool
    """Whether short-term promotes to long-term: only in a hybrid memory."""


def _rules_of(kind: MemoryKind, policy: Policy, similarity_min: float) -> _Rules:
    hybrid = kind is MemoryKind.HYBRID
    enhanced = policy.short_term.kind is ShortTermKind.ENHANCED if hybrid else kind is MemoryKind.ENHANCED_SHORT_TERM
    return _Rules(policy, similarity_min, TIERS[kind][0], enhanced, goes_on=hybrid)


def observe(state: State, newcomer: Newcomer, policy: Policy, similarity_min: float) -> Transition:
    """Decide on one observation.

    `similarity_min`: the embedding model's, for policies without one. identity.py decides what is an echo or a
    repeat; neither adds anything, so no stored information is lost.
    """
    draft, rules = Draft(state), _rules_of(state.kind, policy, similarity_min)
    fragment = newcomer.fragment
    recalled = newcomer.recalled if policy.short_term.echo_window_s > 0 else None
    if newcomer.corrects:
        _enter_memory(draft, rules, newcomer)
    elif recalled is not None and _is_found(recalled, fragment, policy) and is_echo(fragment, recalled):
        draft.record_event(EventType.ECHOED, recalled.id, other=fragment.id)
    elif not (policy.short_term.repeats and _count_if_repeat(draft, rules, newcomer)):
        _enter_memory(draft, rules, newcomer)
    return draft.finish_transition()


def recollect(state: State, recollections: Sequence[Recollected], policy: Policy, similarity_min: float) -> Transition:
    """Reinforcement: let the recollections of a recall enhance short-term fragments, in rank order.

    The caller excludes fragments that were forgotten or removed since the recall: the state does not know them.
    """
    draft, rules = Draft(state), _rules_of(state.kind, policy, similarity_min)
    if rules.enhanced:
        near = may_hit(state.short_term, [found.vector for found in recollections], policy.short_term, similarity_min)
        for place in near:
            found = recollections[place]
            if draft.is_removed(found.id):  # an earlier recollection promoted it, and the kind has no next tier
                continue
            other = Enhancement(found.id, found.text, recollection=True, structured=found.structured)
            enhance_anchors(draft, other, found.vector, policy.short_term, similarity_min)
            _promote_ripe(draft, rules)
    return draft.finish_transition()


def settle_held(state: State, policy: Policy, similarity_min: float) -> Transition:
    """Apply the capacities of a changed policy to the tiers."""
    draft, rules = Draft(state), _rules_of(state.kind, policy, similarity_min)
    _pass_sensory(draft, rules)
    if rules.enhanced:
        _promote_ripe(draft, rules)
    _evict_overflow(draft, rules)
    return draft.finish_transition()


# ---- entry


def _enter_memory(draft: Draft, rules: _Rules, newcomer: Newcomer) -> None:
    fragment = newcomer.fragment.with_tier(rules.first)
    draft.record_event(EventType.OBSERVED, fragment.id, to_tier=rules.first, importance=fragment.importance)
    if newcomer.refused:
        draft.record_event(EventType.UNVECTORED, fragment.id)
    if newcomer.supersedes:  # first: the newcomer must not enhance what it corrects
        fragment = mark_superseded(draft, newcomer.supersedes, fragment, fragment.create_time_us)
    held = Held(fragment, newcomer.vector)
    if rules.first is Tier.SENSORY:
        draft.put_fragment(fragment)
        insert_fragment(draft.sensory, held)
        _pass_sensory(draft, rules)
    elif rules.first is Tier.SHORT_TERM:
        _admit_short_term(draft, rules, held)
    else:
        consolidate(draft, rules.policy, fragment)


def insert_fragment(tier: list[Held], held: Held) -> None:
    """Insert in order of receipt. Usually at the end, but decisions may be out of order."""
    position = held.fragment.last_position
    if tier and tier[-1].fragment.last_position > position:
        tier.insert(bisect([one.fragment.last_position for one in tier], position), held)
    else:
        tier.append(held)


def _count_if_repeat(draft: Draft, rules: _Rules, newcomer: Newcomer) -> bool:
    """Count the newcomer on the fragment that it repeats, held or in long-term. Returns whether there is one."""
    fragment = newcomer.fragment
    for tier in (draft.sensory, draft.short_term):
        for place, held in enumerate(tier):
            if held.fragment.content == fragment.content and _is_counted_on(held.fragment, fragment, rules.policy):
                again = _count_repeat(draft, held.fragment, fragment)
                del tier[place]
                insert_fragment(tier, strengthen_anchor(draft, replace(held, fragment=again), held.enhancements))
                if rules.enhanced:
                    _promote_ripe(draft, rules)
                return True
    if newcomer.known is not None and _is_counted_on(newcomer.known, fragment, rules.policy):
        again = _count_repeat(draft, newcomer.known, fragment)
        draft.put_fragment(again.but(enhancement_count=again.enhancement_count + 1))
        return True
    return False


def _is_counted_on(known: Fragment, new: Fragment, policy: Policy) -> bool:
    """Whether the newcomer repeats that fragment."""
    return is_repeat(new, known) and _is_found(known, new, policy)


def _is_found(known: Fragment, new: Fragment, policy: Policy) -> bool:
    """Whether the fragment is not yet expired for the newcomer; maintenance may not have forgotten it yet."""
    return known.forget_time_us is None and not is_expired(known, new.create_time_us, policy.retention)


def _count_repeat(draft: Draft, fragment: Fragment, new: Fragment) -> Fragment:
    """The fragment with one more repeat. A time to live given with the repeat restarts at the repeat.

    Its words were observed last at the repeat, unless the repeat has a time of its own: that is the fragment's, and the
    observation is an old one that was sent again.
    """
    replaced_us = None if fragment.expire_time_us == new.expire_time_us else fragment.expire_time_us
    last_repeat = None
    again = fragment.but(duplicate_count=fragment.duplicate_count + 1, expire_time_us=new.expire_time_us)
    if given_time_us(new) is None and new.last_observed > fragment.last_observed:
        last_repeat = (fragment.repeat_time_us, fragment.repeat_position)
        again = again.but(repeat_time_us=new.observe_time_us, repeat_position=new.position)
    draft.record_event(
        EventType.REPEATED, fragment.id, other=new.id, expire_time_us=replaced_us, last_repeat=last_repeat
    )
    return again


# ---- sensory


def _pass_sensory(draft: Draft, rules: _Rules) -> None:
    """Flush sensory when it exceeds its capacity, the newest included; admit the important ones, in order."""
    if len(draft.sensory) <= rules.policy.sensory.capacity:
        return
    leaving, draft.sensory = draft.sensory, []
    for held in leaving:
        fragment = held.fragment
        if fragment.importance < rules.policy.sensory.threshold and not fragment.pinned:
            _remove_fragment(draft, fragment, EventType.FILTERED, Reason.BELOW_THRESHOLD)
        elif rules.goes_on:
            _admit_short_term(draft, rules, held)
        else:
            _remove_fragment(draft, fragment, EventType.DROPPED, Reason.NO_NEXT_TIER)


def _remove_fragment(draft: Draft, fragment: Fragment, how: EventType, reason: Reason) -> None:
    draft.record_event(how, fragment.id, from_tier=fragment.tier, reason=reason)
    draft.remove_fragment(fragment.id)
    take_back(draft, (fragment.id,))


# ---- short-term


def _admit_short_term(draft: Draft, rules: _Rules, held: Held) -> None:
    came_from = held.fragment.tier
    fragment = held.fragment.with_tier(Tier.SHORT_TERM)
    if rules.enhanced and not fragment.superseded_by:
        other = Enhancement(fragment.id, fragment.content, structured=fragment.structured)
        enhance_anchors(draft, other, held.vector, rules.policy.short_term, rules.similarity_min)
        _promote_ripe(draft, rules)
    if came_from is not Tier.SHORT_TERM:
        draft.record_event(EventType.ADMITTED, fragment.id, from_tier=came_from, to_tier=Tier.SHORT_TERM)
    draft.put_fragment(fragment)
    insert_fragment(draft.short_term, Held(fragment, held.vector, held.enhancements))
    if rules.enhanced:
        _promote_ripe(draft, rules)  # repeats counted in sensory may have reached the threshold
    _evict_overflow(draft, rules)


def _promote_ripe(draft: Draft, rules: _Rules) -> None:
    """Promote the fragments with enough hits; their enhancers stay."""
    threshold = rules.policy.short_term.enhance_threshold
    ripe = [held for held in draft.short_term if held.fragment.enhancement_count >= threshold]
    if not ripe:
        return
    draft.short_term = [held for held in draft.short_term if held.fragment.enhancement_count < threshold]
    for held in ripe:
        if rules.goes_on and rules.policy.reflection.insight_on_promotion:
            draft.requests.append(_insight_request(held, rules))
        _promote_held(draft, rules, held)


def _insight_request(held: Held, rules: _Rules) -> InsightRequest:
    enhancers = select_enhancements(held.enhancements, recollections=rules.policy.short_term.merge_content)
    return InsightRequest(
        anchor=held.fragment.id,
        fragments=(held.fragment.id, *(done.id for done in enhancers)),
        texts=(held.fragment.content, *(done.text for done in enhancers)),
    )


def _evict_overflow(draft: Draft, rules: _Rules) -> None:
    while len(draft.short_term) > rules.policy.short_term.capacity:
        held = draft.short_term.pop(_weakest_index(draft.short_term) if rules.enhanced else 0)
        draft.record_event(EventType.OVERFLOWED, held.fragment.id, from_tier=Tier.SHORT_TERM)
        drops = rules.enhanced and rules.policy.short_term.overflow is Overflow.DROP
        if drops and not (held.fragment.pinned and rules.goes_on):
            _remove_fragment(draft, held.fragment, EventType.DROPPED, Reason.CAPACITY)
        else:
            _promote_held(draft, rules, held)


def _weakest_index(held: Sequence[Held]) -> int:
    """Index of the lowest (importance, enhancements), excluding the newest; ties go to the oldest."""
    weights = [(one.fragment.importance, one.fragment.enhancement_count) for one in held[:-1]]
    return weights.index(min(weights))


def _promote_held(draft: Draft, rules: _Rules, held: Held) -> None:
    """Move to long-term, or drop if the kind has none. The caller has removed `held` from short-term."""
    if not rules.goes_on:
        _remove_fragment(draft, held.fragment, EventType.DROPPED, Reason.NO_NEXT_TIER)
        return
    fragment = _promoted_fragment(held, merge=rules.policy.short_term.merge_content)
    merges = fragment.content != held.fragment.content
    if merges:
        draft.merged.append(fragment.id)
    draft.record_event(
        EventType.PROMOTED,
        fragment.id,
        from_tier=Tier.SHORT_TERM,
        to_tier=Tier.LONG_TERM,
        importance=fragment.importance,
        sources=fragment.sources,
        merges=merges,
    )
    consolidate(draft, rules.policy, fragment)


def _promoted_fragment(held: Held, *, merge: bool) -> Fragment:
    """The fragment in long-term: same id, times and session; its enhancers become sources."""
    enhancers = (done.id for done in held.enhancements)
    sources = tuple(dict.fromkeys((*held.fragment.sources, *enhancers)))
    fragment = held.fragment.but(tier=Tier.LONG_TERM, sources=sources)
    if not merge:
        return fragment
    content = merged_content(fragment, held.enhancements)
    if content == fragment.content:
        return fragment
    return fragment.but(content=content, structured=None)


# ---- long-term


def consolidate(draft: Draft, policy: Policy, fragment: Fragment) -> None:
    """Add the fragment to long-term. An observation's importance counts towards the next reflection."""
    draft.put_fragment(fragment.with_tier(Tier.LONG_TERM))
    if fragment.kind is FragmentKind.OBSERVATION:
        draft.aggregate += fragment.importance
    threshold = policy.reflection.threshold
    if 0 < threshold <= draft.aggregate:
        draft.reflect = True
        draft.aggregate = 0.0
