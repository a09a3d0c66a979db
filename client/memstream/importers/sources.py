"""A source as named streams: a file, the members of a zip archive, or the files of a directory.

Nothing is extracted to the disk, and no name in an archive is ever opened as a path. Every stream is bounded: one
entry, or one line, of at most ENTRY_BYTES_MAX.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

from memstream.importers.records import InvalidSource

ENTRY_BYTES_MAX = 64 << 20
"""One conversation, message or line; a larger one is no chat."""
MEMBERS_MAX = 200_000
_RATIO_MAX, _RATIO_FROM_BYTES = 300, 32 << 20
"""A larger member of an archive that is compressed more than this is made to fill the machine; chats take 5 to 20."""
URI_SCHEMES = ("http://", "https://", "tcp://", "unix:", "postgresql://", "postgres://")
_USER = re.compile(r"//[^/]*@")
SQLITE_HEAD = b"SQLite format 3\0"


class Source:
    """Where an import reads. `names`: the files in it, relative; `uri` as given, which may be a server's address."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.shown = _USER.sub("//", uri)
        """The URI without user and password, for messages."""
        self.path = None if uri.startswith(URI_SCHEMES) else Path(uri)
        self._archive: zipfile.ZipFile | None = None
        self.names: tuple[str, ...] = ()
        if self.path is not None:
            self.names = self._list_names(self.path)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        if self._archive is not None:
            self._archive.close()

    @property
    def title(self) -> str:
        """The name of the file, archive or directory without its extension."""
        return self.shown if self.path is None else self.path.resolve().stem

    def find(self, name: str) -> str | None:
        """The member with that file name that lies nearest to the top."""
        named = (one for one in self.names if PurePosixPath(one).name == name)
        return min(named, key=lambda one: (one.count("/"), one), default=None)

    @contextmanager
    def open(self, name: str) -> Iterator[Entries]:
        """A member as UTF-8 bytes. Raises InvalidSource for what cannot be read."""
        try:
            with self._open_raw(name) as raw, raw:
                yield Entries(_as_utf8(raw), name)
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            what = getattr(error, "strerror", None) or error
            raise InvalidSource(f"{name}: cannot be read: {what}") from error

    def head(self, name: str, size: int = 4_096) -> bytes:
        """The first bytes of a member."""
        with self.open(name) as entries:
            return entries.read(size)

    @contextmanager
    def _open_raw(self, name: str) -> Iterator[BinaryIO]:
        if self._archive is not None:
            member = self._archive.getinfo(name)
            if member.file_size > max(_RATIO_FROM_BYTES, _RATIO_MAX * member.compress_size):
                raise InvalidSource(
                    f"{name}: {member.compress_size:,} bytes unpack to {member.file_size:,}, which no chat does"
                )
            with self._archive.open(member) as opened:
                yield opened  # type: ignore[misc]  # ZipExtFile is typed as IO[bytes]
            return
        assert self.path is not None
        with (self.path / name if self.path.is_dir() else self.path).open("rb") as file:
            yield file

    def _list_names(self, path: Path) -> tuple[str, ...]:
        if path.is_dir():
            return tuple(_walk(path))
        if not path.exists():
            raise FileNotFoundError(f"there is no file {path}")
        if not path.is_file():
            raise InvalidSource(f"{path}: is neither a file nor a directory")
        if not zipfile.is_zipfile(path):
            return (path.name,)
        try:
            self._archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise InvalidSource(f"{path}: is no archive that can be read: {error}") from error
        members = [one for one in self._archive.infolist() if not one.is_dir()]
        if len(members) > MEMBERS_MAX:
            raise InvalidSource(f"{path}: has {len(members):,} members, at most {MEMBERS_MAX:,} are read")
        if any(one.flag_bits & 1 for one in members):
            raise InvalidSource(f"{path}: is encrypted: unpack it, and import the directory")
        return tuple(one.filename for one in members if not one.filename.startswith("__MACOSX/"))


