"""Deleted rows leave no bytes in a SQLite database whose log was emptied, after any history and any interruption."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from memstream_server.adapters.journal.database import checkpoints
from memstream_server.adapters.journal.database.checkpoints import Checkpoints, find_unused

SCHEMA = """
CREATE TABLE rows (key INTEGER PRIMARY KEY, payload BLOB);
CREATE TABLE anchors (memory INTEGER, id TEXT, vector BLOB, PRIMARY KEY (memory, id));
CREATE TABLE names (id TEXT PRIMARY KEY, other TEXT) WITHOUT ROWID;
CREATE INDEX anchors_id ON anchors (id, memory);
"""
SEEDS = range(3)


def writer_of(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = WAL", "synchronous = OFF", "secure_delete = ON", "wal_autocheckpoint = 0"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


class History:
    """Random inserts, updates and deletes of rows that share no word."""

    def __init__(self, path: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.path = path
        self.writer = writer_of(path)
        self.writer.executescript(SCHEMA)
        self.live: dict[str, int] = {}
        self.gone: set[str] = set()

    def run(self, transactions: int) -> Iterator[int]:
        """Yields after each transaction."""
        for number in range(transactions):
            self.writer.execute("BEGIN IMMEDIATE")
            for _ in range(self.draw.randint(1, 60)):
                self._take_step()
            self.writer.execute("COMMIT")
            yield number

    def _take_step(self) -> None:
        chance = self.draw.random()
        if chance < 0.6 or not self.live:
            self._insert(self._new_word())
        elif chance < 0.8:
            self._delete(self.draw.choice(list(self.live)))
        else:
            word, new = self.draw.choice(list(self.live)), self._new_word()
            times = self.draw.choice([1, 50])
            self.writer.execute("UPDATE rows SET payload = ? WHERE key = ?", (new.encode() * times, self.live[word]))
            self.writer.execute("UPDATE anchors SET id = ? WHERE id = ?", (new, word))
            self.writer.execute("UPDATE names SET id = ? WHERE id = ?", (new, word))
            self.live[new] = self.live.pop(word)
            self.gone.add(word)

    def _new_word(self) -> str:
        return f"zq{self.draw.getrandbits(120):030x}"

    def _insert(self, word: str) -> None:
        key, size = self.draw.getrandbits(34), self.draw.choice([1, 1, 3, 50, 150])
        memory, vector = self.draw.randint(0, 5), b"x" * self.draw.randint(0, 400)
        self.writer.execute("INSERT INTO rows VALUES (?, ?)", (key, word.encode() * size))
        self.writer.execute("INSERT INTO anchors VALUES (?, ?, ?)", (memory, word, vector))
        self.writer.execute("INSERT INTO names VALUES (?, '')", (word,))
        self.live[word] = key

    def _delete(self, word: str) -> None:
        self.writer.execute("DELETE FROM rows WHERE key = ?", (self.live.pop(word),))
        self.writer.execute("DELETE FROM anchors WHERE id = ?", (word,))
        self.writer.execute("DELETE FROM names WHERE id = ?", (word,))
        self.gone.add(word)

    def remaining(self) -> set[str]:
        """The deleted words that are in a file; checks that nothing else is lost."""
        files = [file.read_bytes() for file in self.path.parent.iterdir()]
        assert all(any(word.encode() in data for data in files) for word in self.live)
        check_database(self.path, set(self.live))
        return {word for word in self.gone for data in files if word.encode() in data}


def check_database(path: Path, live: set[str]) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert {word for (word,) in connection.execute("SELECT id FROM names")} == live
        assert {word for (word,) in connection.execute("SELECT id FROM anchors INDEXED BY anchors_id")} == live
        assert connection.execute("SELECT count(*) FROM rows").fetchone() == (len(live),)


def test_secure_delete_alone_leaves_deleted_rows(tmp_path: Path) -> None:
    """So the other tests can fail."""
    left = 0
    for seed in SEEDS:
        path = tmp_path / str(seed) / "db"
        path.parent.mkdir()
        history = History(path, seed)
        list(history.run(60))
        history.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        left += len(history.remaining())
        history.writer.close()
    assert left > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_no_history_leaves_bytes_of_deleted_rows(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path / "db", seed)
    tended = Checkpoints(history.path)
    for number in history.run(60):
        tended.checkpoint_if_long(history.draw.choice([50, 300]))
        if number % 20 == 19:
            history.writer.close()
            assert tended.empty_log()
            assert history.remaining() == set()
            history.writer = writer_of(history.path)
    history.writer.close()
    tended.close()
    assert history.remaining() == set()


class Killed(Exception):
    """The process ended here."""


class FailingWrite:
    """os.pwrite, which works that many times."""

    def __init__(self, times: int) -> None:
        self._left, self._write = times, os.pwrite

    def __call__(self, file: int, data: bytes, at: int) -> int:
        if self._left == 0:
            raise Killed
        self._left -= 1
        return self._write(file, data, at)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_at_any_step_leaves_nothing_later(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the n-th write of the checkpoint, for growing n; then another process opens the files."""
    (tmp_path / "0").mkdir()
    history = History(tmp_path / "0" / "db", seed)
    tended = Checkpoints(history.path)
    kills = 0
    for number in history.run(60):
        if number % 6:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.os, "pwrite", FailingWrite(kills % 5))
            try:
                tended.checkpoint()
            except Killed:
                kills += 1
        folder = tmp_path / f"{number + 1}"
        shutil.copytree(history.path.parent, folder)  # as a kill leaves it: no connection closes
        for file in history.path.parent.iterdir():
            times = file.stat()
            os.utime(folder / file.name, ns=(times.st_atime_ns, times.st_mtime_ns))
        after = Checkpoints(folder / "db")
        after.close()
        assert {word for word in history.gone if word.encode() in (folder / "db").read_bytes()} == set()
        check_database(folder / "db", set(history.live))
    assert kills > 2
    history.writer.close()
    tended.close()
    assert history.remaining() == set()


