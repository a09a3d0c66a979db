"""The tunables of a memory: every field with meaning, unit, bounds and default, in two profiles.

`PROFILES` holds the two complete policies; a memory stores a complete policy, never a patch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any

from memstream_server.core.printable import number_text

AUTO_LANGUAGE = "auto"
"""The `language` that selects a stemmer per text."""


class Profile(StrEnum):
    """Source of a policy's defaults: DB-GPT's behaviour, or memstream's measured best."""

    DEFAULT = "default"
    DBGPT = "dbgpt"


class ShortTermKind(StrEnum):
    """Mode of a hybrid memory's short-term tier."""

    FIFO = "fifo"
    ENHANCED = "enhanced"


class SimilarityRule(StrEnum):
    """When a newcomer hits a held fragment."""

    COSINE = "cosine"  # cosine >= similarity_min
    SIGMOID_DRAW = "sigmoid_draw"  # p = sigmoid(cosine) >= similarity_threshold and draw < p


class Overflow(StrEnum):
    """What happens to the weakest fragment of a full enhanced short-term tier."""

    PROMOTE = "promote"
    DROP = "drop"


class Truth(StrEnum):
    """Which fragments a recall returns."""

    CURRENT = "current"
    ALL = "all"


class RankingRule(StrEnum):
    """Ranking formula of a recall."""

    ABSOLUTE = "absolute"  # core/ranking.py
    DBGPT = "dbgpt"  # cosine + 0.99^hours since access + 9 x importance, then all of short-term


