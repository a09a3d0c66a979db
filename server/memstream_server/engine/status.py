"""What the engine reports of itself: its models and stores, its use of RAM, and what works now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    writing: bool = True
    """The journal can be written; reads may work without."""
    models: Mapping[str, bool] = field(default_factory=dict)
    """By role: whether the last call succeeded; true before the first call."""


class WriteStatus:
    """Why the journal cannot be written now, and the streams that wait for it."""

    def __init__(self) -> None:
        self.problem = ""
        """In words for a caller; empty while writing works."""
        self._callbacks: set[Callable[[], None]] = set()

    def set_problem(self, problem: str) -> None:
        """Notify the streams of a problem that is new."""
        changed, self.problem = problem != self.problem, problem
        if changed:
            for callback in tuple(self._callbacks):
                callback()

    @contextmanager
    def notify_on_change(self, callback: Callable[[], None]) -> Iterator[None]:
        """Run `callback` when a problem appears or ends; at once if there is one."""
        self._callbacks.add(callback)
        try:
            if self.problem:
                callback()
            yield
        finally:
            self._callbacks.discard(callback)
