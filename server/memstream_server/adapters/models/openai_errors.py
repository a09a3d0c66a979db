"""What can go wrong at a model's endpoint, and what memstream does about it: try again, give up, or blame the input.

Rule 1. The text of an error names the URL (without the values of its query), the status and the error's own code. The
body may repeat what was sent, which may be another tenant's words: it is shown only where the request was harmless.
Rule 2. `summary` is what any caller of the server may read: neither address nor body.
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
"""A word from a fixed list and no sentence, which might repeat the request."""


class RefusedError(Exception):
    """The endpoint does not accept this input (400, 413, 422). `summary` as in ModelError."""

    def __init__(self, message: str, *, summary: str = "") -> None:
        super().__init__(message)
        self.summary = summary or message


class MalformedError(ValueError):
    """A reply is not of the form asked for; the text says where."""


class ForeignReplyError(TransientError):
    """A successful reply that is not of the API that was asked: there may be another program at that address."""

    def __init__(self, url: str, what: str, excerpt: str) -> None:
        super().__init__(f"malformed reply: {url} answered with {what}", summary=f"malformed reply: {what}")
        self.excerpt = excerpt
        self.also: ForeignReplyError | None = None
        """What came of the same request at the other address that was tried."""

    def text(self, *, harmless: bool) -> str:
        """Everything that may be said of it."""
        said = f"{self}: {self.excerpt}" if harmless and self.excerpt else str(self)
        return said if self.also is None else f"{said}; {self.also.text(harmless=harmless)}"


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

    def text(self, *, harmless: bool) -> str:
        """Everything that may be said of it."""
        said = f"{self.url} answered {self.summary}"
        if harmless and self.excerpt:
            said = f"{said}: {self.excerpt}"
        return said if self.also is None else f"{said}; {self.also.text(harmless=harmless)}"

    def translated(self, *, harmless: bool = False) -> Exception:
        """RefusedError, TransientError, or ModelUnavailable (wrong key, model, address)."""
        text = self.text(harmless=harmless)
        if self.status in _REFUSALS:
            return RefusedError(text, summary=self.summary)
        if self.status in _PASSING or self.status >= 500:
            return TransientError(text, self.retry_after_s, summary=self.summary)
        return ModelUnavailable(text, summary=self.summary)


def error_code(body: bytes) -> str:
    """The error's code, type or status in a body, whichever server made it; empty where there is none."""
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
    """Seconds to wait: `retry-after-ms`, or `Retry-After` in seconds or as an HTTP date; None if there is none."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        if "retry-after" not in headers:
            return None
        asked = headers["retry-after"]
        if asked.replace(".", "", 1).isdigit():
            return float(asked)
        return max(0.0, (parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # not a number, not a date, or a date without a zone
        return None


def parsed_object(body: bytes) -> Any:
    """JSON. Raises MalformedError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {type(error).__name__}") from error
