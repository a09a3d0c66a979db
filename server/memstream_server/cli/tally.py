"""How far `observe` has come with one feed: what was received, stored, skipped, rejected, and where that stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from memstream.observe import ObserveStream
from memstream_server.cli.feeds import Feed, Places, Problem

PROBLEMS_KEPT = 1_000
"""Malformed lines of a pipe remembered with their reason; the rest are counted."""


@dataclass(slots=True)
class Tally:
    """How far one feed has come."""

    feed: Feed
    expected: int | None
    """Observations in it; None for a pipe, which cannot be counted before it is read."""
    base: int = 0
    """Numbers the producer had used before the first observation of this run."""
    skipped: int = 0
    stream: ObserveStream | None = None
    places: Places = field(default_factory=Places)
    malformed: list[Problem] = field(default_factory=list)
    malformed_count: int = 0

    @property
    def received(self) -> int:
        """Observations of this run that are durable, or were refused."""
        return 0 if self.stream is None else max(0, self.stream.received - self.base)

    @property
    def stored(self) -> int:
        """Observations of this run that every recall sees, or that were refused."""
        return 0 if self.stream is None else max(0, self.stream.stored - self.base)

    @property
    def rejected_count(self) -> int:
        """Lines that are not in the memory."""
        return self.malformed_count + (0 if self.stream is None else self.stream.rejected_count)

    def note_malformed(self, problem: Problem) -> None:
        """A line of a pipe was left out."""
        self.malformed_count += 1
        if len(self.malformed) < PROBLEMS_KEPT:
            self.malformed.append(problem)

    def problems(self) -> list[Problem]:
        """Malformed and refused lines, in order; the earliest or latest thousand of each."""
        refused = () if self.stream is None else self.stream.rejected
        found = [(self.places.find(each.sequence - self.base - 1), each.error) for each in refused]
        said = [Problem(file, line, " ".join(str(error).split())) for (file, line), error in found]
        return sorted([*self.malformed, *said], key=lambda problem: problem.line)
