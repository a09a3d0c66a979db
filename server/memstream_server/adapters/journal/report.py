"""What a check of the journal counted and found."""

from __future__ import annotations

from dataclasses import dataclass, field

CHECKS = {
    "memories": "memories whose record can be read",
    "revisions": "transitions, without a gap, up to the memory's revision",
    "fragments": "fragments as their events say: tier, importance, enhancements, sources, forgotten or not",
    "columns": "fragments whose columns say what their record says",
    "anchors": "short-term sides, of held fragments alone",
    "vectors": "vectors of fragments, in the length of their space",
    "lineage": "sources that are there or left by an event",
    "producers": "producers, stored no further than received",
    "receipts": "receipts of known producers, without a gap",
    "pending": "receipts waiting to be stored, of known producers",
    "outbox": "entries for the index, of fragments known",
    "conversations": "conversations whose completion fits their messages",
    "messages": "messages as their columns say, numbered without a gap up to the conversation's last",
    "plans": "plans as their columns say",
    "operations": "operations that can be read, and say their end where they have one",
    "store": "facts of the store, and rows of memories and conversations that exist",
}
"""What is checked, in words, by name."""
SHOWN_MAX = 1_000
"""Violations kept with their text; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that is not as it must be. `memory` and `fragment` are empty where it concerns none."""

    check: str
    memory: str
    fragment: str
    text: str


@dataclass(slots=True)
class Report:
    """What was checked and what was found."""

    checked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKS, 0))
    violated: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKS, 0))
    violations: list[Violation] = field(default_factory=list)
    compacted: dict[str, int] = field(default_factory=dict)
    """Memories whose log begins later than at its first revision, with the oldest revision kept."""
    unfinished: dict[str, str] = field(default_factory=dict)
    """Operations that have not ended, by id: what they are and how far they are."""

    def saw(self, check: str, count: int = 1) -> None:
        self.checked[check] += count

    def found(self, check: str, text: str, memory: str = "", fragment: str = "") -> None:
        self.violated[check] += 1
        if len(self.violations) < SHOWN_MAX:
            self.violations.append(Violation(check, memory, fragment, text))
