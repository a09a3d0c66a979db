"""`memstream verify`: checks that a journal matches its event logs, on every database.

Invariant: nothing here changes the journal, its directory or its database.

verify: runs all checks, a memory or conversation at a time; those of producers, receipts, operations,
    messages and plans
report: counts and violations
fragments: fragments, their versions, suspicions and receipts of recalls, against the event log
read_only_open: opens a journal read-only, in use or not
sqlite_wal: parses SQLite's write-ahead log
"""
