"""Benchmark figures as a table and as JSON, with a description of the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from probe import Pause

LOAD = "load before"
PAUSES = PAUSE, COMPUTING, COLLECTING = "pause ms", "computing ms", "collecting ms"
PACKAGES = ("grpcio", "milvus-lite", "numpy", "protobuf", "pymilvus")


class Size(StrEnum):
    """How much to measure: tiny only checks that it runs, short takes a few minutes, full has the real sizes."""

    TINY = "tiny"
    SHORT = "short"
    FULL = "full"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The command-line parser of every benchmark; the parsed `size` is a Size."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    for size, meaning in ((Size.FULL, "the real sizes; takes many minutes"), (Size.TINY, "only check that it runs")):
        sizes.add_argument(f"--{size}", dest="size", action="store_const", const=size, help=meaning)
    parser.set_defaults(size=Size.SHORT)
    parser.add_argument("--rounds", type=int, help="number of interleaved rounds; medians are shown")
    parser.add_argument("--strict", action="store_true", help="fail if an aim is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures to FILE")
    return parser


def describe_machine() -> dict[str, str]:
    """Name to value of everything the figures depend on besides the code."""
    found = {
        "processor": _processor_name(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        LOAD: f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "?",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }
    return found | {name: version(name) for name in PACKAGES}


def format_machine(machine: dict[str, str]) -> str:
    """The machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def own_cpu_s() -> float:
    """CPU seconds of this process so far, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a `share` (0 to 1) of the values does not exceed; NaN for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass
class Report:
    """Figures by row and column, one per round; printed as medians."""

    columns: Sequence[str]
    machine: dict[str, str] = field(default_factory=describe_machine)
    rows: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """Further values for the JSON that are not rows."""

    def add_round(self, row: str, **figures: float) -> None:
        """Add one round's figures to a row; keyword names are column names with _ for spaces."""
        held = self.rows.setdefault(row, {})
        for name, value in figures.items():
            held.setdefault(name.replace("_", " "), []).append(value)

    def add_pause(self, row: str, pause: Pause) -> None:
        """Add one round's longest event-loop pause to a row."""
        figures = {PAUSE: pause.wall_s, COMPUTING: pause.cpu_s, COLLECTING: pause.collecting_s}
        self.add_round(row, **{name: seconds * 1e3 for name, seconds in figures.items()})

    def round_values(self, row: str, column: str) -> list[float]:
        """The figure of each round; empty if there is none."""
        return self.rows.get(row, {}).get(column, [])

    def median_of(self, row: str, column: str) -> float:
        """Median over rounds; NaN if there is no figure."""
        values = self.round_values(row, column)
        return statistics.median(values) if values else float("nan")

    def print_table(self) -> None:
        """Print the medians."""
        print(format_machine(self.machine))
        width = max(map(len, self.rows), default=0)
        print(f"{'':{width}}  " + "  ".join(f"{column:>14}" for column in self.columns))
        for row in self.rows:
            print(
                f"{row:{width}}  "
                + "  ".join(f"{format_number(self.median_of(row, column)):>14}" for column in self.columns)
            )

    def write_json(self, file: Path | None, **more: Any) -> None:
        """Write everything to `file`, if one is given."""
        if file is not None:
            document = {"machine": self.machine, "rows": self.rows, **self.more, **more}
            file.write_text(json.dumps(document, indent=1), "utf-8")


def format_number(value: float) -> str:
    """For people; "-" for NaN."""
    if value != value:  # NaN
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
