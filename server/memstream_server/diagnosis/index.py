"""Checks the files of Milvus Lite. They derive from the journal, so no finding is a problem."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from memstream_server.adapters.milvus.child import SOCKET_PATTERN, find_flaw
from memstream_server.adapters.milvus.naming import collection_name
from memstream_server.diagnosis.findings import Finding, fine, note
from memstream_server.ports.index import INDEX_FOLDER
from memstream_server.ports.journal.spaces import Space
from memstream_server.settings import Settings

_REBUILT = "nothing to do: the next start fills it again from the journal; recall answers meanwhile"


def check_index(settings: Settings, holder: str, space: Space | None, has_rows: bool) -> Iterator[Finding]:
    """Findings on the index of the settings, if its files are ours. has_rows: whether the journal has rows for it."""
    data_dir = settings.data_dir
    folder = data_dir / INDEX_FOLDER
    if settings.is_without_index and folder.exists():
        yield note("index", f"{folder} has no use: with journal_url, only Milvus is an index", "delete the directory")
    if settings.milvus_uri or settings.is_without_index or not data_dir.is_dir():
        return
    if space is None:
        yield fine("index", "no embedding space is recorded yet, so there is no index")
        return
    if not has_rows and not folder.exists():
        yield fine("index", "there is no long-term fragment yet, so there is no index")
        return
    yield _check_files(folder, space)
    if holder:
        return
    if _is_locked(folder / "LOCK"):
        text = f"a Milvus Lite process{_find_process(folder)} still has it open, though no server runs"
        yield note("index", text, "wait until it ends, which it does after its server; otherwise kill it")
    elif left := sorted(file.name for file in data_dir.glob(SOCKET_PATTERN)):
        yield note("index", f"sockets of a server that was killed are left: {', '.join(left)}")


def _check_files(folder: Path, space: Space) -> Finding:
    if not folder.exists():
        return note("index", "its directory is missing", _REBUILT)
    collection = folder / "collections" / collection_name(space, "memstream")
    if not collection.is_dir():
        others = sorted(file.name for file in (folder / "collections").glob("*") if file.is_dir())
        text = f"it has {', '.join(others)}, of another embedding space" if others else "it is empty"
        return note("index", text, _REBUILT)
    try:
        reason = find_flaw(collection)
    except OSError as error:
        reason = f"it cannot be read ({error})"
    if reason:
        return note("index", f"{collection.name} is damaged: {reason}", _REBUILT)
    return fine("index", f"{collection.name} has all its files; the next start checks their content")


def _is_locked(lock: Path) -> bool:
    """Whether a process holds Lite's lock. Takes and releases it immediately, without writing."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _find_process(folder: Path) -> str:
    """The process that serves the directory, if /proc shows it."""
    wanted = os.fsencode(folder.absolute())
    for commands in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = commands.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
        if b"--directory" in words and any(os.path.abspath(word) == wanted for word in words if word):
            return f" (pid {commands.parent.name})"
    return ""
