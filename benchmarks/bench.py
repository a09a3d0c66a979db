"""Every benchmark, one table: what we claim, beside what was measured of the other side in the same run.

    python benchmarks/bench.py [NAME ...] [--full | --tiny] [--json FILE] [--results FILE]

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
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from claims import Claim, markdown
from report import Size, machine, options, told

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
    loads = ", ".join(f"{name} {each['machine']['load before']}" for name, each in document["benchmarks"].items())
    failed = ", ".join(document["failed"])
    missing = f"\n\nFailed, and so without rows: {failed}." if failed else ""
    command = "make bench" if document["size"] == Size.SHORT else f"make bench-{document['size']}"
    return (
        f"# Results of `{command}`\n\n"
        f"Written by `benchmarks/bench.py`; [README.md](README.md) explains the rows. {document['date']}, code "
        f"{document['code']}, {document['minutes']:.0f} minutes. {told(document['machine'])}.\n\n"
        f"Load average when each benchmark began: {loads}. What is above the benchmark's own is other work on the same "
        f"cores.{missing}\n\n{table}\n"
    )


def _code() -> str:
    """The commit, where this is a clone."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones; all if none: {', '.join(programs())}")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the table here as a page")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print one table, write one file."""
    parser = arguments()
    options_ = parser.parse_args(given)
    known, began = programs(), time.monotonic()
    if unknown := set(options_.names) - known.keys():
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    document: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "code": _code(),
        "size": options_.size,
        "machine": machine(),
        "failed": [],
        "claims": [],
        "benchmarks": {},
    }
    for name in options_.names or known:
        print(f"bench: {name}", file=sys.stderr, flush=True)
        found = measured(known[name], options_.size, options_.rounds)
        if found is None:
            document["failed"].append(name)
            continue
        document["claims"] += [{"benchmark": name, **record} for record in found.pop("claims")]
        document["benchmarks"][name] = found
    document["minutes"] = (time.monotonic() - began) / 60
    table = markdown([Claim.of(record) for record in document["claims"]])
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
