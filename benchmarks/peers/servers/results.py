"""The comparison of servers as a page: the table with ratios, the aims, and a note for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.peers.load import Load
from benchmarks.peers.servers.compare import BATCH, LIMIT, Outcome
from benchmarks.peers.servers.contenders import CHROMA, FLOOR, MEMSTREAM, ONCE, PGVECTOR, REDIS

RESIDENT_MAX_MB = 200
_AND = " and "
_COLUMNS = (
    ("texts/s", "texts_per_s", 0),
    ("lone p50 ms", "lone_p50_ms", 2),
    ("recall p50 ms", "recall_p50_ms", 2),
    ("recall p99 ms", "recall_p99_ms", 2),
    ("RSS MB", "resident_mb", 0),
    ("PSS MB", "proportional_mb", 0),
)


def format_page(outcomes: Sequence[Outcome], load: Load, rounds: int, on: Mapping[str, str]) -> str:
    """Markdown. `on`: the machine, from report.describe_machine, and the load after the run."""
    parts = [
        "# Against servers",
        "Written by `make bench-servers`; the [README](../README.md#servers) explains what is measured and how.",
        ", ".join(f"{name} {value}" for name, value in on.items()),
        f"{len(load.items):,} texts into one memory in batches of {BATCH}, {len(load.queries):,} recalls of {LIMIT}, "
        f"then {len(load.single):,} lone writes; medians of {rounds} interleaved rounds. Memory and the kill are of "
        f"the first round, and {_AND.join(one.title for one in ONCE)} ran only in it. In parentheses: the median of "
        "the rounds' ratios to memstream. Vectors: memstream's own hashing, 384 dimensions, computed once for "
        "all, in no figure.",
        "\n".join(_table_lines(outcomes)),
        *_describe_floor(outcomes),
        "## Aims",
        "\n".join(list_aims(outcomes)) or "Not all the servers that they name were measured.",
        "## Rows",
        "\n".join(f"- **{one.contender.title}** ({one.contender.versions}). {one.contender.note}" for one in outcomes),
    ]
    return "\n\n".join(parts) + "\n"


def make_record(outcomes: Sequence[Outcome], load: Load, on: Mapping[str, str]) -> dict[str, Any]:
    """Every round's figures, for JSON."""
    rows = {
        one.contender.title: {
            "versions": one.contender.versions,
            "rounds": [asdict(each) for each in one.rounds],
            "failed": one.failed,
        }
        for one in outcomes
    }
    sizes = {"items": len(load.items), "queries": len(load.queries), "single": len(load.single), "batch": BATCH}
    return {"machine": dict(on), "load": sizes, "rows": rows}


def _describe_floor(outcomes: Sequence[Outcome]) -> list[str]:
    """memstream's latencies and the floor's, if both were measured."""
    rows = {one.contender.title: one for one in outcomes if one.rounds}
    if not {MEMSTREAM.title, FLOOR.title} <= rows.keys():
        return []
    ours, floor = rows[MEMSTREAM.title], rows[FLOOR.title]
    parts = [
        f"{name} takes {ours.median(figure):.2f} ms, the floor's {floor.median(figure):.2f} ms "
        f"({ours.ratio(figure, floor):.1f} times)"
        for name, figure in (("a lone write", "lone_p50_ms"), ("a recall", "recall_p50_ms"))
    ]
    return [f"Against Python, gRPC, the SDK and the disk without memstream: {'; '.join(parts)}."]


def list_aims(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each aim whose rows were measured: what is wanted, what was measured, and whether it is met."""
    rows = {one.contender.title: one for one in outcomes if one.rounds}
    ours = rows.get(MEMSTREAM.title)
    if ours is None:
        return []
    lines = []
    for other, figure, name, limit in (
        (CHROMA, "texts_per_s", "more texts/s than Chroma", None),
        (CHROMA, "lone_p50_ms", "lone p50 below Chroma's", 1.0),
        (CHROMA, "recall_p50_ms", "recall p50 below Chroma's", 1.0),
        (PGVECTOR, "lone_p50_ms", "lone p50 at most twice pgvector's", 2.0),
        (REDIS, "recall_p50_ms", "recall p50 at most twice Redis Stack's", 2.0),
    ):
        if other.title in rows:
            ratio = ours.ratio(figure, rows[other.title])
            met = ratio > 1 if limit is None else ratio <= limit
            lines.append(f"- {name}: {_say_met(met)}, {ratio:.2f} times")
    resident = ours.median("resident_mb")
    met = resident <= RESIDENT_MAX_MB
    lines.append(f"- RSS with all texts at most {RESIDENT_MAX_MB} MB: {_say_met(met)}, {resident:.0f} MB")
    return lines


def _say_met(met: bool) -> str:
    return "met" if met else "missed"


def _table_lines(outcomes: Sequence[Outcome]) -> list[str]:
    titles = ["", *(title for title, _, _ in _COLUMNS), "finds its own writes", "left after kill -9"]
    ours = next((one for one in outcomes if one.contender == MEMSTREAM), None)
    return [
        _format_row(titles),
        "|---|" + "---:|" * (len(titles) - 1),
        *(_format_row(_row_cells(one, ours)) for one in outcomes),
    ]


def _row_cells(one: Outcome, ours: Outcome | None) -> list[str]:
    if not one.rounds:
        return [
            one.contender.title,
            *["-"] * (len(_COLUMNS) + 1),
            f"not measured: {one.failed or 'the run has not ended'}",
        ]
    cells = [one.contender.title]
    for _, figure, digits in _COLUMNS:
        ratio = "" if ours is None or one is ours else f" ({one.ratio(figure, ours):.2f})"
        cells.append(f"{one.median(figure):,.{digits}f}{ratio}")
    unopened = next((each.unopened for each in one.rounds if each.unopened), "")
    kept = f"unknown: {unopened}" if unopened else f"{one.median('kept'):.0%}"
    return [*cells, f"{one.median('fresh'):.0%}", f"{kept}; {one.failed}" if one.failed else kept]


def _format_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
