"""Random draws that are not random: a keyed hash, so that a decision made again comes out the same."""

from __future__ import annotations

from hashlib import blake2b

_BITS = 53
"""Bits of a float's mantissa: more would round up to 1.0."""


def draw(seed: bytes, fragment_id: str, other_id: str) -> float:
    """A number in [0, 1), uniform over pairs of ids and fixed for one memory.

    `seed` is the memory's, at most 64 bytes (blake2b's longest key; raises ValueError beyond). The pair is
    ordered: the draw of A enhanced by B is not that of B enhanced by A.
    """
    pair = f"{fragment_id}\0{other_id}".encode()
    digest = blake2b(pair, key=seed, digest_size=8).digest()
    return (int.from_bytes(digest) >> (64 - _BITS)) / (1 << _BITS)
