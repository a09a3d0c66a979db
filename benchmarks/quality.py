"""Recall quality through the gRPC client: real conversations through the Observe stream, real questions.

    python benchmarks/quality.py --data DIR [--model-dir MODEL] [--reranker-dir MODEL]

DIR holds the measure (`locomo_eval.py`) and its conversations (`locomo6.json`); neither is part of this project. MODEL
is a sentence-transformers export (docs/models.md explains how to get all-MiniLM-L6-v2); without it vectors are hashed.
The reranker's MODEL is a cross-encoder; without it nothing is reranked. The program starts its own server. It exits
with 1 when a score is below its bar, a turn is lost, or a turn cannot be recalled.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import memstream
from memstream import EventType

LIMIT = 50
OWN_LIMIT = 50
"""A turn counts as recallable if its own words find it within this depth."""
BARS = {"recall@4": 0.685, "recall@10": 0.775, "recall@20": 0.83}
MODEL_BARS = {"recall@4": 0.695, "recall@10": 0.78, "recall@20": 0.84}
"""With the vectors of all-MiniLM-L6-v2."""
_IN_FLIGHT = 32
_WORD = re.compile(r"\w")


class Turn(Protocol):
    """A turn of a conversation, as the measure defines it."""

    @property
    def id(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def speaker(self) -> str: ...
    @property
    def timestamp(self) -> datetime: ...
    @property
    def session(self) -> int: ...


@dataclass
class Ingested:
    """One conversation in its memory, with the fragment of every turn."""

    memory: memstream.Memory
    turns: dict[str, list[str]] = field(default_factory=dict)
    """Turns by fragment id: several where a repeat was counted on an existing fragment."""
    outcomes: Counter[EventType] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def counted_elsewhere(self) -> int:
        """Turns without a fragment of their own, each with an event that says so."""
        return self.outcomes[EventType.REPEATED] + self.outcomes[EventType.ECHOED]


class Retriever:
    """The measure's interface (`ingest`, `recall`, `close`) over the server at `target`."""

    def __init__(self, target: str, namespace: str = "quality") -> None:
        self._runner = asyncio.Runner()
        self._namespace = namespace
        self.target = target
        self._client = memstream.connect(target)
        self.ingested: dict[str, Ingested] = {}

    def ingest(self, conversation_id: str, fragments: Sequence[Turn]) -> None:
        """Send all turns through one Observe stream, each with its time, session and speaker; returns when all are
        stored."""
        self.ingested[conversation_id] = self._runner.run(self._ingest(conversation_id, fragments))

    def recall(self, conversation_id: str, query: str, now: datetime, k: int) -> list[str]:
        """Turn ids, best first: the ranking alone, without working memory and reinforcement."""
        held = self.ingested[conversation_id]
        answer = self._runner.run(self._recall(held, query, now, k))
        # Several turns of one session may share a fragment; the first represents it.
        return [held.turns[found.fragment.id][0] for found in answer]

    def close(self) -> None:
        """Close the connection."""
        self._runner.run(self._client.close())
        self._runner.close()

    def check_turns(self, conversation_id: str, fragments: Sequence[Turn], now: datetime) -> Found:
        """Check that every turn is listed or accounted for, and where its own words find it."""
        return self._runner.run(self._check_turns(self.ingested[conversation_id], fragments, now))

    async def _ingest(self, conversation_id: str, fragments: Sequence[Turn]) -> Ingested:
        held = Ingested(await self._client.create_memory(f"{self._namespace}/{conversation_id}"))
        began = time.perf_counter()
        async with held.memory.observe(producer="quality", outcomes=True) as stream:
            sent = [
                await stream.send(
                    turn.text,
                    speaker=turn.speaker,
                    session=str(turn.session),
                    observe_time=turn.timestamp.replace(tzinfo=UTC),
                )
                for turn in fragments
            ]
            await stream.flush()
            held.seconds = time.perf_counter() - began
        for turn, one in zip(fragments, sent, strict=True):
            outcome = (await one).outcome
            assert outcome is not None, "the stream was opened with outcomes"
            held.outcomes[outcome.type] += 1
            held.turns.setdefault(outcome.other_id or outcome.fragment_id, []).append(turn.id)
        return held

    async def _recall(self, held: Ingested, query: str, now: datetime, k: int) -> memstream.Answer:
        return await held.memory.recall_once(
            query, now=now.replace(tzinfo=UTC), limit=k, reinforce=False, omit_working_memory=True
        )

    async def _check_turns(self, held: Ingested, fragments: Sequence[Turn], now: datetime) -> Found:
        listed = {fragment.id: fragment async for fragment in held.memory.list_fragments()}
        of_turn = {turn: fragment_id for fragment_id, turns in held.turns.items() for turn in turns}
        async with held.memory.recall() as stream:
            free = asyncio.Semaphore(_IN_FLIGHT)

            async def find_place(turn: Turn) -> int | None:
                when = turn.timestamp.replace(tzinfo=UTC)
                options = memstream.RecallOptions(
                    now=now.replace(tzinfo=UTC), limit=OWN_LIMIT, reinforce=False, omit_working_memory=True
                )
                if not _WORD.search(turn.text):  # ";)" has no words to search for, but it has a time
                    moment = timedelta(milliseconds=1)
                    options["filter"] = memstream.Filter(observe_time_min=when, observe_time_max=when + moment)
                async with free:
                    answer = await stream.query(turn.text, **options)
                # The same words in another session are an equally good answer.
                good = (n for n, hit in enumerate(answer) if _matches_turn(hit, of_turn[turn.id], turn.text))
                return next(good, None)

            places = await asyncio.gather(*(find_place(turn) for turn in fragments))
        return Found(len(fragments), len(listed), held.counted_elsewhere, set(listed) == set(held.turns), places)


