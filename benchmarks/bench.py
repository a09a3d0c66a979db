"""Run every benchmark and print one table of claims: our figures next to the other side's figures of the same run.

    python benchmarks/bench.py [NAME ...] [--full | --tiny] [--json FILE [--update]] [--results FILE]

Runs each `bench_NAME.py` of this directory and one level below, one after another, as a separate program, and reads the
claims from the JSON that it writes. `benchmarks/README.md` explains the rows. Exits with 1 when a benchmark fails, not
when an aim is missed; the table shows missed aims.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from claims import Claim, format_table
from report import LOAD, Size, describe_machine, format_machine, make_parser

HERE = Path(__file__).parent


def find_benchmarks() -> dict[str, Path]:
    """Benchmark programs by name; not the quickstarts, which install packages for minutes."""
    found = [*sorted(HERE.glob("bench_*.py")), *sorted(HERE.glob("*/bench_*.py"))]
    return {path.stem.removeprefix("bench_"): path for path in found if path.stem != "bench_quickstarts"}


def run_program(program: Path, size: Size, rounds: int | None) -> dict[str, Any] | None:
    """The benchmark's JSON; None if it failed. Its output goes to standard error."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        command = [sys.executable, str(program), "--json", str(file)]
        command += [f"--{size}"] if size is not Size.SHORT else []
        command += ["--rounds", str(rounds)] if rounds else []
        ended = subprocess.run(command, stdout=sys.stderr, check=False)
        if not file.exists():
            print(f"bench: {program.name} ended with {ended.returncode} and no figures", file=sys.stderr)
            return None
        found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        return found


def format_page(document: dict[str, Any], table: str) -> str:
    """The table as a Markdown page."""
    machine = {name: value for name, value in document["machine"].items() if name != LOAD}
    failed = ", ".join(document["failed"])
    missing = f"Failed in the last run, so without new rows: {failed}.\n\n" if failed else ""
    runs = "\n".join(
        f"| {name} | {each['size']} | {each['date']} | {each['code']} | {each['machine'][LOAD]} |"
        for name, each in document["benchmarks"].items()
    )
    return (
        "# Results\n\nWritten by `benchmarks/bench.py`; [README.md](README.md) explains the rows.\n\n"
        f"{format_machine(machine)}.\n\n{table}\n\n{missing}"
        f"| benchmark | size | date | code | {LOAD} |\n|---|---|---|---|---|\n"
        f"{runs}\n\nCode: the last commit to server, client or contract. Load: the machine's load average at the "
        "start, including other work on the same cores.\n"
    )


def _last_commit() -> str:
    """The last commit that changed server, client or contract; "unknown" outside of a clone."""
    git_commands = {"log": ["-1", "--abbrev=10", "--format=%h"], "status": ["--porcelain"]}
    answers = []
    for command, options_ in git_commands.items():
        whole = ["git", "-C", str(HERE.parent), command, *options_, "--", "server", "client", "protos"]
        try:
            answers.append(subprocess.run(whole, capture_output=True, text=True, check=True).stdout.strip())
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
    return f"{answers[0]}{' and changes' if answers[1] else ''}"


def make_bench_parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"benchmarks to run (default: all): {', '.join(find_benchmarks())}"
    )
    parser.add_argument("--update", action="store_true", help="keep the other benchmarks' results in --json's FILE")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the table to this Markdown page")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print one table, write one file."""
    parser = make_bench_parser()
    options_ = parser.parse_args(given)
    known = find_benchmarks()
    if unknown := set(options_.names) - known.keys():
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    document: dict[str, Any] = {"machine": describe_machine(), "failed": [], "benchmarks": {}}
    if options_.update and options_.json is not None and options_.json.exists():
        document["benchmarks"] = json.loads(options_.json.read_text("utf-8"))["benchmarks"]
    for name in options_.names or known:
        print(f"bench: {name}", file=sys.stderr, flush=True)
        found = run_program(known[name], options_.size, options_.rounds)
        if found is None:
            document["failed"].append(name)
            continue
        now = datetime.now(UTC).strftime("%Y-%m-%d")
        how = {"size": options_.size, "date": now, "code": _last_commit()}
        document["benchmarks"][name] = how | {"claims": []} | found
    measured_ones = [document["benchmarks"][name] for name in known if name in document["benchmarks"]]
    table = format_table([Claim.from_record(record) for each in measured_ones for record in each["claims"]])
    print(format_machine(document["machine"]))
    print(table)
    if options_.json is not None:
        options_.json.parent.mkdir(parents=True, exist_ok=True)
        options_.json.write_text(json.dumps(document, indent=1), "utf-8")
    if options_.results is not None:
        options_.results.write_text(format_page(document, table), "utf-8")
    return bool(document["failed"])


if __name__ == "__main__":
    sys.exit(main())
