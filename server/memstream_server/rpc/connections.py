"""Bounds of connections, so that clients without a credential leave room for others and for the journal's files.

Rule 1. At start the process raises its limit of open files to the hard limit. RESERVED_DESCRIPTORS of them are for the
journal, images, the index and models; the ports share the rest.
Rule 2. A port has at most `port_max` connections, one address at most `address_max` of them: an IPv4 address, or an
IPv6 network of 64 bits. Proxies in `trusted_proxies` have no bound of their own.
Rule 3. The HTTP port accepts in Python: a connection too many takes the place of the one of its address (then of the
address with the most) that has waited longest without a request. If none waits, it is closed.
Rule 4. gRPC core accepts by itself. It closes what exceeds `port_max`. `AddressWatch` finds the connections of the port
among the descriptors of the process, and shuts down those that came last from an address with too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import socket
import stat
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import structlog

if TYPE_CHECKING:
    from memstream_server.settings import Settings

log = structlog.get_logger(__name__)

RESERVED_DESCRIPTORS = 256
PORT_MIN = 16
"""A port has this many connections even if there are hardly any descriptors."""
_LOOK_S = 1.0
_LOOK_AGAIN_S = 0.2
"""After a look that found connections too many."""
_LOG_S = 60.0
_DESCRIPTORS = "/dev/fd"
_TCP_INFO_BYTES = 136
"""Of struct tcp_info up to tcpi_bytes_acked and tcpi_bytes_received (Linux 4.1)."""
_FRAMES_BYTES = 256
"""Headers and frames of a message."""
_FORGIVEN_BYTES_PER_S = 16_384
"""Of a connection: pings and other frames that belong to no message."""
_NO_LIMIT = 1 << 20
"""Descriptors if the hard limit is infinite: what Linux allows a process by default (fs.nr_open)."""
_Traffic = dict[tuple[str, int], tuple[int, int]]
"""Bytes (received, sent) by address and port of the client."""
Exempt = Callable[[str], bool]
"""Whether the peer, in gRPC's form, is a proxy."""


def raise_descriptor_limit() -> int:
    """Raises the limit of open files to the hard limit. Returns the limit that is now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (hard, _NO_LIMIT):
        if soft != wanted:
            with contextlib.suppress(OSError, ValueError):  # some systems allow less than their hard limit
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                break
    return descriptor_limit()


def descriptor_limit(hard: bool = False) -> int:
    """Files and sockets that this process may have open; `hard`: once it has raised its limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[hard]
    return _NO_LIMIT if limit == resource.RLIM_INFINITY else limit


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Bounds of each port."""

    port_max: int = 4_096
    address_max: int = 1_024

    @classmethod
    def from_settings(cls, settings: Settings, descriptors: int) -> ConnectionBounds:
        """Those of the settings, or what `descriptors` allow, if that is less."""
        ports = 2 if settings.http_listen else 1
        fitting = max(PORT_MIN, (descriptors - RESERVED_DESCRIPTORS) // ports)
        port_max = min(settings.port_connections_max, fitting)
        return cls(port_max, min(settings.address_connections_max, max(1, port_max // 2)))


def source_of(host: str) -> str:
    """What counts as one address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _peer_of(address: Any) -> str:
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


class _Notice:
    """Logs that connections are closed, once a minute at most."""

    def __init__(self, port: str, bounds: ConnectionBounds) -> None:
        self._port = port
        self._bounds = bounds
        self._closed = 0
        self._logged_s = -_LOG_S

    def count_closed(self, count: int) -> None:
        """Counts closed connections."""
        self._closed += count
        if time.monotonic() - self._logged_s >= _LOG_S:
            self._logged_s = time.monotonic()
            log.warning(
                "connections_closed",
                port=self._port,
                closed=self._closed,
                port_connections_max=self._bounds.port_max,
                address_connections_max=self._bounds.address_max,
            )
            self._closed = 0


