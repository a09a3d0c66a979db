"""The forms in which the journal stores a vector; their lengths differ. All keep every bit.

bytes  form
4 n    n float32, little-endian
2 n+1  n float16 and a zero byte, of a vector whose numbers float16 holds: those of models (values.round_vectors)
0      none: it is computed from the text of the row
2      of an anchor: the fragment's vector in the same space
1      of an anchor that is written: the vector that the stored anchor has in this space
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from memstream_server.adapters.journal.database.database import Packed
from memstream_server.core.rendering import clip_for_index, indexed_text
from memstream_server.core.values import Fragment
from memstream_server.ports.journal.errors import Unreadable
from memstream_server.ports.journal.records import ComputeVectors
from memstream_server.ports.journal.rows import Origin

Floats = npt.NDArray[np.float32]
COMPUTED = b""
KEPT = b"\0"
INDEXED = b"\0\0"
_FORMS = {Origin.CONTENT: COMPUTED, Origin.INDEXED: INDEXED, Origin.KEPT: KEPT}
_HALF = b"\0"
"""Makes the length odd."""


def encode_vector(packed: bytes) -> bytes:
    """float32 as it is stored."""
    numbers = np.frombuffer(packed, "<f4")
    with np.errstate(over="ignore"):
        half = numbers.astype("<f2")
    return half.tobytes() + _HALF if np.array_equal(half.astype(np.float32), numbers) else packed


def encode_anchor(packed: bytes | None, origin: Origin) -> bytes | None:
    """The vector of an anchor as it is stored."""
    if packed is None:
        return None
    return _FORMS[origin] if origin in _FORMS else encode_vector(packed)


def has_valid_length(length: int, dimension: int | None, *, computed: bool, anchor: bool = False) -> bool:
    """Whether a stored vector can have that many bytes; `dimension` None: unknown. `computed`: of such a space."""
    if length in (len(COMPUTED), len(INDEXED)):
        return computed if length == len(COMPUTED) else anchor
    if dimension is not None:
        return length in (4 * dimension, 2 * dimension + 1)
    return length % 4 == 0 or (length % 2 == 1 and length > 1)


def decode_rows(packed: Packed, compute: Callable[[Sequence[int]], Floats]) -> Floats:
    """A column of vectors of one space as float32[rows, dimension]; `compute` makes those of some rows, by place."""
    sizes = packed.sizes
    rows = len(sizes)
    if not rows:
        return np.empty((0, 0), np.float32)
    if not packed.data:
        return compute(range(rows))
    if min(size or 0 for size in sizes) == max(size or 0 for size in sizes):
        return _decode_equal(packed.data, rows)
    values = [decode_bytes(value) if value else None for value in packed.values()]
    width = next(len(each) for each in values if each is not None)
    found = np.zeros((rows, width), np.float32)
    lacking = [place for place, each in enumerate(values) if each is None]
    for place, each in enumerate(values):
        if each is not None:
            found[place] = each
    if lacking:
        found[lacking] = compute(lacking)
    return found


def _decode_equal(data: bytes, rows: int) -> Floats:
    width = len(data) // rows
    if width % 2 == 0:
        return np.frombuffer(data, "<f4").reshape(rows, -1)
    halves = np.frombuffer(data, np.uint8).reshape(rows, width)[:, : width - len(_HALF)]
    found: Floats = np.ascontiguousarray(halves).view("<f2").astype(np.float32)
    return found


def decode_bytes(stored: bytes) -> Floats:
    """A vector that is stored, float32[dimension]."""
    return _decode_equal(stored, 1).ravel()


class Computing:
    """Computes the vectors of fragments in the spaces that need no model."""

    def __init__(self, spaces: Mapping[str, ComputeVectors] | None = None) -> None:
        self._spaces = spaces or {}

    @property
    def spaces(self) -> Collection[str]:
        """Names of the spaces."""
        return self._spaces.keys()

    def compute(self, model: str, fragments: Sequence[Fragment], namespace: str) -> Floats:
        """The indexed vectors of these fragments. Raises Unreadable for a space that it cannot compute."""
        return self._embed(model, [indexed_text(each) for each in fragments], namespace)

    def compute_contents(self, model: str, contents: Sequence[str], namespace: str) -> Floats:
        """The vectors of these contents alone. Raises Unreadable as above."""
        return self._embed(model, [clip_for_index(each) for each in contents], namespace)

    def _embed(self, model: str, texts: Sequence[str], namespace: str) -> Floats:
        if model not in self._spaces:
            raise Unreadable(f"vectors of {model} are not stored, and this server cannot compute them")
        return self._spaces[model](texts, namespace)


def pack(vector: Floats) -> bytes:
    """A vector as the port has it: float32, little-endian."""
    return np.ascontiguousarray(vector, "<f4").tobytes()
