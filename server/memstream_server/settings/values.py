"""Values of settings: kinds, addresses, URLs, headers and query parameters with their checks, and the declaration of a
setting.

Errors never repeat a value, which may be a secret.
"""

from __future__ import annotations

import re
from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import AfterValidator, Field, SecretStr


class EmbeddingKind(StrEnum):
    """Where embeddings come from."""

    HASHING = "hashing"
    OPENAI = "openai"
    ONNX = "onnx"


class StructuredReplies(StrEnum):
    """Whether an LLM's endpoint is asked to hold its replies to a JSON schema."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class LogLevel(StrEnum):
    """The least severe log line written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How log lines are written."""

    CONSOLE = "console"
    JSON = "json"


def parse_listen(address: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[IPv6]:port"; port 0 lets the system choose. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"must be host:port with a port of 0 to 65535, is {address!r}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ip_address(host)
    elif ":" in host:
        raise ValueError(f"an IPv6 host goes in brackets, as in [::1]:7700; is {address!r}")
    return host, int(port)


def _checked_listen(address: str) -> str:
    if address and not address.startswith("unix:"):
        parse_listen(address)
    return address


def _checked_metrics_listen(address: str) -> str:
    if address:
        parse_listen(address)
    return address


Listen = Annotated[str, AfterValidator(_checked_listen)]
MetricsListen = Annotated[str, AfterValidator(_checked_metrics_listen)]


def _checked_journal_url(url: SecretStr) -> SecretStr:
    if url.get_secret_value() and not url.get_secret_value().startswith(("postgresql://", "postgres://")):
        raise ValueError("must begin with postgresql://")
    return url


JournalUrl = Annotated[SecretStr, AfterValidator(_checked_journal_url)]


def _checked_otlp_endpoint(url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    return url


OtlpEndpoint = Annotated[str, AfterValidator(_checked_otlp_endpoint)]


def _checked_milvus_uri(uri: str) -> str:
    if uri and (not uri.startswith(("http://", "https://", "tcp://", "unix:")) or uri.endswith(".db")):
        raise ValueError("must be the URI of a Milvus server, as in http://127.0.0.1:19530")
    return uri


MilvusUri = Annotated[str, AfterValidator(_checked_milvus_uri)]


def setting(default: Any, meaning: str, unit: str = "", low: float | None = None, high: float | None = None) -> Any:
    """A field of a settings class: default, meaning, unit and inclusive bounds."""
    return Field(default, description=meaning, ge=low, le=high, json_schema_extra={"unit": unit}, validate_default=True)


def is_loopback(host: str) -> bool:
    """Whether the name or address is loopback, which only this machine can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_OURS = frozenset({"content-type", "content-length", "transfer-encoding", "connection"})


def headers_of(text: SecretStr) -> dict[str, str]:
    """`name=value,name=value`, as OpenTelemetry writes headers; a comma in a value is %2C. Raises ValueError."""
    found: dict[str, str] = {}
    for number, pair in enumerate(filter(str.strip, text.get_secret_value().split(",")), 1):
        name, equals, value = (part.strip() for part in pair.partition("="))
        value = unquote(value)
        if not equals or not _TOKEN.fullmatch(name):
            raise ValueError(f"header {number} is not name=value; a comma in a value is written %2C")
        if not value.isascii() or not value.isprintable():
            raise ValueError(f"the value of header {name} is not printable ASCII")
        if name.lower() in _OURS:
            raise ValueError(f"header {name} is set by the server itself")
        if name.lower() in {each.lower() for each in found}:
            raise ValueError(f"header {name} is given twice")
        found[name] = value
    return found


def query_of(text: SecretStr) -> dict[str, str]:
    """`name=value&name=value`, percent-encoded. Raises ValueError."""
    given = text.get_secret_value().removeprefix("?")
    if not given:
        return {}
    try:
        pairs = parse_qsl(given, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise ValueError("is not name=value&name=value") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a parameter is given twice")
    return found


def _checked_headers(text: SecretStr) -> SecretStr:
    headers_of(text)
    return text


def _checked_query(text: SecretStr) -> SecretStr:
    query_of(text)
    return text


def _checked_base_url(url: str) -> str:
    if not url:
        return url
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.fragment
        sound = sound and (parts.port is None or parts.port > 0) and url.isprintable() and " " not in url
    except ValueError:  # a port that is not a number, an IPv6 address without its bracket
        sound = False
    if not sound:
        raise ValueError("must be http://host or https://host, with a port, a path and a query where they are needed")
    return url


Headers = Annotated[SecretStr, AfterValidator(_checked_headers)]
Query = Annotated[SecretStr, AfterValidator(_checked_query)]
BaseUrl = Annotated[str, AfterValidator(_checked_base_url)]
