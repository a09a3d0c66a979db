"""The embedding spaces of this process: the one in force, and beside it the one that is being filled.

A memory's working set has the space it was read in; vectors of two spaces are never compared, so whoever asks a model
asks that of the working set it works on, and what was asked under another is seen again `under` the present one.
"""

from __future__ import annotations

from dataclasses import dataclass

from memstream_server.ports.journal.spaces import Space
from memstream_server.ports.models import Embedder, EmbeddingModel


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A space, and who makes vectors of it."""

    model: EmbeddingModel
    embedder: Embedder

    @property
    def name(self) -> str:
        return self.model.name

    def space(self, index_layout: int) -> Space:
        return Space(self.model.name, self.model.dimension, index_layout)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """The model that the settings name as the next one."""

    embedder: Embedder
    name: str = ""
    """Of its space; empty for a model that tells without being reached."""

    async def named(self) -> str:
        return self.name or (await self.embedder.model()).name

    async def embedding(self, known: Space | None) -> Embedding:
        """Its space, `known` from the journal where it was asked before. Raises ModelUnavailable."""
        if self.name and known is not None and known.model == self.name:
            return Embedding(EmbeddingModel(self.name, known.dimension), self.embedder)
        return Embedding(await self.embedder.model(), self.embedder)


@dataclass(slots=True, eq=False)
class Embeddings:
    """Changed by reembedding.py alone."""

    in_force: Embedding
    """What memories are read in that become active now."""
    next: Embedding | None = None
    """What everything new is embedded in, too, while all the rest is embedded anew."""
    candidate: Candidate | None = None
    """What can be the next."""

    def beside(self, name: str) -> Embedding | None:
        """Where a memory that is in the space of that name keeps vectors, too."""
        known = (self.next, self.in_force)
        return next((one for one in known if one is not None and one.name != name), None)
