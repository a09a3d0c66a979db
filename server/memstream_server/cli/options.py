"""Flags that several commands have: --json, and filters of fragments."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

import click

from memstream.values import Filter, FragmentKind, MetadataValue, Tier

F = TypeVar("F", bound=Callable[..., Any])

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def json_option(command: F) -> F:
    """Adds --json to a command, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


class TimeParam(click.ParamType[datetime]):
    """A time: ISO 8601 (UTC if it has no zone), or a duration before now such as 90m, 12h, 7d."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return parse_time(str(value))
        except ValueError:
            self.fail(
                f"{value!r} is neither a time such as 2026-05-08T12:00Z nor a duration such as 12h or 7d", param, ctx
            )


class MomentParam(click.ParamType["int | datetime"]):
    """A moment of a memory: a revision, or a time as in TimeParam."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | datetime:
        if isinstance(value, int | datetime):
            return value
        text = str(value)
        if text.isdecimal():
            return int(text)
        try:
            return parse_time(text)
        except ValueError:
            self.fail(f"{value!r} is neither a revision nor a time such as 2026-05-08T12:00Z or 7d", param, ctx)


as_of_option = click.option(
    "--as-of", type=MomentParam(), metavar="MOMENT", help="As of this revision or time, as far as the memory keeps it."
)


def parse_time(text: str) -> datetime:
    """Parses a time or a duration before now. Raises ValueError."""
    if span := _AGO.fullmatch(text):
        try:
            return datetime.now(UTC) - timedelta(seconds=float(span[1]) * _UNITS_S[span[2]])
        except OverflowError as error:
            raise ValueError(str(error)) from error
    return to_utc(datetime.fromisoformat(text))


def to_utc(time: datetime) -> datetime:
    """Converts to UTC; a time without a zone is UTC."""
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


class MetadataParam(click.ParamType[tuple[str, tuple[MetadataValue, ...]]]):
    """KEY=VALUE of metadata. A value matches as text, and as a number or bool if it parses as one."""

    name = "key=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[MetadataValue, ...]]:
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        if key[-1] in "<>!~:" or text.startswith(("=", "~")):
            self.fail(
                f"{value!r} has an unknown operator: only KEY=VALUE is supported. "
                "Write a value that begins with = or ~ as JSON: KEY='\"=...\"'",
                param,
                ctx,
            )
        return key, metadata_readings(text)


class LabelParam(click.ParamType[tuple[str, str]]):
    """KEY=VALUE of a memory's labels; the value is text."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        return key, text


def metadata_readings(text: str) -> tuple[MetadataValue, ...]:
    """The metadata values that `text` can mean: 5 matches a stored 5 and a stored "5"; '"5"' matches only "5"."""
    try:
        value = json.loads(text)
    except ValueError:
        return (text,)
    if isinstance(value, bool):
        return (value, text)
    if isinstance(value, str):
        return (value,)
    if isinstance(value, int):
        return (value, float(value), text) if abs(value) < 2**53 else (value, text)
    return (value, text) if isinstance(value, float) else (text,)


def filter_options(command: F) -> F:
    """Adds the filter flags to a command, as one argument `chosen`; None if no flag was passed."""

    @click.option("--session", "sessions", multiple=True, metavar="NAME", help="Only this session (may be repeated).")
    @click.option("--speaker", "speakers", multiple=True, metavar="NAME", help="Only this speaker (may be repeated).")
    @click.option(
        "--tier",
        "tiers",
        multiple=True,
        type=click.Choice([tier.value for tier in Tier]),
        help="Only this tier (may be repeated).",
    )
    @click.option(
        "--kind",
        "kinds",
        multiple=True,
        type=click.Choice([kind.value for kind in FragmentKind]),
        help="Only this kind (may be repeated).",
    )
    @click.option(
        "--since", type=TimeParam(), metavar="TIME", help="Only observed at or after: 2026-05-08, or 7d for a week."
    )
    @click.option("--until", type=TimeParam(), metavar="TIME", help="Only observed before.")
    @click.option(
        "--importance-min", type=click.FloatRange(0, 1), metavar="NUMBER", help="Only this importance or more."
    )
    @click.option(
        "--metadata",
        "conditions",
        multiple=True,
        type=MetadataParam(),
        metavar="KEY=VALUE",
        help="Only this metadata; several values of one key match any of them.",
    )
    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        conditions: dict[str, tuple[MetadataValue, ...]] = {}
        for key, values in kwargs.pop("conditions"):
            conditions[key] = conditions.get(key, ()) + values
        chosen = Filter(
            sessions=kwargs.pop("sessions"),
            speakers=kwargs.pop("speakers"),
            tiers=tuple(Tier(tier) for tier in kwargs.pop("tiers")),
            kinds=tuple(FragmentKind(kind) for kind in kwargs.pop("kinds")),
            observe_time_min=kwargs.pop("since"),
            observe_time_max=kwargs.pop("until"),
            importance_min=kwargs.pop("importance_min"),
            metadata=conditions,
        )
        return command(*args, chosen=None if chosen == Filter() else chosen, **kwargs)

    return cast("F", wrapper)
