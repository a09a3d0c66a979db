"""What the engine reports of itself: its models and stores, its use of RAM, and what works now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memstream_server.ports.models import EmbeddingModel, ModelStatus, Spent


@dataclass(frozen=True, slots=True)
class Info:
    """The models and stores of the engine."""

    embedding: EmbeddingModel
    scorer_model: str
    insight_model: str
    index: str
    journal: str
    degraded: str
    spent: Sequence[Spent] = ()
    models: Sequence[ModelStatus] = ()


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Use of RAM over all active memories."""

    memories: int
    size_bytes: int
    backlog: int
    """Observations received and not yet stored."""
    sessions: int
    producers: int
    watchers: int
    """Watches and standing queries."""
    owned: int
    """Memories that only this process may change: with a shared journal those it has taken, else the active ones."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Which stores and models work now."""

    journal: bool
    """It answers, and the lease of this process is valid if the journal is shared."""
    index: bool
    """It answers and is complete except for rows in the outbox."""
    models: Mapping[str, bool] = field(default_factory=dict)
    """By role: whether the last call succeeded; true before the first call."""
