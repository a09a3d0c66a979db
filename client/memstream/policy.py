"""A memory's tunables: in a request None means the profile's default, in an answer every field is set.

A dict of the same shape is accepted wherever a policy is: `{"profile": "dbgpt", "recall": {"limit": 4}}`, with
enums by value and durations as timedelta or seconds. Units, bounds and defaults are in memstream/v1/memory.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeAlias

from memstream.arguments import check_fields
from memstream.values import Truth


class Profile(StrEnum):
    """The source of defaults: the best measured values, or DB-GPT's behaviour without its defects."""

    DEFAULT = "default"
    DBGPT = "dbgpt"


class ShortTermKind(StrEnum):
    """How a hybrid memory's short-term tier works."""

    FIFO = "fifo"
    ENHANCED = "enhanced"


class SimilarityRule(StrEnum):
    """When a short-term fragment and a new observation count as similar."""

    COSINE = "cosine"
    SIGMOID_DRAW = "sigmoid_draw"


class Overflow(StrEnum):
    """What happens to the weakest fragment of a full enhanced short-term tier."""

    PROMOTE = "promote"
    DROP = "drop"


class RankingRule(StrEnum):
    """How recollections are ranked."""

    ABSOLUTE = "absolute"
    DBGPT = "dbgpt"


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SensoryPolicy:
    """The buffer that every observation enters first."""

    capacity: int | None = None
    threshold: float | None = None


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ShortTermPolicy:
    """The tier in which similar observations strengthen each other."""

    kind: ShortTermKind | None = None
    capacity: int | None = None
    similarity_rule: SimilarityRule | None = None
    similarity_min: float | None = None
    similarity_threshold: float | None = None
    enhance_threshold: int | None = None
    overflow: Overflow | None = None
    compare_content: bool | None = None
    merge_content: bool | None = None
    repeats: bool | None = None
    echo_window: timedelta | None = None


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectionPolicy:
    """When and how insights are derived; requires an LLM."""

    insight_on_promotion: bool | None = None
    threshold: float | None = None
    fragments: int | None = None
    questions: int | None = None
    insights: int | None = None
    merge_cosine: float | None = None


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RecallPolicy:
    """Defaults of a recall."""

    ranking: RankingRule | None = None
    limit: int | None = None
    candidates: int | None = None
    alpha: float | None = None
    beta: float | None = None
    gamma: float | None = None
    decay_per_hour: float | None = None
    dense_weight: float | None = None
    lexical_weight: float | None = None
    context_weight: float | None = None
    speaker_bonus: float | None = None
    min_relevance: float | None = None
    sensory: bool | None = None
    reinforce: bool | None = None
    fold: bool | None = None
    weak_below: float | None = None
    truth: Truth | None = None


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """When fragments are forgotten; all off by default."""

    ttl: timedelta | None = None
    retention_min: float | None = None
    strength_half_life: timedelta | None = None
    long_term_capacity: int | None = None
    forget_grace: timedelta | None = None
    event_retention: timedelta | None = None


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ConflictPolicy:
    """Statements of one speaker of which the later one may have replaced the earlier one."""

    suspect: bool | None = None
    ask_llm: bool | None = None


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPolicy:
    """What is kept of earlier contents and of recalls; by default the last 10 versions of a fragment, and the last 100
    receipts."""

    versions: int | None = None
    version_retention: timedelta | None = None
    receipts: int | None = None


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A memory's tunables."""

    profile: Profile | None = None
    language: str | None = None
    importance_default: float | None = None
    score_importance: bool | None = None
    wait_for_models: bool | None = None
    backlog_max: int | None = None
    sensory: SensoryPolicy | None = None
    short_term: ShortTermPolicy | None = None
    reflection: ReflectionPolicy | None = None
    recall: RecallPolicy | None = None
    retention: RetentionPolicy | None = None
    conflicts: ConflictPolicy | None = None
    history: HistoryPolicy | None = None


PolicyLike: TypeAlias = Policy | Mapping[str, Any]
"""A Policy, or a mapping of the same shape."""
