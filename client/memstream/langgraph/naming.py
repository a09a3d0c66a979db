"""Maps LangGraph's namespaces to names of memories, and its keys to external ids; both mappings are injective.

A namespace ("users", "bob@home") is the memory `n.users.bob~40home`: an n, then each label after a dot, with letters,
digits, "-" and "_" as they are and every other byte of its UTF-8 as "~" and two hexadecimal digits. A name that would
be too long is truncated and ends in "~~" and a hash; no other name contains "~~". A label of the
memory holds the namespace itself, so names are never decoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import blake2b

NAME_MAX = 128
"""Longest memory name in characters, longest external id in bytes, with the server's default settings."""
LABEL = "langgraph.namespace"
"""Label of a memory: its namespace as a JSON array."""

Namespace = tuple[str, ...]

_ESCAPED = re.compile(r"[^A-Za-z0-9_-]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HASHED = "~~"
_DIGEST_BYTES = 16


def memory_name(namespace: Namespace) -> str:
    """The name of a namespace's memory."""
    name = _whole(namespace)
    return name if len(name) <= NAME_MAX else _shortened(name, namespace_label(namespace))


def name_prefix(namespace: Namespace) -> str:
    """The prefix shared by the memory names of a namespace and of all below it (and possibly of others)."""
    return _whole(namespace)[: NAME_MAX - len(_HASHED) - 2 * _DIGEST_BYTES]


def namespace_label(namespace: Namespace) -> str:
    """The value of LABEL for a namespace."""
    return json.dumps(namespace)


def namespace_of(labels: Mapping[str, str]) -> Namespace | None:
    """The namespace of a memory with these labels; None if it is not from a store."""
    return tuple(json.loads(labels[LABEL])) if LABEL in labels else None


def external_id(key: str) -> str:
    """The external id of a key: the key itself, or a hash if the server would reject it."""
    fits = 0 < len(key.encode("utf-8", "surrogatepass")) <= NAME_MAX
    if fits and not _CONTROL.search(key) and not key.startswith(_HASHED):
        return key
    return _HASHED + digest(key)


def _whole(namespace: Namespace) -> str:
    return "n" + "".join(f".{_ESCAPED.sub(_escaped, label)}" for label in namespace)


def _escaped(character: re.Match[str]) -> str:
    return "".join(f"~{byte:02x}" for byte in character[0].encode("utf-8", "surrogatepass"))


def _shortened(name: str, whole: str) -> str:
    ending = _HASHED + digest(whole)
    return name[: NAME_MAX - len(ending)] + ending


def digest(text: str) -> str:
    """A hash of any text, as 32 hexadecimal digits."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
