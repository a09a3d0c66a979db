"""Records the distinct SQL statements that tests of stores and of the engine send to journals in their own process.

Texts that differ only in the length of a list of values are the same statement. Statements of tests, and of migrations,
which run once, are not recorded. As a plugin, with the statements of all tests, it writes them into a folder:
`MEMSTREAM_TEST_STATEMENTS=FOLDER pytest -p tests.support.statement_recorder ...`. Each process of the run writes a file
of JSON lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, Engine, event

from memstream_server.adapters.journal.database import postgres, sqlite

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = "MEMSTREAM_TEST_STATEMENTS"
_MARK = re.compile(r"\?|%s|%\((\w+)\)s")
_CAST = r"\?(?:::[\w ]+)?"
_ROW = rf"\({_CAST}(?:, {_CAST})*\)"
_LIST = re.compile(rf"(?<=VALUES )({_ROW})(?:, {_ROW})*|(?<=IN )\(({_CAST})(?:, {_CAST})*\)")


class Statement(msgspec.Struct, frozen=True):
    """A statement with a mark `?` for each value, the first row of each list of values, and the values' types."""

    text: str
    types: list[str]

    def repeat_rows(self, rows: int) -> Statement:
        """The statement with so many rows in each list of values."""
        types: list[str] = []
        text, start, taken = "", 0, 0
        for found in [*_LIST.finditer(self.text), None]:
            before = self.text[start : found.start() if found else None]
            types += self.types[taken : taken + before.count("?")]
            taken += before.count("?")
            text += before
            if found is None:
                break
            row, start = found[1] or found[2], found.end()
            types += self.types[taken : taken + row.count("?")] * rows
            taken += row.count("?")
            text += ", ".join([row] * rows) if found[1] else f"({', '.join([row] * rows)})"
        return Statement(text, types)


def _make_statement(text: str, values: Sequence[Any] | Mapping[str, Any]) -> Statement:
    """The statement that a driver got, with its lists cut to one row."""
    order: list[Any] = []

    def mark(found: re.Match[str]) -> str:
        order.append(found[1] or len(order))
        return "?"

    plain = _MARK.sub(mark, text)
    kinds = [type(values[name]).__name__ for name in order]  # type: ignore[call-overload]  # a key of either
    types: list[str] = []
    taken = start = 0
    for found in _LIST.finditer(plain):
        before, row = plain[start : found.start()].count("?"), (found[1] or found[2]).count("?")
        types += kinds[taken : taken + before + row]
        taken, start = taken + before + found[0].count("?"), found.end()
    types += kinds[taken:]
    return Statement(_LIST.sub(lambda found: found[1] or f"({found[2]})", plain), types)


RECORDED = (
    *("tests/journal", "tests/blocks", "tests/conversations/test_store.py", "tests/operations/test_store.py"),
    *("tests/engine", "tests/transfer", "tests/rpc", "tests/access"),
)
"""Tests of what may not scan a table; `verify` and `doctor` may."""
_seen: dict[str, Statement] = {}
_known: set[str] = set()
_is_recording = FOLDER in os.environ


def record_test(path: Path) -> None:
    """Record the statements of the test that begins, in this file, if it is one of RECORDED."""
    global _is_recording
    _is_recording = FOLDER in os.environ or any(path.is_relative_to(REPOSITORY / place) for place in RECORDED)


def list_recorded() -> list[Statement]:
    """What this process has sent so far."""
    return list(_seen.values())


def _record(text: str, values: Sequence[Any] | Mapping[str, Any]) -> None:
    if _is_recording and text not in _known and _is_sent_by_journal():
        _known.add(text)
        made = _make_statement(text, values)
        _seen.setdefault(made.text, made)


def _is_sent_by_journal() -> bool:
    """Whether the innermost frame of the project is the journal's, and not that of a migration."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/tests/" in path and path != __file__:
            return False
        if "/adapters/journal/" in path:
            return "migrat" not in path
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return False


def watch_journals() -> None:
    """Watch the journals' engines, and the way around SQLAlchemy that small writes to SQLite take."""

    def watch(make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
        def make(*arguments: Any, **options: Any) -> Engine:
            made = make_engine(*arguments, **options)

            @event.listens_for(made, "before_cursor_execute")
            def before(_: Connection, cursor: Any, text: str, values: Any, context: Any, many: bool) -> None:
                _record(text, values[0] if many else values or ())

            return made

        return make

    sqlite._engine = watch(sqlite._engine)
    postgres._engine = watch(postgres._engine)
    run = sqlite.run_statement

    def run_recorded(connection: Connection, text: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        _record(text, values)
        return run(connection, text, values)

    sqlite.run_statement = run_recorded


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write what this process sent, as a plugin."""
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in _seen.values()))


def read_statements(folder: Path) -> list[Statement]:
    """The distinct statements that all processes of a run wrote, in the order of their texts."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    found = {one.text: one for one in (msgspec.json.decode(line, type=Statement) for line in lines)}
    return [found[text] for text in sorted(found)]


def record_suite(folder: Path, *arguments: str, **environment: str) -> list[Statement]:
    """The distinct statements that a run of pytest with these arguments sends. The run must pass."""
    environment = {FOLDER: str(folder), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", __name__, *arguments]
    ended = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return read_statements(folder)
