"""Conversion between messages of memstream.v1 and domain values: pure functions, no I/O, no engine.

conversations: messages and plans of conversations
fragments: fragments, events and suspicions
filters: filters of fragments, from messages and from text
observations: observations, and a producer's rejections and outcomes
policies: memories and their policies
queries: queries and their answers, receipts of recalls
scalars: enums, times, durations, vectors and metadata
scan: counts the fields of a serialised message before it is parsed
scopes: scopes of queries, and answers of other servers
"""
