"""The comparison of servers: one after the other, in interleaved rounds of the same load."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from report import percentile

from benchmarks.peers.contenders import Contender
from benchmarks.peers.load import Load, Table
from benchmarks.peers.protocol import Query
from benchmarks.peers.runner import Failed, Runner
from tests.toolchains.programs import Absent

BATCH = 64
"""Texts in a batch; the next one is sent after the acknowledgement of the one before."""
LIMIT = 10
"""Texts per recall."""
SETTLE_S = 17.0
"""Pause before memory is measured, longer than memstream's write-behind of the index waits."""
FRESH = 20
"""Lone writes that are searched by their own words at once."""
_WARM = 20


@dataclass(frozen=True)
class Round:
    """One server's figures for one round."""

    texts_per_s: float
    """In batches."""
    lone_p50_ms: float
    recall_p50_ms: float
    recall_p99_ms: float
    resident_mb: float | None
    """Of the server's processes, with all texts; None: only the first round measures memory."""
    proportional_mb: float | None
    fresh: float
    """Share of the lone writes that the next recall finds."""
    kept: float | None
    """Share of the lone writes that are listed after kill -9; None: not tried in this round, or not possible."""
    unopened: str = ""
    """Why a new server over the directory does not serve after kill -9."""


@dataclass
class Outcome:
    """One row: rounds, or the reason for their absence."""

    contender: Contender
    rounds: list[Round] = field(default_factory=list[Round])
    failed: str = ""

    def median(self, figure: str) -> float:
        """Median over the rounds; NaN without rounds."""
        values = [getattr(one, figure) for one in self.rounds if getattr(one, figure) is not None]
        return statistics.median(values) if values else float("nan")

    def ratio(self, figure: str, other: Outcome) -> float:
        """Median of the ratios to another row's figure of the same round; NaN without common rounds."""
        pairs = zip(self.rounds, other.rounds, strict=False)
        figures = [(getattr(mine, figure), getattr(theirs, figure)) for mine, theirs in pairs]
        ratios = [mine / theirs for mine, theirs in figures if mine is not None and theirs]
        return statistics.median(ratios) if ratios else float("nan")


def compare_servers(
    contenders: Iterable[Contender],
    load: Load,
    rounds: int,
    scratch: Path,
    once: Collection[Contender] = (),
    save: Callable[[list[Outcome]], None] = lambda _outcomes: None,
) -> list[Outcome]:
    """Run all rounds, with those of `once` in the first only. A server that cannot be installed or fails has the reason
    in its row, and no further rounds. `save` is called with all rows after every measurement.

    `load.single` are the lone writes, into the memory that already has `load.items`.
    """
    outcomes = [Outcome(contender) for contender in contenders]
    scratch.chmod(0o711)  # PostgreSQL runs as another user, if the benchmark runs as root
    for outcome in outcomes:
        try:
            outcome.contender.python()
        except Absent as reason:
            _report(outcome, "installing", str(reason))
    table = Table(scratch / "vectors.f32")
    try:
        table.write_vectors(load.texts)
        for number in range(rounds):
            for outcome in outcomes:
                if number and outcome.contender in once:
                    continue
                _try_round(outcome, load, table, scratch / f"{number}-{outcomes.index(outcome)}", number)
                save(outcomes)
    finally:
        table.close()
    return outcomes


def _try_round(outcome: Outcome, load: Load, table: Table, directory: Path, number: int) -> None:
    if outcome.failed:
        return
    began = time.monotonic()
    try:
        outcome.rounds.append(measure_round(outcome.contender, load, table, directory, first=number == 0))
    except Failed as reason:
        _report(outcome, f"round {number + 1}", str(reason))
    else:
        _say(f"round {number + 1}, {time.monotonic() - began:.0f} s: {outcome.contender.title}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _report(outcome: Outcome, step: str, reason: str) -> None:
    outcome.failed = reason
    _say(f"{step}: {outcome.contender.title}: {reason}")


def _say(text: str) -> None:
    load = f"load {os.getloadavg()[0]:.1f}, " if hasattr(os, "getloadavg") else ""
    print(f"{load}{text}", file=sys.stderr, flush=True)


def measure_round(contender: Contender, load: Load, table: Table, directory: Path, *, first: bool) -> Round:
    """One round over an empty directory. `first`: also memory, and what is left after kill -9. Raises Failed."""
    lone, fresh = load.single[:-FRESH], load.single[-FRESH:]
    with Runner(contender, directory, table) as runner:
        for memory in ("warm", "talk"):
            runner.open(memory)
        runner.add_each("warm", load.items[: 3 * BATCH], BATCH)
        runner.recall("warm", load.queries[:_WARM], LIMIT)
        batch_ms = runner.add_each("talk", load.items, BATCH)
        asked = runner.recall("talk", load.queries, LIMIT)
        if asked.errors:
            raise Failed(asked.errors[0])
        if first:
            time.sleep(SETTLE_S)
        used = runner.processes()
        lone_ms = runner.add_each("talk", lone)
        found = 0
        for item in fresh:
            runner.add_each("talk", [item])
            (texts,) = runner.recall("talk", [Query(item.line, load.queries[0].now_s)], LIMIT).found
            found += item.line in texts
        if first:
            runner.kill()
    measured = Round(
        texts_per_s=len(load.items) / sum(batch_ms) * 1e3,
        lone_p50_ms=percentile(lone_ms, 0.5),
        recall_p50_ms=percentile(asked.ms, 0.5),
        recall_p99_ms=percentile(asked.ms, 0.99),
        resident_mb=used.resident_mb if first else None,
        proportional_mb=used.proportional_mb if first else None,
        fresh=found / len(fresh),
        kept=None,
    )
    if not first:
        return measured
    try:
        return replace(measured, kept=_kept_share(contender, load, table, directory))
    except Failed as reason:
        return replace(measured, unopened=str(reason))


def _kept_share(contender: Contender, load: Load, table: Table, directory: Path) -> float:
    with Runner(contender, directory, table) as runner:
        runner.open("talk")
        listed = set(runner.lines("talk"))
    return sum(item.line in listed for item in load.single) / len(load.single)
