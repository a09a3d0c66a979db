"""Fragments that may not be true together, their decisions, and earlier statements near to an observation."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class ConflictDecision(StrEnum):
    """How a suspicion is decided. UNKNOWN: newer than this SDK.

    NEWER and OLDER: that fragment is true and supersedes the other. BOTH: there is no conflict. NEITHER: only the
    suspicion ends.
    """

    UNKNOWN = "unknown"
    NEWER = "newer"
    OLDER = "older"
    BOTH = "both"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Two fragments of one speaker that may not be true together; `reason`: "twins", or that of an earlier version."""

    newer_id: str
    older_id: str
    reason: str
    create_time: datetime | None


@dataclass(frozen=True, slots=True)
class ConflictRecord:
    """A suspicion and its decision; `decision` is None while it is open."""

    suspicion: Suspicion
    decision: ConflictDecision | None
    note: str
    decide_time: datetime | None


@dataclass(frozen=True, slots=True)
class Related:
    """An earlier statement near to an observation; `share`: of the words of the shorter of the two, in [0, 1]."""

    fragment_id: str
    share: float
