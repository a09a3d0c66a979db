"""Compare memstream's server with Chroma, PostgreSQL with pgvector, Redis Stack and Milvus: same texts and vectors.

    python -m benchmarks.peers.servers [--only NAME ...] [--texts N] [--rounds N] [--out DIR]

Each runs over loopback with durable writes, in its own environment in .cache/, installed on first use. SERVERS.md and
SERVERS.json are written to --out; a run with --only writes them only if --out is given, and the page is printed. Takes
several minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from report import describe_machine

from benchmarks.peers.load import Load, made_up
from benchmarks.peers.results import find_out
from benchmarks.peers.servers.compare import FRESH, Outcome, compare_servers
from benchmarks.peers.servers.contenders import MEMSTREAM, ONCE, SERVERS
from benchmarks.peers.servers.results import format_page, make_record

QUESTIONS, LONE = 100, 200


def main() -> int:
    """The exit code: 0 when every server could be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=10_000, help="texts in the memory that is asked")
    parser.add_argument("--rounds", type=int, default=3, help="number of interleaved rounds; medians are shown")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="servers whose title contains one of these"
    )
    parser.add_argument("--out", type=Path, help="directory for the results; default: this package, none with --only")
    arguments = parser.parse_args()
    out = find_out(arguments.out, arguments.only, Path(__file__).parents[1])
    chosen = [name.lower() for name in arguments.only]
    wanted = [
        one for one in SERVERS if one == MEMSTREAM or not chosen or any(each in one.title.lower() for each in chosen)
    ]
    load, on = made_up(arguments.texts, QUESTIONS, LONE + FRESH), describe_machine()
    with tempfile.TemporaryDirectory() as scratch:
        save = partial(_save, load=load, rounds=arguments.rounds, on=on, out=out)
        outcomes = compare_servers(wanted, load, arguments.rounds, Path(scratch), ONCE, save)
    print(format_page(outcomes, load, arguments.rounds, on))
    return 1 if any(one.failed for one in outcomes) else 0


def _save(outcomes: list[Outcome], load: Load, rounds: int, on: dict[str, str], out: Path | None) -> None:
    """Write what is measured so far: an interrupted run leaves its rows. Without `out`, write nothing."""
    if out is None:
        return
    if hasattr(os, "getloadavg"):
        on = on | {"load after": f"{os.getloadavg()[0]:.1f}"}
    (out / "SERVERS.md").write_text(format_page(outcomes, load, rounds, on), "utf-8")
    (out / "SERVERS.json").write_text(json.dumps(make_record(outcomes, load, on), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
