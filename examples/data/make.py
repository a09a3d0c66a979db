"""Make tz.jsonl from the comments of an unpacked tz database: `python make.py DIRECTORY > tz.jsonl`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

FILES = ("africa", "antarctica", "asia", "australasia", "europe", "northamerica", "southamerica")
ATTRIBUTION = re.compile(r"^From (?P<who>.+?) \((?P<day>\d{4}-\d\d-\d\d)(?:[ ,][^)]*)?\)[:.,]?\s*(?P<rest>.*)$")
HEADING = re.compile(r"^[A-ZÅÉ][\w'\u2019.,()/& -]{2,40}$")
NOT_A_HEADING = re.compile(
    r"\d|[.]{2}|\bFrom\b|\bRule\b|\bZone\b|\.$|^(NOTES|See|The|This|It|Also|But|And|For|In|We|As)\b"
)
ADDRESS = re.compile(r"<?\b(?:https?|ftp)://\S+|\S+@\S+|\+\d+(?:[ .-]\d+){3,}|\[\s*\]")
TABLE = re.compile(r"\t|\S {3,}\S|^[-=_* ]{4,}$")
CHUNK_CHARS = 600
PIECE_CHARS_MAX = 900
"""Longer chunks are tables or program text, and left out."""
WORDS_MIN = 6
DAY_MIN = "1986"
"""Older dates are those of quoted documents; the tz mailing list began in 1986."""


@dataclass
class Letter:
    """One dated comment: author, date, place, and its paragraphs."""

    who: str
    day: str
    place: str
    paragraphs: list[str] = field(default_factory=lambda: [""])

    def add(self, line: str) -> None:
        """Add a line; an empty one ends the paragraph."""
        if line:
            self.paragraphs[-1] = f"{self.paragraphs[-1]} {line}".strip()
        elif self.paragraphs[-1]:
            self.paragraphs.append("")

    def chunks(self) -> Iterator[str]:
        """The text in chunks of complete sentences, each at most CHUNK_CHARS unless one sentence is longer."""
        piece = ""
        for sentence in re.split(r"(?<=[.?!])\s+(?=[\"“A-Z\[])", " ".join(filter(None, self.paragraphs))):
            if piece and len(piece) + len(sentence) > CHUNK_CHARS:
                yield piece
                piece = ""
            piece = f"{piece} {sentence}".strip()
        if piece:
            yield piece


def find_letters(lines: list[str], countries: dict[str, str]) -> Iterator[Letter]:
    """The dated comments of one file, in order. A comment precedes the zone it is about.

    Its place is the last heading since the previous zone, otherwise the next zone.
    """
    heading, current = "", None
    for number, raw in enumerate(lines):
        if raw.startswith("Zone"):
            heading = ""
        if not raw.startswith("#"):
            current = None
            continue
        line = raw.lstrip("#").strip()
        if opened := ATTRIBUTION.match(line):
            current = Letter(speaker_name(opened["who"]), opened["day"], heading or next_zone(lines, number, countries))
            yield current
            current.add(strip_addresses(opened["rest"]))
        elif line.startswith("From ") or re.match(r"(Rule|Zone)\t", line):
            current = None
        elif current is None and is_heading(line, lines, number):
            heading = re.split(r" \(|, represented| - ", line)[0]
        elif current is not None and (not line or not TABLE.search(line)):
            current.add(strip_addresses(line))


def next_zone(lines: list[str], number: int, countries: dict[str, str]) -> str:
    """Country and city of the first zone after a line; empty after the last zone."""
    for line in lines[number:]:
        if line.startswith("Zone"):
            zone = line.split()[1]
            country, city = countries.get(zone, ""), zone.rpartition("/")[2].replace("_", " ")
            return f"{country} ({city})" if country and city not in country else city
    return ""


def zone_countries(directory: Path) -> dict[str, str]:
    """The country of each zone's main city."""
    table = [line.split("\t") for line in (directory / "iso3166.tab").read_text("utf-8").splitlines() if line[0] != "#"]
    names = {code: name.split(" (")[0] for code, name in table}
    zones = [
        line.split("\t") for line in (directory / "zone1970.tab").read_text("utf-8").splitlines() if line[0] != "#"
    ]
    return {zone: names[codes[:2]] for codes, _, zone, *_ in zones}


def is_heading(line: str, lines: list[str], number: int) -> bool:
    """Whether a comment line is isolated and looks like the name of a place."""
    before = lines[number - 1].strip("# \n") if number else ""
    after = lines[number + 1].lstrip("#").strip() if number + 1 < len(lines) else ""
    alone = not before and (not after or after.startswith(("From ", "Zone\t", "Rule\t", "See ")))
    return alone and bool(HEADING.match(line)) and not NOT_A_HEADING.search(line)


def speaker_name(who: str) -> str:
    """The name alone, without office or source."""
    return re.split(r",| of | via | citing | quoting | in | translating | <| \(", who)[0].strip()


def strip_addresses(line: str) -> str:
    """Remove web addresses, mail addresses and telephone numbers."""
    return re.sub(r"\s+", " ", ADDRESS.sub("", line)).strip(" <>")


def make_rows(directory: Path) -> list[dict[str, str]]:
    """Every chunk of every letter, by time; chunks of one day are a minute apart, from noon UTC."""
    countries = zone_countries(directory)
    texts = [(directory / name).read_text("utf-8").splitlines() for name in FILES]
    found = [letter for lines in texts for letter in find_letters(lines, countries)]
    noon: dict[str, datetime] = {}
    made = []
    for letter in sorted(found, key=lambda letter: letter.day):
        for chunk in letter.chunks():
            if (
                letter.place
                and letter.day >= DAY_MIN
                and len(chunk.split()) >= WORDS_MIN
                and len(chunk) <= PIECE_CHARS_MAX
            ):
                time = noon.setdefault(letter.day, datetime.fromisoformat(letter.day).replace(hour=12, tzinfo=UTC))
                noon[letter.day] = time + timedelta(minutes=1)
                text = f"{letter.place}: {chunk}"
                made.append({"time": time.isoformat(), "speaker": letter.who, "session": letter.place, "text": text})
    return made


if __name__ == "__main__":
    for row in make_rows(Path(sys.argv[1])):
        print(json.dumps(row, ensure_ascii=False))
