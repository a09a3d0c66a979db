"""Outdated facts in recall: does the newer of two statements come first, and is the older one still shown?

    python benchmarks/truth.py [--half tuned|held_out|others] [--model-dir MODEL] [--peers] [--failures] [--json FILE]

The cases in truth_cases/ are a fact, its update and a question, in five languages, among other statements of the same
speaker. `tuned` and `held_out` were written for this program; rules and margins may be tuned on the first, never on the
second. `others` was written without knowledge of the program and its rules, and is never tuned on. Every case is a
memory of its own; it is asked through the gRPC client.

    current@1   share of questions whose first recollection is the newer statement
    stale@5     share of questions with the older statement among the first five recollections

memstream runs with twins turned off (plain), with `supersedes` named by the client, with twins alone, and with a client
that supersedes the first related statement of the update's outcome (related). A statement is in the one session of the
memory, or in its own.
With --peers, mem0 (`infer=False`) and LangGraph's SqliteStore answer the same questions over the same vectors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import memstream

CASES = Path(__file__).parent / "truth_cases"
MODES = ("plain", "supersedes", "twins", "related")
SESSIONS = ("one", "own")
HALVES = ("tuned", "held_out", "others")
STEMMERS = {"en": "english", "de": "german", "fr": "french", "es": "spanish", "zh": "english"}
"""The policy's language of each language; Chinese is split into characters under any."""
START = datetime(2025, 3, 3, 9, tzinfo=UTC)
FIRST = 5
_LIMIT = 10
_BEFORE, _BETWEEN = 3, 3
"""Distractors before the older statement, and between the two; the others follow."""


@dataclass(frozen=True)
class Case:
    """An update of a fact."""

    name: str
    language: str
    speaker: str
    kind: str
    older: str
    newer: str
    question: str
    others: tuple[str, ...]

    def timeline(self) -> list[tuple[str, datetime]]:
        """All statements in order, each a week after the one before it."""
        rest = self.others[_BEFORE + _BETWEEN :]
        texts = [*self.others[:_BEFORE], self.older, *self.others[_BEFORE : _BEFORE + _BETWEEN], self.newer, *rest]
        return [(text, START + timedelta(weeks=number)) for number, text in enumerate(texts)]

    @property
    def now(self) -> datetime:
        """When the question is asked."""
        return self.timeline()[-1][1] + timedelta(days=1)


@dataclass(frozen=True)
class Score:
    """The outcome of one case."""

    case: Case
    current: bool
    stale: bool


