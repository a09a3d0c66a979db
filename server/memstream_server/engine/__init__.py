"""The server's behaviour: finds a memory's actor and passes it the work. Imports ports and core only.

engine: the front that the rpcs call; starts and stops the background tasks
memories: memories as resources: create, clone, read, change, delete
fragments: fragments as resources: read, summarized by session, put, change, forget, restore, clear
conflicts: suspicions for the rpcs: listed, decided
lifecycle: update, forget, restore, supersede and clear, each one decision in the memory's order
conversations: conversations for the rpcs: store errors as engine errors, times, watches
blocks: blocks of memories for the rpcs and for contexts: reads, writes, edits, watches
context: what an agent sends to its model before a turn: reads its parts at once
quotas: the quotas of a namespace's bytes and of a memory's fragments
requests: requests and answers as domain values (microseconds, arrays, tuples)
errors: the errors that a client sees
status: models, stores, use of RAM, and what works now
settings: limits, lease times and transfer settings
memory: one active memory: its actor, its ingest, its working set (a package)
recall: answers queries (a package)
background: indexing, jobs, retention (a package)
operations: long-running operations, exports and imports (a package)
runtime: what the parts share: registry, ownership, scheduler, clock (a package)
"""
