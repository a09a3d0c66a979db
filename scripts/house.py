"""Print the shape of the house as a table, and fail where it got worse: `python -m scripts.house [--check | --record]`.

A figure has a limit and an aim in scripts/house.json. Lower is better for all. `--check` ends with 1 if a figure is
over its limit; `--record` lowers the limits to the figures of today and raises none. Who raises a limit edits the
file and gives the reason in docs/decisions.md. `--cpu COMMAND...` runs a command and compares the CPU minutes of it
and of its children, in proportion to the speed of the machine, with the limit of `test.cpu_minutes`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from scripts.measure_code import ROOT, import_circles, module_imports, python_files, single_importer_modules

RECORDS = Path(__file__).with_name("house.json")
SERVER = ROOT / "server/memstream_server"
TYPESCRIPT = ROOT / "client/typescript/src"
WAY = ROOT / "benchmarks/way.py"
CPU = "test.cpu_minutes"
REST = "rest.rss_ratio"
MEASURED_WITH_ROOM = {"calls": 1.05, "functions": 1.03, "way.recall.files": 1.05, CPU: 1.25, REST: 1.02}
"""The room over a limit, by a figure's name or its last word: background work adds calls, a busy machine CPU."""
PACKAGES = "click, grpc.aio, numpy, prometheus_client, pydantic_settings, sqlalchemy, structlog, uvicorn"
"""What every server imports of others."""
LOOP_S, LOOP_INTERVAL_S = 0.0245, 5.0
"""The loop on the machine that `test.cpu_minutes` was recorded for, and how often it is timed."""
REPEATS = 3
SMALL_LINES = 100
"""Lines of a module that should be part of its only importer, unless a reason keeps them apart."""
FIELD_WORDS = ("valid_until", "suspic", "supersed")
PUBLIC_CLASS = re.compile(r"^class ([A-Z]\w*)", re.MULTILINE)
TYPESCRIPT_IMPORT = re.compile(r"""^(?:import|export)\b[^;'"]*?\bfrom\s+["'](\.[^"']+)["']""", re.MULTILINE)


def measure_files() -> Iterator[tuple[str, int]]:
    """The figures that the files of the repository give."""
    texts = [path.read_text("utf-8") for path in python_files(SERVER)]
    yield "server.files", len(texts)
    yield "server.lines", sum(text.count("\n") for text in texts)
    imports = module_imports()
    single = single_importer_modules(imports)
    yield "server.single_importers", len(single)
    own = [name for name in single if is_imported_by_its_package(imports, name)]
    yield "server.single_importers_in_own_package", len(own)
    yield "server.small_single_importers", sum(is_small(name) for name in own)
    for word in FIELD_WORDS:
        yield f"server.files_naming.{word}", sum(word in text for text in texts)
    classes = Counter(name for text in texts for name in PUBLIC_CLASS.findall(text))
    yield "server.classes_of_one_name", sum(count > 1 for count in classes.values())
    yield "circles.python", len(import_circles(imports))
    yield "circles.typescript", len(import_circles(typescript_imports()))


def is_imported_by_its_package(imports: dict[str, set[str]], name: str) -> bool:
    """Whether a module of the same package imports this one."""
    package = name.rpartition(".")[0]
    return any(name in found and package in (one, one.rpartition(".")[0]) for one, found in imports.items())


def is_small(name: str) -> bool:
    """Whether a module has so few lines that its importer may hold them."""
    path = (SERVER.parent / name.replace(".", "/")).with_suffix(".py")
    return path.exists() and path.read_text("utf-8").count("\n") < SMALL_LINES


def typescript_imports() -> dict[str, set[str]]:
    """The imports among the modules of the TypeScript SDK, imports of types included, without generated code."""
    modules = {path for path in TYPESCRIPT.rglob("*.ts") if "gen" not in path.relative_to(TYPESCRIPT).parts}
    found: dict[str, set[str]] = {}
    for path in modules:
        targets = {
            (path.parent / name).resolve().with_suffix(".ts")
            for name in TYPESCRIPT_IMPORT.findall(path.read_text("utf-8"))
        }
        found[str(path)] = {str(target) for target in targets & modules if target != path}
    return found


def measure_way() -> dict[str, float]:
    """The figures of benchmarks/way.py."""
    run = subprocess.run([sys.executable, str(WAY), "--json"], capture_output=True, text=True, check=True, timeout=600)
    return {
        f"way.{operation}.{column}": figure
        for operation, figures in json.loads(run.stdout).items()
        for column, figure in figures.items()
    }


