"""Page tokens: opaque to clients, and good only for the call and the arguments they were made by.

A token is base64url(check + payload) with an 8-byte check over the method, the arguments and the payload. It is
no secret and grants nothing: the check finds tokens that were mixed up, not tokens that were forged.
"""

from __future__ import annotations

import base64
import binascii
from hashlib import blake2b

from google.protobuf.message import Message

from memstream_server.rpc.errors import PageTokenInvalid

_CHECK_BYTES = 8
_TOKEN_CHARS_MAX = 1_024


def make(request: Message, payload: str) -> str:
    """The token that continues after `payload`."""
    data = payload.encode()
    return base64.urlsafe_b64encode(_check(request, data) + data).decode()


def read(request: Message) -> str:
    """The payload of the request's page_token; empty for the first page. Raises PageTokenInvalid."""
    token: str = request.page_token  # type: ignore[attr-defined]  # every paginated request has one
    if not token:
        return ""
    try:
        data = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        payload = data[_CHECK_BYTES:]
        if len(token) <= _TOKEN_CHARS_MAX and data[:_CHECK_BYTES] == _check(request, payload):
            return payload.decode()
    except (binascii.Error, UnicodeError):
        pass  # falls to the one refusal below
    raise PageTokenInvalid("the page_token was not made by this call with these arguments; start without one")


def _check(request: Message, payload: bytes) -> bytes:
    arguments = type(request)()
    arguments.CopyFrom(request)
    arguments.ClearField("page_token")
    arguments.ClearField("page_size")  # may change between pages
    text = request.DESCRIPTOR.full_name.encode() + b"\n" + arguments.SerializeToString(deterministic=True) + b"\n"
    return blake2b(text + payload, digest_size=_CHECK_BYTES, person=b"memstream page").digest()