class BoundedListener(socket.socket):
    """A listening socket that accepts within the bounds. `idle` says whether a client address waits for a request."""

    def bind_bounds(self, bounds: ConnectionBounds, exempt: Exempt, idle: Callable[[Any], bool]) -> None:
        """Call it before the first `accept`."""
        self._bounds = bounds
        self._exempt = exempt
        self._idle = idle
        self._notice = _Notice("http", bounds)
        self._open: dict[str, dict[Any, _Accepted]] = defaultdict(dict)
        """By source and client address, in the order of arrival."""
        self._count = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection that may stay. Raises BlockingIOError if none waits."""
        while True:
            accepted, address = super().accept()
            connection = _Accepted(accepted.family, accepted.type, accepted.proto, accepted.detach())
            source = source_of(address[0])
            if not self._make_room(source, address):
                self._notice.count_closed(1)
                connection.close()
                continue
            connection.on_close = lambda source=source, address=address: self._forget(source, address)
            self._open[source][address] = connection
            self._count += 1
            return connection, address

    def _make_room(self, source: str, address: Any) -> bool:
        alone = len(self._open.get(source, ())) >= self._bounds.address_max and not self._exempt(_peer_of(address))
        if not alone and self._count < self._bounds.port_max:
            return True
        chosen = source if alone else max(self._open, key=lambda each: len(self._open[each]))
        for waiting, connection in self._open[chosen].items():
            if self._idle(waiting):
                self._notice.count_closed(1)
                self._forget(chosen, waiting)
                connection.on_close = None
                with contextlib.suppress(OSError):  # the client has closed it meanwhile
                    connection.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _forget(self, source: str, address: Any) -> None:
        of_source = self._open.get(source, {})
        if of_source.pop(address, None) is not None:
            self._count -= 1
        if not of_source:
            self._open.pop(source, None)


class _Accepted(socket.socket):
    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()
        super().close()


class AddressWatch:
    """Bounds the connections of each address on the port that gRPC core listens at. `run` ends with its task."""

    def __init__(self, port: int, bounds: ConnectionBounds, exempt: Exempt) -> None:
        self._port = port
        self._bounds = bounds
        self._exempt = exempt
        self._known: set[Any] = set()
        self._notice = _Notice("grpc", bounds)

    async def run(self) -> None:
        """Looks again and again."""
        while True:
            found = await asyncio.to_thread(self.close_excess)
            await asyncio.sleep(_LOOK_AGAIN_S if found else _LOOK_S)

    def close_excess(self) -> int:
        """Shuts down the connections that are too many, the newest first; returns their number."""
        descriptors = [int(name) for name in os.listdir(_DESCRIPTORS) if name.isdigit()]
        if len(descriptors) <= self._bounds.address_max:
            return 0
        by_source: dict[str, list[tuple[bool, Any, int]]] = defaultdict(list)
        for descriptor in descriptors:
            client = _client_at(descriptor, self._port)
            if client is not None:
                by_source[source_of(client[0])].append((client not in self._known, client, descriptor))
        self._known = {client for connections in by_source.values() for _, client, _ in connections}
        closed = 0
        for connections in by_source.values():
            excess = len(connections) - self._bounds.address_max
            if excess <= 0 or self._exempt(_peer_of(connections[0][1])):
                continue
            connections.sort(key=lambda each: each[0])
            for _, client, descriptor in connections[-excess:]:
                self._known.discard(client)
                closed += _client_at(descriptor, self._port, _shutting(client)) is not None
        if closed:
            self._notice.count_closed(closed)
        return closed


def _shutting(wanted: Any) -> Callable[[socket.socket, Any], None]:
    """Ends the connection, unless another one has its descriptor by now."""

    def shut(client: socket.socket, address: Any) -> None:
        if address == wanted:
            client.shutdown(socket.SHUT_RDWR)

    return shut


class UnreadBytes:
    """How much of what arrived on the connections of a port is not yet a message: Linux counts what arrives.

    It counts from `begin`, within some percent: messages have frames and headers, and a client acknowledges what it
    gets. Elsewhere than on Linux it is always 0.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._before: _Traffic = {}
        self._now: _Traffic = {}
        self._messages: Counter[str] = Counter()
        self.counts = False
        self._began_s = 0.0

    def begin(self) -> None:
        """Starts to count, for all connections."""
        self._before, self.counts, self._began_s = self._count_traffic(), True, time.monotonic()
        self._now = self._before

    def end(self) -> None:
        """Stops counting."""
        self.counts = False
        self._messages.clear()

    def look(self) -> None:
        """Reads what has arrived until now; takes some microseconds for each descriptor."""
        self._now = self._count_traffic()

    def add_message(self, peer: str, size: int) -> None:
        """A message of that size was read on the connection of a peer, in gRPC's form."""
        self._messages[peer] += size + size // 50 + _FRAMES_BYTES

    def of_peers(self, peers: Iterable[str]) -> int:
        """Bytes of these connections that are in no message, at the last look."""
        forgiven = (time.monotonic() - self._began_s) * _FORGIVEN_BYTES_PER_S
        unread = 0
        for peer in peers:
            key = _key_of(peer)
            received, sent = self._now.get(key, (0, 0))
            received_before, sent_before = self._before.get(key, (0, 0))
            known = self._messages[peer] + (sent - sent_before) // 50 + forgiven
            unread += max(0, round(received - received_before - known))
        return unread

    def _count_traffic(self) -> _Traffic:
        found: _Traffic = {}
        if sys.platform != "linux":
            return found

        def note(client: socket.socket, address: Any) -> None:
            info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if len(info) == _TCP_INFO_BYTES:
                sent, received = struct.unpack_from("=QQ", info, _TCP_INFO_BYTES - 16)
                found[_key_of(_peer_of(address))] = (received, sent)

        for name in os.listdir(_DESCRIPTORS):
            if name.isdigit():
                _client_at(int(name), self._port, note)
        return found


def _key_of(peer: str) -> tuple[str, int]:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host, 0
    return str(getattr(address, "ipv4_mapped", None) or address), int(port)


def _client_at(descriptor: int, port: int, use: Callable[[socket.socket, Any], None] | None = None) -> Any:
    """The client's address if the descriptor is a connection of that local port; `use` gets a duplicate of it."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        with _duplicate(descriptor) as client:
            local = client.getsockname()
            if not isinstance(local, tuple) or local[1] != port:
                return None
            address = client.getpeername()
            if use is not None:
                use(client, address)
            return address
    except OSError:  # not connected, or closed meanwhile
        return None


def _duplicate(descriptor: int) -> socket.socket:
    """Another descriptor of the socket, which the caller closes. Raises OSError."""
    another = os.dup(descriptor)
    try:
        return socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, another)  # of AF_INET it would cut IPv6 addresses
    except OSError:  # a file has its number by now
        os.close(another)
        raise
