"""The nouns of memstream as frozen values: observations, fragments and what a tier holds.

Times are integers of microseconds since the Unix epoch, UTC (`*_us`). Vectors are one-dimensional float32
arrays of unit length. Importance is unweighted, in [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

Vector = npt.NDArray[np.float32]
MetadataValue = str | int | float | bool
Metadata = tuple[tuple[str, MetadataValue], ...]
"""Sorted (key, value) pairs: immutable, so that no two fragments can come to share one dict."""


class MemoryKind(StrEnum):
    """Which tiers a memory has. Never changes after creation."""

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
    """How a fragment came to be."""

    OBSERVATION = "observation"
    INSIGHT = "insight"


@dataclass(frozen=True, slots=True)
class Structured:
    """A structured observation of an agent's step; empty fields were not given."""

    question: str = ""
    thought: str = ""
    phase: str = ""
    action_intention: str = ""
    action_reason: str = ""
    action: str = ""
    action_input: str = ""
    observation: str = ""

    def parts(self) -> dict[str, str]:
        """The values that are set, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name))}

    def text(self) -> str:
        """The values that are set, one a line, without their keys: what is embedded and indexed."""
        return "\n".join(self.parts().values())


class Fragment(Struct, frozen=True, gc=False):
    """An observation once it is in a memory, or an insight derived from others.

    `content` is always the text (for a structured observation, `structured.text()`). A Struct, not a frozen dataclass:
    every step of every observation makes one anew, and every recall ten, each in a twentieth of the time. The garbage
    collector does not look at it: what it holds cannot lead back to it.
    """

    id: str
    """Time-ordered and unique: 26 characters of Crockford base 32 (a ULID), safe in every language."""
    content: str
    tier: Tier = Tier.SENSORY
    kind: FragmentKind = FragmentKind.OBSERVATION
    structured: Structured | None = None
    speaker: str = ""
    session: str = ""
    importance: float = 0.5
    observe_time_us: int = 0
    """When it was perceived, by the client's clock; the server's clock where the client gave none."""
    create_time_us: int = 0
    """When it was received here."""
    access_time_us: int = 0
    access_count: int = 0
    enhancement_count: int = 0
    duplicate_count: int = 0
    """How many repeats of the same words were counted instead of being kept; part of enhancement_count."""
    sources: tuple[str, ...] = ()
    """Ids this fragment derives from: enhancers of a promoted one, evidence of an insight."""
    metadata: Metadata = ()
    expire_time_us: int | None = None
    pinned: bool = False
    external_id: str = ""
    token_count: int = 0
    """Tokens as the client's model counts them; 0 when it did not say."""
    model: str = ""
    """Name of the embedding space of its indexed vector; empty when it has none."""
    position: int = 0
    """Order of receipt in its memory; insights take the next one."""
    version: int = 0
    """Revision of the memory that last changed this fragment: its etag."""
    forget_time_us: int | None = None
    """When it was forgotten; out of recall, restorable until the grace has passed."""
    own_vector: bool = False
    """The client gave the vector: it serves the comparison of contents too, and is not the model's to make anew."""
    own_importance: bool = False
    """The client gave the importance."""
    ttl_us: int | None = None
    """The time to live that the client gave, from which `expire_time_us` was computed; None for none."""

    def but(self, **changes: Any) -> Fragment:
        """The same with these fields changed. Raises TypeError for an unknown field."""
        return replace(self, **changes)

    def at(self, tier: Tier) -> Fragment:
        """The same in that tier; itself when it is there."""
        return self if self.tier is tier else self.but(tier=tier)


@dataclass(frozen=True, slots=True)
class Enhancement:
    """One hit on a short-term fragment: who strengthened it, with the text a promotion may merge."""

    id: str
    text: str
    recollection: bool = False
    structured: Structured | None = None
    """Of which `text` is the text."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A fragment in the sensory or short-term tier, with what the enhancement rule needs."""

    fragment: Fragment
    vector: Vector | None = None
    """Embedding of the content alone (no date, no speaker), unit length; None when there is no model."""
    enhancements: tuple[Enhancement, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What a memory's tiers hold before long-term: the whole input of a decision beside the newcomer."""

    kind: MemoryKind
    seed: bytes
    """Key of the draws, given at the memory's creation and never changed."""
    sensory: tuple[Held, ...] = ()
    short_term: tuple[Held, ...] = ()
    reflection_aggregate: float = 0.0
    """Sum of the importances of observations that reached long-term since the last reflection."""
