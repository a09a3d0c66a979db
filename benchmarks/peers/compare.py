"""The comparison: interleaved rounds of the same load, the kill, and the measure of recall quality."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from report import percentile

from benchmarks.peers.contenders import Contender
from benchmarks.peers.load import Load, Table, item_of_turn
from benchmarks.peers.protocol import Query
from benchmarks.peers.runner import Failed, Runner
from benchmarks.quality import Turn
from tests.toolchains.programs import Absent

LIMIT = 10
"""Recollections per recall in the timed rounds."""
JUDGED = 20
"""Recollections per recall when quality is measured."""
DEPTHS = (4, 10, 20)
_WARM = 20
_T = TypeVar("_T")


@dataclass(frozen=True)
class Round:
    """One peer's figures for one round of the load."""

    ingest_per_s: float
    """At full speed."""
    single_per_s: float
    """One at a time, each acknowledged before the next."""
    recall_p50_ms: float
    recall_p99_ms: float
    ingest_cpu_us: float
    """CPU of all processes per observation at full speed."""
    recall_cpu_ms: float
    """CPU of all processes per query. Deferred work (an index) may count in either figure."""
    resident_empty_mb: float
    resident_mb: float
    """With all items."""
    held: float
    """Share of the items that the peer lists."""
    kept: float
    """Share of the items written one at a time that the peer lists after kill -9."""
    recalled: float
    """Share of a sample of these that their own words find among the first 10."""
    errors: Sequence[str]
    """Errors raised instead of an answer, each kind once."""


@dataclass
class Outcome:
    """One row of the table: rounds, quality, or the reason for their absence."""

    contender: Contender
    rounds: list[Round] = field(default_factory=list[Round])
    quality: dict[str, float] = field(default_factory=dict[str, float])
    """By recall@4, recall@10, recall@20; empty without conversations."""
    failed: str = ""

    def median(self, figure: str) -> float:
        """Median over the rounds; NaN without rounds."""
        values = [getattr(one, figure) for one in self.rounds]
        return statistics.median(values) if values else float("nan")

    @property
    def errors(self) -> list[str]:
        """Errors of all rounds, each kind once."""
        return list(dict.fromkeys(error for one in self.rounds for error in one.errors))

    @property
    def keeps(self) -> bool:
        """Whether it lists all items, and lists and finds them after kill -9, in every round."""
        figures = ("held", "kept", "recalled")
        return bool(self.rounds) and all(getattr(one, each) == 1.0 for one in self.rounds for each in figures)


def compare(
    contenders: Iterable[Contender],
    load: Load,
    rounds: int,
    scratch: Path,
    measure: Any = None,
    conversations: Sequence[Any] = (),
    model: Path | None = None,
) -> list[Outcome]:
    """Run all rounds, interleaved, then measure quality if a measure is given. A failing peer has the reason in its
    row.

    `measure` and `conversations` come from benchmarks/quality.py.
    """
    outcomes = [Outcome(contender) for contender in contenders]
    for outcome in outcomes:
        _try_step(outcome, "installing", outcome.contender.python)
    table = Table(scratch / "vectors.f32", model)
    try:
        table.write_vectors([*load.texts, *_all_texts(conversations)])
        for number in range(rounds):
            for outcome in outcomes:
                directory = scratch / f"{number}-{outcomes.index(outcome)}"
                work = partial(measure_round, outcome.contender, load, table, directory)
                found = _try_step(outcome, f"round {number + 1}", work)
                if found is not None:
                    outcome.rounds.append(found)
                shutil.rmtree(directory, ignore_errors=True)
        for outcome in outcomes if conversations else ():
            directory = scratch / f"quality-{outcomes.index(outcome)}"
            asked = partial(measure_quality, outcome.contender, measure, conversations, table, directory)
            outcome.quality = _try_step(outcome, "quality", asked) or {}
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        table.close()
    return outcomes


def _try_step(outcome: Outcome, what: str, work: Callable[[], _T]) -> _T | None:
    if outcome.failed:
        return None
    print(f"{what}: {outcome.contender.title}", file=sys.stderr, flush=True)
    try:
        return work()
    except (Absent, Failed) as failure:
        outcome.failed = str(failure)
        print(f"  {failure}", file=sys.stderr, flush=True)
        return None


