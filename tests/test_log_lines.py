"""Log lines: exceptions, values from outside, and repeated failures."""

from __future__ import annotations

import ast
import asyncio
import gc
import io
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from memstream_server.core.printable import escape_unprintable, number_text
from memstream_server.log_lines import REPEAT_S, LogHandler, describe_error, site_of
from memstream_server.observability import configure_logging
from memstream_server.ports.journal.errors import OutcomeUnknown
from memstream_server.settings import LogFormat, LogLevel

SERVER = Path(__file__).resolve().parents[1] / "server" / "memstream_server"
CANARY = "canary-7f3a91"
HOSTILE = "\x1b]0;owned\x07\x1b[2J\n2026-01-01 [error] forged\r\x00\x85\u202eleft\u2066\u200f\u2028\ud800\U000e0041end"
RAW = [one for one in HOSTILE if not one.isprintable()]
Configure = Callable[..., io.StringIO]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    gc.collect()  # what other tests left is not logged here
    root = logging.getLogger()
    before = (root.handlers, root.level)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    root.handlers = []

    def set_up(form: LogFormat = LogFormat.JSON, secrets: tuple[str, ...] = ()) -> io.StringIO:
        out = io.StringIO()
        configure_logging(LogLevel.DEBUG, form, out, secrets)
        return out

    yield set_up
    root.handlers, level = before
    root.setLevel(level)
    structlog.reset_defaults()


def raise_with_content(content: str) -> None:
    held = {"content": content, "key": content}
    raise ValueError(f"cannot parse {held['content']}")


@pytest.mark.parametrize("form", LogFormat)
def test_tracebacks_show_no_locals_and_no_text(configure: Configure, form: LogFormat) -> None:
    out = configure(form)
    try:
        try:
            raise_with_content(CANARY)
        except ValueError as error:
            raise KeyError(CANARY) from error
    except KeyError as error:
        structlog.get_logger("memstream_server.x").exception("broke")
        structlog.get_logger("memstream_server.x").warning("failed", error=error)
        logging.getLogger("asyncio").error("Task exception\nfuture: %r" % error, exc_info=error)  # noqa: UP031
        logging.getLogger("some.library").error("cannot send %s to %r: %d", CANARY, error, 7, exc_info=True)
    text = out.getvalue()
    assert CANARY not in text
    assert "Traceback" in text
    assert "ValueError" in text
    assert "KeyError <- ValueError" in text
    assert "test_log_lines.py:" in text
    assert "in raise_with_content" in text
    assert len(text) < 6_000


@pytest.mark.parametrize("form", LogFormat)
@pytest.mark.parametrize("width", [1, 3_000])
def test_unprintable_characters_are_escaped(configure: Configure, form: LogFormat, width: int) -> None:
    out = configure(form)
    log = structlog.get_logger("memstream_server.x")
    log.warning("denied", principal=HOSTILE, names=[HOSTILE, {HOSTILE: HOSTILE}])
    log.info(HOSTILE * width)
    logging.getLogger("memstream_server.y").warning("peer %s", HOSTILE)
    logging.getLogger("library").warning(HOSTILE)
    logging.getLogger("library").warning("from %s", HOSTILE)
    lines = out.getvalue().splitlines()
    assert len(lines) == 5, "a caller forged a line"
    for line in lines:
        shown = json.dumps(json.loads(line), ensure_ascii=False) if form is LogFormat.JSON else line
        assert not [one for one in RAW if one in shown]
    assert "\\x1b]0;owned\\x07" in out.getvalue().replace("\\\\", "\\")


def test_texts_composed_by_the_server_are_shown() -> None:
    error = OutcomeUnknown("disk I/O error")
    error.__cause__ = OSError(5, "Input/output error", f"/data/{CANARY}")
    assert describe_error(error) == "OutcomeUnknown: disk I/O error <- OSError errno=5 (Input/output error)"
    assert CANARY not in describe_error(ValueError(CANARY))


def test_objects_are_shown_by_their_type(configure: Configure) -> None:
    out = configure()
    structlog.get_logger("memstream_server.x").info("seen", held=Exception, raw=CANARY.encode(), count=3, ratio=0.5)
    line = json.loads(out.getvalue())
    assert (line["held"], line["raw"], line["count"], line["ratio"]) == ("<type>", "<bytes>", 3, 0.5)


@pytest.mark.parametrize("form", LogFormat)
def test_secrets_of_the_settings_are_hidden(configure: Configure, form: LogFormat) -> None:
    out = configure(form, secrets=(CANARY,))
    log = structlog.get_logger("memstream_server.x")
    log.info("asked", url="https://joy:hunter2@models.example/v1", api_key="sk-1", said=f"wrong key {CANARY}")
    log.warning("failed", error=OutcomeUnknown(f"no connection as postgresql://joy:hunter2@db/{CANARY}"))
    assert CANARY not in out.getvalue()
    assert "hunter2" not in out.getvalue()
    assert "sk-1" not in out.getvalue()
    assert "models.example" in out.getvalue()


