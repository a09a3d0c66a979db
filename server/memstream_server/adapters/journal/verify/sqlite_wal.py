"""Parses SQLite's write-ahead log: how much of it SQLite reads, and whether damage hides later commits.

SQLite silently stops at the first damaged frame. At the end of the log that is correct: the frame belongs to an
unfinished commit. Anywhere else the following commits were acknowledged, so a server must not start without them.
Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
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
"""Bytes before each page: page number, database size after a commit (else 0), two salts, two checksums."""
_MAGIC, _VERSION = 0x377F0682, 3_007_000
_CHUNK = 256
"""Frames checked at once."""
_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Wal:
    """The content of a log. `damage` says why acknowledged commits would be lost; empty if none would."""

    committed: int = 0
    """Frames up to the last commit that SQLite reads."""
    torn: int = 0
    """Later frames, of a commit that was never acknowledged."""
    damage: str = ""


def read_wal(file: Path) -> Wal:
    """Parse a log that no process writes to; a missing file is an empty log. Raises OSError."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return Wal()
    if len(data) < _HEADER.size or not any(data[: _HEADER.size]):
        return Wal()
    magic, version, page, _, salt1, salt2, sum1, sum2 = _HEADER.unpack_from(data)
    order = ">u4" if magic & 1 else "<u4"
    expected = _checksum(np.frombuffer(data, order, 6).astype(np.uint64)[None, :])[0]
    if magic | 1 != _MAGIC | 1 or version != _VERSION or page % 8 or not page or [*expected] != [sum1, sum2]:
        return Wal(damage="its header is not one of SQLite's, so SQLite would read nothing of it")
    width = _FRAME + page
    count = (len(data) - _HEADER.size) // width
    frames = np.frombuffer(data, np.uint8, count * width, _HEADER.size).reshape(count, width)
    heads = np.ascontiguousarray(frames[:, :_FRAME]).view(">u4").astype(np.uint64)
    ours = (heads[:, 2] == salt1) & (heads[:, 3] == salt2) & (heads[:, 0] > 0)
    whole = ours & _verify_checksums(frames, heads, order, np.array([[sum1, sum2]], np.uint64))
    commits = ours & (heads[:, 1] > 0)
    end = count if whole.all() else int(np.argmin(whole))
    read = np.flatnonzero(commits[:end])
    committed = int(read[-1]) + 1 if len(read) else 0
    # A commit directly followed by valid frames was on disk before those frames were written.
    followed = np.flatnonzero(commits[end:-1] & whole[end + 1 :])
    if len(followed):
        after = f"its frame {end + 1} of {count} is damaged, and commits behind it would be lost"
        return Wal(committed, 0, after)
    return Wal(committed, int(ours[committed:].sum()))


def _verify_checksums(frames: npt.NDArray[np.uint8], heads: _Words, order: str, first: _Words) -> npt.NDArray[np.bool_]:
    """Whether each frame's checksum follows from its bytes and the previous checksum."""
    before = np.concatenate([first, heads[:-1, 4:6]]) if len(heads) else first[:0]
    found = np.empty_like(before)
    for start in range(0, len(frames), _CHUNK):
        part = frames[start : start + _CHUNK]
        words = np.concatenate([part[:, :8], part[:, _FRAME:]], axis=1).view(order).astype(np.uint64)
        found[start : start + _CHUNK] = _checksum(words, before[start : start + _CHUNK])
    return np.asarray((found == heads[:, 4:6]).all(axis=1))


def _checksum(words: _Words, before: _Words | None = None) -> _Words:
    """SQLite's checksum of each row of 32-bit words, continuing from `before`.

    For each pair (x, y): s0 += x + s1; s1 += y + s0. This is linear, so one matrix product computes a row.
    """
    matrix, power = _checksum_matrices(words.shape[1] // 2)
    total = words @ matrix
    if before is not None:
        total = total + before @ power
    return np.asarray(total & np.uint64(0xFFFFFFFF))


@lru_cache(maxsize=4)
def _checksum_matrices(pairs: int) -> tuple[_Words, _Words]:
    """The matrices by which the words, and the sums before them, enter the sums after that many pairs."""
    step = np.array([[1, 1], [1, 2]], np.uint64)  # maps (s0, s1) to the sums after a pair of zeros
    rows: list[npt.NDArray[np.uint64]] = []
    power = np.eye(2, dtype=np.uint64)
    for _ in range(pairs):
        rows.append(power @ np.array([[1, 0], [1, 1]], np.uint64))  # x enters both sums, y the second
        power = (power @ step) & np.uint64(0xFFFFFFFF)
    stacked = np.concatenate([row.T for row in reversed(rows)])
    return stacked & np.uint64(0xFFFFFFFF), power.T.copy()
