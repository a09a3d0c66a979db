"""The journal on a SQL database (SQLite or PostgreSQL): one writer thread with group commit, several readers.

store: `SqlJournal`, the methods of `ports.journal`, and `open_journal`
writer: the writer thread, which commits all waiting writes in one transaction
conversations: the conversation store
operations: the operation store
processes: leases and memory ownership of several servers on one PostgreSQL database
"""

from memstream_server.adapters.journal.directory import restore
from memstream_server.adapters.journal.store import SqlJournal, open_journal

__all__ = ["SqlJournal", "open_journal", "restore"]
