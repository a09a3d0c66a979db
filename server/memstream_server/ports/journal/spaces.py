"""The embedding spaces that a store knows, and vectors on their way from one to another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Space:
    """The embedding space in force: its model's name and dimension, and the Milvus collection's partitions."""

    model: str
    dimension: int
    partitions: int


@dataclass(frozen=True, slots=True)
class Spaces:
    """The embedding spaces a store knows: recalls use the one in force alone."""

    in_force: Space | None = None
    """None in a new store."""
    next: Space | None = None
    """Being filled, to be put in force."""
    old: Space | None = None
    """No longer used: its vectors and its collection are being removed."""


@dataclass(frozen=True, slots=True)
class Made:
    """Vectors of a stored fragment in another space, made of what it said at `version`."""

    fragment: str
    version: int
    vector: bytes | None
    content_vector: bytes | None = None
    """Of the content alone, for one that is held and compared."""
