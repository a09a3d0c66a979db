"""The journal (`ports.journal`) on a SQL database, SQLite or PostgreSQL.

Invariant: one writer thread makes every write; a write returns only after COMMIT. Readers never wait for it.

store: `SqlJournal`, the port's methods over the writer and the readers, and `open_journal`
writer: the writer thread, which commits all waiting writes in one transaction
conversations: the conversation store
blocks: the block store
processes: the operation store; leases and memory ownership of several servers on one PostgreSQL database
sql: tables, encoding and statements (a package)
database: SQLite, PostgreSQL, the data directory and migrations (a package)
verify: `memstream verify` and opening a journal read-only (a package)
migrations: Alembic's environment and one file per schema revision
"""
