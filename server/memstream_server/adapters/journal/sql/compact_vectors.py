"""Converts vectors that an earlier server stored as float32 to the forms of vector_forms.py, a slice at a time.

A vector that its text gives bit by bit is no longer stored, an anchor that has its fragment's vector refers to it, and
the vector of a model is rounded as new ones are (values.round_vectors). A client's vector stays as it is, and all
vectors of a memory that keeps receipts of recalls, whose replays compare every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import BindParameter, Connection, bindparam, func, or_, select

from memstream_server.adapters.journal.sql import bulk, codec
from memstream_server.adapters.journal.sql.reads import find_row
from memstream_server.adapters.journal.sql.schema import (
    anchors,
    fragments,
    key_position,
    key_range,
    recall_receipts,
    vectors,
)
from memstream_server.adapters.journal.sql.vector_forms import (
    COMPUTED,
    INDEXED,
    Computing,
    decode_bytes,
    encode_vector,
    pack,
)
from memstream_server.core.values import Fragment, round_vectors

_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_number: BindParameter[int] = bindparam("number")


def _is_whole(column: Any) -> Any:
    """Whether a stored vector is float32."""
    return (func.length(column) % 4 == 0) & (func.length(column) > 0)


_RECEIPT = select(recall_receipts.c.key).where(recall_receipts.c.key.between(_low, _high)).limit(1)
_VECTORS = (
    select(vectors.c.key, vectors.c.model, vectors.c.vector, fragments.c.payload)
    .join(fragments, fragments.c.key == vectors.c.key)
    .where(vectors.c.key.between(_low, _high), _is_whole(vectors.c.vector))
    .order_by(vectors.c.key, vectors.c.model)
    .limit(bindparam("limit"))
)
_anchored = (fragments.c.memory == anchors.c.memory) & (fragments.c.id == anchors.c.id)
_ANCHORS = (
    select(
        *(anchors.c.id, fragments.c.key, fragments.c.payload),
        *(anchors.c.model, anchors.c.vector, anchors.c.next_model, anchors.c.next_vector),
    )
    .join(fragments, _anchored)
    .where(anchors.c.memory == _number, or_(_is_whole(anchors.c.vector), _is_whole(anchors.c.next_vector)))
)
_INDEXED = select(vectors.c.vector).where(vectors.c.key == bindparam("key"), vectors.c.model == bindparam("model"))
_SET_VECTOR = bulk.build_update(
    "vectors",
    ("key", "model", "was", "now"),
    "vector = given.now",
    "vectors.key = given.key AND vectors.model = given.model AND vectors.vector = given.was",
)
_SET_ANCHOR = bulk.build_update(
    "anchors",
    ("memory", "id", "was", "now"),
    "vector = CASE WHEN vector = given.was THEN given.now ELSE vector END,"
    " next_vector = CASE WHEN next_vector = given.was THEN given.now ELSE next_vector END",
    "anchors.memory = given.memory AND anchors.id = given.id",
)


_SPACES_MAX = 3
"""Spaces in which a fragment may have a vector: the one in force, the next and the old one."""


class Slice(NamedTuple):
    """What is to be written, and where the next slice begins; the values are those that were read."""

    vectors: Sequence[tuple[int, str, bytes, bytes]]
    anchors: Sequence[tuple[int, str, bytes, bytes]]
    after: int | None
    """The last position that is done; None at the end of the memory."""
    is_rounded: bool
    """Whether a vector is not the one that it was."""


def read_slice(connection: Connection, computing: Computing, uid: str, after: int, limit: int) -> Slice:
    """The next conversions of a memory after a position (-1: from the start, with its anchors)."""
    memory = find_row(connection, uid)
    if memory is None:
        return Slice((), (), None, False)
    low, high = key_range(memory.number)
    exact = connection.execute(_RECEIPT, {"low": low, "high": high}).first() is not None
    converting = _Converting(computing, memory.namespace, exact)
    held = list(_read_anchors(connection, converting, memory.number)) if after < 0 else []
    limit = max(limit, _SPACES_MAX + 1)
    values = {"low": low + after + 1, "high": high, "limit": limit}
    rows = connection.execute(_VECTORS, values).all()
    last = key_position(rows[-1].key) if len(rows) == limit else None
    if last is not None:  # the last one may have another vector
        rows, last = [row for row in rows if row.key < rows[-1].key], last - 1
    changes = [(row.key, row.model, row.vector, converting.convert(*row[1:])) for row in rows]
    return Slice([one for one in changes if one[2] != one[3]], held, last, converting.is_rounded)


def write_slice(connection: Connection, given: Slice) -> None:
    """Write what is still as it was read."""
    bulk.write_rows(connection, _SET_ANCHOR, given.anchors)
    bulk.write_rows(connection, _SET_VECTOR, given.vectors)


class _Converting:
    """One slice of a memory."""

    def __init__(self, computing: Computing, namespace: str, exact: bool) -> None:
        self._computing, self._namespace, self._exact = computing, namespace, exact
        self.is_rounded = False

    def convert(self, model: str, vector: bytes, payload: bytes) -> bytes:
        """The fragment's vector in its new form."""
        fragment = codec.decode_fragment(payload, 0, 0)
        if model in self._computing.spaces:
            made = self._computing.compute(model, [fragment], self._namespace)
            return COMPUTED if pack(made[0]) == vector else encode_vector(vector)
        return self._round(fragment, model, vector)

    def convert_content(self, model: str, vector: bytes, payload: bytes) -> bytes:
        """The vector of its content in its new form."""
        fragment = codec.decode_fragment(payload, 0, 0)
        if model in self._computing.spaces:
            made = self._computing.compute_contents(model, [fragment.content], self._namespace)
            return COMPUTED if pack(made[0]) == vector else encode_vector(vector)
        return self._round(fragment, model, vector)

    def _round(self, fragment: Fragment, model: str, vector: bytes) -> bytes:
        own = fragment.own_vector and fragment.model == model
        if not self._exact and not own:
            rounded = pack(round_vectors(np.frombuffer(vector, "<f4")))
            self.is_rounded = self.is_rounded or rounded != vector
            vector = rounded
        return encode_vector(vector)


def _read_anchors(
    connection: Connection, converting: _Converting, number: int
) -> Iterator[tuple[int, str, bytes, bytes]]:
    for id_, key, payload, *sides in connection.execute(_ANCHORS, {"number": number}).all():
        for model, vector in zip(sides[::2], sides[1::2], strict=True):
            if not vector or len(vector) % 4:
                continue
            indexed = connection.execute(_INDEXED, {"key": key, "model": model}).scalar_one_or_none()
            if indexed and pack(decode_bytes(indexed)) == vector:
                now = INDEXED
            else:
                now = converting.convert_content(model, vector, payload)
            if now != vector:
                yield number, id_, vector, now
