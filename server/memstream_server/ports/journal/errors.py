"""What a journal raises; what each leaves behind is the contract of the port (port.py)."""

from __future__ import annotations


class JournalError(Exception):
    """Base of what a journal raises. Its text names places and conditions, never a value of a row."""

    log_text = True


class Conflict(JournalError):
    """The memory is at another (epoch, revision), or was deleted: somebody else wrote, or the RAM state is stale."""


class AlreadyExists(JournalError):
    """A memory of that name, or a fragment of that external id, exists."""


class NamespaceFull(JournalError):
    """The namespace holds as many memories as it may."""

    def __init__(self, namespace: str, limit: int) -> None:
        super().__init__(f"namespace {namespace} holds {limit} memories, the most that are allowed")
        self.limit = limit


class StorageFull(JournalError):
    """The disk is (nearly) full; writes are refused while reads go on. Free space and retry."""


class OutcomeUnknown(JournalError):
    """The commit may or may not have happened. Read again before deciding anything."""


class Unreadable(JournalError):
    """The data directory is corrupt, of another format version, or held by another server. The text says what to do."""
