"""Enhancement: what counts as a hit on a short-term fragment, and what a promotion makes of the hits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memstream_server.core.draws import draw
from memstream_server.core.events import EventType
from memstream_server.core.policy import ShortTermPolicy, SimilarityRule
from memstream_server.core.transition import Draft
from memstream_server.core.values import Enhancement, Fragment, Held, Vector

_ROUNDING = 1e-3
"""More than two sums of the same float32 products in different orders can differ by."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Why a fragment was enhanced: the cosine, and the draw where the rule takes one."""

    cosine: float
    draw: float | None = None


def cosine(one: Vector, other: Vector) -> float:
    """Cosine of two unit vectors of one embedding space, in [-1, 1] whatever float32 rounds to."""
    return max(-1.0, min(1.0, float(np.dot(one, other))))


def hit(
    anchor: Held, other: Enhancement, vector: Vector, policy: ShortTermPolicy, similarity_min: float, seed: bytes
) -> Hit | None:
    """Whether `other`, whose content has `vector`, enhances `anchor`; None when it does not.

    SIGMOID_DRAW is DB-GPT's rule (and YuLan-Rec's before it): p = 1 / (1 + e^-cosine), a hit when p reaches
    `similarity_threshold` and a draw from [0, 1) is below p. COSINE compares with the policy's
    `similarity_min`, or with the embedding model's (the argument) where the policy has none.
    """
    if anchor.vector is None:
        return None
    id_ = anchor.fragment.id
    value = cosine(anchor.vector, vector)
    by_cosine = policy.similarity_rule is SimilarityRule.COSINE
    if by_cosine and value < (similarity_min if policy.similarity_min is None else policy.similarity_min):
        return None  # most end here
    if other.id == id_ or any(done.id == other.id for done in anchor.enhancements):
        return None
    if by_cosine:
        return Hit(value)
    probability = 1 / (1 + math.exp(-value))
    if probability < policy.similarity_threshold:
        return None
    drawn = draw(seed, id_, other.id)
    return Hit(value, drawn) if drawn < probability else None


def enhance(
    draft: Draft, other: Enhancement, vector: Vector | None, policy: ShortTermPolicy, similarity_min: float
) -> None:
    """Let `other` strengthen every short-term fragment it hits. Without a vector it hits none."""
    if vector is None:
        return
    anchors = [each.vector for each in draft.short_term]
    for place in _perhaps_near(anchors, [vector], policy, similarity_min):
        anchor = draft.short_term[place]
        found = hit(anchor, other, vector, policy, similarity_min, draft.seed)
        if found is not None:
            draft.record(EventType.ENHANCED, anchor.fragment.id, other=other.id, cosine=found.cosine, draw=found.draw)
            draft.short_term[place] = strengthened(draft, anchor, (*anchor.enhancements, other))


def may_hit(
    held: Sequence[Held], vectors: Sequence[Vector | None], policy: ShortTermPolicy, similarity_min: float
) -> list[int]:
    """Places of those vectors that may hit one of the held; all others hit none.

    No vector of a fragment changes while it is held.
    """
    return _perhaps_near(vectors, [each.vector for each in held], policy, similarity_min)


def _perhaps_near(
    ones: Sequence[Vector | None], others: Sequence[Vector | None], policy: ShortTermPolicy, similarity_min: float
) -> list[int]:
    """Places of those of `ones` that may be near enough to one of the `others`, of which `hit` asks exactly.

    By cosine these are few, and found by one product; otherwise all that have a vector.
    """
    given = [(place, one) for place, one in enumerate(ones) if one is not None]
    known = [other for other in others if other is not None]
    if not given or not known:
        return []
    if policy.similarity_rule is not SimilarityRule.COSINE:
        return [place for place, _ in given]
    wanted = similarity_min if policy.similarity_min is None else policy.similarity_min
    cosines = np.array([one for _, one in given]) @ np.array(known).T
    near = np.flatnonzero((cosines >= wanted - _ROUNDING).any(axis=1))
    return [given[at][0] for at in near.tolist()]


def take_back(draft: Draft, gone: Iterable[str]) -> None:
    """What the fragments `gone` had given to held ones is taken back: who left by policy strengthens nobody."""
    leavers = set(gone)
    for place, anchor in enumerate(draft.short_term):
        left = [done.id for done in anchor.enhancements if done.id in leavers]
        if left:
            for id_ in left:
                draft.record(EventType.WEAKENED, anchor.fragment.id, other=id_)
            kept = tuple(done for done in anchor.enhancements if done.id not in leavers)
            draft.short_term[place] = strengthened(draft, anchor, kept)


def strengthened(draft: Draft, anchor: Held, enhancements: tuple[Enhancement, ...]) -> Held:
    """The anchor with these enhancements and the count that follows from them, entered among the puts."""
    count = len(enhancements) + anchor.fragment.duplicate_count
    fragment = anchor.fragment.but(enhancement_count=count)
    draft.put(fragment)
    return Held(fragment, anchor.vector, enhancements)


def merged_text(anchor: Fragment, enhancements: Iterable[Enhancement], *, recollections: bool = False) -> str:
    """Anchor and enhancers in order (the one that promoted comes last), each text once, joined by ";".

    `recollections` tells whether the texts of recalled fragments take part: only where the merged text becomes
    the content (see `merged_content`), never for display.
    """
    texts = (done.text for done in told(enhancements, recollections=recollections))
    return ";".join(dict.fromkeys((anchor.content, *texts)))


def merged_content(anchor: Fragment, enhancements: Iterable[Enhancement]) -> str:
    """What a promotion under `short_term.merge_content` makes the content, recollections included.

    Of a structured anchor a JSON array of everyone's parts, as DB-GPT reduces its structured fragments.
    """
    if anchor.structured is None:
        return merged_text(anchor, enhancements, recollections=True)
    others = tuple(enhancements)
    if all(done.structured == anchor.structured for done in others):
        return anchor.content
    given = (done.structured.parts() if done.structured else {"observation": done.text} for done in others)
    steps = (json.dumps(parts, ensure_ascii=False) for parts in (anchor.structured.parts(), *given))
    return f"[{', '.join(dict.fromkeys(steps))}]"


def told(enhancements: Iterable[Enhancement], *, recollections: bool) -> tuple[Enhancement, ...]:
    """The enhancements whose text is told on: those of recollections only where `recollections` says so."""
    return tuple(done for done in enhancements if recollections or not done.recollection)
