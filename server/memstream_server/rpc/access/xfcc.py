"""The header x-forwarded-client-cert, in which a proxy such as Envoy passes on the client certificate that it verified.

The server accepts it from trusted peers only. Each proxy appends an element; the server reads only the last one, from
the nearest proxy, because a client may have forged the earlier ones.
"""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from urllib.parse import unquote

from memstream_server.rpc.access.files import AccessError
from memstream_server.rpc.errors import Unauthenticated

HEADER = "x-forwarded-client-cert"
UNIX = "unix"


class TrustedProxies:
    """Peers whose header is trusted: networks as in 10.0.0.0/8, addresses, `unix` for unix sockets."""

    def __init__(self, listed: str) -> None:
        """`listed` is comma-separated. Raises AccessError."""
        names = [name.strip() for name in listed.split(",") if name.strip()]
        self._unix = UNIX in names
        try:
            self._networks = [ip_network(name) for name in names if name != UNIX]
        except ValueError as error:
            raise AccessError(f"trusted_proxies: {error}") from error

    def __bool__(self) -> bool:
        return self._unix or bool(self._networks)

    def __contains__(self, peer: str) -> bool:
        """`peer` in gRPC's form: ipv4:1.2.3.4:5, ipv6:[::1]:5, unix:."""
        kind, _, rest = unquote(peer).partition(":")
        if kind == "unix":
            return self._unix
        try:
            address = ip_address(rest.rpartition(":")[0].strip("[]").partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)


def forwarded_uri(header: str) -> str:
    """The URI of the certificate that the nearest proxy has verified. Raises Unauthenticated without exactly one."""
    uris = []
    for pair in _split_unquoted(_split_unquoted(header, ",")[-1], ";"):
        name, _, value = pair.strip().partition("=")
        if name.lower() == "uri":
            uris.append(re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value)
    if len(uris) != 1 or not uris[0]:
        raise Unauthenticated(f"the proxy's {HEADER} must name one URI")
    return uris[0]


def _split_unquoted(text: str, separator: str) -> list[str]:
    """Splits at separators outside of quotes; a backslash in quotes escapes the next character."""
    parts, begin, quoted, at = [], 0, False, 0
    while at < len(text):
        if quoted and text[at] == "\\":
            at += 1
        elif text[at] == '"':
            quoted = not quoted
        elif text[at] == separator and not quoted:
            parts.append(text[begin:at])
            begin = at + 1
        at += 1
    if quoted:
        raise Unauthenticated(f"the proxy's {HEADER} is malformed")
    return [*parts, text[begin:]]