def measure_rest() -> dict[str, float]:
    """RSS of a server that has just begun to listen, divided by that of an interpreter that has imported PACKAGES."""
    cached = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # compiling takes memory too
    imports = [sys.executable, "-c", f"import os, {PACKAGES}; print(open('/proc/self/status').read())"]
    alone = subprocess.run(imports, env=cached, capture_output=True, text=True, check=True, timeout=600).stdout
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "memstream_server", "serve", "--listen", "127.0.0.1:0", "--data", data]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, env=cached, stdout=pipe, stderr=nowhere, text=True) as server:
            assert server.stdout is not None
            assert any("memstream listens" in line for line in server.stdout), "the server did not start"
            status = Path(f"/proc/{server.pid}/status").read_text("utf-8")
            server.terminate()
            server.wait(60)
    return {REST: round(resident_kib(status) / resident_kib(alone), 3)}


def resident_kib(status: str) -> int:
    """VmRSS of a status file of Linux' /proc."""
    return int(status.partition("VmRSS:")[2].split()[0])


def measure_least(measure: Callable[[], dict[str, float]], records: dict[str, dict[str, float]]) -> dict[str, float]:
    """The least of several measurements while one is worse than its limit: a busy machine lets background work into
    the way, and a first start compiles modules, which only add to them."""
    least = measure()
    for _ in range(REPEATS):
        if not any(is_worse(name, figure, records[name]["limit"]) for name, figure in least.items()):
            break
        least = {name: min(figure, least[name]) for name, figure in measure().items()}
    return least


def is_worse(name: str, figure: float, limit: float) -> bool:
    """Whether a figure is over its limit and the room that its measurement needs."""
    return figure > limit * MEASURED_WITH_ROOM.get(name, MEASURED_WITH_ROOM.get(name.rpartition(".")[2], 1))


def report_worse(figures: dict[str, float], records: dict[str, dict[str, float]]) -> bool:
    """Whether a figure is worse than its limit; prints those."""
    worse = {name for name, figure in figures.items() if is_worse(name, figure, records[name]["limit"])}
    for name in sorted(worse):
        print(f"worse: {name} is {figures[name]:g}, the limit is {records[name]['limit']:g}", file=sys.stderr)
    if worse:
        print(
            "make it no worse, or raise the limit in scripts/house.json and say why in docs/decisions.md",
            file=sys.stderr,
        )
    return bool(worse)


def print_table(figures: dict[str, float], records: dict[str, dict[str, float]]) -> None:
    """Print each figure with its limit and its aim."""
    print("| figure | today | limit | aim |\n|---|---|---|---|")
    for name, figure in figures.items():
        known = records.get(name, {})
        print(f"| {name} | {figure:g} | {known.get('limit', '-')} | {known.get('aim', '-')} |")


def lower_limits(figures: dict[str, float], records: dict[str, dict[str, float]]) -> None:
    """Write each figure that is better than its limit, and those that have none."""
    for name, figure in figures.items():
        known = records.setdefault(name, {})
        known["limit"] = min(figure, known.get("limit", figure))
    RECORDS.write_text(json.dumps(records, indent=2) + "\n", "utf-8")


def run_measured(command: list[str], records: dict[str, dict[str, float]]) -> int:
    """The exit code of a command, or 1 if it took more CPU than the limit.

    Its minutes are those of a machine on which the loop of `time_loop` takes LOOP_S: the loop runs every few seconds
    next to the command, since a machine that others share changes its speed.
    """
    loops_s = []
    with subprocess.Popen(command) as process:
        while process.returncode is None:
            loops_s.append(time_loop())
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOP_INTERVAL_S)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes, slowness = (used.ru_utime + used.ru_stime) / 60, fmean(loops_s) / LOOP_S
    figures = {CPU: round(minutes / slowness, 2)}
    print_table(figures, records)
    print(f"{minutes:.2f} CPU minutes here: this machine takes {slowness:.2f} times as long as the recorded one")
    return process.returncode or report_worse(figures, records)


def time_loop() -> float:
    """CPU seconds of a million steps of a loop."""
    began_s, total = time.thread_time(), 0
    for number in range(1_000_000):
        total += number
    return time.thread_time() - began_s


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a figure is over its limit")
    parser.add_argument("--record", action="store_true", help="lower the limits to the figures of today")
    parser.add_argument(
        "--cpu", nargs=argparse.REMAINDER, metavar="COMMAND", help="measure the CPU minutes of a command"
    )
    given = parser.parse_args()
    records: dict[str, dict[str, float]] = json.loads(RECORDS.read_text("utf-8"))
    if given.cpu:
        return run_measured(given.cpu, records)
    figures: dict[str, float] = {
        **dict(measure_files()),
        **measure_least(measure_way, records),
        **measure_least(measure_rest, records),
    }
    print_table(figures, records)
    if given.record:
        lower_limits(figures, records)
    return report_worse(figures, records) if given.check else 0


if __name__ == "__main__":
    sys.exit(main())