def _walk(top: Path) -> Iterator[str]:
    """Files below a directory in order; neither hidden ones nor those behind links, which may lead anywhere."""
    found = 0
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(one for one in folders if not one.startswith(".") and one != "node_modules")
        for file in sorted(files):
            path = Path(folder, file)
            if file.startswith(".") or path.is_symlink():
                continue
            found += 1
            if found > MEMBERS_MAX:
                raise InvalidSource(f"{top}: has more than {MEMBERS_MAX:,} files")
            yield path.relative_to(top).as_posix()


class Entries:
    """A stream that refuses an entry of more than ENTRY_BYTES_MAX: `begin_entry` after each one."""

    def __init__(self, raw: IO[bytes], name: str) -> None:
        self._raw = raw
        self.name = name
        self.position = 0
        self._since = 0

    def begin_entry(self) -> None:
        """The bytes read until now belong to entries that are done."""
        self._since = 0

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes. Raises InvalidSource."""
        data = self._raw.read(size if size >= 0 else ENTRY_BYTES_MAX)
        self.position += len(data)
        self._since += len(data)
        if self._since > ENTRY_BYTES_MAX:
            raise InvalidSource(f"{self.name}: an entry near byte {self.position:,} has more than 64 MiB")
        return data

    def lines(self) -> Iterator[tuple[int, str]]:
        """Number and text of each line, without its end. Raises InvalidSource for what is not UTF-8."""
        number = 0
        while line := self._raw.readline(ENTRY_BYTES_MAX + 1):
            number += 1
            if len(line) > ENTRY_BYTES_MAX:
                raise InvalidSource(f"{self.name}:{number}: has more than 64 MiB")
            try:
                yield number, line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise InvalidSource(
                    f"{self.name}:{number}: is not UTF-8 ({error.reason}): save the file as UTF-8"
                ) from error

    def items(self, prefix: str) -> Iterator[tuple[int, Any]]:
        """Number (from 1) and value of each JSON value at a prefix of ijson. Raises InvalidSource."""
        import ijson

        number = 0
        with self._translated("entry", lambda: number + 1):
            for value in ijson.items(self, prefix, use_float=True):
                number += 1
                self.begin_entry()
                yield number, value

    def events(self) -> Iterator[tuple[str, str, Any]]:
        """Prefix, event and value of every step of the JSON. Raises InvalidSource."""
        import ijson

        with self._translated("byte", lambda: self.position):
            yield from ijson.parse(self, use_float=True)

    @contextmanager
    def _translated(self, what: str, place: Any) -> Iterator[None]:
        import ijson

        try:
            yield
        except InvalidSource:
            raise
        except (ijson.JSONError, UnicodeDecodeError, ValueError, RecursionError) as error:
            why = " ".join(str(error).split()[:12])
            raise InvalidSource(
                f"{self.name}: {what} {place():,}: is no JSON, or the file is cut off ({why})"
            ) from error


def _as_utf8(raw: IO[bytes]) -> IO[bytes]:
    """The stream without a byte order mark; UTF-16 is converted."""
    buffered = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)  # type: ignore[type-var]
    mark = buffered.peek(4)[:4]
    if mark.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return io.BufferedReader(_Converted(buffered))
    if mark.startswith(codecs.BOM_UTF8):
        buffered.read(3)
    return buffered


class _Converted(io.RawIOBase):
    """UTF-16 as UTF-8."""

    def __init__(self, raw: io.BufferedReader[Any]) -> None:
        self._raw = raw
        self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            data = self._raw.read(1 << 16)
            self._rest = self._decoder.decode(data, final=not data).encode("utf-8", "replace")
            if not data:
                break
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def is_sqlite(source: Source, name: str) -> bool:
    """Whether a member is a SQLite database."""
    with suppress(InvalidSource):
        return source.head(name, len(SQLITE_HEAD)) == SQLITE_HEAD
    return False
