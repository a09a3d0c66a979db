"""The gRPC and HTTP layer: decodes requests, calls the engine, encodes responses.

Rule 1. Nothing here decides about tiers or scores: a handler validates, calls the engine and encodes.
Rule 2. Every refusal is an EngineError; errors.py has the one table from its reason to a status.
Rule 3. The end of a request stream does not mean that the client has finished: only its explicit `close` does.
Rule 4. Stream handlers are async generators; they cancel and await the tasks that they start in `finally`.

access: authentication, authorization and limits of each caller
blocks: BlockService, with the watch
calls: request ids, spans and deadlines of calls
connections: bounds of connections by port and address, and of open files
context: ContextService: what an agent sends to its model before a turn
conversations: ConversationService, with plans and the watch
drain: notifies open streams that the server shuts down, and waits for them
errors: the table from reasons to gRPC statuses
forwarding: passes calls on to the server that owns the memory
fragments: fragment rpcs of MemoryService
http: the HTTP port: Connect, gRPC-Web and JSON over the same handlers
idempotency: returns the first response to a repeated request_id
info: ServerService: the server and its status; grpc.health.v1
limits: bounds of requests, streams and calls
memories: memory rpcs of MemoryService
memory_records: its rpcs for suspicions, receipts of recalls, sessions and standing queries
messages: message rpcs of ConversationService
observe: the Observe stream
operations: OperationService, and operations as messages
page_tokens: page tokens of list rpcs
pipeline: the way of every call around its handler: request id, metrics, errors, limits, identity, rights; registers the
    handlers from the contract's descriptors
recall: the Recall stream and a single query
request_reader: reads, bounds, decompresses and parses request messages
rpc_table: rights, locality, capability and message size of every rpc
scopes: queries over several memories: rights, and owners in other processes
server: builds, starts and stops the gRPC server
slow_consumer: streams of changes: progress marks, and the end of one whose client does not read
streams: StreamService, with the Watch stream
validation: checks of request fields
wire: conversion between messages and domain values
"""
