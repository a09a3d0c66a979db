"""Update, put, forget, restore, clear in the engine: etags, filters, and one answer for all repeats of a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from memstream_server.core.events import Event, EventType
from memstream_server.core.filters import Filter, Listing
from memstream_server.core.policy import DEFAULT, with_value
from memstream_server.core.values import Fragment, MemoryKind, Tier
from memstream_server.engine import lifecycle
from memstream_server.engine.errors import AlreadyAnswered, EtagMismatch, FragmentNotFound
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import AckLevel, ChangeCount, NewMemory, Once, Query, fragment_etag
from memstream_server.ports.journal.records import Answer
from tests.engine.conftest import open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation

NAME = ("test", "joy")

T = TypeVar("T")


async def create(engine: PartsEngine, kind: MemoryKind = MemoryKind.LONG_TERM, **overrides: object) -> str:
    """Create a memory with these policy values; two underscores stand for a dot. Returns its uid."""
    policy = DEFAULT
    for name, value in overrides.items():
        policy = with_value(policy, name.replace("__", "."), value)
    record, _ = await engine.memories.create(NewMemory(*NAME, kind, policy))
    return record.uid


async def tell(engine: PartsEngine, *texts: str, **fields: object) -> list[str]:
    """Observe texts up to *stored*; returns the ids of their fragments."""
    new = [observation(text, **fields) for text in texts]  # type: ignore[arg-type]  # tests name real fields
    done = await engine.observe_batch(*NAME, "", 1, new, AckLevel.STORED)
    return [outcome.fragment for outcome in done.outcomes]


async def listed(engine: PartsEngine, forgotten: bool = False) -> list[Fragment]:
    """All fragments, or all forgotten ones."""
    return (await engine.fragments.list_page(*NAME, Listing(forgotten=forgotten), -1, 1_000))[0]


async def told(engine: PartsEngine, type_: EventType) -> list[Event]:
    """All events of that type in the journal."""
    uid = (await engine.memories.get(*NAME)).uid
    recorded = await engine.journal.list_events(uid, 0, 100_000)
    return [event for one in recorded for event in one.events if event.type is type_]


def once(key: str, say: Callable[[T], str]) -> Once[T]:
    """A call with a request_id; `say` makes the answer from its result."""
    return Once(key, lambda result: Answer(key, b"digest", say(result).encode(), time.time_ns() // 1_000))


async def answered(engine: PartsEngine, key: str) -> str:
    answer = await engine.stored_answer(key)
    return "" if answer is None else answer.response.decode()


def counted(changed: ChangeCount) -> str:
    return f"{changed.count} at {changed.revision}"


@pytest.mark.parametrize("kind", [MemoryKind.LONG_TERM, MemoryKind.HYBRID])
async def test_forget_and_restore_work_by_filter(engine: PartsEngine, kind: MemoryKind) -> None:
    await create(engine, kind)
    monday = await tell(engine, "the heron by the canal", "an umbrella in the hall", session="monday")
    (tuesday,) = await tell(engine, "the heron flew off", session="tuesday")
    chosen = Filter(sessions=("monday",))
    assert (await engine.fragments.forget(*NAME, chosen)).count == 2
    assert [one.id for one in await listed(engine)] == [tuesday]
    assert (await engine.fragments.forget(*NAME, chosen)).count == 0
    answer = await engine.recall(*NAME, Query(text="heron"))
    assert [found.fragment.id for found in answer.recollections] == [tuesday]
    assert (await engine.fragments.restore(*NAME, chosen)).count == 2
    assert [one.id for one in await listed(engine)] == [*monday, tuesday]


async def test_large_request_takes_several_decisions_and_one_answer(
    engine: PartsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "BATCH", 2)
    await create(engine)
    ids = await tell(engine, *(f"line {number}" for number in range(5)))
    before = (await engine.memories.get(*NAME)).revision
    changed = await engine.fragments.forget(*NAME, ids, once("r", counted))
    assert changed == ChangeCount(5, before + 3)
    assert await answered(engine, "r") == counted(changed)
    assert len(await told(engine, EventType.FORGOTTEN)) == 5


async def test_answer_commits_with_its_change_and_survives_restart(tmp_path: Path) -> None:
    async with open_engine(tmp_path / "data") as engine:
        await create(engine)
        (id_,) = await tell(engine, "the heron by the canal")
        changed = await engine.fragments.forget(*NAME, [id_], once("r", counted))
        with pytest.raises(AlreadyAnswered):
            await engine.fragments.restore(*NAME, [id_], once("r", counted))
    async with open_engine(tmp_path / "data") as engine:
        assert await answered(engine, "r") == counted(changed)
        assert [one.id for one in await listed(engine, forgotten=True)] == [id_]


async def test_answer_is_kept_even_if_nothing_changed(engine: PartsEngine) -> None:
    await create(engine)
    changed = await engine.fragments.forget(*NAME, ["nobody"], once("r", counted))
    assert changed == ChangeCount(0, (await engine.memories.get(*NAME)).revision)
    assert await answered(engine, "r") == counted(changed)


async def test_update_needs_the_current_etag_and_returns_the_next(engine: PartsEngine) -> None:
    await create(engine)
    (id_,) = await tell(engine, "the heron by the canal")
    (first,) = await listed(engine)
    change = FragmentChange(id_, content="an umbrella in the hall", pinned=True, etag=fragment_etag(first))
    changed, revision = await engine.fragments.update(*NAME, change)
    assert (changed.content, changed.pinned, changed.version) == ("an umbrella in the hall", True, revision)
    assert await listed(engine) == [changed]
    with pytest.raises(EtagMismatch):
        await engine.fragments.update(*NAME, change)
    with pytest.raises(FragmentNotFound):
        await engine.fragments.update(*NAME, FragmentChange("nobody", pinned=True))


async def test_put_observes_first_and_then_updates(engine: PartsEngine) -> None:
    await create(engine)
    made = await engine.fragments.put(*NAME, observation("the heron by the canal", external_id="k"))
    assert made.created
    assert made.fragment is not None
    again = await engine.fragments.put(
        *NAME, observation("an umbrella in the hall", external_id="k"), fragment_etag(made.fragment)
    )
    assert not again.created
    assert [(one.id, one.content) for one in await listed(engine)] == [(made.fragment.id, "an umbrella in the hall")]
    with pytest.raises(EtagMismatch):
        await engine.fragments.put(*NAME, observation("rain", external_id="k"), fragment_etag(made.fragment))


async def test_clear_permanently_empties_the_named_tiers(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.HYBRID, short_term__capacity=2)
    ids = await tell(engine, "the heron by the canal", "an umbrella in the hall", "it rained on Monday")
    await engine.fragments.forget(*NAME, ids[1:2])
    assert (await engine.fragments.clear(*NAME, [Tier.SHORT_TERM])).count == 2
    assert [one.id for one in await listed(engine)] == ids[:1]
    assert (await engine.fragments.restore(*NAME, ids)).count == 0
    assert (await engine.fragments.clear(*NAME, [])).count == 1
    assert await listed(engine) == []


async def test_clone_has_the_structure_without_the_content(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.HYBRID, short_term__capacity=2)
    await tell(engine, "the heron by the canal")
    source = await engine.memories.get(*NAME)
    clone = await engine.memories.clone(*NAME, "test", "bliss")
    assert (clone.kind, clone.policy, clone.labels) == (source.kind, source.policy, source.labels)
    assert (clone.uid != source.uid, clone.seed != source.seed, clone.revision) == (True, True, 1)
    assert (await engine.fragments.list_page("test", "bliss", Listing(), -1, 10))[0] == []
