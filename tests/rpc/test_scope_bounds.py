"""How many memories a query with scopes may select, and what merged answers keep."""

from __future__ import annotations

from typing import Any

import pytest

from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.scope_pb2 import RecallScope
from memstream_server.core.policy import Policy
from memstream_server.core.values import MemoryKind
from memstream_server.engine.engine import Engine
from memstream_server.engine.errors import InvalidField
from memstream_server.engine.recall import scopes
from memstream_server.engine.requests import AckLevel, NewMemory, NewObservation
from memstream_server.rpc.scopes import ScopedQuery
from tests.engine.conftest import engine  # noqa: F401  # a fixture
from tests.rpc.conftest import LIMITS


async def fill(opened: Engine, count: int) -> None:
    for number in range(count):
        await opened.memories.create(NewMemory("ns", f"m{number}", MemoryKind.LONG_TERM, Policy()))
        said = [NewObservation(f"tea of memory {number}"), NewObservation(f"tea with {'milk ' * number}")]
        await opened.observe_batch("ns", f"m{number}", "", 1, said, AckLevel.STORED)


def scoped(opened: Engine, *asked: RecallScope, **fields: Any) -> ScopedQuery:
    query = pb.RecallQuery(text="tea", reinforce=False, scopes=asked, **fields)
    return ScopedQuery(opened, None, LIMITS, query, "", None)  # type: ignore[arg-type]  # no other server is asked


async def test_a_selection_of_too_many_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(scopes, "MEMORIES_MAX", 3)
    await fill(engine, 4)
    for prefix, most in (("ns/", False), ("ns/m", False), ("ns/m1", True)):
        query = scoped(engine, RecallScope(prefix=prefix))
        if most:
            assert len(await query.find_memories()) == 1
        else:
            with pytest.raises(InvalidField, match=r"query\.scopes"):
                await query.find_memories()


async def test_the_merge_keeps_the_best_of_every_limit(engine: Engine) -> None:  # noqa: F811
    await fill(engine, 4)
    asked = [RecallScope(memory=f"ns/m{number}", weight=1 + number / 10) for number in range(4)]
    whole = scoped(engine, *asked, limit=8)
    everything = (await whole.recall(await whole.find_memories(), None, now_us=2 * 10**15)).recollections
    assert len(everything) == 8
    for limit in range(1, 8):
        some = scoped(engine, *asked, limit=limit)
        found = (await some.recall(await some.find_memories(), None, now_us=2 * 10**15)).recollections
        assert [(one.memory, one.fragment.id, one.scored.score) for one in found] == [
            (one.memory, one.fragment.id, one.scored.score) for one in everything[:limit]
        ]
