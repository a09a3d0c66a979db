"""What the engine needs from the outside world, as protocols; adapters/ implement them.

A protocol's docstring is its contract: order, idempotency, ownership, and the state after a failure. The conformance
suites (tests/journal/conformance/, and conformance.py in tests/index/, tests/conversations/ and tests/operations/) run
against every adapter.

journal: the journal, the source of truth (a package)
index: the vector index
images: files that spare an activation the rows
models: embedder, scorer, insights, judge of conflicts, lexical analyzer, reranker
conversations: messages and plans of conversations
conversation_records: the same store: labels, lists, time to live, forks, state documents, erasure of a user
blocks: small named texts of memories, with versions
operations: long-running operations
processes: leases and memory ownership of several servers
"""
