"""Receipts of recalls: query, policy, revision and ranking, without content of fragments."""

from __future__ import annotations

from msgspec import Struct

from memstream_server.core.policy import Policy
from memstream_server.core.suspicions import Suspicion


class RankedFragment(Struct, frozen=True, gc=False, array_like=True):
    """A recollection in a receipt. Encoded as an array of its fields: append new ones at the end."""

    id: str
    score: float
    relevance: float
    names: int
    """Index in RecallReceipt.names of the names of its parts."""
    weights: int
    """Index in RecallReceipt.weights."""
    values: tuple[float, ...]
    companion: bool = False
    """Whether it is the companion of the one before it."""


class RecallReceipt(Struct, frozen=True, gc=False, omit_defaults=True):
    """What is kept of a recall, complete enough to rank the same again."""

    id: str
    revision: int
    """The revision that was ranked; the commit that writes the receipt is a later one."""
    time_us: int
    """When it was ranked: expiry counted at this time."""
    now_us: int
    """The time that recency counted from."""
    formula: str
    space: str
    """Name of the embedding space."""
    policy: Policy
    query: bytes = b""
    """As the client sent it; opaque to engine and journal. Empty: erased."""
    vector: bytes | None = None
    """The query's vector, float32 little-endian, if the embedder need not give the same again; None: embed, see
    `embedded`."""
    embedded: bool = True
    """Whether there was a query vector; without one the lexical legs answered."""
    terms: bytes = b""
    """Hashes of the query's words, 8 bytes each as in Terms: an erasure finds the queries that share a word."""
    analyzer: int = 1
    """Version of the analyzer of `terms`."""
    ranking: tuple[RankedFragment, ...] = ()
    names: tuple[tuple[str, ...], ...] = ()
    weights: tuple[tuple[float, ...], ...] = ()
    suspicions: tuple[Suspicion, ...] = ()
    """The open suspicions about candidates."""
    accesses: tuple[tuple[str, int], ...] = ()
    """(id, time of its last access) of the candidates, if the formula counts accesses."""
    indexed: bool = False
    """Whether the vector index chose the candidates, because the memory was larger than RAM."""
    principal: str = ""
    """Who recalled; empty without authentication."""
    degraded: str = ""
    erased: tuple[str, ...] = ()
    """Ids of the ranking whose content has left for good since."""

    @property
    def is_query_erased(self) -> bool:
        """Whether the query is gone."""
        return not self.query
