"""Receipts of recalls, and their replays."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from memstream.answer_values import Answer, ScorePart
from memstream.policy import Policy
from memstream.values import RecallOptions, Structured


class DifferenceType(StrEnum):
    """What differs between a receipt and its replay. UNKNOWN: newer than this SDK."""

    UNKNOWN = "unknown"
    FRAGMENT_ERASED = "fragment_erased"
    FRAGMENT_REMOVED = "fragment_removed"
    VERSION_NOT_KEPT = "version_not_kept"
    QUERY_ERASED = "query_erased"
    FORMULA = "formula"
    EMBEDDING_MODEL = "embedding_model"
    LANGUAGE = "language"
    DEGRADED = "degraded"
    INDEX = "index"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class RankedFragment:
    """A recollection in a receipt, without content. `companion`: of the one before it."""

    fragment_id: str
    score: float
    relevance: float
    parts: tuple[ScorePart, ...]
    companion: bool = False


@dataclass(frozen=True, slots=True)
class RecallReceipt:
    """What is kept of a recall.

    `what` and `options`: the query as it was given; None and empty if it was erased. `policy`: the complete policy that
    was used. `principal`: who recalled; empty on a server without authentication. `erased_ids`: fragments of the
    ranking whose content was erased since.
    """

    id: str
    create_time: datetime | None
    what: str | Structured | None
    options: RecallOptions
    policy: Policy
    revision: int
    formula: str
    embedding_model: str
    ranking: tuple[RankedFragment, ...]
    principal: str
    degraded: str
    erased_ids: tuple[str, ...]
    query_erased: bool


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """One difference: of the fragment `fragment_id`, or from the value `recorded` to `present`."""

    type: DifferenceType
    fragment_id: str
    recorded: str
    present: str


@dataclass(frozen=True, slots=True)
class Replay:
    """A receipt, and the ranking as of its revision.

    `answer` is None if the query was erased. `same`: ids, scores, relevances and parts equal those of the receipt, to
    the last bit. `differences`: what prevents that, or may.
    """

    receipt: RecallReceipt
    answer: Answer | None
    same: bool
    differences: tuple[ReplayDifference, ...]
