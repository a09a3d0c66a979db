"""Converts rows of a collection of text and vectors to lines of an export: the long-term fragments of a new memory.

Pure: no I/O, no clock. The same rows, fields and time give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from memstream.times import read_time
from memstream_server.core.policy import Policy
from memstream_server.core.values import MemoryKind, MetadataValue, Tier
from memstream_server.engine.operations.transfer.lines import (
    FragmentLine,
    Header,
    MemoryLine,
    decode_line,
    encode_line,
    policy_line,
)
from memstream_server.engine.runtime.clock import encode_ulid

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NAMED = ("speaker", "session", "external_id")


class InvalidRow(ValueError):
    """A row that cannot become a fragment; the message names the row and the reason."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The field of a row for each attribute; empty: none."""

    key: str
    """The primary key."""
    text: str
    vector: str = ""
    id: str = ""
    """For external_id; empty: the primary key."""
    speaker: str = ""
    session: str = ""
    time: str = ""
    importance: str = ""
    metadata: tuple[str, ...] = ()

    def field_names(self) -> tuple[str, ...]:
        """All fields to read."""
        one = (self.key, self.text, self.vector, self.id, self.speaker, self.session, self.time, self.importance)
        return tuple(name for name in (*one, *self.metadata) if name)


@dataclass(frozen=True, slots=True)
class Adoption:
    """Parameters of all rows."""

    collection: str
    namespace: str
    memory: str
    columns: Columns
    importance: float
    time_us: int
    """Creation time of the fragments; also their time, if no field has it."""
    model: str = ""
    """The model of the vectors; empty: do not read vectors."""
    missing_time_us: int | None = None
    """Time of rows whose time is null; None: such a row is refused."""
    content_bytes_max: int = 0
    """The server's limit; 0: not announced."""
    name_bytes_max: int = 0


def fragment_id(adoption: Adoption, key: object) -> str:
    """The ULID of a row in this memory: the time of the adoption, and a hash of collection and primary key."""
    where = f"{adoption.namespace}/{adoption.memory}\n{adoption.collection}\n{type(key).__name__}:{key}"
    digest = blake2b(where.encode(), digest_size=10).digest()
    return encode_ulid(adoption.time_us // 1_000 << 80 | int.from_bytes(digest))


def header_lines(adoption: Adoption, server: str, kind: MemoryKind, policy: Policy, fragments: int) -> bytes:
    """The first line, and the line of the memory."""
    header = Header(
        format="memstream-export", version=1, server=server, time_us=adoption.time_us, vectors=bool(adoption.model)
    )
    uid = fragment_id(adoption, None)
    memory = MemoryLine(
        namespace=adoption.namespace,
        name=adoption.memory,
        uid=uid,
        kind=kind,
        policy=policy_line(policy),
        labels={},
        seed=blake2b(uid.encode(), digest_size=16).hexdigest(),
        revision=1,
        create_time_us=adoption.time_us,
        update_time_us=adoption.time_us,
        reflection_aggregate=0.0,
        fragments=fragments,
    )
    return encode_line(header) + encode_line(memory)


def fragment_line(row: Mapping[str, Any], position: int, adoption: Adoption) -> bytes | None:
    """The line of a row; None if it has no text. Raises Unfit."""
    columns = adoption.columns
    text = row.get(columns.text)
    if text is None or (isinstance(text, str) and not text.strip()):
        return None
    key = row[columns.key]
    try:
        line = FragmentLine(
            id=fragment_id(adoption, key),
            position=position,
            content=_check_content(columns.text, text, adoption.content_bytes_max),
            tier=Tier.LONG_TERM,
            importance=_parse_importance(row, adoption),
            observe_time_us=_parse_time_us(row, adoption),
            create_time_us=adoption.time_us,
            access_time_us=adoption.time_us,
            speaker=_parse_name(row, columns.speaker),
            session=_parse_name(row, columns.session),
            metadata={name: _convert_metadata(row[name]) for name in columns.metadata if row.get(name) is not None},
            external_id=f"{adoption.collection}:{_parse_name(row, columns.id or columns.key)}",
        )
        if adoption.model and (vector := _encode_vector(columns.vector, row.get(columns.vector))) is not None:
            line = msgspec.structs.replace(line, model=adoption.model, vector=vector)
        return _encode_checked(line, adoption.name_bytes_max)
    except ValueError as error:
        raise InvalidRow(f"the row of {columns.key} {key!r}: {error}") from error


def _encode_checked(line: FragmentLine, name_bytes_max: int) -> bytes:
    """Encodes a line after the server's checks. Raises ValueError, which names fields of the row, not a line number."""
    for name in NAMED:
        size = len(getattr(line, name).encode())
        if name_bytes_max and size > name_bytes_max:
            raise ValueError(f"its {name} has {size:,} bytes, the server allows {name_bytes_max:,}")
    raw = encode_line(line)
    try:
        decode_line(raw)
    except msgspec.ValidationError as error:
        text, _, field = str(error).rstrip("`").partition(" - at `$.")
        raise ValueError(f"its {field}: {text[:1].lower()}{text[1:]}") from error
    return raw


def _check_content(name: str, text: object, bytes_max: int) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{name} is not text but {text!r}")
    size = len(text.encode())
    if bytes_max and size > bytes_max:
        raise ValueError(
            f"{name} has {size:,} bytes, the server accepts at most {bytes_max:,}: start it with a larger "
            "content_max_bytes, or split the text"
        )
    return text


def _parse_name(row: Mapping[str, Any], field: str) -> str:
    value = row.get(field) if field else None
    return "" if value is None else str(value)


def _parse_importance(row: Mapping[str, Any], adoption: Adoption) -> float:
    field = adoption.columns.importance
    value = row.get(field) if field else None
    if value is None:
        return adoption.importance
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{field} must be a number from 0 to 1, is {value!r}")
    return float(value)


def _parse_time_us(row: Mapping[str, Any], adoption: Adoption) -> int:
    field = adoption.columns.time
    value = row.get(field) if field else None
    if not field:
        return adoption.time_us
    if value is None:
        if adoption.missing_time_us is None:  # an unknown time would become the present
            raise ValueError(f"{field} is null, which is no time: pass --time for such rows, or omit --time-field")
        return adoption.missing_time_us
    if not isinstance(value, str | int | float):
        raise ValueError(f"{field} must be a time, is {value!r}")
    try:
        now = _EPOCH + timedelta(microseconds=adoption.time_us)
        return (read_time(value, now=now) - _EPOCH) // timedelta(microseconds=1)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _convert_metadata(value: object) -> MetadataValue:
    """The value itself, or its text where JSON has no such value: of a time, for instance."""
    try:
        converted: MetadataValue = json.loads(json.dumps(value, default=str))
    except ValueError:  # a list inside of itself
        return str(value)
    return converted


def _encode_vector(field: str, value: object) -> bytes | None:
    """Normalises a vector to unit length; None for a zero vector. Raises ValueError."""
    if value is None:
        return None
    vector = np.asarray(value, dtype=np.float64)
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length):
        raise ValueError(f"{field} has a number that is not finite")
    return (vector / length).astype("<f4").tobytes() if length else None


__all__ = ["Adoption", "Columns", "InvalidRow", "fragment_id", "fragment_line", "header_lines"]
