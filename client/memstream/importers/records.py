"""What importers read: records, options, and the report of what is kept, lost and skipped. Pure values."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from memstream.times import read_time
from memstream.values import MetadataValue, Role

NAME_BYTES = 128
"""The server's default limit of a session, a speaker or an external id; a longer one is cut and gets a digest."""
PLACES_SHOWN = 20
"""Skipped records that a report names; it counts all."""
UNREADABLE = datetime.min.replace(tzinfo=UTC)
"""The time of a record whose own cannot be read: it is skipped, unless the user gives one."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
ROLES = {
    "user": Role.USER,
    "human": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "system": Role.SYSTEM,
}


class InvalidSource(ValueError):
    """A source that cannot be imported; the message names the file, the place in it and the reason."""


@dataclass(frozen=True, slots=True)
class Record:
    """One message or fact of a source.

    `id`: unique in the source, the same in a later export of it. `block`: the name of the memory's block that the text
    becomes; empty: an observation. `place`: where the source has it, for messages.
    """

    id: str
    text: str
    session: str = ""
    speaker: str = ""
    role: Role | None = None
    time: datetime | None = None
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict[str, MetadataValue])
    importance: float | None = None
    embedding: tuple[float, ...] | None = field(default=None, repr=False)
    block: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """How a source is read. `fields`: the field of a row by attribute of a record (text, id, speaker, session, time,
    importance, vector). `model`: the model of the source's embeddings, which is the server's; empty: read none."""

    time_zone: str = ""
    date_order: str = ""
    collection: str = ""
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    milvus_token: str = field(default="", repr=False)
    model: str = ""
    missing_time: datetime | None = None
    """The time of records whose own cannot be read."""


@dataclass(slots=True)
class Report:
    """What one pass over a source found. `lost`: parts of kept records, and records of a kind that is not imported."""

    kept: Counter[str] = field(default_factory=Counter[str])
    lost: Counter[str] = field(default_factory=Counter[str])
    skipped: Counter[str] = field(default_factory=Counter[str])
    places: list[str] = field(default_factory=list[str])
    earliest: datetime | None = None
    latest: datetime | None = None

    def keep(self, what: str, count: int = 1) -> None:
        """Counts what is imported."""
        self.kept[what] += count

    def lose(self, what: str, count: int = 1) -> None:
        """Counts what is not imported."""
        if count:
            self.lost[what] += count

    def skip(self, why: str, place: str) -> None:
        """Counts a record that is skipped, and keeps the first places."""
        self.skipped[why] += 1
        if len(self.places) < PLACES_SHOWN:
            self.places.append(f"{place}: {why}")

    def see_time(self, time: datetime | None) -> None:
        """Widens the range of times."""
        if time is not None:
            self.earliest = min(time, self.earliest or time)
            self.latest = max(time, self.latest or time)


def clean_text(text: str) -> str:
    """The text without half characters (a cut emoji), which UTF-8 cannot hold, and without NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "").strip()


def fit_name(name: str, bytes_max: int = NAME_BYTES) -> str:
    """A name of at most `bytes_max` bytes without control characters; one that is cut ends with a digest."""
    plain = _CONTROL.sub(" ", clean_text(name))
    raw = plain.encode()
    if len(raw) <= bytes_max:
        return plain
    return raw[: bytes_max - 17].decode(errors="ignore") + "~" + digest_of(plain)


def digest_of(text: str) -> str:
    """16 hexadecimal digits that stand for a text."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def time_of(value: object, zone: str = "", *, required: bool = False) -> datetime | None:
    """The time of a field; None for an absent one. UNREADABLE for what is no time, and for an absent one that is
    required: it must not become the present."""
    if value is None or value == "":
        return UNREADABLE if required else None
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        if isinstance(value, str) and not value[:4].isdigit():
            raise ValueError  # "yesterday" is a time of the command line, not of a file
        return read_time(value, zone)
    except (ValueError, OverflowError):
        return UNREADABLE


def plain_metadata(values: Mapping[str, Any], depth: int = 6) -> dict[str, MetadataValue]:
    """Values as JSON has them; what JSON does not have becomes text, what is too deep becomes JSON as text."""
    return {fit_name(str(key)): _plain(value, depth) for key, value in values.items() if value is not None and key}


def _plain(value: Any, depth: int) -> MetadataValue:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, bool | int | float):
        return value if abs(value) < 2**53 else str(value)
    if isinstance(value, Mapping | list | tuple) and depth <= 0:
        return json.dumps(value, default=str, ensure_ascii=False)
    if isinstance(value, Mapping):
        return {str(key): _plain(one, depth - 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, depth - 1) for one in value]
    return None if value is None else str(value)
