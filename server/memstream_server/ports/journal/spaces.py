"""Embedding spaces of a store, and vectors in the space that comes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

ComputeVectors: TypeAlias = Callable[[Sequence[str], str], npt.NDArray[np.float32]]
"""The vectors of some texts, for a namespace, in a space that needs no model: float32[texts, dimension]. The same bits
every time, whatever the other texts are; any thread may call it."""


@dataclass(frozen=True, slots=True)
class Space:
    """An embedding space."""

    model: str
    dimension: int
    index_layout: int
    """A number that the first start takes from the index's settings; only the index gives it a meaning. Stored, because
    the layout of an index is fixed when it is created."""


@dataclass(frozen=True, slots=True)
class Spaces:
    """The embedding spaces of a store. Recall uses only the one in force."""

    in_force: Space | None = None
    """None in a new store."""
    next: Space | None = None
    """Being filled; will be put in force."""
    old: Space | None = None
    """No longer used; its vectors and its collection are being removed."""


@dataclass(frozen=True, slots=True)
class Made:
    """Vectors of a stored fragment in another space, computed from its content at `version`."""

    fragment: str
    version: int
    vector: bytes | None
    content_vector: bytes | None = None
    """Vector of the content alone, for a held fragment that is compared."""
    computed: bool = False
    """Both follow from the text: the journal need not store them."""
