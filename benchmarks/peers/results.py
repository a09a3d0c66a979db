"""The comparison as a page: the table, the figures in which memstream is not first, and a note for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.compare import DEPTHS, LIMIT, Outcome
from benchmarks.peers.contenders import MEMSTREAM
from benchmarks.peers.load import Load


@dataclass(frozen=True)
class Column:
    """A compared figure; `digits` after the decimal point."""

    title: str
    figure: str
    digits: int = 0
    more_is_better: bool = True


COLUMNS = (
    Column("ingest/s", "ingest_per_s"),
    Column("one at a time/s", "single_per_s"),
    Column("recall p50 ms", "recall_p50_ms", 2, more_is_better=False),
    Column("recall p99 ms", "recall_p99_ms", 2, more_is_better=False),
    Column("ingest CPU µs", "ingest_cpu_us", more_is_better=False),
    Column("recall CPU ms", "recall_cpu_ms", 2, more_is_better=False),
    Column("RSS MB", "resident_mb", more_is_better=False),
)
"""Compared among the systems that keep everything they are given."""
DEPTH_TITLES = {f"recall@{depth}": f"@{depth}" for depth in DEPTHS}
"""Compared among all."""


def find_out(given: Path | None, only: Sequence[str], committed: Path) -> Path | None:
    """The directory for the results, None to write none: a run of some peers does not replace the table of all."""
    return given or (None if only else committed)


def format_page(outcomes: Sequence[Outcome], load: Load, rounds: int, vectors: str, on: Mapping[str, str]) -> str:
    """Markdown. `on`: the machine, from report.describe_machine before the run."""
    parts = [
        "# Against peers",
        "Written by `make bench-peers`; the [README](../README.md#peers) explains what is measured and how.",
        ", ".join(f"{name} {value}" for name, value in on.items()),
        f"{len(load.items):,} observations into one memory, {len(load.queries):,} recalls of {LIMIT}, "
        f"{len(load.single):,} observations one at a time before the kill; medians of {rounds} interleaved rounds. "
        f"Vectors: {vectors}.",
        "\n".join(_table_lines(outcomes)),
        _QUALITY if any(one.quality for one in outcomes) else _NO_QUALITY,
        "## Where memstream is not first",
        "\n".join(not_first(outcomes)) or "Nowhere in this run.",
        "## Rows",
        "\n".join(f"- **{one.contender.title}** ({one.contender.versions}). {one.contender.note}" for one in outcomes),
    ]
    return "\n\n".join(parts) + "\n"


_QUALITY = (
    "@4, @10, @20: share of the known evidence of answerable questions among the first 4, 10 and 20 "
    "(`benchmarks/quality.py`). Hashing vectors carry no meaning: with a model's vectors (`--model`), systems that "
    "rank by vectors alone score higher than here."
)
_NO_QUALITY = "Recall quality was not measured: it needs the measure and its conversations (`--data DIR`)."


def make_record(outcomes: Sequence[Outcome], load: Load, vectors: str, on: Mapping[str, str]) -> dict[str, Any]:
    """Every round's figures, for JSON."""
    rows = {
        one.contender.title: {
            "versions": one.contender.versions,
            "rounds": [asdict(each) for each in one.rounds],
            "quality": one.quality,
            "failed": one.failed,
        }
        for one in outcomes
    }
    sizes = {"items": len(load.items), "queries": len(load.queries), "single": len(load.single)}
    return {"machine": dict(on), "load": sizes, "vectors": vectors, "rows": rows}


def not_first(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each column in which a comparable system is ahead of memstream."""
    (ours,) = (one for one in outcomes if one.contender == MEMSTREAM)
    others = [one for one in outcomes if one.contender.module != MEMSTREAM.module]
    lines = []
    for column in COLUMNS:
        sign = -1 if column.more_is_better else 1
        mine = ours.median(column.figure)
        before = sorted(
            (one for one in others if one.keeps and sign * one.median(column.figure) < sign * mine),
            key=lambda one: sign * one.median(column.figure),
        )
        if before:
            named = ", ".join(
                f"{one.contender.title} {_format_figure(one.median(column.figure), column)}" for one in before
            )
            lines.append(f"- {column.title} (memstream {_format_figure(mine, column)}): {named}")
    for key, title in DEPTH_TITLES.items():
        mine = ours.quality.get(key, 0.0)
        ahead = [one for one in others if one.quality.get(key, 0.0) > mine]
        if ahead:
            named = ", ".join(f"{one.contender.title} {one.quality[key]:.3f}" for one in ahead)
            lines.append(f"- {title} (memstream {mine:.3f}): {named}")
    return lines


def _table_lines(outcomes: Sequence[Outcome]) -> list[str]:
    titles = ["", *(column.title for column in COLUMNS), *DEPTH_TITLES.values(), "holds", "durable"]
    return [
        _format_row(titles),
        "|---|" + "---:|" * (len(titles) - 2) + "---|",
        *(_format_row(_row_cells(one)) for one in outcomes),
    ]


def _row_cells(one: Outcome) -> list[str]:
    quality = [f"{one.quality[key]:.3f}" if key in one.quality else "-" for key in DEPTH_TITLES]
    if not one.rounds:
        return [one.contender.title, *["-"] * len(COLUMNS), *quality, "-", f"not measured: {one.failed}"]
    figures = [_format_figure(one.median(column.figure), column) for column in COLUMNS]
    figures[-1] = f"{one.median('resident_empty_mb'):,.0f} → {figures[-1]}"
    if not one.keeps:  # discarded items cost nothing
        figures = [f"({figure})" for figure in figures]
    return [one.contender.title, *figures, *quality, f"{one.median('held'):.0%}", _describe_durability(one)]


def _describe_durability(one: Outcome) -> str:
    said = "yes" if one.keeps else "no"
    if one.contender.in_memory:
        said = "no, in memory"
    else:
        said += f": {one.median('kept'):.0%} listed, {one.median('recalled'):.0%} found"
    for problem in (*one.errors, one.failed):
        said += f"; {problem}" if problem else ""
    return said


def _format_figure(value: float, column: Column) -> str:
    return f"{value:,.{column.digits}f}"


def _format_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
