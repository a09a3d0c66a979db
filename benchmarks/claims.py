"""Claims: our figure compared with another side's figure of the same run, as one table."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from report import PAUSE, Report, Size, format_number, make_parser

HEADER = ("claim", "ours", "other side", "other's", "ratio", "aim", "met", "CPU µs", "other's CPU µs")
CPU = "CPU µs"
"""Report column: CPU of all processes that took part, in microseconds per operation."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on the ratio or, with a `unit`, on our own figure in that unit."""

    bound: float
    at_most: bool
    unit: str = ""

    def is_met_by(self, claim: Claim) -> bool:
        """Whether the claim's medians are within the bound; False if there is no figure."""
        value = claim.ours if self.unit else claim.ratio
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        sign = "≤" if self.at_most else "≥"
        return f"{sign} {self.bound:,g} {self.unit or 'times'}"


def at_most(bound: float, unit: str = "") -> Aim:
    """The ratio (with a unit: our figure) must not exceed `bound`."""
    return Aim(bound, True, unit)


def at_least(bound: float, unit: str = "") -> Aim:
    """The ratio (with a unit: our figure) must reach `bound`."""
    return Aim(bound, False, unit)


PAUSE_AIM = at_most(20, "ms")


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the table. Figures are medians of rounds; the ratio is ours / other's, NaN if one is missing."""

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
        """ "yes", "no", or "-" without an aim."""
        return "-" if self.aim is None else "yes" if self.aim.is_met_by(self) else "no"

    def table_cells(self) -> tuple[str, ...]:
        """The cells in the order of `HEADER`."""
        other_unit = f" {self.unit}" if not math.isnan(self.other) else ""
        return (
            self.name,
            f"{format_number(self.ours)} {self.unit}",
            self.other_name,
            format_number(self.other) + other_unit,
            "-" if math.isnan(self.ratio) else f"{self.ratio:.3g}",
            "-" if self.aim is None else str(self.aim),
            self.met,
            format_number(self.cpu_us),
            format_number(self.other_cpu_us),
        )

    def to_record(self) -> dict[str, Any]:
        """For JSON, which has no NaN; includes `met`."""
        figures = {name: None if value != value else value for name, value in asdict(self).items()}
        return figures | {"met": self.met}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Claim:
        """Inverse of `to_record`."""
        given = {field.name: record[field.name] for field in fields(cls)}
        figures = {name: math.nan if value is None else value for name, value in given.items()}
        return cls(**figures | {"aim": given["aim"] and Aim(**given["aim"])})


def make_claim(
    report: Report, name: str, row: str, column: str, other: str, aim: Aim | None = None, other_column: str = ""
) -> Claim:
    """Compare a row of a report with another one. The unit is the last word of the column's name.

    The ratio is the median of the per-round ratios, so a slow round affects both sides. If one side was not measured in
    every round, it is the ratio of the medians.
    """
    there = other_column or column
    ours, others = report.round_values(row, column), report.round_values(other, there)
    if len(ours) == len(others) and others:
        ratio = statistics.median(a / b if b else math.nan for a, b in zip(ours, others, strict=True))
    else:
        below = report.median_of(other, there)
        ratio = report.median_of(row, column) / below if below else math.nan
    return Claim(
        name,
        column.rpartition(" ")[2],
        report.median_of(row, column),
        other,
        report.median_of(other, there),
        ratio,
        aim,
        report.median_of(row, CPU),
        report.median_of(other, CPU),
    )


def make_pause_claim(report: Report, name: str, row: str, other: str) -> Claim:
    """Compare the longest event-loop pause of the server with that of another loop."""
    return make_claim(report, name, row, PAUSE, other, PAUSE_AIM)


def format_table(claims: Sequence[Claim]) -> str:
    """The claims as a Markdown table."""
    lines = [HEADER, *(claim.table_cells() for claim in claims)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEADER))]
    table = [
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([table[0], rule, *table[1:]])


def run_standalone(
    description: str | None,
    run: Callable[[Size, int | None], Report],
    make_claims: Callable[[Report], list[Claim]],
    strict: bool = False,
) -> Report:
    """Run a benchmark as a program: measure, print figures and claims, write JSON if requested.

    With --strict the program fails if a claim misses its aim; with `strict` always, except with --tiny.
    """
    given = make_parser(description).parse_args()
    report = run(given.size, given.rounds)
    claims = make_claims(report)
    report.print_table()
    print(format_table(claims))
    report.write_json(given.json, claims=[claim.to_record() for claim in claims])
    missed = [claim.name for claim in claims if claim.met == "no"]
    if missed and (given.strict or (strict and given.size is not Size.TINY)):
        sys.exit(f"aims missed: {len(missed)}: {'; '.join(missed)}")
    return report
