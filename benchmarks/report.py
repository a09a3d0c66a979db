"""Figures as a table and as JSON, with the machine they were measured on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("grpcio", "milvus-lite", "numpy", "protobuf", "pymilvus")


def options(description: str | None) -> argparse.ArgumentParser:
    """The command line every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the real sizes; takes many minutes")
    parser.add_argument("--rounds", type=int, help="rounds, interleaved; medians are shown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures here")
    return parser


def machine() -> dict[str, str]:
    """What the figures depend on beside the code."""
    found = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "load before": f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "?",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    return found | {name: version(name) for name in PACKAGES}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


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

    def add(self, row: str, **figures: float) -> None:
        """One round's figures of a row; names of columns with _ for spaces."""
        held = self.rows.setdefault(row, {})
        for name, value in figures.items():
            held.setdefault(name.replace("_", " "), []).append(value)

    def median(self, row: str, column: str) -> float:
        """NaN where there is no such figure."""
        values = self.rows.get(row, {}).get(column, [])
        return statistics.median(values) if values else float("nan")

    def ratio(self, what: str, row: str, other: str, column: str, other_column: str = "") -> None:
        """Prints how many times one row's median is another's."""
        above, below = self.median(row, column), self.median(other, other_column or column)
        print(f"{what}: {above / below:.3g}" if below else f"{what}: -")

    def show(self) -> None:
        """The table."""
        print(", ".join(f"{name} {value}" for name, value in self.machine.items()))
        width = max(map(len, self.rows), default=0)
        print(f"{'':{width}}  " + "  ".join(f"{column:>14}" for column in self.columns))
        for row in self.rows:
            print(f"{row:{width}}  " + "  ".join(f"{_shown(self.median(row, column)):>14}" for column in self.columns))

    def write(self, file: Path | None, **more: Any) -> None:
        """Everything as JSON, where a file was asked for."""
        if file is not None:
            file.write_text(json.dumps({"machine": self.machine, "rows": self.rows, **more}, indent=1), "utf-8")


def _shown(value: float) -> str:
    if value != value:  # NaN
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
