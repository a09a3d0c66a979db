"""What a receipt needs of a recall besides its answer: one time for everything, one revision, and the values used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memstream_server.core.values import Fragment, Vector
from memstream_server.engine.recall.rank_memory import Found
from memstream_server.engine.requests import Evidence, Query

if TYPE_CHECKING:
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.ports.journal.rows import Terms

RANKINGS_MAX = 10
"""Rankings of one recall with a receipt, if its results change meanwhile."""


def pin_times(query: Query, now_us: int) -> Query:
    """The query with one time for recency and expiry."""
    return replace(
        query,
        now_us=now_us if query.now_us is None else query.now_us,
        expiry_us=now_us if query.expiry_us is None else query.expiry_us,
    )


def has_changed(found: Found, known: Mapping[str, Fragment]) -> bool:
    """Whether a result has left the memory or was changed since it was ranked: the answer is of no one revision."""
    return any(id_ not in known or known[id_].version > found.revision for id_ in found.ids)


def collect_evidence(working: WorkingSet, query: Query, found: Found, vector: Vector | None, terms: Terms) -> Evidence:
    """What was ranked with. `vector`: of the query, None if it had none; `terms`: of its words."""
    return Evidence(
        policy=working.record.policy,
        now_us=query.now_us or 0,
        expiry_us=query.expiry_us or 0,
        space=working.embedding.name,
        vector=vector,
        embedded=vector is not query.vector,
        terms=terms,
        suspicions=found.suspicions,
        accesses=found.accesses,
        indexed=working.dense is None and vector is not None,
    )
