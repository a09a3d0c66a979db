"""memstream compared with the servers that a user would run instead: over loopback TCP, with durable writes.

`python -m benchmarks.peers.servers` runs the comparison. Runners and `processes` import nothing of memstream, because
they run in their peer's own environment; only the runners of memstream and of the floor do.

    __main__: the command line
    compare: interleaved rounds, reads of own writes, and the kill
    contenders: the servers, their environments, and what each does not do
    results: the comparison as a Markdown page and as JSON
    processes: starts a server from a runner, and measures its processes
    memstream: runner of memstream, over gRPC
    floor: runner of the floor, through memstream's SDK
    floor_server: a bare grpc.aio server that takes memstream's messages: one commit or one product a call
    chroma: runner of Chroma's server
    milvus: runner of a Milvus server
    pgvector: runner of PostgreSQL with pgvector
    redis: runner of Redis Stack
"""
