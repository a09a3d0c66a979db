"""One connection of the HTTP port: how long it may wait, and its client certificate.

Rule 1. A new connection is closed if it sends no complete head of a request within `opening_max_s`. A connection that
is kept alive has as long from its first byte after an answer, and 75 s (listener.py) until that byte.
Rule 2. After malformed HTTP nothing but one 400 is sent: a call whose body breaks off cannot answer as well.
Rule 3. The URIs of a client certificate are in the state of every request of the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from memstream_server.rpc.http.port import PEER_URIS


class _BoundedProtocol(H11Protocol):
    opening_max_s = 0.0
    of_address: ClassVar[dict[Any, _BoundedProtocol]] = {}
    """By client address; each listener has a class and a table of its own."""
    _opening: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.of_address[transport.get_extra_info("peername")] = self
        self._expect_head()
        if (tls := transport.get_extra_info("ssl_object")) is not None:
            self.app_state = {**self.app_state, PEER_URIS: _certificate_uris(tls.getpeercert() or {})}

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_opening()
        self.of_address.pop(self.transport.get_extra_info("peername"), None)  # kept by the transport after its end
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_waiting():
            self._expect_head()
        else:
            self._cancel_opening()

    def send_400_response(self, msg: str) -> None:
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # otherwise its answer raises in h11, and uvicorn logs a traceback
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    @classmethod
    def is_idle(cls, address: Any) -> bool:
        """Whether the connection from that address waits for a request, or still for its TLS handshake."""
        protocol = cls.of_address.get(address)
        return protocol is None or protocol._is_waiting()

    def _is_waiting(self) -> bool:
        """Whether no request is being answered. The rest of a body that was answered early counts as waiting."""
        cycle: Any = self.cycle  # None until the first head is complete
        return cycle is None or bool(cycle.response_complete)

    def _expect_head(self) -> None:
        if self._opening is None:
            self._opening = self.loop.call_later(self.opening_max_s, self._close_if_waiting)

    def _cancel_opening(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    def _close_if_waiting(self) -> None:
        self._opening = None
        if self._is_waiting():
            self.transport.close()


def protocol_class(opening_max_s: float) -> type[_BoundedProtocol]:
    """The protocol of every connection of one listener."""
    return type("BoundedProtocol", (_BoundedProtocol,), {"opening_max_s": opening_max_s, "of_address": {}})


def _certificate_uris(certificate: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The URIs of a verified certificate, as gRPC's auth_context has them."""
    return tuple(value.encode() for kind, value in certificate.get("subjectAltName", ()) if kind == "URI")
