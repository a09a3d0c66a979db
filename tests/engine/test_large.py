"""Large memories compute cosines in a thread: the answer reflects the changes made meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from memstream_server.core import arrays, dense
from memstream_server.core.dense import DenseMatrix, Scan
from memstream_server.core.policy import DBGPT, DEFAULT, Policy
from memstream_server.core.values import MemoryKind
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import AckLevel, AsOf, NewMemory, Query, RecallAnswer
from memstream_server.engine.settings import EngineLimits
from tests.engine.assembled import Assembled, assembled, check_index
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.support.memory_index import MemoryIndex
from tests.support.scripted_models import VECTOR_BYTES
from tests.support.waiting import until

TEXTS = [f"{animal} eats {food}" for animal in ("otter", "heron", "badger") for food in ("fish", "frogs", "roots")]


class Gate:
    """Blocks every computed scan until `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.waiting = 0
        compute = Scan.compute

        def computed_and_held(scan: Scan) -> None:
            compute(scan)
            self.waiting += 1
            assert self.open.wait(30)

        monkeypatch.setattr(Scan, "compute", computed_and_held)

    async def somebody_waits(self) -> bool:
        return self.waiting > 0


@pytest.fixture
async def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Assembled]:
    """From now on every memory counts as large."""
    monkeypatch.setattr(dense, "_LARGE_BYTES", 0)
    async with assembled(tmp_path, dense_bytes_max=10 * VECTOR_BYTES) as made:
        await made.engine.memories.create(NewMemory("test", "zoo", MemoryKind.LONG_TERM, DEFAULT))
        await observe(made.engine, *TEXTS)
        yield made


async def observe(engine: PartsEngine, *texts: str, name: str = "zoo") -> None:
    await engine.observe_batch("test", name, "", 1, [observation(text) for text in texts], AckLevel.STORED)


async def asked(engine: PartsEngine, text: str, near_misses: int = 0, name: str = "zoo") -> RecallAnswer:
    query = Query(text=text, limit=20, now_us=0, reinforce=False, near_misses=near_misses)
    return await engine.recall("test", name, query)


async def matrix(engine: PartsEngine) -> DenseMatrix | None:
    async with engine.actors.use("test", "zoo") as actor:
        return actor.working.dense


def contents(answer: RecallAnswer) -> list[str]:
    return [one.fragment.content for one in answer.recollections]


def test_some_thousand_vectors_are_scanned_in_a_thread() -> None:
    matrix = DenseMatrix(384)
    matrix.extend(np.zeros((3_000, 384), np.float32))
    assert matrix.large


async def test_large_memory_answers_as_any_other(parts: Assembled, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = [await asked(parts.engine, text) for text in TEXTS]
    monkeypatch.setattr(dense, "_LARGE_BYTES", 1 << 30)
    for text, found in zip(TEXTS, aside, strict=True):
        at_once = await asked(parts.engine, text)
        assert [one.scored for one in found.recollections] == [one.scored for one in at_once.recollections]
        assert contents(found)[0] == text


async def test_answer_includes_changes_made_during_its_scan(parts: Assembled, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await asked(parts.engine, TEXTS[0])
    gate = Gate(monkeypatch)
    asking = asyncio.create_task(asked(parts.engine, "lynx eats hares"))
    await until(gate.somebody_waits)
    await observe(parts.engine, "lynx eats hares", "lynx eats roots")
    await parts.engine.fragments.forget("test", "zoo", [before.recollections[0].fragment.id])
    gate.open.set()
    answer = await asking
    first = answer.recollections[0]
    assert first.fragment.content == "lynx eats hares"
    assert (first.scored.cosine or 0.0) > 0.5
    assert "lynx eats roots" in contents(answer)
    assert TEXTS[0] not in contents(answer)
    again = await asked(parts.engine, "lynx eats hares")
    assert answer.revision == again.revision
    assert contents(again) == contents(answer)
    for one, other in zip(answer.recollections, again.recollections, strict=True):
        assert one.scored.relevance == pytest.approx(other.scored.relevance)


async def test_memory_that_outgrows_ram_in_a_scan_uses_its_index(
    parts: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    asking = asyncio.create_task(asked(parts.engine, "lynx number 7"))
    await until(gate.somebody_waits)
    await observe(parts.engine, *[f"lynx number {number}" for number in range(20)])
    assert await matrix(parts.engine) is None
    gate.open.set()
    assert contents(await asking)[0] == "lynx number 7"


async def test_cancelled_recall_leaves_no_scan(parts: Assembled, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    asking = asyncio.create_task(asked(parts.engine, TEXTS[0]))
    await until(gate.somebody_waits)
    vectors = await matrix(parts.engine)
    assert vectors is not None
    assert len(vectors._scans) == 1
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert vectors._scans == []
    gate.open.set()
    assert contents(await asked(parts.engine, TEXTS[0]))[0] == TEXTS[0]


@pytest.mark.parametrize(("dimension", "most"), [(384, 677_867), (1_536, 173_407), (3_072, 87_041), (1, 20_648_881)])
def test_one_memory_uses_at_most_a_quarter_of_vector_ram(dimension: int, most: int) -> None:
    limits = EngineLimits(active_bytes_max=1 << 30)
    assert limits.dense_max(dimension) == most
    assert most * (dimension + 12) <= limits.active_bytes_max / 4


async def test_a_restart_keeps_vectors_where_they_were(tmp_path: Path) -> None:
    """In RAM up to the bound, whether the memory grew to that size or was read."""
    bound, index = 4, MemoryIndex()
    for place, text in enumerate(TEXTS[: bound + 1]):
        async with assembled(tmp_path, index=index, dense_bytes_max=bound * VECTOR_BYTES) as made:
            if not place:
                await made.engine.memories.create(NewMemory("test", "zoo", MemoryKind.LONG_TERM, DEFAULT))
            await observe(made.engine, text)
            await check_index(made, "zoo")
            answer = contents(await asked(made.engine, TEXTS[0]))
            assert ((await matrix(made.engine)) is None) is (place >= bound)
        async with assembled(tmp_path, index=index, dense_bytes_max=bound * VECTOR_BYTES) as made:
            assert contents(await asked(made.engine, TEXTS[0])) == answer
            assert ((await matrix(made.engine)) is None) is (place >= bound)


def test_a_quarter_too_small_for_int8_copies_counts_float32() -> None:
    assert EngineLimits(active_bytes_max=128 << 20).dense_max(384) == (32 << 20) // (4 * 384)


@pytest.mark.parametrize("policy", [DEFAULT, DBGPT])
@pytest.mark.parametrize("near_misses", [0, 4])
async def test_memory_with_int8_vectors_answers_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near_misses: int, policy: Policy
) -> None:
    monkeypatch.setattr(arrays, "BLOCK", 4)
    found = ["acorns", "beetles", "clover", "dandelions", "eggs"]  # of other lengths, so that no two fragments tie
    texts = [" ".join([text, "and", *found[:number]]) for number in range(5) for text in TEXTS]
    async with assembled(tmp_path) as made:
        for name, quantized_bytes in (("int8", 0), ("float32", 1 << 30)):
            monkeypatch.setattr(dense, "QUANTIZED_BYTES", quantized_bytes)
            await made.engine.memories.create(NewMemory("test", name, MemoryKind.LONG_TERM, policy))
            for start in range(0, len(texts), 5):
                await observe(made.engine, *texts[start : start + 5], name=name)
            changed = (await asked(made.engine, texts[7], name=name)).recollections[0].fragment.id
            forgotten = (await asked(made.engine, texts[9], name=name)).recollections[0].fragment.id
            await made.engine.fragments.update("test", name, FragmentChange(changed, content="voles eat berries"))
            await made.engine.fragments.forget("test", name, [forgotten])
        async with made.engine.actors.use("test", "int8") as actor:
            assert actor.working.dense is not None
            assert actor.working.dense.quantized >= 16
        reads: list[Sequence[str]] = []
        get_vectors = made.journal.get_vectors

        async def counted(uid: str, model: str, ids: Sequence[str]) -> dict[str, bytes]:
            reads.append(ids)
            return await get_vectors(uid, model, ids)

        monkeypatch.setattr(made.journal, "get_vectors", counted, raising=False)
        for text in (*texts[::4], "voles eat berries", "frogs"):
            one, other = [await asked(made.engine, text, near_misses, name) for name in ("int8", "float32")]
            assert facts(one) == facts(other)
            assert one.considered == other.considered
        assert reads


async def test_past_of_int8_vectors_is_not_changed_by_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "BLOCK", 4)
    monkeypatch.setattr(dense, "QUANTIZED_BYTES", 0)
    async with assembled(tmp_path) as made:
        await made.engine.memories.create(NewMemory("test", "zoo", MemoryKind.LONG_TERM, DEFAULT))
        await observe(made.engine, *TEXTS)
        before = await asked(made.engine, TEXTS[0])
        first = before.recollections[0].fragment.id
        get_vectors, updates = made.journal.get_vectors, iter(["voles eat berries", "moles eat worms"])

        async def read_after_update(uid: str, model: str, ids: Sequence[str]) -> dict[str, bytes]:
            await made.engine.fragments.update("test", "zoo", FragmentChange(first, content=next(updates)))
            return await get_vectors(uid, model, ids)

        monkeypatch.setattr(made.journal, "get_vectors", read_after_update, raising=False)
        for _ in range(2):  # changed since the load, then already before it
            query = Query(text=TEXTS[0], limit=20, now_us=0, reinforce=False, as_of=AsOf(revision=before.revision))
            past = await made.engine.recall("test", "zoo", query)
            assert contents(past) == contents(before)
            assert facts(past) == facts(before)
        assert next(updates, None) is None


def facts(answer: RecallAnswer) -> list[tuple[object, ...]]:
    """What an answer and its near misses say of each fragment, without its id."""
    scored = [one.scored for one in answer.recollections] + [one.scored for one in answer.near_misses]
    return [(one.slot, one.names, one.values, one.relevance, one.cosine) for one in scored]
