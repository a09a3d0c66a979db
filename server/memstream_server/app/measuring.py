"""The engine's metrics, for Prometheus."""

from __future__ import annotations

from collections import Counter

from memstream_server.core.events import EventType
from memstream_server.observability import Metrics
from memstream_server.ports.journal.records import Recorded


class EngineMetrics:
    """Counts what the engine does."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._recalls = {False: metrics.recalls.labels("ok"), True: metrics.recalls.labels("degraded")}
        self._transitions = {each: metrics.transitions.labels(each.value) for each in EventType}

    def count_received(self, observations: int, rejected: int, seconds: float) -> None:
        self._metrics.observations_received.inc(observations)
        self._metrics.received_seconds.observe(seconds)
        if rejected:
            self._metrics.observations_rejected.labels("INVALID_FIELD").inc(rejected)

    def count_stored(self, observations: int, seconds: float | None) -> None:
        self._metrics.observations_stored.inc(observations)
        if seconds is not None:
            self._metrics.stored_seconds.observe(seconds)

    def count_commit(self, seconds: float) -> None:
        self._metrics.commit_seconds.observe(seconds)

    def count_events(self, recorded: Recorded) -> None:
        for type_, times in Counter([event.type for event in recorded.events]).items():
            self._transitions[type_].inc(times)

    def count_recall(self, seconds: float, degraded: bool) -> None:
        self._metrics.recall_seconds.observe(seconds)
        self._recalls[degraded].inc()

    def count_indexed(self, seconds: float) -> None:
        self._metrics.indexed_seconds.observe(seconds)

    def set_outbox(self, depth: int) -> None:
        self._metrics.outbox_depth.set(depth)
