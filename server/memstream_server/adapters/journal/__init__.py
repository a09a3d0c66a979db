"""The journal on SQL: SQLAlchemy Core on SQLite or PostgreSQL, one writer with group commit, readers beside it.

Reading order: schema (tables and keys), codec (what the blobs hold), database (what is asked of a database), sqlite
and postgres (all that is their own), directory (SQLite's files, lock, restore), bulk (many rows in one statement),
writes, transition, reads, selecting and outbox (one function per operation), writer (the thread that commits), store
(the port's methods).
"""

from memstream_server.adapters.journal.directory import restore
from memstream_server.adapters.journal.store import SqlJournal, open_journal

__all__ = ["SqlJournal", "open_journal", "restore"]
