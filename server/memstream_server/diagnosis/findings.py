"""What a diagnosis says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; a server starts and serves all the same."""
    PROBLEM = "problem"
    """A server does not start, refuses writes, or has lost something."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `advice` says what to do; empty when there is nothing to do."""

    level: Level
    subject: str
    text: str
    advice: str = ""


def fine(subject: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, subject, text)


def note(subject: str, text: str, advice: str = "nothing to do") -> Finding:
    """Worth knowing."""
    return Finding(Level.NOTE, subject, text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """To be acted on."""
    return Finding(Level.PROBLEM, subject, text, advice)
