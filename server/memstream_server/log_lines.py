"""What a log line may show, whichever code writes it.

Rules
1. An exception shows its type, its codes, its causes and its stack as file:line. Its text may repeat what a request or
a model's endpoint said, so it is omitted unless the class declares `log_text = True`: then this server composed the
text from values that are neither content nor credentials. Local variables are never shown.
2. A value is a text, a number or a collection of these; of any other object only the type is shown.
3. Unprintable characters are escaped: no caller can forge a line or control a terminal.
4. A value of a secret setting is never shown, whichever line contains it.
5. Of equal failures one line in REPEAT_S is written; the next line counts those in between as `repeated`. The
refusals of one principal and the lines that gRPC core writes are counted like failures, at any level.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TextIO

import structlog

from memstream_server.core.printable import escape_unprintable

REPEAT_S = 10.0
"""Equal failures within this time after a written one are counted."""
STDERR = "stderr"
"""The logger of lines that gRPC core and child processes write."""
KINDS_MAX = 1_024
"""Kinds of failures that are counted at once; beyond that the oldest count is written early."""
_TEXT_CHARS_MAX = 500
_CAUSES_MAX = 6
_FRAMES_MAX = 30
_OURS = ("memstream", "memstream_server")
_CODES = ("reason", "errno", "sqlstate", "sqlite_errorname", "status_code")
"""Attributes of exceptions that identify a failure to a program."""
_CODE = re.compile(r"[A-Z0-9][A-Z0-9_]{0,63}")
_VALUES_FOLLOW = re.compile(r"[\n<({\['\"]")
"""Where a library's formatted message begins to show values."""
_HIDDEN = "**********"
_USER_IN_URL = re.compile(r"://[^/@\s]+@")
_PATH_HEAD = re.compile(r".*/(?=(?:memstream|memstream_server)/)|.*/(?:site-packages|lib/python[0-9.]+)/")

Event = MutableMapping[str, Any]


def describe_error(error: BaseException) -> str:
    """Types, codes and causes: "ModelUnavailable <- openai.InternalServerError status_code=503"."""
    return " <- ".join(_describe_one(each) for each in _iterate_causes(error))


def describe_stack(error: BaseException) -> str:
    """A traceback without source lines, texts or local variables, the first cause first."""
    lines = ["Traceback (most recent call last):"]
    for each in reversed(list(_iterate_causes(error))):
        lines += [
            f"  {_shorten_path(name)}:{line} in {function}"
            for name, line, function in _list_frames(each)[-_FRAMES_MAX:]
        ]
        lines.append(_describe_one(each))
        if isinstance(each, BaseExceptionGroup):
            lines += [f"  + {describe_error(one)}" for one in each.exceptions[:_CAUSES_MAX]]
    return "\n".join(lines)


def site_of(error: BaseException) -> str:
    """The same 16 hexadecimal digits for every failure of this type at this place."""
    frames = [f"{_shorten_path(name)}:{line}" for name, line, _ in _list_frames(error)]
    text = "\n".join([type(error).__qualname__, *frames])
    return blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def make_safe(_logger: Any, _method: str, event: Event) -> Event:
    """A processor of structlog's ProcessorFormatter that applies rules 1 to 3; the last one before rendering."""
    record: logging.LogRecord = event.pop("_record")
    if not event.pop("_from_structlog"):
        event["event"] = _message_of(record, event.pop("positional_args", None) or ())
    error = _error_of(event.pop("exc_info", None))
    for key in ("stack_info", "stack", "exception"):
        event.pop(key, None)
    for key, value in event.items():
        event[key] = _safe_value(value)
    if error is not None:
        event["exception"] = "\n".join(escape_unprintable(line) for line in describe_stack(error).splitlines())
    return event


def hide_secrets(text: str, secrets: Iterable[str]) -> str:
    """The text without these values, and without user names and passwords in URLs."""
    for secret in secrets:
        text = text.replace(secret, _HIDDEN)
    return _USER_IN_URL.sub(f"://{_HIDDEN}@", text)


