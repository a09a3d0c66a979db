"""Events: every step of a fragment, as ids and numbers without content.

Replaying the events of a memory from its first revision gives the place of every fragment (replay_events.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from memstream_server.core.values import FragmentKind, Tier


class EventType(StrEnum):
    """FILTERED, DROPPED, MERGED and ERASED remove the fragment; REPEATED and ECHOED report one that was not kept."""

    OBSERVED = "observed"  # entered its memory at tier `to_tier`
    FILTERED = "filtered"  # left sensory below the importance threshold; removed
    ADMITTED = "admitted"  # sensory to short-term
    ENHANCED = "enhanced"  # `other` enhanced the fragment, with `cosine` and `draw`
    WEAKENED = "weakened"  # `other` left: its enhancement of the fragment, or its place in the sources, is undone
    PROMOTED = "promoted"  # to `to_tier`, with `sources`
    OVERFLOWED = "overflowed"  # evicted from a full tier; PROMOTED or DROPPED follows in the same transition
    DROPPED = "dropped"  # left the memory by policy, with `reason`; removed
    REPEATED = "repeated"  # the newcomer `other` repeats `fragment`: counted there, not kept
    ECHOED = "echoed"  # the newcomer `other` repeats the recalled `fragment`; not kept
    REFLECTED = "reflected"  # an insight entered long-term, with its `sources`
    MERGED = "merged"  # the fragment was merged into the insight `other`; removed
    UPDATED = "updated"  # a request changed content, importance, metadata, expiry or pin
    ACCESSED = "accessed"  # reserved: access statistics are written in batches without a revision
    FORGOTTEN = "forgotten"  # left recall by age, retention or request; restorable within the grace period
    RESTORED = "restored"  # undoes FORGOTTEN
    ERASED = "erased"  # content and vectors removed permanently
    UNVECTORED = "unvectored"  # the model refused the input permanently: stored without a vector
    VECTORED = "vectored"  # a missing vector was filled in
    RATED = "rated"  # an importance that was missing because the scorer was down was filled in
    MODEL_ASKED = "model_asked"  # the memory used an LLM; `use` has the cost
    MEMORY_CREATED = "memory_created"
    MEMORY_UPDATED = "memory_updated"
    SUPERSEDED = "superseded"  # `other` supersedes the fragment
    SUPERSESSION_UNDONE = "supersession_undone"  # `other` no longer supersedes the fragment
    CONFLICT_SUSPECTED = "conflict_suspected"  # the newer fragment may contradict the older `other`
    CONFLICT_RESOLVED = "conflict_resolved"  # a suspicion about the newer fragment and `other` was decided
    CONFLICT_ENDED = "conflict_ended"  # a suspicion, or a decision that keeps two apart, ended with a change of one
    RECALLED = "recalled"  # a recall kept the receipt `receipt`
    IMPORTED = "imported"  # came from an export into tier `to_tier`, with the history in `imported`


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
    """The purpose of an LLM call."""

    IMPORTANCE = "importance"
    INSIGHT = "insight"
    REFLECTION = "reflection"
    CONFLICT = "conflict"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The cost of an LLM call as its endpoint reports it, failed requests included."""

    purpose: Purpose
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Imported:
    """The history of an imported fragment, from before this memory's log begins."""

    kind: FragmentKind = FragmentKind.OBSERVATION
    enhancements: tuple[str, ...] = ()
    """Ids of the enhancers, for a held fragment."""
    enhancement_count: int = 0
    duplicate_count: int = 0
    forgotten: bool = False


class Event(Struct, frozen=True, gc=False, array_like=True):
    """One step. Fields that do not apply to `type` keep their defaults. The log stores an event as an array of its
    fields, so new fields are added at the end."""

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
    conflict_reason: str = ""
    """Of CONFLICT_SUSPECTED: a ConflictReason."""
    conflict_decision: str = ""
    """Of CONFLICT_RESOLVED: a ConflictDecision."""
    version: int = 0
    """The version that an UPDATED restored."""
    expire_time_us: int | None = None
    """The expiry that a repeat replaced; None if it replaced none."""
    merges: bool | None = None
    """Whether a promotion replaced the content by the merged text; None in logs from before this field."""
    receipt: str = ""
    """The receipt of a RECALLED."""
    last_repeat: tuple[int, int] | None = None
    """(time, position) of the earlier repeat that a repeat replaced as the last one, (0, 0) if it is the first; None if
    it is not the last one."""

    def concerns(self, fragment: str) -> bool:
        """Whether it happened to the fragment, or the fragment took part in it."""
        return fragment in (self.fragment, self.other) or fragment in self.sources


def list_concerned(events: Iterable[Event]) -> list[str]:
    """The ids of the fragments that any of the events concerns, in ascending order."""
    found: set[str] = set()
    for event in events:
        found.add(event.fragment)
        found.add(event.other)
        if event.sources:
            found.update(event.sources)
    found.discard("")
    return sorted(found)