def _tunable(default: Any, meaning: str, unit: str = "", low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"meaning": meaning, "unit": unit, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class SensoryPolicy:
    """The buffer every observation enters first."""

    capacity: int = _tunable(
        0,
        "capacity; one more fragment empties the tier; 0 passes every fragment straight through",
        "fragments",
        0,
        10_000,
    )
    threshold: float = _tunable(
        0.0, "importance below which a fragment is filtered when the tier empties", "importance", 0, 1
    )


@dataclass(frozen=True, slots=True)
class ShortTermPolicy:
    """The tier in which similar observations enhance each other."""

    kind: ShortTermKind = _tunable(ShortTermKind.ENHANCED, "how a hybrid memory's short-term tier works")
    capacity: int = _tunable(10, "capacity (5 for the FIFO kind)", "fragments", 1, 1_000)
    similarity_rule: SimilarityRule = _tunable(SimilarityRule.COSINE, "what counts as a hit")
    similarity_min: float | None = _tunable(
        None, "cosine that counts as a hit; unset takes the embedding model's value", "cosine", -1, 1
    )
    similarity_threshold: float = _tunable(
        0.7, "sigmoid of the cosine that counts as a hit, under sigmoid_draw", "probability", 0, 1
    )
    enhance_threshold: int = _tunable(3, "hits that promote a fragment", "hits", 1, 1_000)
    overflow: Overflow = _tunable(Overflow.PROMOTE, "what happens to the weakest fragment of a full enhanced tier")
    compare_content: bool = _tunable(
        True, "compare vectors of the content alone; off compares indexed vectors, at half the cost"
    )
    merge_content: bool = _tunable(False, "a promotion replaces the content by the merged text of its enhancers")
    repeats: bool = _tunable(
        True,
        "count an observation that brings nothing of its own (it has the words, speaker, session, metadata, "
        "expiry, importance and time of a fragment) on that fragment instead of storing it",
    )
    echo_window_s: int = _tunable(
        600,
        "an observation of words that its session recalled within this time is an echo, not stored; 0 is off",
        "seconds",
        0,
        86_400,
    )


@dataclass(frozen=True, slots=True)
class ReflectionPolicy:
    """When and how an LLM derives insights; without effect if the server has no LLM."""

    insight_on_promotion: bool = _tunable(True, "derive an insight when enhancement promotes a fragment")
    threshold: float = _tunable(
        15.0,
        "sum of the importances of fragments that reached long-term at which a reflection starts; 0 is off",
        "importance",
        0,
        1_000_000,
    )
    fragments: int = _tunable(100, "latest long-term fragments shown to the LLM", "fragments", 1, 1_000)
    questions: int = _tunable(3, "questions about them", "questions", 1, 20)
    insights: int = _tunable(5, "insights requested per question", "insights", 1, 20)
    merge_cosine: float = _tunable(0.95, "cosine at which insights merge", "cosine", 0, 1)


@dataclass(frozen=True, slots=True)
class RecallPolicy:
    """Defaults of a recall; a query may override limit, weights, minimum relevance and reinforcement."""

    ranking: RankingRule = _tunable(RankingRule.ABSOLUTE, "ranking formula")
    limit: int = _tunable(10, "recollections returned", "fragments", 1, 1_000)
    candidates: int = _tunable(50, "candidates taken from each leg", "fragments", 1, 1_000)
    alpha: float = _tunable(0.005, "weight of recency", "", 0, 100)
    beta: float = _tunable(1.0, "weight of relevance", "", 0, 100)
    gamma: float = _tunable(0.1, "weight of importance", "", 0, 100)
    decay_per_hour: float = _tunable(0.01, "recency lost per hour", "1/hour", 0, 1)
    dense_weight: float | None = _tunable(
        None, "weight of the dense leg in relevance; unset takes the embedding model's value", "", 0, 1
    )
    lexical_weight: float | None = _tunable(None, "weight of the BM25 leg; unset takes the model's value", "", 0, 1)
    context_weight: float | None = _tunable(
        None, "weight of the BM25 leg with neighbours; unset takes the model's value", "", 0, 1
    )
    speaker_bonus: float = _tunable(
        0.1, "added to relevance when the query names exactly the fragment's speaker", "", 0, 1
    )
    min_relevance: float = _tunable(0.0, "minimum relevance of a recollection", "", 0, 1)
    sensory: bool = _tunable(True, "whether recall includes the sensory tier")
    reinforce: bool = _tunable(True, "a recall counts as an access of its recollections and offers them to short-term")
    fold: bool = _tunable(True, "fold recollections that say the same into one")
    truth: Truth = _tunable(
        Truth.CURRENT, "whether a recall returns only current fragments, or superseded and not valid ones too"
    )
    weak_below: float | None = _tunable(
        None,
        "best relevance below which an answer is marked weak; 0 is off; unset marks answers whose best "
        "recollection shares no word with the query but names, and none with DB-GPT's ranking",
        "",
        0,
        1,
    )


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """When fragments are forgotten; all off by default."""

    ttl_s: int = _tunable(
        0, "age at which fragments without an expiry of their own expire; 0 is off", "seconds", 0, 3_153_600_000
    )
    retention_min: float = _tunable(0.0, "strength below which a fragment is forgotten; 0 is off", "strength", 0, 1)
    strength_half_life_s: int = _tunable(
        2_592_000, "time since access that halves the strength of an average fragment", "seconds", 1, 3_153_600_000
    )
    long_term_capacity: int = _tunable(
        0, "long-term fragments to keep; the weakest are forgotten first; 0 is off", "fragments", 0, 100_000_000
    )
    forget_grace_s: int = _tunable(604_800, "how long a forgotten fragment can be restored", "seconds", 0, 315_360_000)
    event_retention_s: int = _tunable(0, "how long the server keeps events; 0 keeps all", "seconds", 0, 315_360_000)


@dataclass(frozen=True, slots=True)
class ConflictPolicy:
    """Twins: statements of one speaker that share so many words that the later one may replace the earlier one."""

    suspect: bool = _tunable(True, "recall puts the later one of twins before the earlier one")
    ask_llm: bool = _tunable(
        False,
        "record suspicions about a new or changed observation and its nearest twins, and let the LLM, if any, decide "
        "each in the background with one question; without effect if `suspect` is off",
    )


@dataclass(frozen=True, slots=True)
class HistoryPolicy:
    """What is kept of earlier contents and of recalls."""

    versions: int = _tunable(10, "versions of a fragment that are kept; 0 is off", "versions", 0, 100)
    version_retention_s: int = _tunable(
        0, "how long a version is kept after it was replaced; 0 sets no limit", "seconds", 0, 315_360_000
    )
    receipts: int = _tunable(100, "recall receipts that are kept, the latest ones; 0 is off", "receipts", 0, 1_000)


@dataclass(frozen=True, slots=True)
class Policy:
    """One memory's complete policy."""

    profile: Profile = _tunable(Profile.DEFAULT, "where the defaults come from")
    language: str = _tunable("english", "Snowball stemmer of its texts; auto detects the language of each text")
    importance_default: float = _tunable(0.5, "importance if neither client nor scorer gives one", "importance", 0, 1)
    score_importance: bool = _tunable(True, "let the LLM, if any, rate observations without an importance")
    wait_for_models: bool = _tunable(
        False, "keep observations *received* while a model is down, instead of storing them without a vector"
    )
    backlog_max: int = _tunable(
        10_000, "observations received but not stored at which further ones are refused", "observations", 1, 1_000_000
    )
    sensory: SensoryPolicy = SensoryPolicy()
    short_term: ShortTermPolicy = ShortTermPolicy()
    reflection: ReflectionPolicy = ReflectionPolicy()
    recall: RecallPolicy = RecallPolicy()
    retention: RetentionPolicy = RetentionPolicy()
    conflicts: ConflictPolicy = ConflictPolicy()
    history: HistoryPolicy = HistoryPolicy()


DEFAULT = Policy()
DBGPT = Policy(
    profile=Profile.DBGPT,
    wait_for_models=True,
    sensory=SensoryPolicy(capacity=0, threshold=0.01),
    short_term=ShortTermPolicy(
        similarity_rule=SimilarityRule.SIGMOID_DRAW,
        overflow=Overflow.DROP,
        merge_content=True,
        repeats=False,
        echo_window_s=0,
    ),
    reflection=ReflectionPolicy(threshold=0.0),
    recall=RecallPolicy(ranking=RankingRule.DBGPT, limit=4, candidates=100, sensory=False, fold=False, truth=Truth.ALL),
    conflicts=ConflictPolicy(suspect=False),
    history=HistoryPolicy(versions=0, receipts=0),
)
PROFILES = {Profile.DEFAULT: DEFAULT, Profile.DBGPT: DBGPT}
FIFO_CAPACITY = 5
"""short_term.capacity of a FIFO short-term tier if the client gives none."""


@dataclass(frozen=True, slots=True)
class PolicyViolation:
    """A policy field out of bounds: dotted name and description."""

    field: str
    description: str


def iterate_tunables(policy: Any, prefix: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(dotted name, value, metadata) of every tunable, in declaration order."""
    for item in fields(policy):
        value = getattr(policy, item.name)
        if is_dataclass(value):
            yield from iterate_tunables(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value, dict(item.metadata)


def find_violations(policy: Policy) -> list[PolicyViolation]:
    """The fields out of bounds; empty for a valid policy."""
    found = []
    for name, value, meta in iterate_tunables(policy):
        low, high = meta.get("low"), meta.get("high")
        if isinstance(value, bool) or not isinstance(value, int | float) or low is None or high is None:
            continue
        if not low <= value <= high:  # also false for NaN
            found.append(
                PolicyViolation(name, f"must be between {number_text(low)} and {number_text(high)}, is {value}")
            )
    return found


def with_value(policy: Any, name: str, value: Any) -> Any:
    """The policy with the field of a dotted name set."""
    head, _, rest = name.partition(".")
    return replace(policy, **{head: with_value(getattr(policy, head), rest, value) if rest else value})