class WritingMeanwhile:
    """os.pwrite, before which the writer commits some of its transactions; ends with Killed after that many calls."""

    def __init__(self, steps: Iterator[int], calls: int) -> None:
        self._steps, self._calls, self._write = steps, calls, os.pwrite

    def __call__(self, file: int, data: bytes, at: int) -> int:
        next(self._steps, None)
        self._calls -= 1
        if self._calls < 0:
            raise Killed
        return self._write(file, data, at)


@pytest.mark.parametrize("seed", SEEDS)
def test_commits_during_a_copy_leave_no_bytes(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer commits between any two steps of a copy, which ends after the n-th, for growing n."""
    history = History(tmp_path / "db", seed)
    tended = Checkpoints(history.path)
    steps, kills = history.run(60), 0
    for number in steps:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.os, "pwrite", WritingMeanwhile(steps, number))
            try:
                tended.copy_log()
            except Killed:
                kills += 1
    assert kills > 2
    history.writer.close()
    assert tended.empty_log()
    assert history.remaining() == set()
    tended.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_on_another_thread_leaves_no_bytes(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path / "db", seed)
    tended = Checkpoints(history.path)
    ended = threading.Event()

    def copy_always() -> None:
        while not ended.is_set():
            tended.copy_log()

    copying = threading.Thread(target=copy_always)
    copying.start()
    list(history.run(60))
    ended.set()
    copying.join()
    history.writer.close()
    assert tended.empty_log()
    assert history.remaining() == set()
    tended.close()


def test_a_commit_waits_for_no_copy_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path / "db", 1)
    tended = Checkpoints(history.path)
    begun, let_go, write = threading.Event(), threading.Event(), os.pwrite

    def write_late(file: int, data: bytes, at: int) -> int:
        if threading.current_thread().name.startswith("journal-checkpoint"):
            begun.set()
            assert let_go.wait(60)
        return write(file, data, at)

    monkeypatch.setattr(checkpoints.os, "pwrite", write_late)
    list(history.run(80))
    tended.checkpoint_if_long(100)
    assert begun.wait(60)
    for _ in history.run(20):
        tended.checkpoint_if_long(100)  # the copy has not ended
    let_go.set()
    history.writer.close()
    assert tended.empty_log()
    assert history.remaining() == set()
    tended.close()


def _call_until_error(call: Callable[[], None]) -> None:
    while True:
        call()


def test_a_copy_that_fails_is_reported_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path / "db", 2)
    tended = Checkpoints(history.path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "pwrite", FailingWrite(0))
        list(history.run(80))
        tended.checkpoint_if_long(100)
        with pytest.raises(Killed):
            _call_until_error(lambda: tended.checkpoint_if_long(100))
    for _ in history.run(20):
        tended.checkpoint_if_long(100)
    history.writer.close()
    assert tended.empty_log()
    assert history.remaining() == set()
    tended.close()


def test_what_another_program_wrote_is_cleaned_too(tmp_path: Path) -> None:
    """It checkpoints, while the server runs or is stopped, and leaves copies of moved rows."""
    history = History(tmp_path / "db", 1)
    tended = Checkpoints(history.path)
    for number in history.run(60):
        if number % 10 == 9:
            with closing(sqlite3.connect(history.path)) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    history.writer.close()
    assert tended.empty_log()
    assert history.remaining() == set()
    tended.close()
    history.writer = writer_of(history.path)
    list(history.run(60))
    history.writer.close()  # SQLite checkpoints
    Checkpoints(history.path).close()
    assert history.remaining() == set()


def test_a_database_beyond_the_bound_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PAGES_MAX", 2)
    history = History(tmp_path / "db", 0)
    tended = Checkpoints(history.path)
    for _ in history.run(40):
        tended.checkpoint_if_long(100)
    history.writer.close()
    assert tended.empty_log()
    assert history.remaining() == set()
    tended.close()


def test_a_reader_delays_the_end_of_the_log(tmp_path: Path) -> None:
    history = History(tmp_path / "db", 2)
    tended = Checkpoints(history.path)
    list(history.run(5))
    with closing(sqlite3.connect(history.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        (before,) = reader.execute("SELECT count(*) FROM names").fetchone()
        list(history.run(5))
        assert not tended.empty_log()
        assert reader.execute("SELECT count(*) FROM names").fetchone() == (before,)
        reader.execute("COMMIT")
    history.writer.close()
    assert tended.empty_log()
    assert history.remaining() == set()
    tended.close()


@pytest.mark.parametrize("header", [0, 100])
def test_unused_parts_never_overlap_with_used_ones(header: int) -> None:
    """Of pages of any content: what is no page of cells, or contradicts itself, has none."""
    draw = random.Random(header)
    for _ in range(2_000):
        page = bytearray(draw.randbytes(512))
        page[header] = draw.choice([0, 2, 5, 10, 13, 255])
        for start, end in find_unused(bytes(page), header):
            assert page[header] in (2, 5, 10, 13)
            assert header + 8 <= start < end <= len(page)
    assert find_unused(b"", header) == []
