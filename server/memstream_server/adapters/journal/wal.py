"""SQLite's write-ahead log, read as bytes: how much of it SQLite takes, and whether damage hides commits behind it.

SQLite stops at the first frame that is not whole and says nothing. At the end of the log that is right: such a frame
is of a commit that was under way. Anywhere else what follows was acknowledged, so a start must not go on without it.
The format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

_HEADER = struct.Struct(">8I")
_FRAME = 24
"""Bytes before each page: page number, size of the database after a commit (else 0), two salts, two checksums."""
_MAGIC, _VERSION = 0x377F0682, 3_007_000
_CHUNK = 256
"""Frames checked at once."""
_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Wal:
    """What a log holds. `damage` says why acknowledged commits in it would be lost, empty if none would."""

    committed: int = 0
    """Frames up to the last commit that SQLite reads."""
    torn: int = 0
    """Frames after it that belong to a commit that was never acknowledged."""
    damage: str = ""


def read_wal(file: Path) -> Wal:
    """Read a log that nobody writes to; an absent one is empty. Raises OSError."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return Wal()
    if len(data) < _HEADER.size or not any(data[: _HEADER.size]):
        return Wal()
    magic, version, page, _, salt1, salt2, sum1, sum2 = _HEADER.unpack_from(data)
    order = ">u4" if magic & 1 else "<u4"
    expected = _sums(np.frombuffer(data, order, 6).astype(np.uint64)[None, :])[0]
    if magic | 1 != _MAGIC | 1 or version != _VERSION or page % 8 or not page or [*expected] != [sum1, sum2]:
        return Wal(damage="its header is not one of SQLite's, so SQLite would read nothing of it")
    width = _FRAME + page
    count = (len(data) - _HEADER.size) // width
    frames = np.frombuffer(data, np.uint8, count * width, _HEADER.size).reshape(count, width)
    heads = np.ascontiguousarray(frames[:, :_FRAME]).view(">u4").astype(np.uint64)
    ours = (heads[:, 2] == salt1) & (heads[:, 3] == salt2) & (heads[:, 0] > 0)
    whole = ours & _chained(frames, heads, order, np.array([[sum1, sum2]], np.uint64))
    commits = ours & (heads[:, 1] > 0)
    end = count if whole.all() else int(np.argmin(whole))
    read = np.flatnonzero(commits[:end])
    committed = int(read[-1]) + 1 if len(read) else 0
    # A commit with whole frames right behind it was on the disk before those were begun.
    followed = np.flatnonzero(commits[end:-1] & whole[end + 1 :])
    if len(followed):
        after = f"its frame {end + 1} of {count} is damaged, and commits behind it would be lost"
        return Wal(committed, 0, after)
    return Wal(committed, int(ours[committed:].sum()))


def _chained(frames: npt.NDArray[np.uint8], heads: _Words, order: str, first: _Words) -> npt.NDArray[np.bool_]:
    """Whether each frame's checksum follows from its bytes and the checksum that stands before it."""
    before = np.concatenate([first, heads[:-1, 4:6]]) if len(heads) else first[:0]
    found = np.empty_like(before)
    for start in range(0, len(frames), _CHUNK):
        part = frames[start : start + _CHUNK]
        words = np.concatenate([part[:, :8], part[:, _FRAME:]], axis=1).view(order).astype(np.uint64)
        found[start : start + _CHUNK] = _sums(words, before[start : start + _CHUNK])
    return np.asarray((found == heads[:, 4:6]).all(axis=1))


def _sums(words: _Words, before: _Words | None = None) -> _Words:
    """SQLite's checksum of each row of 32-bit words, going on from `before`.

    Of each pair (x, y) it makes s0 += x + s1; s1 += y + s0, which is linear: one product with a matrix does a row.
    """
    matrix, power = _weights(words.shape[1] // 2)
    total = words @ matrix
    if before is not None:
        total = total + before @ power
    return np.asarray(total & np.uint64(0xFFFFFFFF))


@lru_cache(maxsize=4)
def _weights(pairs: int) -> tuple[_Words, _Words]:
    """What each word adds to the two sums after that many pairs, and how the sums before them enter."""
    step = np.array([[1, 1], [1, 2]], np.uint64)  # (s0, s1) after a pair, from those before it
    rows: list[npt.NDArray[np.uint64]] = []
    power = np.eye(2, dtype=np.uint64)
    for _ in range(pairs):
        rows.append(power @ np.array([[1, 0], [1, 1]], np.uint64))  # x enters both sums, y the second
        power = (power @ step) & np.uint64(0xFFFFFFFF)
    stacked = np.concatenate([row.T for row in reversed(rows)])
    return stacked & np.uint64(0xFFFFFFFF), power.T.copy()
