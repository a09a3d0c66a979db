"""The bytes of an image.

magic (16), CRC-32 of all that follows (4), length of the header (4), header, arrays

The header is msgpack: the key, the values, and name, type, shape and place of each array. Arrays begin at multiples of
64 bytes, are little-endian and hold numbers only. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Parts
from memstream_server.ports.images import Image, ImageKey

MAGIC = b"memstream image\n"
LAYOUT = 7
"""Raise it with every change of the layout or of what a working set packs."""
_PREFIX = struct.Struct("<16sII")
_ALIGNMENT = 64
_READ_BYTES = 1 << 20
_KINDS = frozenset("biuf")
"""Of numpy types: booleans, integers, floats."""


class Damaged(ValueError):
    """The bytes are not those that were written."""


class _Array(msgspec.Struct, array_like=True):
    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    """Counted from the first array."""


class _Header(msgspec.Struct):
    key: ImageKey
    values: dict[str, Any]
    arrays: list[_Array]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode_image(key: ImageKey, parts: Parts) -> list[memoryview]:
    """The file in pieces; the arrays are not copied."""
    arrays, pieces, at = [], [], 0
    for name, array in parts.arrays.items():
        flat = np.ascontiguousarray(array)
        arrays.append(_Array(name, flat.dtype.newbyteorder("<").str, flat.shape, at))
        padding = -flat.nbytes % _ALIGNMENT
        pieces += [flat.reshape(-1).view(np.uint8).data, memoryview(bytes(padding))]
        at += flat.nbytes + padding
    header = _encoder.encode(_Header(key, dict(parts.values), arrays))
    pieces.insert(0, memoryview(bytes(-(_PREFIX.size + len(header)) % _ALIGNMENT)))
    check = zlib.crc32(header)
    for piece in pieces:
        check = zlib.crc32(piece, check)
    return [memoryview(_PREFIX.pack(MAGIC, check, len(header))), memoryview(header), *pieces]


def check_file(file: BinaryIO) -> None:
    """Read a file from its start, and compare its checksum. Raises Damaged and OSError."""
    prefix = file.read(_PREFIX.size)
    check, buffer = 0, bytearray(_READ_BYTES)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # of every file that is opened unbuffered
        check = zlib.crc32(memoryview(buffer)[:count], check)
    if len(prefix) < _PREFIX.size or check != _PREFIX.unpack(prefix)[1]:
        raise Damaged("its checksum differs")


def decode_image(data: npt.NDArray[np.uint8], mapped: bool = False) -> Image:
    """What was encoded, as views of `data`. `mapped`: these are a file's pages, which `check_file` has read.

    Raises Damaged.
    """
    if len(data) < _PREFIX.size:
        raise Damaged("it is shorter than its prefix")
    magic, check, header_bytes = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if magic != MAGIC:
        raise Damaged("it does not begin like an image")
    if not mapped and zlib.crc32(data.data[_PREFIX.size :]) != check:
        raise Damaged("its checksum differs")
    end = _PREFIX.size + header_bytes
    header = _decode_header(data[_PREFIX.size : end].tobytes())
    first = end + -end % _ALIGNMENT
    arrays = {each.name: _view_array(data, first, each) for each in header.arrays}
    return Image(header.key, Parts(arrays, header.values, mapped))


def _decode_header(packed: bytes) -> _Header:
    try:
        return _decoder.decode(packed)
    except msgspec.DecodeError as error:
        raise Damaged("its header cannot be decoded") from error


def _view_array(data: npt.NDArray[np.uint8], first: int, entry: _Array) -> npt.NDArray[Any]:
    type_ = np.dtype(entry.type)
    count = int(np.prod(entry.shape, dtype=np.int64))
    if type_.kind not in _KINDS or first + entry.start + count * type_.itemsize > len(data):
        raise Damaged("an array does not fit")
    found: npt.NDArray[Any] = np.frombuffer(data, type_, count, first + entry.start)
    return found.reshape(entry.shape)
