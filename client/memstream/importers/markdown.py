"""Notes in Markdown: a file or a directory of them, by headings, paragraphs and list items."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import PurePosixPath

from memstream.importers.records import Options, Record, Report, plain_metadata, time_of
from memstream.importers.sources import Source

SUFFIXES = (".md", ".markdown", ".mdx")
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*$")
_ITEM = re.compile(r"([-*+]|\d{1,9}[.)])\s+")
_FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
_DATE = re.compile(r"(?<!\d)(\d{4}-\d\d-\d\d)(?!\d)")
_RULE = re.compile(r"\s*([-*_])(\s*\1){2,}\s*")


def markdown_files(source: Source) -> list[str]:
    """The Markdown files of a source, in order."""
    return sorted(one for one in source.names if one.lower().endswith(SUFFIXES))


def read_markdown(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """A record for each paragraph, list item and block of code, with the headings above it before its words."""
    for name in markdown_files(source):
        report.keep("files")
        yield from _read_file(source, name, options, report)


def _read_file(source: Source, name: str, options: Options, report: Report) -> Iterator[Record]:
    headings: list[tuple[int, str]] = []
    counts: dict[str, int] = {}
    dated = _date_in(PurePosixPath(name).stem)
    for number, kind, text in _blocks(source, name):
        if kind == "front matter":
            dated = next(
                (day for line in re.findall(r"(?m)^(?:date|created)\s*:.*", text) if (day := _date_in(line))), dated
            )
            report.lose("front matter")
            continue
        if kind.startswith("#"):
            headings = [one for one in headings if one[0] < len(kind)] + [(len(kind), text)]
            continue
        path = " > ".join(one for _, one in headings)
        counts[path] = counts.get(path, 0) + 1
        day = next((found for _, one in reversed(headings) if (found := _date_in(one))), dated)
        report.lose("images", text.count("!["))
        yield Record(
            # The place under its heading, not the words: a note that is edited replaces what it said.
            id=f"{name}#{path}#{counts[path]}",
            text=f"{path}: {text}" if path else text,
            session=name,
            time=time_of(day, options.time_zone),
            metadata=plain_metadata({"file": name, "heading": path or None}),
            place=f"{name}:{number}",
        )


def _date_in(text: str) -> str | None:
    """The first date in a heading or a name."""
    for found in _DATE.finditer(text):
        with suppress(ValueError):
            return date.fromisoformat(found[1]).isoformat()
    return None


def _blocks(source: Source, name: str) -> Iterator[tuple[int, str, str]]:
    """Line, kind ("#" to "######" for a heading, "front matter", "") and text of each block."""
    held: list[str] = []
    start, fence, front = 1, "", False
    with source.open(name) as entries:
        for number, line in entries.lines():
            if number == 1 and line.strip() == "---":
                front = True
                continue
            if front:
                if line.strip() in ("---", "..."):
                    yield 1, "front matter", "\n".join(held)
                    held, front = [], False
                else:
                    held.append(line)
                continue
            if fence or _FENCE.match(line):
                held.append(line)
                fence = _next_fence(fence, line)
                continue
            heading = _HEADING.match(line)
            if heading or not line.strip() or _RULE.fullmatch(line) or _ITEM.match(line):
                yield from _end_block(start, held)
                held, start = [], number
            if heading:
                yield number, heading[1], heading[2]
            elif line.strip() and not _RULE.fullmatch(line):
                start = number if not held else start
                held.append(line)
    yield from _end_block(start, held)


def _next_fence(fence: str, line: str) -> str:
    found = _FENCE.match(line)
    if found is None:
        return fence
    if not fence:
        return found[1]
    return "" if found[1].startswith(fence) and line.strip() == found[1] else fence


def _end_block(start: int, lines: list[str]) -> Iterator[tuple[int, str, str]]:
    text = "\n".join(lines).strip()
    if text:
        text = _ITEM.sub("", text, count=1) if _ITEM.match(text) else text
        yield start, "", text
