"""Enhancement: when a fragment hits a short-term fragment, and the content that a promotion merges from its hits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from memstream_server.core.events import EventType
from memstream_server.core.policy import ShortTermPolicy, SimilarityRule
from memstream_server.core.transition import Draft
from memstream_server.core.values import Enhancement, Fragment, Held, Vector

_BITS = 53
"""Bits of a float's mantissa; with more, a draw could round up to 1.0."""
_ROUNDING = 1e-3
"""Upper bound of the difference between two summation orders of the same float32 products."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Why a fragment was enhanced: the cosine, and the draw if the rule uses one."""

    cosine: float
    draw: float | None = None


def draw_number(seed: bytes, fragment_id: str, other_id: str) -> float:
    """A number in [0, 1), uniform over pairs of ids and fixed within a memory.

    `seed`: the memory's, at most 64 bytes (the longest key of BLAKE2b; raises ValueError beyond). The pair is
    ordered: A enhanced by B and B enhanced by A are different draws.
    """
    pair = f"{fragment_id}\0{other_id}".encode()
    digest = blake2b(pair, key=seed, digest_size=8).digest()
    return (int.from_bytes(digest) >> (64 - _BITS)) / (1 << _BITS)


def compute_cosine(one: Vector, other: Vector) -> float:
    """Cosine of two unit vectors of one embedding space, clipped to [-1, 1] against float32 rounding."""
    return max(-1.0, min(1.0, float(np.dot(one, other))))


def find_hit(
    anchor: Held, other: Enhancement, vector: Vector, policy: ShortTermPolicy, similarity_min: float, seed: bytes
) -> Hit | None:
    """The hit of `other` (whose content has `vector`) on `anchor`; None if there is none.

    SIGMOID_DRAW is DB-GPT's rule (from YuLan-Rec): p = 1 / (1 + e^-cosine); it hits if p reaches
    `similarity_threshold` and a draw from [0, 1) is below p. COSINE compares with the policy's `similarity_min`,
    or with the embedding model's (the argument) if the policy has none.
    """
    if anchor.vector is None:
        return None
    id_ = anchor.fragment.id
    value = compute_cosine(anchor.vector, vector)
    by_cosine = policy.similarity_rule is SimilarityRule.COSINE
    if by_cosine and value < (similarity_min if policy.similarity_min is None else policy.similarity_min):
        return None  # the common case
    if other.id == id_ or any(done.id == other.id for done in anchor.enhancements):
        return None
    if by_cosine:
        return Hit(value)
    probability = 1 / (1 + math.exp(-value))
    if probability < policy.similarity_threshold:
        return None
    drawn = draw_number(seed, id_, other.id)
    return Hit(value, drawn) if drawn < probability else None


def enhance_anchors(
    draft: Draft, other: Enhancement, vector: Vector | None, policy: ShortTermPolicy, similarity_min: float
) -> None:
    """Enhance every short-term fragment that `other` hits. Without a vector it hits none.

    Superseded fragments are not enhanced.
    """
    if vector is None:
        return
    anchors = [None if each.fragment.superseded_by else each.vector for each in draft.short_term]
    for place in _find_near(anchors, [vector], policy, similarity_min):
        anchor = draft.short_term[place]
        found = find_hit(anchor, other, vector, policy, similarity_min, draft.seed)
        if found is not None:
            draft.record_event(
                EventType.ENHANCED, anchor.fragment.id, other=other.id, cosine=found.cosine, draw=found.draw
            )
            draft.short_term[place] = strengthen_anchor(draft, anchor, (*anchor.enhancements, other))


def may_hit(
    held: Sequence[Held], vectors: Sequence[Vector | None], policy: ShortTermPolicy, similarity_min: float
) -> list[int]:
    """Indices of the vectors that may hit a held fragment; the others certainly hit none.

    The vector of a held fragment never changes.
    """
    return _find_near(vectors, [each.vector for each in held], policy, similarity_min)


def _find_near(
    ones: Sequence[Vector | None], others: Sequence[Vector | None], policy: ShortTermPolicy, similarity_min: float
) -> list[int]:
    """Indices of those of `ones` that may be close enough to one of `others`; `hit` then decides exactly.

    Under the COSINE rule, one matrix product finds the few; under other rules, all that have a vector.
    """
    given = [(place, one) for place, one in enumerate(ones) if one is not None]
    known = [other for other in others if other is not None]
    if not given or not known:
        return []
    if policy.similarity_rule is not SimilarityRule.COSINE:
        return [place for place, _ in given]
    wanted = similarity_min if policy.similarity_min is None else policy.similarity_min
    best = (np.array([one for _, one in given]) @ np.array(known).T).max(axis=1).tolist()
    return [place for (place, _), cosine in zip(given, best, strict=True) if cosine >= wanted - _ROUNDING]


def take_back(draft: Draft, gone: Iterable[str]) -> None:
    """Undo the enhancements that the fragments `gone` gave to held fragments."""
    leavers = set(gone)
    for place, anchor in enumerate(draft.short_term):
        left = [done.id for done in anchor.enhancements if done.id in leavers]
        if left:
            for id_ in left:
                draft.record_event(EventType.WEAKENED, anchor.fragment.id, other=id_)
            kept = tuple(done for done in anchor.enhancements if done.id not in leavers)
            draft.short_term[place] = strengthen_anchor(draft, anchor, kept)


def strengthen_anchor(draft: Draft, anchor: Held, enhancements: tuple[Enhancement, ...]) -> Held:
    """The anchor with these enhancements and the resulting count; adds the fragment to the draft's puts."""
    count = len(enhancements) + anchor.fragment.duplicate_count
    fragment = anchor.fragment.but(enhancement_count=count)
    draft.put_fragment(fragment)
    return Held(fragment, anchor.vector, enhancements)


def merged_text(anchor: Fragment, enhancements: Iterable[Enhancement], *, recollections: bool = False) -> str:
    """The texts of anchor and enhancers in order (the promoting one last), without duplicates, joined by ";".

    `recollections`: include the texts of recalled fragments; only for a merged content (`merged_content`), not for
    display.
    """
    texts = (done.text for done in select_enhancements(enhancements, recollections=recollections))
    return ";".join(dict.fromkeys((anchor.content, *texts)))


def merged_content(anchor: Fragment, enhancements: Iterable[Enhancement]) -> str:
    """The content after a promotion under `short_term.merge_content`, recollections included.

    For a structured anchor: a JSON array of the parts of all, as DB-GPT reduces its structured fragments.
    """
    if anchor.structured is None:
        return merged_text(anchor, enhancements, recollections=True)
    others = tuple(enhancements)
    if all(done.structured == anchor.structured for done in others):
        return anchor.content
    given = (done.structured.parts() if done.structured else {"observation": done.text} for done in others)
    steps = (json.dumps(parts, ensure_ascii=False) for parts in (anchor.structured.parts(), *given))
    return f"[{', '.join(dict.fromkeys(steps))}]"


def select_enhancements(enhancements: Iterable[Enhancement], *, recollections: bool) -> tuple[Enhancement, ...]:
    """All enhancements, or only those that are not recollections."""
    return tuple(done for done in enhancements if recollections or not done.recollection)