def measure_round(contender: Contender, load: Load, table: Table, directory: Path) -> Round:
    """One round of one peer over an empty directory. Raises Failed."""
    with Runner(contender, directory, table) as runner:
        for memory in ("warm", "talk", "single"):
            runner.open(memory)
        runner.add("warm", load.items[:_WARM])
        runner.recall("warm", load.queries[:_WARM], LIMIT)
        empty = runner.processes()
        ingest_s = runner.add("talk", load.items) / 1e3
        full = runner.processes()
        asked = runner.recall("talk", load.queries, LIMIT)
        searched = runner.processes()
        held = _listed_share(load.items, runner.lines("talk"))
        single_s = sum(runner.add_each("single", load.single)) / 1e3
        runner.kill()  # immediately after the last acknowledgement
    with Runner(contender, directory, table) as runner:
        runner.open("single")
        kept = _listed_share(load.single, runner.lines("single"))
        own = runner.recall("single", load.sample, LIMIT)
    found = [any(query.text in text for text in texts) for query, texts in zip(load.sample, own.found, strict=True)]
    return Round(
        ingest_per_s=len(load.items) / ingest_s,
        single_per_s=len(load.single) / single_s,
        recall_p50_ms=percentile(asked.ms, 0.5),
        recall_p99_ms=percentile(asked.ms, 0.99),
        ingest_cpu_us=(full.cpu_s - empty.cpu_s) / len(load.items) * 1e6,
        recall_cpu_ms=(searched.cpu_s - full.cpu_s) / len(load.queries) * 1e3,
        resident_empty_mb=empty.resident_mb,
        resident_mb=searched.resident_mb,
        held=held,
        kept=kept,
        recalled=sum(found) / len(found),
        errors=list(dict.fromkeys([*asked.errors, *own.errors])),
    )


def _listed_share(items: Sequence[Any], held: Sequence[str]) -> float:
    """Share of the items that are listed, alone or within a longer text."""
    listed, longer = set(held), "\n".join(held)
    return sum(one.line in listed or one.line in longer for one in items) / len(items)


def measure_quality(
    contender: Contender, measure: Any, conversations: Sequence[Any], table: Table, directory: Path
) -> dict[str, float]:
    """Share of the known evidence of answerable questions among the first 4, 10 and 20. Raises Failed."""
    with Runner(contender, directory, table) as runner:
        result = measure.evaluate(Retriever(runner), conversations, JUDGED)
    if result["errors"]:
        raise Failed(f"{sum(result['errors'].values())} questions had no answer: {next(iter(result['errors']))}")
    return {f"recall@{depth}": result["answerable"][f"recall@{depth}"] for depth in DEPTHS}


class Retriever:
    """The measure's interface over a runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._ids: dict[str, dict[str, str]] = {}

    def ingest(self, conversation_id: str, fragments: Sequence[Turn]) -> None:
        """Add each turn with its date and speaker."""
        items = [item_of_turn(turn) for turn in fragments]
        self._ids[conversation_id] = {}
        for turn, item in zip(
            fragments, items, strict=True
        ):  # the first of several turns with the same line represents it
            self._ids[conversation_id].setdefault(item.line, turn.id)
        self._runner.open(conversation_id)
        self._runner.add(conversation_id, items)

    def recall(self, conversation_id: str, query: str, now: datetime, k: int) -> list[str]:
        """Turn ids, best first. A text merged from several turns yields each of them."""
        question = Query(query, now.replace(tzinfo=UTC).timestamp(), judged=True)
        asked = self._runner.recall(conversation_id, [question], k)
        if asked.errors:
            raise Failed(asked.errors[0])
        ids = self._ids[conversation_id]
        found = [[ids[text]] if text in ids else _ids_within(text, ids) for text in asked.found[0]]
        return list(dict.fromkeys(id for each in found for id in each))


def _ids_within(text: str, ids: dict[str, str]) -> list[str]:
    places = sorted((text.find(line), id) for line, id in ids.items() if line in text)
    return [id for _, id in places]


def _all_texts(conversations: Sequence[Any]) -> list[str]:
    turns = [item_of_turn(turn).line for each in conversations for turn in each.fragments]
    return turns + [question.text for each in conversations for question in each.questions]
