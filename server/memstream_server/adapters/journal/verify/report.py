"""The result of a journal check: counts and violations."""

from __future__ import annotations

from dataclasses import dataclass, field

CHECKS = {
    "memories": "memories whose record can be read",
    "revisions": "transitions, without a gap, up to the memory's revision, found by the fragments that they concern",
    "fragments": "fragments as their events say: tier, importance, enhancements, sources, forgotten or not",
    "columns": "fragments whose columns match their record",
    "anchors": "short-term data, of held fragments only",
    "vectors": "vectors of fragments, in the length of their space",
    "versions": "versions of fragments, each replaced by an event of the log",
    "recall_receipts": "receipts of recalls, each named by an event of the log",
    "lineage": "sources that exist or that an event removed",
    "chains": "supersessions: both ends name each other, and no chain closes",
    "conflicts": "suspicions between fragments of the memory, decided or not",
    "blocks": "versions of blocks, up to the memory's last one",
    "producers": "producers, stored no further than received",
    "receipts": "receipts of known producers, without a gap",
    "pending": "receipts waiting to be stored, of known producers",
    "outbox": "index entries of known fragments",
    "conversations": "conversations whose completion fits their messages",
    "messages": "messages that match their columns, numbered without a gap up to the conversation's last",
    "plans": "plans that match their columns",
    "states": "state documents that are JSON, those of a session with its conversation",
    "operations": "operations that can be read, with an end time if they have ended",
    "store": "metadata of the store, and rows of existing memories and conversations",
}
"""Each check's name, and what it counts."""
SHOWN_MAX = 1_000
"""Violations kept with their text; further ones are only counted."""


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A broken rule. `memory` and `fragment` are empty if it concerns none."""

    check: str
    memory: str
    fragment: str
    text: str


@dataclass(slots=True)
class Report:
    """Counts of checked items, and the violations found."""

    checked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKS, 0))
    violated: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKS, 0))
    violations: list[BrokenRule] = field(default_factory=list)
    compacted: dict[str, int] = field(default_factory=dict)
    """Memories whose event log was pruned, with the oldest revision kept."""
    unfinished: dict[str, str] = field(default_factory=dict)
    """Unfinished operations by id: type and progress."""

    def count_checked(self, check: str, count: int = 1) -> None:
        self.checked[check] += count

    def add_violation(self, check: str, text: str, memory: str = "", fragment: str = "") -> None:
        self.violated[check] += 1
        if len(self.violations) < SHOWN_MAX:
            self.violations.append(BrokenRule(check, memory, fragment, text))
