"""Flags that several commands have: --json, and filters of fragments."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar, cast

import click

from memstream.times import read_time, read_zone
from memstream.values import Filter, FragmentKind, Scalar, Tier

F = TypeVar("F", bound=Callable[..., Any])

_ZONE = "memstream.time_zone"
"""Key of the zone in the context of a command."""


def json_option(command: F) -> F:
    """Adds --json to a command, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


class TimeParam(click.ParamType[datetime]):
    """A time as `memstream.read_time` reads it, in the zone of --time-zone."""

    name = "time"

    def __init__(self, until: bool = False) -> None:
        self._until = until

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        zone = "" if ctx is None else ctx.meta.get(_ZONE, "")
        try:
            return read_time(str(value), zone, until=self._until)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class MomentParam(click.ParamType["int | datetime"]):
    """A moment of a memory: a revision, or a time as in TimeParam."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | datetime:
        text = str(value)
        return int(text) if text.isdecimal() else TimeParam().convert(value, param, ctx)


as_of_option = click.option(
    "--as-of", type=MomentParam(), metavar="MOMENT", help="As of this revision or time, as far as the memory keeps it."
)


def _keep_zone(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    try:
        read_zone(value or "")
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error
    ctx.meta[_ZONE] = value or ""
    return value


def time_zone_option(of: str = "Time zone of dates", expose: bool = False) -> Callable[[F], F]:
    """Adds --time-zone to a command. It is eager, so that the times of the command are read in it."""
    return click.option(
        "--time-zone",
        metavar="NAME",
        is_eager=True,
        expose_value=expose,
        callback=_keep_zone,
        help=f"{of}, by its IANA name. Default: UTC.",
    )


class MetadataParam(click.ParamType[tuple[str, tuple[Scalar, ...]]]):
    """KEY=VALUE of metadata. A value matches as text, and as a number or bool if it parses as one."""

    name = "key=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[Scalar, ...]]:
        key, equals, text = str(value).partition("=")
        if not equals or not key:
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        if key[-1] in "<>!~:" or text.startswith(("=", "~")):
            self.fail(
                f"{value!r} has an unknown operator: only KEY=VALUE is supported; --where has others. "
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


def metadata_readings(text: str) -> tuple[Scalar, ...]:
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
    @click.option(
        "--until", type=TimeParam(until=True), metavar="TIME", help="Only observed before; a date includes its day."
    )
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
    @click.option(
        "--where",
        "expression",
        default="",
        metavar="TEXT",
        help="Only what this filter selects: 'metadata.n >= 3 and not speaker = \"Bob\"'. See docs/filters.md.",
    )
    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        conditions: dict[str, tuple[Scalar, ...]] = {}
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
            expression=kwargs.pop("expression"),
        )
        return command(*args, chosen=None if chosen == Filter() else chosen, **kwargs)

    return cast("F", wrapper)