def _matches_turn(hit: memstream.Recollection, fragment_id: str, text: str) -> bool:
    """Whether the hit, its reply or one that is folded into it is the turn."""
    shown = any(one.id == fragment_id or one.content == text for one in hit.fragments)
    return shown or fragment_id in hit.folded_ids


@dataclass(frozen=True)
class Found:
    """The outcome of a conversation's turns. `places`: rank of each in the answer to its own words, from 0."""

    turns: int
    listed: int
    counted_elsewhere: int
    same: bool
    """The listed fragments are exactly those that the outcomes name."""
    places: Sequence[int | None]

    @property
    def complete(self) -> bool:
        """Every turn is a fragment or counted on one."""
        return self.same and self.listed == self.turns - self.counted_elsewhere

    @property
    def lost(self) -> int:
        """Turns that their own words (or their time, if they have no words) do not find."""
        return sum(place is None for place in self.places)

    @property
    def first(self) -> int:
        """Turns that their own words find first."""
        return sum(place == 0 for place in self.places)


def load_measure(directory: Path) -> Any:
    """Import the measure's module from `directory`."""
    spec = importlib.util.spec_from_file_location("locomo_eval", directory / "locomo_eval.py")
    if spec is None or spec.loader is None or not (directory / "locomo_eval.py").exists():
        raise SystemExit(f"{directory} has no locomo_eval.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["locomo_eval"] = module  # its dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def load_conversations(directory: Path) -> Sequence[Any]:
    """The conversations in `directory`, parsed by the measure."""
    loaded: Sequence[Any] = load_measure(directory).load_locomo(str(directory / "locomo6.json"))
    return loaded


def _run_measure(directory: Path, target: str) -> tuple[dict[str, Any], list[Found]]:
    talks = load_conversations(directory)
    retriever = Retriever(target)
    try:
        result = load_measure(directory).evaluate(retriever, talks, LIMIT)
        result["stored_s"] = sum(held.seconds for held in retriever.ingested.values())
        return result, [retriever.check_turns(each.id, each.fragments, each.now) for each in talks]
    finally:
        retriever.close()


def _print_report(result: dict[str, Any], found: Sequence[Found], bars: dict[str, float]) -> bool:
    """Print the figures. Returns whether everything is as required."""
    answerable, good = result["answerable"], True
    print(f"answerable questions: {answerable['n']}, share of gold evidence among the first k")
    for name, bar in bars.items():
        met = answerable[name] >= bar
        good &= met
        print(
            f"  @{name.removeprefix('recall@'):<3} {answerable[name]:.3f}   bar {bar:.3f}   {'ok' if met else 'MISSED'}"
        )
    turns = sum(one.turns for one in found)
    elsewhere, lost = sum(one.counted_elsewhere for one in found), sum(one.lost for one in found)
    complete = all(one.complete for one in found)
    print(
        f"turns {turns}: {sum(one.listed for one in found)} fragments + {elsewhere} counted as repeats or echoes",
        end="",
    )
    print("   ok" if complete else "   LOST SOME")
    depths = [place for one in found for place in one.places if place is not None]
    print(
        f"own words: first {sum(one.first for one in found) / turns:.1%}, deepest place {max(depths, default=0) + 1}, "
        f"mean {statistics.fmean(depths) + 1:.2f}; not among the first {OWN_LIMIT}: {lost}{'' if lost else '   ok'}"
    )
    print(f"ingest {turns / result['stored_s']:.0f} turns/s to stored through one stream")
    query = result["query"]
    print(f"recall of {LIMIT}, one at a time, unary: p50 {query['p50_ms']:.1f} ms, p99 {query['p99_ms']:.1f} ms")
    for error, count in result["errors"].items():
        print(f"  {count} x {error}")
    return good and complete and lost == 0 and not result["errors"]


def main() -> int:
    """The exit code: 0 when every bar is met."""
    from served import (
        BenchServer,
    )  # a sibling, on the path when this file runs as a program but not when a test imports it

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the measure")
    parser.add_argument("--model-dir", type=Path, help="directory of a local embedding model (default: hashing)")
    parser.add_argument("--reranker-dir", type=Path, help="directory of a cross-encoder (default: no reranker)")
    parser.add_argument("--json", type=Path, help="write the measure's complete result here")
    arguments = parser.parse_args()
    model: dict[str, Any] = {}
    if arguments.model_dir:
        model = {"embedding": "onnx", "embedding_model_dir": str(arguments.model_dir)}
    if arguments.reranker_dir:  # no time limit in practice: the order is measured, not the latency
        model |= {"reranker_model_dir": str(arguments.reranker_dir), "reranker_timeout_s": "60"}
    with tempfile.TemporaryDirectory() as scratch, BenchServer(Path(scratch) / "data", **model) as server:
        result, found = _run_measure(arguments.data, server.address)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0 if _print_report(result, found, MODEL_BARS if arguments.model_dir else BARS) else 1


if __name__ == "__main__":
    sys.exit(main())
