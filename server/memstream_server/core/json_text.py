"""Whether a text is JSON (RFC 8259), without building its value."""

from __future__ import annotations

import re

import msgspec

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def find_fault(body: bytes) -> str:
    """Why a text is not JSON; empty if it is. Builds no value. JSON allows a lone surrogate in an escape."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except RecursionError:
        return "it is nested too deeply"
    except msgspec.DecodeError as error:
        mended = _SURROGATE.sub(rb"\\u0020", body)
        return str(error) if mended == body else find_fault(mended)
    return ""
