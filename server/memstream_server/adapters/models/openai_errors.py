"""Errors of a model endpoint, and their consequence: retry, give up, or refuse the input.

Rule 1. An error text names the URL (without query values), the status and the endpoint's error code. The body may
echo the request, which may contain another tenant's words: it is shown only for harmless requests.
Rule 2. `summary` is safe for any caller of the server: it has neither the address nor the body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from memstream_server.adapters.models.resilience import TransientError
from memstream_server.ports.models import ModelUnavailable

_REFUSALS = frozenset({400, 413, 422})
_PASSING = frozenset({408, 409, 425, 429})
_CODE = re.compile(r"[A-Za-z][\w.\-]{0,63}")
"""An identifier; not a sentence, which might echo the request."""


class RefusedError(Exception):
    """The endpoint rejects this input (400, 413, 422). `summary` as in ModelError."""

    def __init__(self, message: str, *, summary: str = "") -> None:
        super().__init__(message)
        self.summary = summary or message


class MalformedError(ValueError):
    """A reply deviates from the required form; the text says where."""


class NoCompletionError(MalformedError):
    """A reply is no chat completion: it has no answer of a model."""


class MalformedReplyError(TransientError):
    """A successful answer (200) that cannot be read as a whole."""


class ForeignReplyError(MalformedReplyError):
    """A successful reply that is not of this API: another program may be listening at the address."""

    def __init__(self, url: str, what: str, excerpt: str) -> None:
        super().__init__(f"malformed reply: {url} answered with {what}", summary=f"malformed reply: {what}")
        self.excerpt = excerpt
        self.also: ForeignReplyError | None = None
        """What came of the same request at the other address that was tried."""

    def format_text(self, *, harmless: bool) -> str:
        """The full error text; with the body if the request was `harmless`."""
        said = f"{self}: {self.excerpt}" if harmless and self.excerpt else str(self)
        return said if self.also is None else f"{said}; {self.also.format_text(harmless=harmless)}"


class StatusError(Exception):
    """The endpoint answered with an error status."""

    def __init__(
        self, status: int, url: str, *, code: str = "", excerpt: str = "", retry_after_s: float | None = None
    ) -> None:
        """`excerpt` is the beginning of the body, without credentials."""
        super().__init__(f"{url} answered HTTP {status}")
        self.status = status
        self.url = url
        self.code = code
        self.excerpt = excerpt
        self.retry_after_s = retry_after_s
        self.also: StatusError | ForeignReplyError | None = None
        """What came of the same request at the other address that was tried."""

    @property
    def summary(self) -> str:
        """Status and code."""
        return f"HTTP {self.status} ({self.code})" if self.code else f"HTTP {self.status}"

    def format_text(self, *, harmless: bool) -> str:
        """The full error text; with the body if the request was `harmless`."""
        said = f"{self.url} answered {self.summary}"
        if harmless and self.excerpt:
            said = f"{said}: {self.excerpt}"
        return said if self.also is None else f"{said}; {self.also.format_text(harmless=harmless)}"

    def translate_error(self, *, harmless: bool = False) -> Exception:
        """The error as RefusedError, TransientError, or ModelUnavailable (wrong key, model or address)."""
        text = self.format_text(harmless=harmless)
        if self.status in _REFUSALS:
            return RefusedError(text, summary=self.summary)
        if self.status in _PASSING or self.status >= 500:
            return TransientError(text, self.retry_after_s, summary=self.summary, loading=self.status == 503)
        return ModelUnavailable(text, summary=self.summary)


def error_code(body: bytes) -> str:
    """The code, type or status of an error body of any server; empty if there is none."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if isinstance(document, list) and document:  # Google's
        document = document[0]
    if not isinstance(document, dict):
        return ""
    error = document.get("error", document)
    named = [error.get(name) for name in ("code", "type", "status")] if isinstance(error, dict) else []
    return next((name for name in named if isinstance(name, str) and _CODE.fullmatch(name)), "")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by `retry-after-ms`, or by `Retry-After` in seconds or as an HTTP date; None without a header."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        if "retry-after" not in headers:
            return None
        asked = headers["retry-after"]
        if asked.replace(".", "", 1).isdigit():
            return float(asked)
        return max(0.0, (parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds())  # noqa: TID251  (that is for the core)
    except (ValueError, TypeError):  # neither a number nor a date with a time zone
        return None


def parsed_object(body: bytes) -> Any:
    """Parse JSON. Raises MalformedError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {type(error).__name__}") from error
