"""The position of a conversation's context, as bytes that the client keeps between turns."""

from __future__ import annotations

from hashlib import blake2b

from msgspec import MsgspecError, msgpack

from memstream_server.core.context.values import FORMAT, NUMBER_MAX, PartKind, Position

POSITION_BYTES_MAX = 131_072
"""Of a position as it is sent."""
MEMORIES_MAX = 1_000
"""Of all scopes of a request."""
_CHECK_BYTES = 8
_ENCODER = msgpack.Encoder()
_DECODER = msgpack.Decoder(Position)


def pack_position(position: Position) -> bytes:
    """A check, and the position. The check finds accidents; it is no secret."""
    data = _ENCODER.encode(position)
    return _check(data) + data


def unpack_position(data: bytes) -> Position | None:
    """The position; None if no server of this format wrote it. A forged one has ids that are read again by the
    caller's rights."""
    body = data[_CHECK_BYTES:]
    if len(data) > POSITION_BYTES_MAX or data[:_CHECK_BYTES] != _check(body):
        return None
    try:
        position = _DECODER.decode(body)
        names = [int(one.key.split()[1]) for one in position.seen if one.kind in (PartKind.MESSAGE, PartKind.EVIDENCE)]
    except (MsgspecError, ValueError, IndexError):
        return None
    entries = [entry for turn in position.turns for entry in turn.entries]
    if position.format != FORMAT or any(entry.memory >= len(position.memories) for entry in entries):
        return None
    numbers = [entry.number for entry in entries if not entry.again]
    whole = len(set(numbers)) == len(numbers) and all(entry.corrects < position.next_number for entry in entries)
    whole = whole and len(position.memories) <= MEMORIES_MAX and position.next_number < NUMBER_MAX // 2
    return position if whole and all(0 <= name <= NUMBER_MAX for name in names) else None


def _check(data: bytes) -> bytes:
    return blake2b(data, digest_size=_CHECK_BYTES, person=b"memstream contxt").digest()
