"""The value that a check yields, and its levels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; a server starts and serves."""
    PROBLEM = "problem"
    """A server does not start, rejects writes, or has lost data."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` says what to do; empty if there is nothing to do."""

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
