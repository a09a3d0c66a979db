"""Limits of requests, streams and calls, from the settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from memstream.v1 import server_service_pb2 as pb
from memstream_server.engine.runtime.turns import in_slices
from memstream_server.ports.journal.records import ANSWER_KEPT_S
from memstream_server.rpc.connections import ConnectionBounds, descriptor_limit

if TYPE_CHECKING:
    from memstream_server.settings import Settings

M = TypeVar("M", bound=Message)
_OVERSIZE_BYTES = 1 << 20
V = TypeVar("V")
ENTRIES_PER_SLICE = 8
"""Entries of a page that are made between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of requests and streams; bytes are of UTF-8 or of the serialised message."""

    content_bytes_max: int = 65_536
    batch_max: int = 1_024
    """Observations in one batch."""
    window_observations: int = 4_096
    window_bytes: int = 16 << 20
    """Serialised observations of one Observe stream in flight, not yet received."""
    message_bytes_max: int = 4 << 20
    small_message_bytes_max: int = 256 << 10
    """For rpcs other than those that take observations, bodies of messages, plans and imports."""
    message_fields_max: int = 131_072
    """Fields of one message, including those of its sub-messages; an eighth of it for small messages."""
    caller_streams_max: int = 0
    """Open streams of one principal; 0: no limit."""
    caller_calls_max: int = 0
    """Concurrent calls with one response of one principal; 0: no limit."""
    caller_request_bytes_max: int = 64 << 20
    """Bytes of one caller's requests that are being received or processed; further requests wait."""
    connections: ConnectionBounds = field(default_factory=ConnectionBounds)
    connection_streams_max: int = 256
    """Open calls and streams of one connection; a client queues further ones itself."""
    name_bytes_max: int = 128
    metadata_entries_max: int = 64
    metadata_bytes_max: int = 16_384
    """Keys and values of one observation's metadata."""
    page_size_max: int = 1_000
    page_bytes_max: int = 512 << 10
    """A page of a list ends early beyond this: gRPC takes a message in one step, 6 ms for 2 MiB."""
    states_bytes_max: int = 2 << 20
    """State documents of one answer, at least one: a client asks again for the rest, which is of a later moment."""
    recall_limit_max: int = 1_000
    queries_in_flight_max: int = 64
    streams_max: int = 4_096
    calls_in_flight_max: int = 1_024
    opening_max_s: float = 20.0
    """Maximum time for a connection's handshake, and for the first message of a stream."""
    connection_idle_max_s: float = 1_800.0
    """How long a connection without a call stays open."""
    watch_stalled_max_s: float = 600.0
    """How long a watcher may leave a response unread."""
    backlog_wait_s: float = 5.0
    """How long an Observe stream is throttled while its memory's backlog is full, before it is refused."""

    @property
    def received_bytes_max(self) -> int:
        """The largest message that gRPC takes: what is a little too large is refused by us, with a reason."""
        return self.message_bytes_max + _OVERSIZE_BYTES

    @classmethod
    def from_settings(cls, settings: Settings) -> RequestLimits:
        """The limits of a server's settings."""
        return cls(
            content_bytes_max=settings.content_max_bytes,
            batch_max=settings.batch_max,
            window_observations=settings.window_observations,
            window_bytes=settings.window_bytes,
            message_bytes_max=settings.message_max_bytes,
            small_message_bytes_max=max(256 << 10, 4 * settings.content_max_bytes, 4 * settings.metadata_max_bytes),
            message_fields_max=settings.message_fields_max,
            caller_request_bytes_max=settings.caller_request_bytes_max,
            connections=ConnectionBounds.from_settings(settings, descriptor_limit()),
            connection_streams_max=settings.connection_streams_max,
            caller_streams_max=settings.caller_streams_max if settings.authenticates else 0,
            caller_calls_max=settings.caller_calls_max if settings.authenticates else 0,
            name_bytes_max=settings.id_max_chars,
            metadata_entries_max=settings.metadata_entries_max,
            metadata_bytes_max=settings.metadata_max_bytes,
            page_size_max=settings.page_size_max,
            recall_limit_max=settings.recall_limit_max,
            queries_in_flight_max=settings.recall_in_flight_max,
            streams_max=settings.streams_max,
            calls_in_flight_max=settings.calls_in_flight_max,
            opening_max_s=settings.opening_max_s,
            connection_idle_max_s=settings.connection_idle_max_s,
            watch_stalled_max_s=settings.watch_stalled_max_s,
        )

    def to_message(self) -> pb.Limits:
        """The message in GetServerInfo and in the `opened` message of streams."""
        names = (each.name for each in pb.Limits.DESCRIPTOR.fields if each.name != "request_id_retention")
        return pb.Limits(
            request_id_retention=Duration(seconds=ANSWER_KEPT_S), **{name: getattr(self, name) for name in names}
        )


async def encode_fitting(
    values: Sequence[V], page: M, add: Callable[[M, V], Awaitable[None] | None], bytes_max: int
) -> tuple[bytes, int]:
    """(serialised entries of a page, how many): as many of the first values as fit, at least one.

    `add` adds a value to an empty page. Entries are serialised one by one, with pauses: joined, and with the other
    fields of the page behind them, they are a whole message.
    """
    entries: list[bytes] = []
    size = 0
    async for part in in_slices(values, ENTRIES_PER_SLICE):
        for value in part:
            page.Clear()
            if (adding := add(page, value)) is not None:
                await adding
            entry = page.SerializeToString()
            size += len(entry)
            if size > bytes_max and entries:
                return b"".join(entries), len(entries)
            entries.append(entry)
    return b"".join(entries), len(entries)
