"""Output of commands: JSON with stable names for programs, tables for people.

JSON has the SDK's values under the SDK's field names (memstream.values, memstream.resources): times as RFC 3339 in UTC,
durations in seconds, enums by value. A listing is one JSON object per line, anything else a single object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

import click
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from memstream.errors import MemstreamError
from memstream.values import Fragment
from memstream_server.core.printable import escape_unprintable, number_text

_LAYOUT = "\n\t"
"""Control characters allowed in a text of several lines."""
UNSIZED_WIDTH = 160
"""Width of a table that is not written to a terminal."""


def to_json_value(value: object) -> Any:
    """Converts a value to what json.dumps accepts."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, MemstreamError):
        return {"reason": value.reason, "message": str(value.message)}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(to_json_value(item) for item in value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [to_json_value(item) for item in value]
    return value


def print_json(value: object) -> None:
    """Prints one line of JSON on standard output."""
    click.echo(json.dumps(to_json_value(value), ensure_ascii=False))


def open_console(*, stderr: bool = False) -> Console:
    """A console without markup, so that content of a memory is shown unchanged."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNSIZED_WIDTH
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, width=width)


def print_parts(out: Console, *parts: RenderableType) -> None:
    """Prints tables and texts without trailing blanks; escapes untrusted text."""
    with out.capture() as captured:
        for part in parts:
            if isinstance(part, str | Text):  # a pipe gets each text as one line
                out.print(_escape_cell(part), soft_wrap=not out.is_terminal)
            else:
                out.print(part)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    click.echo("\n".join(lines), err=out.stderr)


def print_line(text: str, *, err: bool = False) -> None:
    """Prints a line for people; escapes untrusted text."""
    click.echo(escape_unprintable(text, _LAYOUT), err=err)


class SafeTable(Table):
    """A table that escapes control characters in its cells: they come from memories and servers."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(_escape_cell(cell) if isinstance(cell, str | Text) else cell for cell in cells), **options)


def _escape_cell(text: str | Text) -> Text:
    if isinstance(text, str):
        return Text(escape_unprintable(text, _LAYOUT))
    if text.plain == escape_unprintable(text.plain, _LAYOUT):
        return text
    return Text(escape_unprintable(text.plain, _LAYOUT), style=text.style)


def escape_text(text: str, longest: int | None = None) -> Text:
    """Text of a memory, truncated to `longest`; escapes control characters, which could control the terminal."""
    if longest is not None and len(text) > longest:
        text = text[: longest - 1].rstrip() + "…"
    return _escape_cell(text)


def escape_line(text: str, longest: int) -> Text:
    """As `shown`, without line breaks."""
    return escape_text(" ".join(text.split()), longest)


def format_time(time: datetime | None) -> str:
    """Formats a time in UTC, to the minute."""
    return "" if time is None else time.astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def fragment_text(fragment: Fragment) -> str:
    """The content of a fragment; of a structured one its values, one line each."""
    if fragment.structured is None:
        return fragment.content
    values = ((field.name, getattr(fragment.structured, field.name)) for field in fields(fragment.structured))
    return "\n".join(f"{name}: {value}" for name, value in values if value)


def create_table(*columns: str, numbers: Iterable[str] = (), wide: str = "") -> SafeTable:
    """An empty table; columns in `numbers` are right-aligned, `wide` takes the remaining width."""
    grid = SafeTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    right = set(numbers)
    for name in columns:
        if name == wide:
            grid.add_column(name, overflow="fold", ratio=1)
        else:
            grid.add_column(name, justify="right" if name in right else "left", no_wrap=name in right)
    return grid


def facts_table(pairs: Iterable[tuple[str, object]]) -> SafeTable:
    """Names and values in two columns; empty values and None are omitted."""
    grid = SafeTable(box=None, padding=(0, 2), show_header=False, pad_edge=False, collapse_padding=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value not in (None, "", (), [], {}):
            grid.add_row(name, escape_text(_format_fact(value)))
    return grid


def _format_fact(value: object) -> str:
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, timedelta):
        return f"{number_text(value.total_seconds())} s"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_format_fact(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(sorted(_format_fact(item) for item in value))
    return str(value)
