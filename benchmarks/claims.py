"""Claims: what we say of the server beside what was measured of the other side in the same run, as one table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from report import PAUSE, Report, Size, options, shown

HEADER = ("claim", "ours", "other side", "other's", "ratio", "aim", "met", "CPU µs", "other's CPU µs")
CPU = "CPU µs"
"""The column of a report that holds the CPU of all processes that took part, in microseconds per operation."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on the ratio or, where `unit` is given, on our own figure in that unit."""

    bound: float
    at_most: bool
    unit: str = ""

    def met(self, claim: Claim) -> bool:
        """Whether the claim's medians keep the bound; never so where there is no figure."""
        value = claim.ours if self.unit else claim.ratio
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        sign = "≤" if self.at_most else "≥"
        return f"{sign} {self.bound:,g} {self.unit or 'times'}"


def at_most(bound: float, unit: str = "") -> Aim:
    """The ratio (our figure, where a unit is given) must not exceed it."""
    return Aim(bound, True, unit)


def at_least(bound: float, unit: str = "") -> Aim:
    """The ratio (our figure, where a unit is given) must reach it."""
    return Aim(bound, False, unit)


PAUSE_AIM = at_most(20, "ms")


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the table. Figures are medians of rounds; the ratio is ours / other's, NaN where one is missing."""

    name: str
    unit: str
    ours: float
    other_name: str
    other: float
    ratio: float
    aim: Aim | None = None
    cpu_us: float = math.nan
    other_cpu_us: float = math.nan

    @property
    def met(self) -> str:
        """yes, no, or - where there is no aim."""
        return "-" if self.aim is None else "yes" if self.aim.met(self) else "no"

    def cells(self) -> tuple[str, ...]:
        """As `HEADER` names them."""
        other_unit = f" {self.unit}" if not math.isnan(self.other) else ""
        return (
            self.name,
            f"{shown(self.ours)} {self.unit}",
            self.other_name,
            shown(self.other) + other_unit,
            "-" if math.isnan(self.ratio) else f"{self.ratio:.3g}",
            "-" if self.aim is None else str(self.aim),
            self.met,
            shown(self.cpu_us),
            shown(self.other_cpu_us),
        )

    def record(self) -> dict[str, Any]:
        """For JSON, which has no NaN; with whether it is met."""
        figures = {name: None if value != value else value for name, value in asdict(self).items()}
        return figures | {"met": self.met}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Claim:
        """What `record` gave."""
        given = {field.name: record[field.name] for field in fields(cls)}
        told = {name: math.nan if value is None else value for name, value in given.items()}
        return cls(**told | {"aim": given["aim"] and Aim(**given["aim"])})


def claim(
    report: Report, name: str, row: str, column: str, other: str, aim: Aim | None = None, other_column: str = ""
) -> Claim:
    """A row of a report beside another one of it. The unit is what the column's name ends in.

    The ratio is the median of the rounds' own ratios, so that what slows a whole round down counts on both sides; of
    the medians, where one side was not measured in every round.
    """
    there = other_column or column
    ours, others = report.values(row, column), report.values(other, there)
    if len(ours) == len(others) and others:
        ratio = statistics.median(a / b if b else math.nan for a, b in zip(ours, others, strict=True))
    else:
        below = report.median(other, there)
        ratio = report.median(row, column) / below if below else math.nan
    return Claim(
        name,
        column.rpartition(" ")[2],
        report.median(row, column),
        other,
        report.median(other, there),
        ratio,
        aim,
        report.median(row, CPU),
        report.median(other, CPU),
    )


def pause(report: Report, name: str, row: str, other: str) -> Claim:
    """The longest pause of the server's event loop beside that of another one."""
    return claim(report, name, row, PAUSE, other, PAUSE_AIM)


def markdown(claims: Sequence[Claim]) -> str:
    """The table."""
    lines = [HEADER, *(claim.cells() for claim in claims)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEADER))]
    told = [
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([told[0], rule, *told[1:]])


def standalone(
    description: str | None, run: Callable[[Size, int | None], Report], told: Callable[[Report], list[Claim]]
) -> Report:
    """A benchmark as a program of its own: measures, prints its figures and its claims, writes JSON where asked to."""
    given = options(description).parse_args()
    report = run(given.size, given.rounds)
    claims = told(report)
    report.show()
    print(markdown(claims))
    report.write(given.json, claims=[claim.record() for claim in claims])
    return report