def test_exceptions_of_threads_show_no_text(configure: Configure) -> None:
    out = configure()
    thread = threading.Thread(target=raise_with_content, args=(CANARY,))
    thread.start()
    thread.join()

    class Broken:
        def __del__(self) -> None:
            raise_with_content(CANARY)

    Broken()
    assert CANARY not in out.getvalue()
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["thread_failed", "unraisable"]


async def test_failing_callback_shows_no_value(configure: Configure) -> None:
    out = configure()
    asyncio.get_running_loop().call_soon(raise_with_content, CANARY)
    await asyncio.sleep(0.01)
    assert CANARY not in out.getvalue()
    assert json.loads(out.getvalue().splitlines()[-1])["event"] == "Exception in callback raise_with_content"


def make_counting_handler(messages: int) -> tuple[list[str], LogHandler, Callable[..., None], list[float]]:
    """(lines, handler, write, clock) of a handler with its own clock."""
    out, clock = io.StringIO(), [0.0]
    handler = LogHandler(out, lambda: clock[0])
    lines: list[str] = []

    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            values: Any = record.msg
            lines.append(f"{values['event']} {values.get('error') or ''} x{values.get('repeated', 1)}")
            return lines[-1]

    handler.setFormatter(Formatter())

    def write(event: str, level: int = logging.WARNING, **values: Any) -> None:
        record = {"name": "memstream_server.x", "levelno": level, "msg": {"event": event} | values, "exc_info": None}
        for _ in range(messages):
            handler.handle(logging.makeLogRecord(record))

    return lines, handler, write, clock


def test_equal_failures_are_counted() -> None:
    lines, handler, write, clock = make_counting_handler(1_000)
    write("index_unavailable", retry_in_s=1)
    write("index_unavailable", retry_in_s=2)
    write("memory_not_maintained", memory="a")
    assert [line.split()[0] for line in lines] == ["index_unavailable", "memory_not_maintained"]
    clock[0] = REPEAT_S
    write("started", logging.INFO)
    assert lines[2:4] == ["index_unavailable  x1999", "memory_not_maintained  x999"]
    write("index_unavailable")
    handler.close()
    assert lines[-1] == "index_unavailable  x1000"


def test_different_failures_are_all_written() -> None:
    lines, _, write, _ = make_counting_handler(1)
    for error in (ValueError("a"), ValueError("b"), KeyError("a"), OSError(5, "x"), OSError(6, "x")):
        write("failed", error=error)
    assert len(lines) == 4


def test_non_failures_are_not_counted() -> None:
    lines, _, write, _ = make_counting_handler(50)
    write("operation_begins", logging.INFO)
    assert len(lines) == 50


def test_failure_site_ignores_the_text() -> None:
    sites = set()
    for text in ("a", "b"):
        try:
            raise_with_content(text)
        except ValueError as error:
            sites.add(site_of(error))
    assert len(sites) == 1
    assert site_of(KeyError("a")) not in sites


def test_log_calls_pass_errors_instead_of_texts() -> None:
    """`error=error` goes through log_lines.py; `error=str(error)` would not."""
    wrong = []
    for file in SERVER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in {"debug", "info", "warning", "error", "exception", "critical"}:
                continue
            holder = ast.unparse(node.func.value)
            if holder not in {"log", "logger", "self._log"} and "get_logger" not in holder:
                continue
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                if _is_text_of_an_error(value):
                    wrong.append(f"{file.relative_to(SERVER)}:{node.lineno}: {ast.unparse(value)}")
    assert not wrong


def _is_text_of_an_error(value: ast.AST) -> bool:
    for node in ast.walk(value):
        if isinstance(node, ast.JoinedStr):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"str", "repr", "ascii", "format"}:
            return "error" in ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr in {"message", "args", "content", "text"}:
            return True
    return False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain 漢字 é 😀", "plain 漢字 é 😀"),
        ("a\u3000b\xa0c", "a\u3000b\xa0c"),
        ("क्\u200dष", "क्\u200dष"),
        ("\x1b[0m\n\t\x7f\x9b", "\\x1b[0m\\n\\t\\x7f\\x9b"),
        ("\u202e\u2069\u200e\ufeff\u2029", "\\u202e\\u2069\\u200e\\ufeff\\u2029"),
        ("\ud800\U000e0001\uffff", "\\ud800\\U000e0001\\uffff"),
    ],
)
def test_printable_escapes_unprintable_characters(text: str, expected: str) -> None:
    assert escape_unprintable(text) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1_000_001, "1000001"),
        (2.0**31, "2147483648"),
        (0.1, "0.1"),
        (1e300, "1e+300"),
        (float("nan"), "nan"),
        (-0.0, "0"),
    ],
)
def test_numbers_are_written_as_given(value: float, text: str) -> None:
    assert number_text(value) == text
