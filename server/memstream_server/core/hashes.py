"""Hashes that are the same in every process, unlike Python's own.

Images keep hashes of a memory's fragments (`stable_hash`); a repeated decision has the same draw (`draw_number`).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from msgspec.msgpack import Encoder

_encode = Encoder().encode
_BITS = 53
"""Bits of a float's mantissa; with more, a draw could round up to 1.0."""


def stable_hash(fields: Any) -> int:
    """A signed 64-bit hash of values that msgpack can hold; True, 1 and 1.0 differ. Takes about a microsecond."""
    return int.from_bytes(blake2b(_encode(fields), digest_size=8).digest(), "little", signed=True)


def draw_number(seed: bytes, fragment_id: str, other_id: str) -> float:
    """A number in [0, 1), uniform over pairs of ids and fixed within a memory.

    `seed`: the memory's, at most 64 bytes (the longest key of BLAKE2b; raises ValueError beyond). The pair is
    ordered: A enhanced by B and B enhanced by A are different draws.
    """
    pair = f"{fragment_id}\0{other_id}".encode()
    digest = blake2b(pair, key=seed, digest_size=8).digest()
    return (int.from_bytes(digest) >> (64 - _BITS)) / (1 << _BITS)
