"""Figures as a table and as JSON, with the machine they were measured on."""

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
    """How much is measured: tiny only shows that it runs, short takes a few minutes, full has the real sizes."""

    TINY = "tiny"
    SHORT = "short"
    FULL = "full"


def options(description: str | None) -> argparse.ArgumentParser:
    """The command line every benchmark has; `size` of what it parses is a Size."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    for size, meaning in ((Size.FULL, "the real sizes; takes many minutes"), (Size.TINY, "only to see that it runs")):
        sizes.add_argument(f"--{size}", dest="size", action="store_const", const=size, help=meaning)
    parser.set_defaults(size=Size.SHORT)
    parser.add_argument("--rounds", type=int, help="rounds, interleaved; medians are shown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures here")
    return parser


def machine() -> dict[str, str]:
    """What the figures depend on beside the code."""
    found = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        LOAD: f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "?",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }
    return found | {name: version(name) for name in PACKAGES}


def told(machine: dict[str, str]) -> str:
    """The machine in a line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def own_cpu_s() -> float:
    """CPU seconds this process has used, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them (0 to 1) do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass
class Report:
    """Figures by row and column, one per round; shown as medians."""

    columns: Sequence[str]
    machine: dict[str, str] = field(default_factory=machine)
    rows: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """What is no row, for the JSON."""

    def add(self, row: str, **figures: float) -> None:
        """One round's figures of a row; names of columns with _ for spaces."""
        held = self.rows.setdefault(row, {})
        for name, value in figures.items():
            held.setdefault(name.replace("_", " "), []).append(value)

    def pause(self, row: str, pause: Pause) -> None:
        """One round's longest pause of an event loop."""
        figures = {PAUSE: pause.wall_s, COMPUTING: pause.cpu_s, COLLECTING: pause.collecting_s}
        self.add(row, **{name: seconds * 1e3 for name, seconds in figures.items()})

    def values(self, row: str, column: str) -> list[float]:
        """Each round's figure; empty where there is none."""
        return self.rows.get(row, {}).get(column, [])

    def median(self, row: str, column: str) -> float:
        """NaN where there is no such figure."""
        values = self.values(row, column)
        return statistics.median(values) if values else float("nan")

    def show(self) -> None:
        """The table."""
        print(told(self.machine))
        width = max(map(len, self.rows), default=0)
        print(f"{'':{width}}  " + "  ".join(f"{column:>14}" for column in self.columns))
        for row in self.rows:
            print(f"{row:{width}}  " + "  ".join(f"{shown(self.median(row, column)):>14}" for column in self.columns))

    def write(self, file: Path | None, **more: Any) -> None:
        """Everything as JSON, where a file was asked for."""
        if file is not None:
            told = {"machine": self.machine, "rows": self.rows, **self.more, **more}
            file.write_text(json.dumps(told, indent=1), "utf-8")


def shown(value: float) -> str:
    """For people: a - where there is none."""
    if value != value:  # NaN
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
