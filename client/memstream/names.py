"""Names of memories: validation, and a reversible mapping from any user id to a name.

An id of letters, digits, "-", "_" and "." that begins with a letter or a digit is its own name. Any other id becomes
"u~" and the id with every other byte of its UTF-8 escaped as "~" and two hexadecimal digits; if that is too long, "b~"
and the UTF-8 in URL-safe base64. So "bob" is `bob`, "bob@home" is `u~bob~40home`, and different ids have different
names.
"""

from __future__ import annotations

import base64
import binascii
import re

from memstream.argument_types import quote_text
from memstream.arguments import check_arguments
from memstream.errors import InvalidArgument

NAME_CHARS_MAX = 128
"""Longest name of a memory or namespace in characters, with the server's default settings."""
ID_BYTES_MAX = (NAME_CHARS_MAX - 2) * 3 // 4
"""Bytes of UTF-8 that fit into a name, whatever the characters."""

_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9._~-]")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ESCAPED = re.compile(r"[^A-Za-z0-9._-]")
_ESCAPE = re.compile(rb"~([0-9a-f]{2})")
_READABLE, _PACKED = "u~", "b~"


@check_arguments
def memory_name(user_id: str) -> str:
    """The name of a user's memory; `user_id_of` is the inverse.

    Raises InvalidArgument for an empty id, and for one that does not fit into 128 characters: 94 bytes of UTF-8 always
    fit, more if most characters are letters and digits.
    """
    if not user_id:
        raise InvalidArgument("user_id", "is empty")
    if len(user_id) <= NAME_CHARS_MAX and _PLAIN.fullmatch(user_id):
        return user_id
    readable = _READABLE + _ESCAPED.sub(lambda found: "".join(f"~{byte:02x}" for byte in found[0].encode()), user_id)
    if len(readable) <= NAME_CHARS_MAX:
        return readable
    packed = _PACKED + base64.urlsafe_b64encode(user_id.encode()).decode().rstrip("=")
    if len(packed) <= NAME_CHARS_MAX:
        return packed
    raise InvalidArgument(
        "user_id",
        f"has {len(user_id.encode())} bytes of UTF-8, but a name holds {ID_BYTES_MAX}: shorten it, or name the "
        "memory by a hash of it and store the id in a label",
    )


@check_arguments
def user_id_of(name: str) -> str:
    """The user id of a name that `memory_name` returned. Raises InvalidArgument for any other name."""
    try:
        user_id = _decode_name(name)
        if memory_name(user_id) == name:
            return user_id
    except ValueError:
        pass
    raise InvalidArgument("name", f"is {quote_text(name)}, which memory_name did not make")


def _decode_name(name: str) -> str:
    if name.startswith(_READABLE):
        return _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), name[2:].encode()).decode()
    if name.startswith(_PACKED):
        try:
            return base64.urlsafe_b64decode(name[2:] + "=" * (-len(name[2:]) % 4)).decode()
        except binascii.Error as error:
            raise ValueError(str(error)) from error
    return name


def name_problem(name: str) -> str:
    """Why a memory's or namespace's name is invalid (characters, length); empty if it is valid."""
    if not name:
        return "is empty"
    if len(name) > NAME_CHARS_MAX:
        return f"has {len(name)} characters, at most {NAME_CHARS_MAX} are allowed"
    if (wrong := _NOT_ALLOWED.search(name)) is not None:
        allowed = 'letters, digits, "-", "_", "." and "~" are allowed'
        return f"has {wrong[0]!a} at character {wrong.start() + 1}: {allowed}"
    if not name[0].isalnum():
        return f"begins with {name[0]!r}: the first character must be a letter or a digit"
    return ""
