"""Names in Milvus: collections of embedding spaces, partitions of memories, and encoded ids."""

from __future__ import annotations

import re
from hashlib import blake2b
from urllib.parse import quote, unquote

from memstream_server.ports.journal.records import Space

SCHEMA_VERSION = 2
"""Version of the collection's columns. Lite cannot change a schema, so a new version needs a new collection."""

KEY_LENGTH_MAX = 1025
ID_LENGTH_MAX = 512
"""Characters of a stored id, which is ASCII: Lite limits characters, a server bytes."""


def collection_name(space: Space, prefix: str) -> str:
    """The collection of an embedding space: readable, and unique by a hash."""
    identity = f"{space.model}\n{space.dimension}\n{space.index_layout}\n{SCHEMA_VERSION}"
    readable = re.sub(r"[^a-z0-9]+", "_", space.model.lower()).strip("_")[:40]
    digest = blake2b(identity.encode(), digest_size=5).hexdigest()
    return f"{prefix}_{readable}_{space.dimension}_v{SCHEMA_VERSION}_{digest}"


def partition_name(memory: str, partitions: int) -> str:
    """The partition of a memory on Lite, by a stable hash (Python's own differs from run to run)."""
    bucket = int.from_bytes(blake2b(memory.encode(), digest_size=8).digest(), "big") % partitions
    return bucket_name(bucket)


def bucket_name(bucket: int) -> str:
    """The name of the bucket-th partition."""
    return f"p{bucket}"


def encode_id(identifier: str) -> str:
    """Percent-encode an id: ULIDs stay unchanged, and no filter needs escaping, whose syntax differs between engines.
    Raises ValueError if it is too long or not valid Unicode."""
    encoded = quote(identifier, safe="")
    if len(encoded) > ID_LENGTH_MAX:
        raise ValueError(f"id too long for the index: {len(encoded)} characters encoded, {ID_LENGTH_MAX} at most")
    return encoded


def decode_id(identifier: str) -> str:
    """The inverse of `encode_id`."""
    return unquote(identifier)


def make_key(memory: str, fragment: str) -> str:
    """The primary key of a row. Fragment ids alone are not unique: an imported memory keeps them."""
    return f"{encode_id(memory)}/{encode_id(fragment)}"


def parse_fragment(key: str) -> str:
    """The fragment id in a primary key."""
    return decode_id(key.partition("/")[2])


def quote_id(identifier: str) -> str:
    """An id as a string literal in Milvus' filter language."""
    return f'"{encode_id(identifier)}"'
