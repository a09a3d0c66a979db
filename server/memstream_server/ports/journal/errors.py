"""Errors of a journal; the port's contract says what each of them leaves (port.py)."""

from __future__ import annotations


class JournalError(Exception):
    """Base of a journal's errors. The text names places and conditions, never a value of a row."""

    log_text = True


class StaleWrite(JournalError):
    """The memory has another (epoch, revision) or was deleted: another process wrote, or the RAM state is stale."""


class AnswerExists(StaleWrite):
    """The request has a stored answer, or its batch is received and waits to be stored: serve that answer."""


class AlreadyExists(JournalError):
    """A memory with this name, or a fragment with this external id, exists."""


class PreconditionFailed(JournalError):
    """What the write depends on does not hold; it left nothing."""


class NamespaceFull(JournalError):
    """The namespace has reached its limit of memories."""

    def __init__(self, namespace: str, limit: int) -> None:
        super().__init__(f"namespace {namespace} holds {limit} memories, the most that are allowed")
        self.limit = limit


class WriteRefused(JournalError):
    """The write left nothing, and later ones will fail for the same reason; reads work. `cause` is for callers."""

    cause = "writing its file fails"


class StorageFull(WriteRefused):
    """The disk is (nearly) full. Free space and retry."""

    cause = "its disk has no space left"


class NotWritable(WriteRefused):
    """The file system is read-only, the process has no file descriptor left, or the disk fails."""

    def __init__(self, text: str, cause: str = WriteRefused.cause) -> None:
        super().__init__(text)
        self.cause = cause


class OutcomeUnknown(JournalError):
    """The commit may or may not have happened. Read again before any decision."""


class Unreadable(JournalError):
    """The data directory is damaged, of another format, or held by another server. The text says what to do."""
