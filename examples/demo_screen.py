"""Output of the demo: progress, tables and sentences, on a terminal or in a file."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from memstream import Answer, Event, EventType, Explanation, Fragment, MemoryStats, Recollection, ServerInfo

SHOWN = 3
"""Recollections shown of each answer."""
PLAIN_WIDTH = 110

MEANINGS = {
    EventType.OBSERVED: "entered the memory",
    EventType.FILTERED: "left sensory below the importance threshold",
    EventType.ADMITTED: "sensory → short-term",
    EventType.ENHANCED: "was strengthened by a similar letter",
    EventType.WEAKENED: "lost the strength given by a dropped letter",
    EventType.PROMOTED: "short-term → long-term",
    EventType.OVERFLOWED: "had to leave the full short-term tier",
    EventType.DROPPED: "left the memory by policy",
    EventType.REPEATED: "repeated a stored letter: counted there, not kept",
    EventType.ECHOED: "repeated a recent recollection: not kept",
}


class Screen:
    """Prints the demo's output."""

    def __init__(self) -> None:
        self._console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)

    def show_title(self, text: str, under: str = "") -> None:
        """Start a section."""
        self._console.print()
        self._console.rule(f"[bold]{escape(text)}", align="left", style="dim")
        if under:
            self._console.print(f"[dim]{escape(under)}")

    def show_server(self, info: ServerInfo, pid: int, address: str, seconds: float) -> None:
        """Describe the server."""
        model = info.embedding
        self._print(f"memstream {info.version} serves on {address} (process {pid}, {seconds:.1f} s to start)")
        self._print(f"embedding {model.name}, {model.dimension} dimensions; journal {info.journal}; index {info.index}")
        scorer, insight = info.scorer_model or "none: constant", info.insight_model or "none"
        self._print(f"importance model {scorer}; insight model {insight}")

    @contextlib.contextmanager
    def show_progress(self, total: int) -> Iterator[Callable[[int, int], None]]:
        """Two progress bars; the yielded function sets how many observations are received and stored."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as bars:
            received = bars.add_task("received (durable)     ", total=total)
            stored = bars.add_task("stored (seen by recall)", total=total)

            def show(received_now: int, stored_now: int) -> None:
                bars.update(received, completed=received_now)
                bars.update(stored, completed=stored_now)

            yield show

    def show_ingest(self, count: int, seconds: float, stats: MemoryStats) -> None:
        """Show the rate, and the number of letters per tier."""
        self._print(f"{count:,} observations stored in {seconds:.1f} s, every one acknowledged")
        self._print(
            f"now in sensory {stats.sensory}, short-term {stats.short_term}, long-term {stats.long_term:,} "
            f"(revision {stats.revision})"
        )

    def show_event_counts(self, events: Sequence[Event]) -> None:
        """Show how many letters moved between the tiers."""
        table = Table("event", "times", "a letter ...", title="What a watch saw", title_justify="left")
        table.columns[1].justify = "right"
        counts = Counter(event.type for event in events)
        for type_, meaning in MEANINGS.items():
            if counts[type_]:
                table.add_row(type_.name, f"{counts[type_]:,}", meaning)
        self._console.print(table)

    def show_path(self, letter: Fragment, path: Sequence[Event], others: Mapping[str, str]) -> None:
        """Show one letter's path through the tiers."""
        table = Table("revision", "step", "with", title="One letter's path", title_justify="left")
        self._print(f"[bold]for example[/] {_letter_heading(letter)}: {_shorten(letter.content, 90)}")
        for event in path:
            # An event inside a revision carries the previous revision's cursor.
            revision = event.cursor.revision + (1 if event.cursor.ordinal else 0)
            table.add_row(str(revision), event.type.name, _event_details(event, others))
        self._console.print(table)

    def show_answers(self, asked: Sequence[tuple[str, Collection[str]]], answers: Sequence[Answer]) -> None:
        """Show every question with its best recollections and the reasons for their ranks."""
        for (question, expected), answer in zip(asked, answers, strict=True):
            table = Table(show_header=False, show_lines=True, title=f"? {escape(question)}", title_justify="left")
            table.add_column("score", justify="right")
            table.add_column("recalled, and why", ratio=1)
            for hit in answer[:SHOWN]:
                table.add_row(f"{hit.rank}\n[bold]{hit.score:.3f}[/]", _format_recollection(hit, expected))
            self._console.print(table)
            self._console.print(Text(_summarise(answer, expected), style="dim"))

    def show_working_memory(self, answer: Answer) -> None:
        """Show the short-term tier that accompanies every answer."""
        table = Table(title="Working memory: the short-term tier, with every answer", expand=True, title_justify="left")
        table.add_column("letter", no_wrap=True, ratio=1)
        table.add_column("strengthened", justify="right", min_width=12)
        for fragment in answer.working_memory:
            table.add_row(
                f"{_letter_heading(fragment)}: {_shorten(fragment.content, 90)}", str(fragment.enhancement_count)
            )
        self._console.print(table)

    def show_kill(self, pid: int, sent: int, received: int) -> None:
        """Show the state at the kill."""
        self._print(f"process {pid} killed, and the agent with it")
        self._print(f"{sent:,} observations were sent, {received:,} of them acknowledged as received")

    def show_continuation(self, acknowledged: int, first: int, total: int, kept: int, repeats: int, lost: int) -> None:
        """Show the final contents of the second memory."""
        self._print(f"the server had received up to {first - 1:,} (acknowledged: {acknowledged:,})")
        self._print(f"the agent continues from {first:,}, as `opened` says, to {total:,}")
        self._print(f"of {total:,} letters: {lost} lost, {kept:,} kept once each, {repeats} counted as repeats")

    def show_comparison(self, asked: Sequence[str], sizes: Sequence[int], same: Sequence[bool]) -> None:
        """Show whether the answers are the same as before."""
        table = Table(title="The same questions, asked again", title_justify="left")
        table.expand = True
        table.add_column("question", no_wrap=True, ratio=1)
        table.add_column("recalled", justify="right", min_width=8)
        table.add_column("same letters, order, scores", no_wrap=True)
        for question, size, equal in zip(asked, sizes, same, strict=True):
            table.add_row(escape(question), str(size), "[green]yes[/]" if equal else "[red]NO[/]")
        self._console.print(table)

    def show_end(self, failures: Sequence[str], seconds: float, kept: Path | None) -> None:
        """Show the verdict, and commands to try next."""
        self._console.print()
        for failure in failures:
            self._console.print(f"[bold red]wrong:[/] {escape(failure)}")
        if failures:
            self._console.print("[bold red]The demo failed.")
            return
        self._print(
            f"[bold green]Nothing acknowledged was lost or duplicated, and every answer is the same.[/] {seconds:.0f} s"
        )
        self.show_title("What next")
        data = f"--data {kept / 'data'}" if kept else "--data ./memory"
        self._console.print(f"  .venv/bin/memstream serve {escape(data)}")
        self._console.print("  .venv/bin/memstream observe demo/notes README.md --create   # lines in")
        self._console.print('  .venv/bin/memstream recall demo/notes "What is a tier?" --explain')
        self._console.print("  .venv/bin/python examples/quickstart.py                     # the SDK in ten lines")
        self._console.print(
            "  .venv/bin/memstream dev --open                              # these letters in the console"
        )
        self._console.print("  docs/getting-started.md, then docs/concepts.md and docs/console.md")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=False)


