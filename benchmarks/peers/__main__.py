"""memstream beside DB-GPT, LangChain, LangGraph, mem0 and LlamaIndex: same texts, same vectors, same machine, one run.

    python -m benchmarks.peers [--data DIR] [--model DIR] [--only NAME ...] [--full] [--rounds N] [--out DIR]

Each peer runs in an environment of its own in .cache/, installed from benchmarks/peers/requirements when it is not
there yet (some gigabytes in all). DIR of --data holds the measure of recall quality and its conversations, which are
no part of this project; without it these columns are empty. --model takes a sentence-transformers export instead of
hashing. RESULTS.md and RESULTS.json are written into --out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from report import machine

from benchmarks.peers.compare import compare
from benchmarks.peers.contenders import CONTENDERS, MEMSTREAM
from benchmarks.peers.load import made_up
from benchmarks.peers.results import page, record
from benchmarks.quality import conversations, measure

SHORT, FULL = 1_000, 10_000
"""Observations in the memory that is asked."""
QUESTIONS, SINGLE = 200, 300


def main() -> int:
    """The exit code: 0 when everybody could be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help=f"{FULL:,} observations instead of {SHORT:,}")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, interleaved; medians are shown")
    parser.add_argument("--data", type=Path, help="directory of the measure of recall quality")
    parser.add_argument("--model", type=Path, help="sentence-transformers export for the vectors (extra onnx)")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="peers whose title contains one of these")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the results are written")
    given = parser.parse_args()
    wanted = [one for one in CONTENDERS if one == MEMSTREAM or _named(one.title, given.only)]
    load, rounds = made_up(FULL if given.full else SHORT, QUESTIONS, SINGLE), given.rounds
    judge = measure(given.data) if given.data else None
    talks = conversations(given.data) if given.data else ()
    on = machine()
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = compare(wanted, load, rounds, Path(scratch), judge, talks, given.model and given.model.resolve())
    vectors = given.model.name if given.model else "memstream's own hashing, 384 dimensions, computed once for all"
    text = page(outcomes, load, rounds, vectors, on)
    (given.out / "RESULTS.md").write_text(text, "utf-8")
    figures = json.dumps(record(outcomes, load, vectors, on), indent=1)
    (given.out / "RESULTS.json").write_text(figures + "\n", "utf-8")
    print(text)
    return 1 if any(one.failed for one in outcomes) else 0


def _named(title: str, only: list[str]) -> bool:
    return not only or any(each.lower() in title.lower() for each in only)


if __name__ == "__main__":
    sys.exit(main())
