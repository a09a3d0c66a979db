"""Parses settings of a model's endpoint: URL, headers and query parameters.

Errors never repeat a value, which may be a secret.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import AfterValidator, SecretStr

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
