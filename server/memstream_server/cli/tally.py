"""The progress of `observe` with one feed: observations received, stored, skipped and rejected."""

from __future__ import annotations

from dataclasses import dataclass, field

from memstream.observe import ObserveStream
from memstream_server.cli.feeds import Feed, FeedContents, LinePositions, Problem

PROBLEMS_KEPT = 1_000
"""Malformed lines of a pipe that are kept with their reason; the rest are only counted."""


@dataclass(slots=True)
class Tally:
    """The progress of one feed."""

    feed: Feed
    contents: FeedContents | None
    """None for a pipe, which cannot be read in advance."""
    remaining: int | None = None
    """Observations that this run sends, if they can be counted."""
    base: int = 0
    """The producer's last number before this run."""
    skipped: int = 0
    stream: ObserveStream | None = None
    places: LinePositions = field(default_factory=LinePositions)
    malformed: list[Problem] = field(default_factory=list)
    malformed_count: int = 0

    @property
    def received(self) -> int:
        """Observations of this run that are durable, or rejected."""
        return 0 if self.stream is None else max(0, self.stream.received - self.base)

    @property
    def stored(self) -> int:
        """Observations of this run that are visible to every recall, or rejected."""
        return 0 if self.stream is None else max(0, self.stream.stored - self.base)

    @property
    def rejected_count(self) -> int:
        """Malformed and rejected lines."""
        return self.malformed_count + (0 if self.stream is None else self.stream.rejected_count)

    def note_malformed(self, problem: Problem) -> None:
        """Records a malformed line of a pipe, which is skipped."""
        self.malformed_count += 1
        if len(self.malformed) < PROBLEMS_KEPT:
            self.malformed.append(problem)

    def problems(self) -> list[Problem]:
        """Malformed and rejected lines in order: the first 1,000 malformed, the last 1,000 rejected."""
        refused = () if self.stream is None else self.stream.rejected
        located = [(self.places.find(each.sequence - self.base - 1), each.error) for each in refused]
        problems = [Problem(file, line, " ".join(str(error).split())) for (file, line), error in located]
        return sorted([*self.malformed, *problems], key=lambda problem: problem.line)
