"""Hashes of the lines that this user has sent from files, so that a changed line is noticed when a file is sent again.

The server counts a producer's observations and does not compare them. A record, `$XDG_STATE_HOME/memstream/sent/ID`,
has 8 bytes for each observation of a feed, in order: a hash of its line. ID depends on the memory's uid and the
producer. The first byte says whether the file has diverged: changed lines were sent, so that numbers are no longer
places in the file. From then on, the lines that the record lacks are new, and a producer named after the record sends
them. Eight bytes with the memory's revision follow: a memory with a lower one was restored and lacks some of the lines.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

HASH_BYTES = 8


def hash_line(line: bytes) -> int:
    """The hash of a line of input, without its line end."""
    digest = hashlib.blake2b(line.rstrip(b"\r\n"), digest_size=HASH_BYTES)
    return int.from_bytes(digest.digest())


@dataclass(slots=True)
class SentLines:
    """The record of one feed."""

    file: Path
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    diverged: bool = False
    revision: int = 0
    """Of the memory when the lines were sent."""

    def first_difference(self, lines: array[int], count: int) -> int | None:
        """The place of the first of `count` observations whose line is not the one that was sent."""
        known = min(count, len(self.hashes), len(lines))
        return next((place for place in range(known) if lines[place] != self.hashes[place]), None)

    def find_new(self, lines: array[int]) -> list[int]:
        """Places of the lines that were not sent. A line that was sent twice is new the third time."""
        sent = Counter(self.hashes)
        new = []
        for place, each in enumerate(lines):
            if sent[each] > 0:
                sent[each] -= 1
            else:
                new.append(place)
        return new

    def digest(self) -> str:
        """Identifies the lines that were sent."""
        return hashlib.blake2b(self.hashes.tobytes(), digest_size=6).hexdigest()

    def save(self, hashes: Iterable[int], diverged: bool, revision: int) -> None:
        """Writes the record; a machine without a writable home directory keeps none."""
        self.hashes, self.diverged, self.revision = array("Q", hashes), diverged, revision
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.file.parent, delete=False) as new:
                new.write(bytes([diverged]) + revision.to_bytes(HASH_BYTES) + self.hashes.tobytes())
            os.replace(new.name, self.file)


def load_sent_lines(memory_uid: str, producer: str) -> SentLines:
    """The record of a feed; empty if there is none or it cannot be read."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    identity = f"{memory_uid}\0{producer}".encode()
    found = SentLines(Path(home) / "memstream/sent" / hashlib.blake2b(identity, digest_size=16).hexdigest())
    with contextlib.suppress(OSError):
        data = found.file.read_bytes()
        if len(data) > HASH_BYTES and len(data) % HASH_BYTES == 1 and data[0] in (0, 1):
            found.diverged, found.revision = bool(data[0]), int.from_bytes(data[1 : 1 + HASH_BYTES])
            found.hashes.frombytes(data[1 + HASH_BYTES :])
    return found