def load_cases(half: str) -> list[Case]:
    """The cases of a half, as truth_cases/ has them."""
    cases: list[Case] = []
    blocks: list[tuple[str, str, list[str], list[list[str]]]] = []
    for line in (CASES / f"{half}.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            language, speaker = line.strip("[]").split()
            blocks.append((language, speaker, [], []))
        elif line.startswith("~"):
            blocks[-1][2].append(line[1:].strip())
        elif line and not line.startswith("#"):
            blocks[-1][3].append([part.strip() for part in line.split("|")])
    for language, speaker, others, rows in blocks:
        for number, (kind, older, newer, question) in enumerate(rows):
            name = f"{half}-{language}-{number}".replace("_", "-")
            cases.append(Case(name, language, speaker, kind, older, newer, question, tuple(others)))
    return cases


def score_case(case: Case, found: Sequence[str]) -> Score:
    """Judge the contents of an answer, best first."""
    return Score(case, bool(found) and found[0] == case.newer, case.older in found[:FIRST])


async def ask_memstream(target: str, cases: Sequence[Case], mode: str, sessions: str) -> list[Score]:
    """Every case in a memory of its own."""
    async with memstream.connect(target) as client:
        return [await _ask_case(client, case, mode, sessions) for case in cases]


async def _ask_case(client: memstream.Client, case: Case, mode: str, sessions: str) -> Score:
    policy: dict[str, Any] = {"language": STEMMERS[case.language], "conflicts": {"suspect": mode == "twins"}}
    memory = await client.create_memory(f"truth/{mode}-{sessions}-{case.name}", policy=policy)
    ids: dict[str, str] = {}
    async with memory.observe(producer="truth", outcomes=True, related=1) as stream:
        for number, (text, when) in enumerate(case.timeline()):
            more: dict[str, Any] = (
                {"supersedes": [ids[case.older]]} if mode == "supersedes" and text == case.newer else {}
            )
            session = "s" if sessions == "one" else f"s{number}"
            one = await stream.send(text, speaker=case.speaker, session=session, observe_time=when, **more)
            await stream.flush()
            outcome = (await one).outcome
            assert outcome is not None, "the stream was opened with outcomes"
            ids[text] = outcome.fragment_id
            if mode == "related" and text == case.newer and outcome.related:
                await memory.supersede([outcome.related[0].fragment_id], newer_id=outcome.fragment_id)
    answer = await memory.recall_once(
        case.question, now=case.now, limit=_LIMIT, reinforce=False, omit_working_memory=True
    )
    return score_case(case, [one.fragment.content for one in answer])


def ask_peers(cases: Sequence[Case], scratch: Path, model: Path | None) -> dict[str, list[Score]]:
    """The same through mem0 and LangGraph, installed as benchmarks/peers says."""
    from benchmarks.peers.contenders import CONTENDERS
    from benchmarks.peers.load import Table, make_item
    from benchmarks.peers.protocol import Query
    from benchmarks.peers.runner import Runner

    items = {case.name: [make_item(text, case.speaker, "s", when) for text, when in case.timeline()] for case in cases}
    table = Table(scratch / "vectors.f32", model)
    table.write_vectors([one.line for some in items.values() for one in some] + [case.question for case in cases])
    scores: dict[str, list[Score]] = {}
    for peer in CONTENDERS:
        if peer.title not in ("mem0, Qdrant", "LangGraph SqliteStore"):
            continue
        with Runner(peer, scratch / peer.title.replace(" ", "-"), table) as runner:
            for case in cases:
                runner.open(case.name)
                runner.add(case.name, items[case.name])
                asked = Query(case.question, case.now.timestamp(), judged=True)
                recalled = runner.recall(case.name, [asked], _LIMIT)
                assert not recalled.errors, recalled.errors
                texts = {one.line: one.text for one in items[case.name]}
                found = [texts[line] for line in recalled.found[0]]
                scores.setdefault(peer.title, []).append(score_case(case, found))
    table.close()
    return scores


def _share(scores: Sequence[Score], of: Callable[[Score], bool]) -> float:
    return sum(map(of, scores)) / len(scores)


def _print_scores(title: str, scores: Sequence[Score]) -> None:
    current, stale = _share(scores, lambda one: one.current), _share(scores, lambda one: one.stale)
    print(f"  {title:<28} current@1 {current:.3f}   stale@5 {stale:.3f}   n {len(scores)}")
    for attribute in ("language", "kind"):
        groups: defaultdict[str, list[Score]] = defaultdict(list)
        for one in scores:
            groups[getattr(one.case, attribute)].append(one)
        shares = (
            f"{name} {_share(some, lambda one: one.current):.2f}/{_share(some, lambda one: one.stale):.2f}"
            for name, some in groups.items()
        )
        print(f"    {attribute:<10} {'  '.join(shares)}")


def main() -> int:
    """The exit code: 0 when every case could be asked."""
    from served import BenchServer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=HALVES, help="one file only (default: all)")
    parser.add_argument("--mode", nargs="*", choices=MODES, default=list(MODES), help="of memstream")
    parser.add_argument("--model-dir", type=Path, help="directory of a local embedding model (default: hashing)")
    parser.add_argument("--sessions", choices=SESSIONS, default="one", help="of the statements of a case")
    parser.add_argument("--peers", action="store_true", help="measure mem0 and LangGraph, too")
    parser.add_argument("--failures", action="store_true", help="list failed cases of the tuned half")
    parser.add_argument("--json", type=Path, help="write every score here")
    arguments = parser.parse_args()
    model: dict[str, Any] = {}
    if arguments.model_dir:
        model = {"embedding": "onnx", "embedding_model_dir": str(arguments.model_dir)}
    every: dict[str, list[dict[str, Any]]] = {}
    for half in [arguments.half] if arguments.half else HALVES:
        cases = load_cases(half)
        print(f"{half}: {len(cases)} updates")
        with tempfile.TemporaryDirectory() as scratch:
            with BenchServer(Path(scratch) / "data", **model) as server:
                found = {
                    f"memstream, {mode}": asyncio.run(ask_memstream(server.address, cases, mode, arguments.sessions))
                    for mode in arguments.mode
                }
            if arguments.peers:
                found |= ask_peers(cases, Path(scratch), arguments.model_dir)
        for title, scores in found.items():
            _print_scores(title, scores)
            every[f"{half}: {title}"] = [asdict(one) for one in scores]
        if arguments.failures and half == "tuned":
            for one in found.get("memstream, twins", []):
                if not one.current or one.stale:
                    print(f"    {one.case.name} {one.case.kind}: {one.current}/{one.stale} {one.case.newer}")
    if arguments.json:
        arguments.json.write_text(json.dumps(every, indent=1, ensure_ascii=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
