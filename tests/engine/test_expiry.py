"""No read finds an expired fragment, long before maintenance forgets it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from memstream_server.core.events import EventType, Reason
from memstream_server.core.filters import Filter
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import EtagMismatch, FragmentNotFound
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.operations.transfer.export_memory import Wanted
from memstream_server.engine.requests import Query, fragment_etag
from memstream_server.engine.runtime.clock import Clock
from tests.engine.conftest import open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.engine.test_by_request import NAME, create, listed, tell, told

SECOND_US = 1_000_000
OFF_S = 86_400.0
POLICY_TTL = {"retention__ttl_s": 60}
OWN_TTL = {"ttl_us": 60 * SECOND_US}


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
async def engine(tmp_path: Path, clock: SettableClock) -> AsyncIterator[PartsEngine]:
    """Maintenance runs only on demand."""
    async with open_engine(tmp_path / "data", clock=Clock(now_us=clock.now_us), maintenance_interval_s=OFF_S) as opened:
        yield opened


async def exported(engine: PartsEngine) -> str:
    parts = [part.lines async for part in engine.exporter.export(Wanted(*NAME, vectors=False))]
    return b"".join(parts).decode()


@pytest.mark.parametrize("own", [True, False], ids=["own", "policy"])
@pytest.mark.parametrize("maintained", [False, True], ids=["before", "after"])
async def test_no_read_finds_expired_fragments(
    engine: PartsEngine, clock: SettableClock, own: bool, maintained: bool
) -> None:
    await create(engine, MemoryKind.HYBRID, **{} if own else POLICY_TTL)
    keep = {} if own else {"ttl_us": 9_000 * SECOND_US}
    (gone,) = await tell(engine, "the heron by the canal", session="s", external_id="k", **OWN_TTL if own else {})
    (kept,) = await tell(engine, "the heron by the lake", session="s", **keep)
    etag = fragment_etag((await engine.fragments.get(*NAME, id=gone))[0])
    clock.offset_us += 61 * SECOND_US
    if maintained:
        await engine.run_maintenance()
    for key in ({"id": gone}, {"external_id": "k"}):
        with pytest.raises(FragmentNotFound):
            await engine.fragments.get(*NAME, **key)
    with pytest.raises(FragmentNotFound):
        await engine.fragments.update(*NAME, FragmentChange(id=gone, pinned=True))
    with pytest.raises(EtagMismatch):
        await engine.fragments.put(*NAME, observation("a crane", external_id="k"), etag)
    assert [one.id for one in await listed(engine)] == [kept]
    assert [one.id for one in await engine.fragments.read_many(*NAME, [gone, kept])] == [kept]
    answer = await engine.recall(*NAME, Query(text="heron"))
    assert [one.fragment.id for one in answer.recollections] == [kept]
    assert answer.working_ids == (kept,)
    text = await exported(engine)
    assert gone not in text
    assert '"fragments":1' in text
    assert (await engine.memories.get_statistics(*NAME)).counts.short_term == 1
    assert (await engine.fragments.forget(*NAME, [gone])).count == 0
    assert (await engine.fragments.forget(*NAME, Filter(sessions=("s",)))).count == 1
    assert (await engine.fragments.restore(*NAME, [gone])).count == 0
    assert (await engine.fragments.restore(*NAME, Filter(sessions=("s",)))).count == 1
    await engine.run_maintenance()
    forgotten = {(one.fragment, one.reason) for one in await told(engine, EventType.FORGOTTEN)}
    assert forgotten == {(gone, Reason.EXPIRED), (kept, Reason.REQUESTED)}


async def test_pinned_fragments_do_not_expire(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine, MemoryKind.HYBRID)
    (pinned,) = await tell(engine, "the heron by the canal", ttl_us=SECOND_US)
    await engine.fragments.update(*NAME, FragmentChange(id=pinned, pinned=True))
    clock.offset_us += 2 * SECOND_US
    assert [one.id for one in await listed(engine)] == [pinned]
    answer = await engine.recall(*NAME, Query(text="heron"))
    assert [one.fragment.id for one in answer.recollections] == [pinned]
    assert answer.working_ids == (pinned,)


@pytest.mark.parametrize("put", [True, False], ids=["put", "observe"])
@pytest.mark.parametrize("maintained", [False, True], ids=["before", "after"])
async def test_key_of_expired_fragment_is_free(
    engine: PartsEngine, clock: SettableClock, put: bool, maintained: bool
) -> None:
    await create(engine, MemoryKind.HYBRID, **POLICY_TTL)
    (gone,) = await tell(engine, "the heron by the canal", external_id="k")
    clock.offset_us += 61 * SECOND_US
    if maintained:
        await engine.run_maintenance()
    if put:
        made = await engine.fragments.put(*NAME, observation("the crane by the lake", external_id="k"))
        assert made.created
        assert made.fragment is not None
        new = made.fragment.id
    else:
        (new,) = await tell(engine, "the crane by the lake", external_id="k")
    assert new != gone
    found, _, _ = await engine.fragments.get(*NAME, external_id="k")
    assert (found.id, found.content) == (new, "the crane by the lake")
    assert [(one.fragment, one.reason) for one in await told(engine, EventType.ERASED)] == [(gone, Reason.EXPIRED)]
    assert await listed(engine, forgotten=True) == []


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.LONG_TERM])
async def test_repeat_of_expired_fragment_is_kept(engine: PartsEngine, clock: SettableClock, kind: MemoryKind) -> None:
    await create(engine, kind)
    (first,) = await tell(engine, "the heron by the canal", ttl_us=60 * SECOND_US)
    clock.offset_us += 30 * SECOND_US
    (again,) = await tell(engine, "the heron by the canal", ttl_us=60 * SECOND_US)
    assert [one.id for one in await listed(engine)] == [first]
    clock.offset_us += 45 * SECOND_US  # past the expiry of the first, not of the repeat
    assert [one.duplicate_count for one in await listed(engine)] == [1]
    clock.offset_us += 20 * SECOND_US
    assert await listed(engine) == []
    (new,) = await tell(engine, "the heron by the canal", ttl_us=60 * SECOND_US)
    assert [one.id for one in await listed(engine)] == [new]
    assert len({first, again, new}) == 3
    await tell(engine, "the heron by the canal", ttl_us=60 * SECOND_US)
    assert [(one.id, one.duplicate_count) for one in await listed(engine)] == [(new, 1)]
