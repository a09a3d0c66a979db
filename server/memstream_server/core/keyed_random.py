"""Reproducible random draws: a keyed hash, so that a repeated decision has the same outcome."""

from __future__ import annotations

from hashlib import blake2b

_BITS = 53
"""Bits of a float's mantissa; with more, a draw could round up to 1.0."""


def draw_number(seed: bytes, fragment_id: str, other_id: str) -> float:
    """A number in [0, 1), uniform over pairs of ids and fixed within a memory.

    `seed`: the memory's, at most 64 bytes (the longest key of BLAKE2b; raises ValueError beyond). The pair is
    ordered: A enhanced by B and B enhanced by A are different draws.
    """
    pair = f"{fragment_id}\0{other_id}".encode()
    digest = blake2b(pair, key=seed, digest_size=8).digest()
    return (int.from_bytes(digest) >> (64 - _BITS)) / (1 << _BITS)
