"""Feeds: files and standard input, each with the producer that numbers its observations.

Rule 1: when a file is sent again by its producer, the observations that the server has received are skipped by count.
A malformed line would shift that count, so a file with one is rejected before anything is sent.
Rule 2: a pipe has no identity and cannot be read twice. It gets a producer of its own, nothing is skipped, and a
malformed line is reported and skipped.
Rule 3: the server counts a producer's observations and does not compare them. So that a changed line is noticed when a
file is sent again, this user keeps hashes of the lines that were sent from files. A record,
`$XDG_STATE_HOME/memstream/sent/ID`, has 8 bytes for each observation of a feed, in order: a hash of its line. ID
depends on the memory's uid and the producer. The first byte says whether the file has diverged: changed lines were
sent, so that numbers are no longer places in the file. From then on, the lines that the record lacks are new, and a
producer named after the record sends them. Eight bytes with the memory's revision follow: a memory with a lower one was
restored and lacks some of the lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import re
import secrets
import socket
import tempfile
import threading
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from memstream.values import Observation
from memstream_server.cli.records import Format, MalformedLine, RecordReader

STDIN = "-"
_CHUNK = 1 << 16
_CHUNKS_AHEAD = 8
_UNSAFE = re.compile(r"[^A-Za-z0-9._~-]+")
HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class ProducerFeed:
    """One producer's input, in order. `resume`: skip what the server has received from this producer."""

    producer: str
    files: tuple[str, ...]
    resume: bool

    @property
    def name(self) -> str:
        """For messages."""
        return ", ".join("standard input" if file == STDIN else file for file in self.files)

    @property
    def repeatable(self) -> bool:
        """Whether it can be read more than once."""
        return all(is_regular(file) for file in self.files)


@dataclass(frozen=True, slots=True)
class Problem:
    """An invalid or rejected line, and why."""

    file: str
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.problem}"


class LinePositions:
    """The file and line of every observation sent, by index from 0."""

    def __init__(self) -> None:
        self._lines = array("Q")
        self._starts: list[int] = []
        self._files: list[str] = []

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, file: str, line: int) -> None:
        """Records the file and line of the next observation."""
        if not self._files or self._files[-1] != file:
            self._starts.append(len(self._lines))
            self._files.append(file)
        self._lines.append(line)

    def find(self, place: int) -> tuple[str, int]:
        """File and line of an observation; ("", 0) for one that this run did not send."""
        if not 0 <= place < len(self._lines):
            return "", 0
        return self._files[bisect_right(self._starts, place) - 1], self._lines[place]


@dataclass(frozen=True, slots=True)
class FeedContents:
    """The observations in a feed, and its malformed lines."""

    lines: array[int]
    """The hash of each observation's line."""
    places: LinePositions
    malformed: tuple[Problem, ...]


def is_regular(file: str) -> bool:
    """Whether this is a regular file, which can be read twice."""
    return file != STDIN and Path(file).is_file()


def plan_feeds(files: Sequence[str], producer: str | None, resume: bool | None) -> list[ProducerFeed]:
    """The feeds of a command line. `resume` None: resume regular files. Raises ValueError, OSError."""
    files = tuple(files) or (STDIN,)
    for file in files:
        if file != STDIN and not Path(file).exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
        if Path(file).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
    if STDIN in files and len(files) > 1:
        raise ValueError("standard input (-) cannot be combined with files")
    if resume and producer is None and not all(is_regular(file) for file in files):
        raise ValueError("to resume from a pipe, name its producer with --producer")
    groups = [files] if producer is not None else [(file,) for file in files]
    return [_create_feed(group, producer, resume) for group in groups]


def _create_feed(files: tuple[str, ...], producer: str | None, resume: bool | None) -> ProducerFeed:
    repeatable = all(is_regular(file) for file in files)
    name = producer or (producer_of_file(files[0]) if repeatable else f"pipe-{secrets.token_hex(8)}")
    return ProducerFeed(name, files, repeatable if resume is None else resume)


def producer_of_file(file: str) -> str:
    """The producer of a file: its name, and a digest of host, path and first line.

    The first line distinguishes another file with the same path, for instance a rotated log.
    """
    path = Path(file).resolve()
    with path.open("rb") as handle:
        first = next((line for line in handle if line.strip()), b"")
    identity = b"\0".join([socket.gethostname().encode(), str(path).encode(errors="surrogateescape"), first.strip()])
    digest = hashlib.blake2b(identity, digest_size=6).hexdigest()
    return f"cli-{digest}-{_UNSAFE.sub('_', path.name)[:80]}"


def scan_feed(feed: ProducerFeed, form: Format, time_zone: str) -> FeedContents:
    """Reads a repeatable feed to its end, without sending anything. Raises OSError."""
    lines, places = array("Q"), LinePositions()
    malformed: list[Problem] = []
    for file in feed.files:
        reader = RecordReader(form, time_zone)
        for number, line in _numbered_lines(file):
            item = reader.read_line(line)
            if isinstance(item, MalformedLine):
                malformed.append(Problem(file, number, item.problem))
            elif item is not None:
                lines.append(hash_line(line))
                places.add(file, number)
    return FeedContents(lines, places, tuple(malformed))


def _numbered_lines(file: str) -> Iterator[tuple[int, bytes]]:
    with Path(file).open("rb") as handle:
        yield from enumerate(handle, 1)


async def read_records(
    feed: ProducerFeed, form: Format, time_zone: str
) -> AsyncIterator[tuple[str, int, Observation | MalformedLine]]:
    """Yields file, line and parsed observation as input arrives. Raises OSError."""
    for file in feed.files:
        reader = RecordReader(form, time_zone)
        number = 0
        async for lines in _read_chunks(file):
            for line in lines:
                number += 1
                item = reader.read_line(line)
                if item is not None:
                    yield file, number, item


async def _read_chunks(file: str) -> AsyncIterator[list[bytes]]:
    """Yields lines as they arrive. A thread reads them, because a silent pipe would block the event loop.

    The thread is a daemon, because a thread that reads from the keyboard cannot be stopped.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[list[bytes] | OSError | None] = asyncio.Queue()
    ahead = threading.Semaphore(_CHUNKS_AHEAD)

    def hand(item: list[bytes] | OSError | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(ready.put_nowait, item)

    def read() -> None:
        try:
            for lines in _read_whole_lines(file):
                ahead.acquire()
                hand(lines)
            hand(None)
        except OSError as error:
            hand(error)
        except RuntimeError:
            return  # the loop is closed: the rest is not needed

    threading.Thread(target=read, name="memstream input", daemon=True).start()
    while (item := await ready.get()) is not None:
        if isinstance(item, OSError):
            raise item
        ahead.release()
        yield item


def _read_whole_lines(file: str) -> Iterator[list[bytes]]:
    # Unbuffered: a read returns what is available, so that lines from a keyboard or `tail -f` are sent at once. Not
    # # sys.stdin: a waiting thread holds its lock, and an interrupted interpreter would abort.
    with open(0 if file == STDIN else file, "rb", buffering=0, closefd=file != STDIN) as handle:
        yield from _split_lines(handle)


def _split_lines(handle: FileIO) -> Iterator[list[bytes]]:
    rest: list[bytes] = []
    while data := handle.read(_CHUNK):
        first, *others = data.split(b"\n")
        rest.append(first)
        if others:
            yield [b"".join(rest), *others[:-1]]
            rest = [others[-1]]
    if last := b"".join(rest):
        yield [last]


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
