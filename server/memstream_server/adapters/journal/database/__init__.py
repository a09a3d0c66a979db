"""The databases that a journal can live in.

Invariant: a database is locked for one server, or shared by servers that all say so, before anything is written.

database: the protocol `Database`, reading in a snapshot, rows by column, and statements compiled once
sqlite: everything specific to SQLite
checkpoints: checkpoints of SQLite's log that leave no bytes of deleted rows
postgres: everything specific to PostgreSQL
directory: the data directory: lock, format, opening, backup, restore
migrate: migrates the tables to this server's version, after a copy of the journal
"""
