"""Page tokens: opaque to clients, and valid only for the rpc and arguments that created them.

A token is base64url(check + payload) with an 8-byte check over the method, the arguments and the payload. It is not
secret and grants nothing: the check detects mixed-up tokens, not forged ones. A payload is therefore validated like any
other input: `read_number`, `read_name`, `read_position` and `read_place` refuse what no server writes.
"""

from __future__ import annotations

import base64
import binascii
import re
from hashlib import blake2b

from google.protobuf.message import Message

from memstream_server.rpc.errors import PageTokenInvalid

_CHECK_BYTES = 8
_TOKEN_CHARS_MAX = 1_024
_NUMBER = re.compile(r"[0-9]{1,19}")
_NAME = re.compile(r"[!-~]{1,1024}")
"""Names and ids in printable ASCII; a comparison does not need a stricter format."""
_TIME_US = re.compile(r"-?[0-9]{1,18}")
NUMBER_MAX = 2**32 - 2
"""The last position of a memory, and the last number of a conversation, that has a successor."""


def make_token(request: Message, payload: str) -> str:
    """The token that continues after `payload`."""
    data = payload.encode()
    return base64.urlsafe_b64encode(_compute_check(request, data) + data).decode()


def read_number(request: Message) -> int | None:
    """The number that the request's page_token continues after; None for the first page. Raises PageTokenInvalid."""
    payload = _read_payload(request)
    return number_in(payload) if payload else None


def read_name(request: Message) -> str:
    """The name or id that it continues after; empty for the first page. Raises PageTokenInvalid."""
    payload = _read_payload(request)
    return name_in(payload) if payload else ""


def read_position(request: Message) -> tuple[int | None, str]:
    """(number, uid of the memory) of a payload `NUMBER:UID`; (None, "") for the first page. Raises PageTokenInvalid."""
    payload = _read_payload(request)
    if not payload:
        return None, ""
    number, _, uid = payload.partition(":")
    return number_in(number), name_in(uid)


def read_place(request: Message) -> tuple[tuple[int, int] | None, str]:
    """((time in µs, position), uid of the memory) of a payload `TIME:POSITION:UID`; (None, "") for the first page.
    Raises PageTokenInvalid."""
    payload = _read_payload(request)
    if not payload:
        return None, ""
    time_us, _, rest = payload.partition(":")
    position, _, uid = rest.partition(":")
    if not _TIME_US.fullmatch(time_us):
        raise _invalid_token()
    return (int(time_us), number_in(position)), name_in(uid)


def number_in(payload: str) -> int:
    """A number as a server writes it. Raises PageTokenInvalid."""
    if _NUMBER.fullmatch(payload) and int(payload) <= NUMBER_MAX:
        return int(payload)
    raise _invalid_token()


def name_in(payload: str) -> str:
    """A name or an id as a server writes it. Raises PageTokenInvalid."""
    if _NAME.fullmatch(payload):
        return payload
    raise _invalid_token()


def _read_payload(request: Message) -> str:
    token: str = request.page_token  # type: ignore[attr-defined]  # every paginated request has one
    if not token:
        return ""
    try:
        data = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        payload = data[_CHECK_BYTES:]
        if payload and len(token) <= _TOKEN_CHARS_MAX and data[:_CHECK_BYTES] == _compute_check(request, payload):
            return payload.decode()
    except (binascii.Error, UnicodeError):
        pass  # refused below
    raise _invalid_token()


def _invalid_token() -> PageTokenInvalid:
    return PageTokenInvalid("the page_token was not made by this call with these arguments; start without one")


def _compute_check(request: Message, payload: bytes) -> bytes:
    arguments = type(request)()
    arguments.CopyFrom(request)
    arguments.ClearField("page_token")
    arguments.ClearField("page_size")  # may change between pages
    text = request.DESCRIPTOR.full_name.encode() + b"\n" + arguments.SerializeToString(deterministic=True) + b"\n"
    return blake2b(text + payload, digest_size=_CHECK_BYTES, person=b"memstream page").digest()
