"""Compare memstream with DB-GPT, LangChain, LangGraph, mem0 and LlamaIndex on the same texts, vectors and machine.

    python -m benchmarks.peers [--data DIR] [--model DIR] [--only NAME ...] [--full] [--rounds N] [--out DIR]

Each peer runs in its own environment in .cache/, installed from benchmarks/peers/requirements on first use (some
gigabytes in total). DIR of --data holds the measure of recall quality and its conversations, which are not part of this
project; without it these columns are empty. --model uses a sentence-transformers export instead of hashing. RESULTS.md
and RESULTS.json are written to --out; a run with --only writes them only if --out is given.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from report import describe_machine

from benchmarks.peers.compare import compare
from benchmarks.peers.contenders import CONTENDERS, MEMSTREAM
from benchmarks.peers.load import made_up
from benchmarks.peers.results import find_out, format_page, make_record
from benchmarks.quality import load_conversations, load_measure

SHORT, FULL = 1_000, 10_000
"""Observations in the memory that is asked."""
QUESTIONS, SINGLE = 200, 300


def main() -> int:
    """The exit code: 0 when every peer could be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help=f"{FULL:,} observations instead of {SHORT:,}")
    parser.add_argument("--rounds", type=int, default=3, help="number of interleaved rounds; medians are shown")
    parser.add_argument("--data", type=Path, help="directory with the measure of recall quality")
    parser.add_argument("--model", type=Path, help="sentence-transformers export for vectors (extra onnx)")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="peers whose title contains one of these")
    parser.add_argument("--out", type=Path, help="directory for the results; default: this package, none with --only")
    arguments = parser.parse_args()
    wanted = [one for one in CONTENDERS if one == MEMSTREAM or _is_selected(one.title, arguments.only)]
    load, rounds = made_up(FULL if arguments.full else SHORT, QUESTIONS, SINGLE), arguments.rounds
    judge = load_measure(arguments.data) if arguments.data else None
    talks = load_conversations(arguments.data) if arguments.data else ()
    on = describe_machine()
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = compare(
            wanted, load, rounds, Path(scratch), judge, talks, arguments.model and arguments.model.resolve()
        )
    vectors = (
        arguments.model.name if arguments.model else "memstream's own hashing, 384 dimensions, computed once for all"
    )
    text = format_page(outcomes, load, rounds, vectors, on)
    if (out := find_out(arguments.out, arguments.only, Path(__file__).parent)) is not None:
        (out / "RESULTS.md").write_text(text, "utf-8")
        figures = json.dumps(make_record(outcomes, load, vectors, on), indent=1)
        (out / "RESULTS.json").write_text(figures + "\n", "utf-8")
    print(text)
    return 1 if any(one.failed for one in outcomes) else 0


def _is_selected(title: str, only: list[str]) -> bool:
    return not only or any(each.lower() in title.lower() for each in only)


if __name__ == "__main__":
    sys.exit(main())
