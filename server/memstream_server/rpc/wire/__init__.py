"""Conversion between messages of memstream.v1 and domain values: pure functions, no I/O, no engine.

conflicts: suspicions and their decisions
conversations: messages and plans of conversations
fragments: fragments and events
filters: filters of fragments, from messages and from text
observations: observations
operations: operations
policies: memories and their policies
progress: rejections and outcomes of a producer
queries: queries and their answers
recall_receipts: receipts of recalls and their replays
scalars: enums, times, durations, vectors and metadata
scan: counts the fields of a serialised message before it is parsed
scopes: scopes of queries, and answers of other servers
"""