def _letter_heading(fragment: Fragment) -> str:
    date = f"{fragment.observe_time:%Y-%m-%d} " if fragment.observe_time else ""
    return f"{date}{escape(fragment.speaker)}"


def _shorten(text: str, length: int) -> str:
    return escape(text if len(text) <= length else f"{text[: length - 1]}…")


def _event_details(event: Event, others: Mapping[str, str]) -> str:
    if event.type is EventType.ENHANCED:
        return f"cosine {event.cosine:.2f} with: {_shorten(others.get(event.other_id, ''), 60)}"
    if event.type is EventType.PROMOTED:
        return f"{len(event.sources)} sources"
    if event.type is EventType.OBSERVED:
        return f"importance {event.importance:.2f}"
    return ""


def _format_recollection(hit: Recollection, expected: Collection[str]) -> str:
    mark = "[bold green]✓[/] " if hit.fragment.content in expected else ""
    words = f"{mark}[cyan]{_letter_heading(hit.fragment)}[/]: {_shorten(hit.fragment.content, 180)}"
    return f"{words}\n[dim]{_explain_score(hit.explanation)}[/]"


def _explain_score(explanation: Explanation | None) -> str:
    """The parts that contribute, largest first: value x weight."""
    if explanation is None:
        return ""
    parts = sorted(explanation.parts, key=lambda part: -part.contribution)
    return "= " + " + ".join(f"{p.name} {p.value:.2f} x {p.weight:g}" for p in parts if p.contribution > 0.0005)


def _summarise(answer: Answer, expected: Collection[str]) -> str:
    ranks = [hit.rank for hit in answer if hit.fragment.content in expected]
    found = f"known answers at rank {', '.join(map(str, ranks))}" if ranks else "no known answer among them"
    more = f"; degraded: {answer.degraded}" if answer.degraded else ""
    milliseconds = sum(answer.timings.values()) * 1000
    return f"{found}; {answer.considered} of {answer.eligible:,} scored, {milliseconds:.1f} ms in the server{more}"
