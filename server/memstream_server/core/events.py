"""Events: every step a fragment takes, as ids and numbers without content.

Folding a memory's events from its first revision gives the place of every fragment (see fold.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from memstream_server.core.values import FragmentKind, Tier


class EventType(StrEnum):
    """The steps. After FILTERED, DROPPED, MERGED and ERASED the fragment is gone; REPEATED and ECHOED made none."""

    OBSERVED = "observed"  # entered its memory at tier `to_tier`
    FILTERED = "filtered"  # left sensory below the importance threshold; gone
    ADMITTED = "admitted"  # sensory to short-term
    ENHANCED = "enhanced"  # fragment was strengthened by `other` with `cosine` and `draw`
    WEAKENED = "weakened"  # `other` left: its part in fragment's enhancements, or among its sources, was taken back
    PROMOTED = "promoted"  # to `to_tier`, with `sources`
    OVERFLOWED = "overflowed"  # chosen to leave a full tier; PROMOTED or DROPPED follows in the same transition
    DROPPED = "dropped"  # left the memory by policy, with `reason`; gone
    REPEATED = "repeated"  # the newcomer `other` said what `fragment` says, and no more; counted there, not kept
    ECHOED = "echoed"  # the newcomer `other` repeats the recalled `fragment`; not kept
    REFLECTED = "reflected"  # an insight entered long-term, with its `sources`
    MERGED = "merged"  # fragment became part of the insight `other`; gone
    UPDATED = "updated"  # content, importance, metadata, expiry or pin were changed by request
    ACCESSED = "accessed"  # reserved: access statistics are written in batches without a revision
    FORGOTTEN = "forgotten"  # left recall by age, retention or request; restorable within the grace
    RESTORED = "restored"  # came back from FORGOTTEN
    ERASED = "erased"  # content and vectors removed for good
    UNVECTORED = "unvectored"  # the model refused the input for good: stored without a vector
    VECTORED = "vectored"  # a vector that was missing was filled in
    RATED = "rated"  # an importance that was missing, as its model was down, was filled in
    MODEL_ASKED = "model_asked"  # an LLM was asked on behalf of the memory, with its `use`
    MEMORY_CREATED = "memory_created"
    MEMORY_UPDATED = "memory_updated"
    IMPORTED = "imported"  # came from an export at tier `to_tier`, as `imported` and the other fields say


class Reason(StrEnum):
    """Why a fragment left."""

    NONE = ""
    BELOW_THRESHOLD = "below_threshold"
    NO_NEXT_TIER = "no_next_tier"
    CAPACITY = "capacity"
    CLEARED = "cleared"
    EXPIRED = "expired"
    RETENTION = "retention"
    REQUESTED = "requested"


class Purpose(StrEnum):
    """What an LLM is asked for."""

    IMPORTANCE = "importance"
    INSIGHT = "insight"
    REFLECTION = "reflection"


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What asking an LLM took, failed requests included, as its endpoint counts."""

    purpose: Purpose
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Imported:
    """What a fragment had been through before its memory's log began here."""

    kind: FragmentKind = FragmentKind.OBSERVATION
    enhancements: tuple[str, ...] = ()
    """Ids of the enhancers of a held one."""
    enhancement_count: int = 0
    duplicate_count: int = 0
    forgotten: bool = False


class Event(Struct, frozen=True, gc=False, array_like=True):
    """One step. Fields that do not apply to `type` keep their defaults. The log has it as an array of its fields, so a
    new one is added at the end."""

    type: EventType
    fragment: str
    other: str = ""
    from_tier: Tier | None = None
    to_tier: Tier | None = None
    reason: Reason = Reason.NONE
    cosine: float | None = None
    draw: float | None = None
    importance: float | None = None
    sources: tuple[str, ...] = ()
    use: ModelUse | None = None
    imported: Imported | None = None
