"""What the `openai` package raises, as what memstream does about it: try again, give up, or blame the input.

A reply that is too long is a failed attempt like others: no body is read beyond a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import openai

from memstream_server.adapters.models.resilience import TransientError
from memstream_server.ports.models import ModelUnavailable

_REFUSALS = frozenset({400, 413, 422})
_PASSING = frozenset({408, 409, 425, 429})
_TEXT_CHARACTERS_MAX = 300


class RefusedError(Exception):
    """The endpoint does not accept this input (400, 413, 422)."""


class TooLongError(TransientError):
    """A reply that is longer than any sound one."""


@contextmanager
def translated() -> Iterator[None]:
    """Inside, errors of the package leave as TransientError, RefusedError, or ModelUnavailable (wrong key, model)."""
    try:
        yield
    except openai.APIStatusError as error:
        text = f"the model's endpoint says {error.status_code}: {str(error)[:_TEXT_CHARACTERS_MAX]}"
        if error.status_code in _REFUSALS:
            raise RefusedError(text) from error
        if error.status_code in _PASSING or error.status_code >= 500:
            raise TransientError(text, retry_after_s(error.response.headers)) from error
        raise ModelUnavailable(text) from error
    except openai.APIError as error:  # no connection, no answer in time
        raise TransientError(f"the model's endpoint does not answer: {str(error)[:_TEXT_CHARACTERS_MAX]}") from error


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


async def bounded(reply: Any, bytes_max: int) -> bytes:
    """The body of a streamed reply. Raises TooLongError beyond `bytes_max`, TransientError when it breaks off."""
    body = bytearray()
    try:
        async for part in reply.iter_bytes():
            body += part
            if len(body) > bytes_max:
                raise TooLongError(f"malformed reply: longer than {bytes_max} bytes")
    except TransientError:
        raise
    except Exception as error:  # the transport's: which package that is depends on the version of openai
        raise TransientError(f"the reply broke off: {error!r}") from error
    return bytes(body)
