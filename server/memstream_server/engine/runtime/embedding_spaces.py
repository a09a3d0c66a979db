"""The embedding spaces of this process: the one in force, and the next one while it is filled.

A working set belongs to the space that was in force when it was loaded. Vectors of two spaces are never compared:
callers embed with the model of the working set, and `EnrichedFragment.in_space` converts results after a switch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memstream_server.ports.journal.spaces import Space
from memstream_server.ports.models import Embedder, EmbeddingModel


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A space and the embedder that makes its vectors."""

    model: EmbeddingModel
    embedder: Embedder
    name: str = field(init=False)
    """The model's, which every step of a batch compares."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.model.name)

    def as_space(self, index_layout: int) -> Space:
        return Space(self.model.name, self.model.dimension, index_layout)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """The model that the settings name as the next one."""

    embedder: Embedder
    name: str = ""
    """The name of its space; empty if only the model endpoint knows it."""

    async def find_name(self) -> str:
        return self.name or (await self.embedder.model()).name

    async def make_embedding(self, known: Space | None) -> Embedding:
        """The candidate's space; `known` is the journal's record of an earlier answer. Raises ModelUnavailable."""
        if self.name and known is not None and known.model == self.name:
            return Embedding(EmbeddingModel(self.name, known.dimension), self.embedder)
        return Embedding(await self.embedder.model(), self.embedder)


@dataclass(slots=True, eq=False)
class Embeddings:
    """The spaces in use. Only operations/reembed.py changes them."""

    in_force: Embedding
    """The space of every memory that is loaded from now on."""
    next: Embedding | None = None
    """The space that new fragments are embedded in as well, until all older ones are."""
    candidate: Candidate | None = None
    """The model that can become the next one."""

    def other_than(self, name: str) -> Embedding | None:
        """The second space in which a memory of space `name` keeps vectors; None if there is only one space."""
        for one in (self.next, self.in_force):
            if one is not None and one.name != name:
                return one
        return None
