"""Recognisers of time phrases on tables of questions: right windows, false hits on traps, CPU, import.

    python benchmarks/time_phrases.py [--dateparser]

The tables are tests/core_recall/time_phrases*.tsv. memstream's rules count as right with exactly the window of a row.
`--dateparser` measures `dateparser.search.search_dates` (pip install dateparser) instead; it finds moments, not
windows, so it counts as right if its one moment is inside the window, or at the limit of an open one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

NOW = datetime(2023, 11, 15, 12, tzinfo=UTC)
TABLES = Path(__file__).parent.parent / "tests" / "core_recall"
_CODES = {"english": "en", "german": "de", "french": "fr", "spanish": "es", "portuguese": "pt", "chinese": "zh",
          "japanese": "ja"}  # fmt: skip
Window = tuple[datetime | None, datetime | None]
Recogniser = Callable[[str, str], Sequence[Window]]


@dataclass(frozen=True)
class Row:
    """A question and the windows that it means; none for a trap."""

    language: str
    windows: tuple[Window, ...]
    question: str


def read_table(path: Path) -> list[Row]:
    """The rows of a table."""
    rows = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            language, *middle, question = line.split("\t")
            windows = () if middle[0] == "none" else tuple(_window(part) for part in " ".join(middle).split(" + "))
            rows.append(Row(language, windows, question))
    return rows


def _window(text: str) -> Window:
    start, end = (None if day == "-" else datetime.fromisoformat(day).replace(tzinfo=UTC) for day in text.split(" "))
    return start, end


def with_rules() -> Recogniser:
    """memstream's own rules."""
    from memstream_server.core.time_phrases.recognition import find_times

    now_us = int(NOW.timestamp() * 1_000_000)

    def find(question: str, language: str) -> list[Window]:
        found = find_times(question, language, now_us, UTC)
        return [(_moment(each.window.start_us), _moment(each.window.end_us)) for each in found]

    return find


def with_dateparser() -> Recogniser:
    """dateparser's search, with the language given and past dates preferred."""
    from dateparser.search import search_dates

    settings = {"RELATIVE_BASE": NOW.replace(tzinfo=None), "PREFER_DATES_FROM": "past", "TIMEZONE": "UTC"}

    def find(question: str, language: str) -> list[Window]:
        found = search_dates(question, languages=[_CODES[language]], settings=settings)
        return [(each.replace(tzinfo=UTC), each.replace(tzinfo=UTC)) for _, each in found or ()]

    return find


def _moment(moment_us: int | None) -> datetime | None:
    return None if moment_us is None else datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=moment_us)


def is_right(found: Sequence[Window], wanted: Sequence[Window]) -> bool:
    """Exactly these windows; a moment is right inside its window."""
    return len(found) == len(wanted) and all(map(_matches, found, wanted))


def _matches(found: Window, wanted: Window) -> bool:
    if found == wanted:
        return True
    moment, (start, end) = found[0], wanted
    if moment is None or moment != found[1]:
        return False
    if start is None or end is None:
        limit = start or end
        return limit is not None and abs(moment - limit) <= timedelta(days=31)
    return start <= moment < end


def measure(find: Recogniser, rows: Sequence[Row]) -> dict[str, float]:
    """Shares of right answers with a phrase and of false hits on traps, and median CPU in microseconds of both."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    spent: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        find(row.question, row.language)  # compiled patterns and loaded data are paid once
        began = time.process_time()
        for _ in range(REPEATS):
            found = find(row.question, row.language)
        spent[bool(row.windows)].append((time.process_time() - began) / REPEATS * 1e6)
        right[bool(row.windows)].append(is_right(found, row.windows))
    return {
        "phrases": len(right[True]),
        "right": statistics.fmean(right[True]),
        "traps": len(right[False]),
        "false hits": 1 - statistics.fmean(right[False]),
        "us with a phrase": statistics.median(spent[True]),
        "most": max(spent[True]),
        "us of a trap": statistics.median(spent[False]),
        "most of a trap": max(spent[False]),
    }


REPEATS = 20


def main() -> None:
    """Print one line per table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dateparser", action="store_true", help="measure dateparser instead of memstream's rules")
    parser.add_argument("--wrong", action="store_true", help="list the questions that were not right")
    arguments = parser.parse_args()
    began = time.process_time()
    find = with_dateparser() if arguments.dateparser else with_rules()
    print(f"import: {(time.process_time() - began) * 1e3:.0f} ms of CPU")
    for path in sorted(TABLES.glob("time_phrases*.tsv")):
        rows = read_table(path)
        figures = measure(find, rows)
        print(path.stem, "  ".join(f"{name} {value:.3g}" for name, value in figures.items()))
        for row in rows if arguments.wrong else ():
            if not is_right(found := find(row.question, row.language), row.windows):
                print(f"  {row.language}: {row.question}  found {[tuple(map(str, each)) for each in found]}")


if __name__ == "__main__":
    main()