def make_hiding_processor(secrets: Iterable[str]) -> Callable[[Any, str, Any], str]:
    """A processor of structlog: applies `hide_secrets` to a rendered line."""
    values = tuple(secrets)
    return lambda _logger, _method, line: hide_secrets(line, values)


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream; counts equal failures (rule 5). `clock` is monotonic, in seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._failures: dict[tuple[str, ...], _Repeats] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the handler's lock held."""
        now_s = self._clock()
        self._write_repeats(now_s)
        kind = _kind_of(record)
        if record.levelno < logging.WARNING and not _is_failure(kind):
            if _is_ours(record):
                super().emit(record)
            return
        if kind in self._failures:
            self._failures[kind].count += 1
            return
        self._failures[kind] = _Repeats(now_s, record.levelno)
        super().emit(record)

    def close(self) -> None:
        """Writes pending counts."""
        self.write_counts()
        super().close()

    def write_counts(self) -> None:
        """Writes the counts of failures since their last line."""
        with self.lock or nullcontext():
            self._write_repeats(float("inf"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Unlike logging's own report, shows no arguments of a line that cannot be written."""
        with suppress(OSError, ValueError):  # the stream itself may be broken
            self.stream.write(f"a log line of {escape_unprintable(record.name)} could not be written\n")

    def _write_repeats(self, now_s: float) -> None:
        """Writes the counts of failures whose time is over."""
        crowded = len(self._failures) >= KINDS_MAX
        over = [kind for kind, seen in self._failures.items() if crowded or now_s - seen.since_s >= REPEAT_S]
        for kind in over:
            seen = self._failures.pop(kind)
            if seen.count:
                self._failures[kind] = _Repeats(self._clock(), seen.level)
                super().emit(_repeats_record(kind, seen))


@dataclass(slots=True)
class _Repeats:
    """Failures of one kind since the last written line of it."""

    since_s: float
    level: int
    count: int = 0


_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)


def _repeats_record(kind: tuple[str, ...], seen: _Repeats) -> logging.LogRecord:
    name, event, error, _, principal = kind
    level = logging.getLevelName(seen.level)
    line = {"event": event, "level": level.lower(), "repeated": seen.count}
    line |= {"error": error} if error else {}
    line |= {"principal": principal} if principal else {}
    return logging.makeLogRecord(
        {"name": name, "levelno": seen.level, "levelname": level, "msg": _stamp(None, "", line)}
        | {"_logger": None, "_name": level.lower()}
    )


def _kind_of(record: logging.LogRecord) -> tuple[str, ...]:
    """(logger, event, error, place, principal): failures that agree in these are equal. Other values are not
    compared."""
    principal = ""
    if not isinstance(record.msg, dict):
        error = _error_of(record.exc_info)
        text = _message_of(record, record.args)
    else:
        values = record.msg
        error = _error_of(values.get("exc_info")) or next(
            (value for value in values.values() if isinstance(value, BaseException)), None
        )
        text, principal = str(values.get("event")), str(values.get("principal", ""))
        if record.name == STDERR:  # the text of gRPC core may have an address
            text = str(values.get("source", ""))
    if error is None:
        return record.name, text, "", "", principal
    return record.name, text, describe_error(error), site_of(error), principal


def _is_failure(kind: tuple[str, ...]) -> bool:
    """Whether lines of this kind are counted although they are no warnings."""
    return bool(kind[4]) or kind[0] == STDERR


def _is_ours(record: logging.LogRecord) -> bool:
    return isinstance(record.msg, dict) or record.name.partition(".")[0] in _OURS


def _message_of(record: logging.LogRecord, args: Any) -> str:
    """The text of a line that came through logging. Of a library's values only numbers are shown."""
    template, ours = str(record.msg), _is_ours(record)
    if not args:
        return template if ours else _VALUES_FOLLOW.split(template, maxsplit=1)[0].strip()
    if isinstance(args, Mapping):  # "%(name)s"
        return template
    shown = (value if isinstance(value, int | float) else _safe_value(value) if ours else "..." for value in args)
    try:
        return template % tuple(shown)
    except (TypeError, ValueError):
        return template


def _safe_value(value: Any) -> Any:
    if isinstance(value, BaseException):
        return escape_unprintable(describe_error(value))
    if isinstance(value, str):
        return escape_unprintable(value if len(value) <= _TEXT_CHARS_MAX else value[:_TEXT_CHARS_MAX] + "...")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_safe_value(str(key)): _safe_value(held) for key, held in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_safe_value(held) for held in value]
    return f"<{type(value).__name__}>"


def _error_of(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return exc_info[1] if isinstance(exc_info[1], BaseException) else None
    return sys.exc_info()[1] if exc_info else None


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then its causes."""
    seen: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def _describe_one(error: BaseException) -> str:
    kind = type(error)
    home = kind.__module__.partition(".")[0]
    parts = [kind.__qualname__ if home in ("builtins", "memstream_server") else f"{home}.{kind.__qualname__}"]
    parts += [f"{name}={value}" for name in _CODES if (value := _format_code(error, name))]
    if getattr(kind, "log_text", False):
        parts[0] += ":"
        parts.append(str(error)[:_TEXT_CHARS_MAX])
    elif isinstance(error, OSError) and error.strerror:
        parts.append(f"({error.strerror})")
    return " ".join(parts)


def _format_code(error: BaseException, name: str) -> str:
    value = getattr(error, name, None)
    if isinstance(value, bool) or not isinstance(value, int | str):
        return ""
    return str(value) if _CODE.fullmatch(str(value)) else ""


def _list_frames(error: BaseException) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost call first."""
    return [
        (frame.f_code.co_filename, line or 0, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]


def _shorten_path(file: str) -> str:
    return _PATH_HEAD.sub("", file)
