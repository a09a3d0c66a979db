"""Settings that limit requests and streams."""

from __future__ import annotations

from pydantic import BaseModel

from memstream_server.settings.values import setting


class RequestSettings(BaseModel):
    """Limits of requests."""

    content_max_bytes: int = setting(
        65_536, "longest content of an observation, in bytes of UTF-8", "bytes", 1, 4_194_304
    )
    batch_max: int = setting(1_024, "observations in one batch", "observations", 1, 100_000)
    message_max_bytes: int = setting(
        4_194_304,
        "largest gRPC message of Observe, ObserveBatch, ImportMemories and SavePlans, and body of a conversation's "
        "message; other rpcs have at most 262,144 bytes, or four times content_max_bytes",
        "bytes",
        65_536,
        268_435_456,
    )
    message_fields_max: int = setting(
        131_072,
        "fields of a gRPC message of those rpcs, including its sub-messages; other rpcs have at most an eighth; a "
        "field costs up to 150 bytes of RAM",
        "fields",
        1_024,
        16_777_216,
    )
    id_max_chars: int = setting(
        128, "longest namespace, memory, producer, session or external id", "characters", 8, 1_024
    )
    metadata_entries_max: int = setting(64, "metadata entries of an observation", "entries", 0, 1_024)
    metadata_max_bytes: int = setting(
        16_384, "metadata of an observation, keys and values in UTF-8", "bytes", 0, 1_048_576
    )
    page_size_max: int = setting(1_000, "items of one page; a larger page_size is reduced to this", "items", 1, 10_000)
    recall_limit_max: int = setting(1_000, "recollections of one answer", "fragments", 1, 10_000)

    import_max_bytes: int = setting(
        17_179_869_184, "size of one import, which the server stores on disk first", "bytes", 1, 1_099_511_627_776
    )


class StreamSettings(BaseModel):
    """Limits of streams and connections."""

    window_observations: int = setting(
        4_096, "observations that a stream may have in flight before *received*", "observations", 1, 1_000_000
    )
    window_bytes: int = setting(
        16_777_216,
        "bytes of content that a stream may have in flight before *received*",
        "bytes",
        65_536,
        1_073_741_824,
    )
    connection_streams_max: int = setting(
        256,
        "calls and streams that one connection may have open (HTTP/2); a client holds back the excess",
        "streams",
        1,
        1_000_000,
    )
    port_connections_max: int = setting(
        4_096,
        "connections of the gRPC port, and of the HTTP port; fewer if the limit of open files (ulimit -n) allows less",
        "connections",
        1,
        1_000_000,
    )
    address_connections_max: int = setting(
        1_024,
        "connections of one address on one port, at most half of the port's; `trusted_proxies` have no such bound",
        "connections",
        1,
        1_000_000,
    )
    streams_max: int = setting(4_096, "streams open at once", "streams", 1, 1_000_000)
    recall_in_flight_max: int = setting(64, "queries in flight on one Recall stream", "queries", 1, 10_000)
    standing_queries_max: int = setting(
        1_024, "standing queries open at once; each is ranked again after commits", "queries", 1, 1_000_000
    )
    memory_standing_queries_max: int = setting(
        512, "standing queries open at once on one memory", "queries", 1, 1_000_000
    )
    calls_in_flight_max: int = setting(1_024, "unary calls in flight, of all clients together", "calls", 1, 1_000_000)
    opening_max_s: float = setting(
        20.0,
        "how long a connection may take for its HTTP/2 (and TLS) handshake, and a stream until its first message",
        "seconds",
        0.1,
        3_600,
    )
    connection_idle_max_s: float = setting(
        1_800.0,
        "how long a connection without a call stays open; clients reconnect automatically",
        "seconds",
        0.1,
        86_400,
    )
    watch_stalled_max_s: float = setting(
        600.0,
        "how long a watcher may leave events unread before its stream ends; it can resume",
        "seconds",
        0.1,
        86_400,
    )
    drain_grace_s: float = setting(
        10.0, "how long streams may finish after SIGTERM, and then the index's backlog", "seconds", 0, 600
    )
