"""Errors of a journal; the port's contract says what each of them leaves (port.py)."""

from __future__ import annotations


class JournalError(Exception):
    """Base of a journal's errors. The text names places and conditions, never a value of a row."""

    log_text = True


class Conflict(JournalError):
    """The memory has another (epoch, revision) or was deleted: another process wrote, or the RAM state is stale."""


class AlreadyExists(JournalError):
    """A memory with this name, or a fragment with this external id, exists."""


class NamespaceFull(JournalError):
    """The namespace has reached its limit of memories."""

    def __init__(self, namespace: str, limit: int) -> None:
        super().__init__(f"namespace {namespace} holds {limit} memories, the most that are allowed")
        self.limit = limit


class StorageFull(JournalError):
    """The disk is (nearly) full: writes are rejected, reads work. Free space and retry."""


class OutcomeUnknown(JournalError):
    """The commit may or may not have happened. Read again before any decision."""


class Unreadable(JournalError):
    """The data directory is damaged, of another format, or held by another server. The text says what to do."""
