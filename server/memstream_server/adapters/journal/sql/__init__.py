"""Tables, encoding and statements of the journal, the same for SQLite and PostgreSQL.

Reading order: schema, codec, bulk, writes, commit, reads, load_memory. A write function runs inside the writer's
transaction, a read function inside one snapshot.

schema: tables, and the integer key that keeps a memory's rows together
codec: encoding of the blobs
byte_counts: the bytes of each namespace, which triggers count
bulk: statements of many rows, and paged reads
writes: writes to the store, its memories, producers and receipts
answers: stored answers to request ids
conflicts: suspicions and their decisions
commit: the commit of transitions, and access statistics
reads: reads of everything except fragments
fragment_reads: reads of fragments by id, in pages, and those that are due
vector_forms: the forms in which vectors are stored, and those that are computed
load_memory: loads an active memory in one snapshot
recall_receipts: receipts of recalls
versions: what fragments said before a commit replaced it
outbox: the outbox of the vector index
vector_upkeep: vectors of another space, missing ones, and those of an earlier server
messages: messages of conversations, and the rows of these
hidden_conversations: what takes several transactions: bodies and documents in parts, deleted conversations
conversation_copies: forks, conversations of which much is deleted, imported ones
conversation_records: conversations as wholes
states: state documents
joint_writes: several writes of one transaction, and what writes cost
export_reads: reads a whole memory or conversation for an export
"""
