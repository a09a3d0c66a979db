"""Insights that merge: whose sources the one that stays has."""

from __future__ import annotations

import numpy as np

from memstream_server.core.lifecycle import insert_insight
from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import Fragment, FragmentKind, Held, MemoryKind, State, Tier, Vector

EAST: Vector = np.array([1, 0], dtype=np.float32)
EMPTY = State(MemoryKind.HYBRID, b"seed")


def insight(id_: str, *sources: str) -> Held:
    return Held(Fragment(id=id_, content=id_, tier=Tier.LONG_TERM, kind=FragmentKind.INSIGHT, sources=sources), EAST)


def test_older_insight_gains_missing_sources() -> None:
    done = insert_insight(EMPTY, insight("new", "b", "c"), [insight("old", "a", "b")], DEFAULT)
    assert [(put.id, put.sources) for put in done.puts] == [("old", ("a", "b", "c"))]


def test_insight_is_never_its_own_source() -> None:
    done = insert_insight(EMPTY, insight("new", "old", "c"), [insight("old", "a")], DEFAULT)
    assert [(put.id, put.sources) for put in done.puts] == [("old", ("a", "c"))]
    assert done.events[-1].sources == ("a", "c")
