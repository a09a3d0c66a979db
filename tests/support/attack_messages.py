"""Messages of attacks: small to send, large to hold in memory."""

from __future__ import annotations

import os

NAMESPACE = "MEMSTREAM_ATTACK_NAMESPACE"


def encode_field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of the wire format."""
    return encode_varint(number << 3 | 2) + encode_varint(len(payload)) + payload


def encode_varint(value: int) -> bytes:
    """A number of the wire format."""
    parts = bytearray()
    while value >= 128:
        parts.append(value % 128 + 128)
        value //= 128
    return bytes([*parts, value])


def attacker_namespace() -> str:
    """The namespace of the attacker's own memories."""
    return os.environ.get(NAMESPACE, "attacker")


def memory_fields() -> bytes:
    """The first two fields of most requests: namespace and memory."""
    return encode_field(1, attacker_namespace().encode()) + encode_field(2, b"m")


def empty_observations(size: int) -> bytes:
    """ObserveBatch with nothing but empty observations."""
    return memory_fields() + b"\x32\x00" * (size // 2)


def empty_ids(size: int) -> bytes:
    """ForgetFragments by a filter with nothing but empty ids."""
    return memory_fields() + encode_field(4, b"\x0a\x00" * (size // 2))


def nest_messages(size: int) -> bytes:
    """Unknown sub-messages, nested as deep as the size allows."""
    inner = b""
    while len(inner) < size // 256:
        inner = encode_field(2, inner)
    return memory_fields() + encode_field(6, inner) * 32


def unknown_fields(size: int) -> bytes:
    """Fields that no message has."""
    return memory_fields() + b"\xf8\x7f\x01" * (size // 3)


def unknown_groups(size: int) -> bytes:
    """Begin and end groups that no message has."""
    return memory_fields() + b"\xfb\x7f\xfc\x7f" * (size // 4)


def packed_floats(size: int) -> bytes:
    """One vector that fills the message."""
    return memory_fields() + encode_field(4, encode_field(4, bytes(size // 4 * 4)))


def single_floats(size: int) -> bytes:
    """The numbers of a vector, each as its own field."""
    return memory_fields() + encode_field(4, b"\x25\0\0\0\0" * (size // 5))


def metadata_entries(size: int) -> bytes:
    """One observation with nothing but metadata entries, all with different keys."""
    entries = b"".join(
        encode_field(7, encode_field(1, number.to_bytes(3).hex().encode())) for number in range(size // 10)
    )
    return memory_fields() + encode_field(6, entries)


def empty_conditions(size: int) -> bytes:
    """A query with nothing but empty conditions."""
    return memory_fields() + encode_field(4, encode_field(9, b"\x42\x00" * (size // 2)))
