"""The values of memstream, all frozen: observations, fragments, held fragments and the state of a memory.

Times (`*_us`) are integers: microseconds since the Unix epoch, UTC. Vectors are one-dimensional float32 arrays of
unit length. Importance is unweighted, in [0, 1].
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

Vector = npt.NDArray[np.float32]
"""Numbers of float32; those that a model makes are numbers of float16, see `round_vectors`."""
MetadataValue = str | int | float | bool | list[Any] | dict[str, Any] | None
"""What JSON has; lists and maps hold the same. Never changed."""
METADATA_DEPTH_MAX = 8
"""Lists and maps that may be inside of one another."""
Metadata = tuple[tuple[str, MetadataValue], ...]
"""Sorted (key, value) pairs: immutable, so fragments cannot share a mutable dict."""


class MemoryKind(StrEnum):
    """Which tiers a memory has. Fixed at creation."""

    SENSORY = "sensory"
    SHORT_TERM = "short_term"
    ENHANCED_SHORT_TERM = "enhanced_short_term"
    LONG_TERM = "long_term"
    HYBRID = "hybrid"


class Tier(StrEnum):
    """Where a fragment is."""

    SENSORY = "sensory"
    SHORT_TERM = "short_term"
    LONG_TERM = "long_term"


class FragmentKind(StrEnum):
    """Origin of a fragment."""

    OBSERVATION = "observation"
    INSIGHT = "insight"


class Role(StrEnum):
    """What a speaker is to the conversation."""

    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    SYSTEM = "system"


class TruthStatus(StrEnum):
    """Whether the content of a fragment is current."""

    CURRENT = "current"
    SUPERSEDED = "superseded"
    NOT_YET_VALID = "not_yet_valid"
    NO_LONGER_VALID = "no_longer_valid"


@dataclass(frozen=True, slots=True)
class Structured:
    """A structured observation of an agent's step; empty fields are unset."""

    question: str = ""
    thought: str = ""
    phase: str = ""
    action_intention: str = ""
    action_reason: str = ""
    action: str = ""
    action_input: str = ""
    observation: str = ""

    def parts(self) -> dict[str, str]:
        """The fields that are set, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name))}

    def text(self) -> str:
        """The values that are set, one per line, without keys: the text that is embedded and indexed."""
        return "\n".join(self.parts().values())


class Fragment(Struct, frozen=True, gc=False, omit_defaults=True):
    """An observation in a memory, or an insight derived from other fragments.

    `content` is always the text (for a structured observation, `structured.text()`). A Struct, not a frozen dataclass,
    because creation takes a twentieth of the time; every step of an observation creates one, and a recall ten. It is
    exempt from garbage collection (gc=False) because it cannot be part of a reference cycle.
    """

    id: str
    """Time-ordered and unique: 26 characters of Crockford base 32 (a ULID), safe in every language."""
    content: str
    tier: Tier = Tier.SENSORY
    kind: FragmentKind = FragmentKind.OBSERVATION
    structured: Structured | None = None
    speaker: str = ""
    role: Role | None = None
    """As the client gave it; core/dialogue.py finds that of a fragment without one."""
    session: str = ""
    importance: float = 0.5
    observe_time_us: int = 0
    """When it was perceived, by the client's clock, or the server's if the client gave no time."""
    create_time_us: int = 0
    """When the server received it."""
    access_time_us: int = 0
    access_count: int = 0
    enhancement_count: int = 0
    duplicate_count: int = 0
    """Repeats that were counted instead of kept; included in enhancement_count."""
    sources: tuple[str, ...] = ()
    """Ids this fragment derives from: enhancers of a promoted fragment, evidence of an insight."""
    metadata: Metadata = ()
    expire_time_us: int | None = None
    pinned: bool = False
    external_id: str = ""
    token_count: int = 0
    """Tokens as the client counts them; 0 if it gave no count."""
    model: str = ""
    """Name of the embedding space of its indexed vector; empty if it has none."""
    position: int = 0
    """Order of receipt in its memory; insights take the next one."""
    repeat_time_us: int = 0
    """When its words were observed last, if a repeat without a time of its own was counted here; else 0."""
    repeat_position: int = 0
    """The position of that repeat in the order of receipt; else 0."""
    version: int = 0
    """Revision of the memory that last changed this fragment; its etag."""
    forget_time_us: int | None = None
    """When it was forgotten: out of recall, restorable until the grace period ends."""
    own_vector: bool = False
    """The client gave the vector: it is also used to compare contents, and never re-embedded."""
    own_importance: bool = False
    """The client gave the importance."""
    ttl_us: int | None = None
    """The client-given time to live that `expire_time_us` was computed from, or None."""
    superseded_by: str = ""
    """Id of the fragment that supersedes it, which is never forgotten; empty if none does."""
    supersedes: tuple[str, ...] = ()
    """Ids of the fragments that it supersedes; of a forgotten fragment, those that it superseded. In a receipt: their
    ids or external ids as the client gave them."""
    supersede_time_us: int | None = None
    valid_from_us: int | None = None
    valid_until_us: int | None = None
    """The content is true in [valid_from_us, valid_until_us); None is no bound."""

    @property
    def last_observed(self) -> tuple[int, int]:
        """(time in microseconds, position) of the last observation of its words: the last counted repeat or its own."""
        return self.repeat_time_us or self.observe_time_us, self.last_position

    @property
    def last_position(self) -> int:
        """The position at which its words were received last: the order within a tier."""
        return self.repeat_position or self.position

    @property
    def has_validity(self) -> bool:
        """Whether the client bounded the time in which the content is true."""
        return self.valid_from_us is not None or self.valid_until_us is not None

    def next_validity_us(self, now_us: int) -> int | None:
        """When it becomes or ceases to be valid next."""
        bounds = self.valid_from_us, self.valid_until_us
        return min((at for at in bounds if at is not None and at > now_us), default=None)

    def is_valid_at(self, now_us: int) -> bool:
        """Whether that time is within its validity, superseded or not."""
        begins_us, ends_us = self.valid_from_us, self.valid_until_us
        return (begins_us is None or begins_us <= now_us) and (ends_us is None or now_us < ends_us)

    def status_at(self, now_us: int) -> TruthStatus:
        """Whether the content is current at that time."""
        if self.superseded_by:
            return TruthStatus.SUPERSEDED
        if self.valid_from_us is not None and now_us < self.valid_from_us:
            return TruthStatus.NOT_YET_VALID
        if self.valid_until_us is not None and now_us >= self.valid_until_us:
            return TruthStatus.NO_LONGER_VALID
        return TruthStatus.CURRENT

    def but(self, **changes: Any) -> Fragment:
        """A copy with these fields changed. Raises TypeError for an unknown field."""
        return replace(self, **changes)

    def with_tier(self, tier: Tier) -> Fragment:
        """A copy in that tier, or the fragment itself if it is already there."""
        return self if self.tier is tier else self.but(tier=tier)


@dataclass(frozen=True, slots=True)
class Enhancement:
    """One hit on a short-term fragment: the enhancer's id, and its text, which a promotion may merge."""

    id: str
    text: str
    recollection: bool = False
    structured: Structured | None = None
    """The structured form of `text`, if any."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A fragment in the sensory or short-term tier, with the inputs of the enhancement rule."""

    fragment: Fragment
    vector: Vector | None = None
    """Embedding of the content alone (no date, no speaker), unit length; None without a model."""
    enhancements: tuple[Enhancement, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The sensory and short-term tiers of a memory: with the newcomer, the whole input of a decision."""

    kind: MemoryKind
    seed: bytes
    """Key of the random draws; fixed at the memory's creation."""
    sensory: tuple[Held, ...] = ()
    short_term: tuple[Held, ...] = ()
    reflection_aggregate: float = 0.0
    """Sum of the importances of observations that entered long-term since the last reflection."""

    def at_version(self, changed: Set[str], version: int) -> State:
        """The state in which the changed fragments have the version of the journal, which is their etag."""
        held = [
            Held(replace(one.fragment, version=version), one.vector, one.enhancements)
            if one.fragment.id in changed
            else one
            for one in (*self.sensory, *self.short_term)
        ]
        sensory, short_term = tuple(held[: len(self.sensory)]), tuple(held[len(self.sensory) :])
        return State(self.kind, self.seed, sensory, short_term, self.reflection_aggregate)


def round_vectors(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The nearest vectors whose numbers float16 holds, too, so that the journal stores half the bytes of the same bits.

    A number moves by at most 2^-11 of itself, or 2^-25 if it is below 2^-14: a cosine by less than 0.0005.
    """
    rounded: npt.NDArray[np.float32] = np.asarray(vectors).astype(np.float16).astype(np.float32)
    return rounded
