"""Every benchmark, one table: what we claim, beside what was measured of the other side in the same run.

    python benchmarks/bench.py [NAME ...] [--full | --tiny] [--json FILE [--update]] [--results FILE]

Runs each `bench_NAME.py` of this directory and of those below it, one after another, as the program it is; takes the
claims from the JSON that it writes. `benchmarks/README.md` explains the rows. Exits with 1 when a benchmark failed, not
when an aim is missed: the table says which.
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

from claims import Claim, markdown
from report import LOAD, Size, machine, options, told

HERE = Path(__file__).parent


def programs() -> dict[str, Path]:
    """Benchmarks by name."""
    found = [*sorted(HERE.glob("bench_*.py")), *sorted(HERE.glob("*/bench_*.py"))]
    return {path.stem.removeprefix("bench_"): path for path in found}


def measured(program: Path, size: Size, rounds: int | None) -> dict[str, Any] | None:
    """What it wrote; None when it failed. What it prints goes to standard error, where one can watch."""
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


def results(document: dict[str, Any], table: str) -> str:
    """The table as a page."""
    failed = ", ".join(document["failed"])
    missing = f"Failed in the last run, and so without new rows: {failed}.\n\n" if failed else ""
    runs = "\n".join(
        f"| {name} | {each['size']} | {each['date']} | {each['code']} | {each['machine'][LOAD]} |"
        for name, each in document["benchmarks"].items()
    )
    return (
        "# Results\n\nWritten by `benchmarks/bench.py`; [README.md](README.md) explains the rows.\n\n"
        f"{told({name: value for name, value in document['machine'].items() if name != LOAD})}.\n\n{table}\n\n{missing}"
        f"| benchmark | size | date | code | {LOAD} |\n|---|---|---|---|---|\n"
        f"{runs}\n\nCode: the last commit to server, client or contract. Load: the machine's average when it began, "
        "other work on the same cores included.\n"
    )


def _code() -> str:
    """The last commit that changed what is measured, where this is a clone."""
    told_by = {"log": ["-1", "--abbrev=10", "--format=%h"], "status": ["--porcelain"]}
    answers = []
    for command, options_ in told_by.items():
        whole = ["git", "-C", str(HERE.parent), command, *options_, "--", "server", "client", "protos"]
        try:
            answers.append(subprocess.run(whole, capture_output=True, text=True, check=True).stdout.strip())
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
    return f"{answers[0]}{' and changes' if answers[1] else ''}"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones; all if none: {', '.join(programs())}")
    parser.add_argument("--update", action="store_true", help="keep what FILE of --json has of other benchmarks")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the table here as a page")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print one table, write one file."""
    parser = arguments()
    options_ = parser.parse_args(given)
    known = programs()
    if unknown := set(options_.names) - known.keys():
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    document: dict[str, Any] = {"machine": machine(), "failed": [], "benchmarks": {}}
    if options_.update and options_.json is not None and options_.json.exists():
        document["benchmarks"] = json.loads(options_.json.read_text("utf-8"))["benchmarks"]
    for name in options_.names or known:
        print(f"bench: {name}", file=sys.stderr, flush=True)
        found = measured(known[name], options_.size, options_.rounds)
        if found is None:
            document["failed"].append(name)
            continue
        now = datetime.now(UTC).strftime("%Y-%m-%d")
        how = {"size": options_.size, "date": now, "code": _code()}
        document["benchmarks"][name] = how | {"claims": []} | found
    measured_ones = [document["benchmarks"][name] for name in known if name in document["benchmarks"]]
    table = markdown([Claim.of(record) for each in measured_ones for record in each["claims"]])
    print(told(document["machine"]))
    print(table)
    if options_.json is not None:
        options_.json.parent.mkdir(parents=True, exist_ok=True)
        options_.json.write_text(json.dumps(document, indent=1), "utf-8")
    if options_.results is not None:
        options_.results.write_text(results(document, table), "utf-8")
    return bool(document["failed"])


if __name__ == "__main__":
    sys.exit(main())
