"""A memory activated from an image, and the rows committed after it, answers like one activated from its rows, to the
last bit.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from memstream_server.adapters import images as image_files
from memstream_server.adapters.journal.sql.bulk import PAGE_ROWS
from memstream_server.app.models import Models
from memstream_server.core import arrays, dense
from memstream_server.core.arrays import BLOCK
from memstream_server.core.filters import Filter
from memstream_server.core.metadata import Condition
from memstream_server.core.policy import DBGPT, DEFAULT, with_value
from memstream_server.core.values import Held, MemoryKind
from memstream_server.engine.errors import EngineError
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.memory import image_changes
from memstream_server.engine.memory.actor import Actor
from memstream_server.engine.memory.enrich import Candidate
from memstream_server.engine.memory.working_set import WorkingSet
from memstream_server.engine.recall.past import PastMemory
from memstream_server.engine.requests import AckLevel, MemoryChange, NewMemory, Query
from memstream_server.engine.runtime import registry
from memstream_server.engine.runtime.clock import Clock
from memstream_server.ports.images import NO_IMAGES
from memstream_server.ports.operations import OperationState
from tests.engine.assembled import NAMESPACE, Assembled, assembled, hasty
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.engine.test_fragments import observe
from tests.engine.test_past import POLICIES, SMALL, STEP_US, WORDS, Walk, listed
from tests.support.faulty_journal import Fault
from tests.support.journals import change_rows, query_rows
from tests.support.scripted_models import ScriptedEmbedder
from tests.support.seeds import SEEDS
from tests.support.waiting import until

__all__ = ["hasty"]
pytestmark = pytest.mark.usefixtures("hasty", "small")

opened = partial(assembled, access_flush_interval_s=3_600)
"""Accesses are written by `leave_ram` only, not between the two loads of a comparison."""
NOW_US = 1_900_000_000_000_000
QUERIES = [
    Query("where did Bob move with the blue bike", now_us=NOW_US, explain=True, near_misses=5),
    Query("Ann likes tea", now_us=NOW_US, explain=True, session="s", limit=30, filter=Filter(speakers=("Bob",))),
    Query("coffee on Monday", now_us=NOW_US, explain=True, fold=False, filter=Filter(sessions=("t", "nowhere"))),
    Query("garden", now_us=NOW_US, explain=True, filter=Filter(metadata=(Condition("n", (1, 2)),))),
]
DATED = with_value(DBGPT, "short_term.capacity", 3)
"""DB-GPT's ranking reads access times."""
AT_ONCE = with_value(DEFAULT, "retention.forget_grace_s", 0)


SAID = observation(
    "a zqword", session="zqsession", speaker="zqspeaker", external_id="zqkey", metadata=(("m", "zqvalue"),)
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small memories have images, too, and these are mapped like those of large ones."""
    monkeypatch.setattr(registry, "IMAGE_MIN", 1)
    monkeypatch.setattr(image_files, "MAPPED_BYTES_MIN", 1)


def files(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "images").iterdir())


def reads(parts: Assembled) -> dict[str, float]:
    """Reads of images by outcome."""
    (family,) = parts.metrics.image_reads.collect()
    return {one.labels["outcome"]: one.value for one in family.samples if one.name.endswith("_total") and one.value}


async def read_vector(engine: PartsEngine, id_: str) -> bytes:
    """The fragment's vector, which the journal computes."""
    uid = (await engine.memories.get(NAMESPACE, "joy")).uid
    return (await engine.journal.get_vectors(uid, "hashing-1", [id_]))[id_]


def needles_of(id_: str, vector: bytes, terms: bytes) -> dict[str, bytes]:
    """What an image has of the fragment SAID."""
    words = {word: word.encode() for word in ("zqsession", "zqspeaker", "zqkey", "zqvalue")}
    return words | {"id": id_.encode(), "vector": vector, "term": terms[:8]}


async def leave_ram(engine: PartsEngine, name: str = "joy") -> None:
    """Evict the memory, and wait until its accesses and its image are written."""
    await engine.wait_for_reinforcement()
    await engine.write_accesses()
    actor = engine.actors.peek((await engine.memories.get(NAMESPACE, name)).uid)
    assert actor is not None
    await until_idle(actor)
    engine.actors._evict_actor(actor)
    await asyncio.gather(*engine.actors._background)


async def until_idle(actor: Actor) -> None:
    async def idle() -> bool:
        return actor.is_idle

    await until(idle)


async def until_done(engine: PartsEngine, operation: str) -> None:
    assert (await engine.operations.wait_for_end(operation)).state is OperationState.SUCCEEDED


async def load_both(
    engine: PartsEngine, name: str = "joy", revision: int | None = None
) -> tuple[WorkingSet, WorkingSet]:
    """The memory loaded from its image, which must be there and of that revision (None: the present one), and from its
    rows.
    """
    record, embedding = await engine.memories.get(NAMESPACE, name), engine.models.embeddings.in_force
    made: list[WorkingSet] = []
    for images in (engine.storage.images, NO_IMAGES):
        working = WorkingSet(embedding, 1_000_000, engine.models.analyzer, images)
        working.finish_load(await engine.journal.load_memory(record.uid, embedding.name, 1_000_000, working))
        made.append(working)
    assert [each.image_revision for each in made] == [record.revision if revision is None else revision, -1]
    return made[0], made[1]


async def ask(engine: PartsEngine, working: WorkingSet, query: Query) -> str:
    """The whole answer; the text of a float tells all its bits."""
    answer = await engine.recaller.recall(PastMemory(working, NOW_US, {}), query)
    return repr(replace(answer, timings_s={}))


def values_of(held: Held) -> tuple[object, ...]:
    return held.fragment, held.enhancements, None if held.vector is None else held.vector.tobytes()


async def check_same(engine: PartsEngine, name: str = "joy", revision: int | None = None) -> None:
    """Both ways to activate the memory lead to the same search structures and the same answers."""
    image, rows = await load_both(engine, name, revision)
    for query in QUERIES:
        assert await ask(engine, image, query) == await ask(engine, rows, query)
    assert image.columns.access_us.tolist() == rows.columns.access_us.tolist()
    if revision is None:
        assert image.columns.sessions.names == rows.columns.sessions.names
    assert (image.record, list(image.suspicions)) == (rows.record, list(rows.suspicions))
    for ours, theirs in ((image.state.sensory, rows.state.sensory), (image.state.short_term, rows.state.short_term)):
        assert list(map(values_of, ours)) == list(map(values_of, theirs))
    assert image.state.reflection_aggregate == rows.state.reflection_aggregate
    assert (image.insights, set(image.list_unsettled())) == (rows.insights, set(rows.list_unsettled()))
    packed, expected = image._pack(), rows._pack()
    assert packed is not None
    assert expected is not None
    assert packed.values == expected.values
    assert {
        name for name in packed.arrays.keys() ^ expected.arrays.keys() if not name.startswith("dense.copies")
    } == set()
    for array_name in packed.arrays.keys() & expected.arrays.keys():
        array, other = packed.arrays[array_name], expected.arrays[array_name]
        assert array.dtype == other.dtype, array_name
        # the order of a term's postings is not specified; rows have later first accesses, compared above
        if not array_name.startswith("lexical") and array_name != "columns._first_access_us":
            assert shared(array_name, array, other) == shared(array_name, other, array), array_name


def shared(name: str, array: npt.NDArray[Any], other: npt.NDArray[Any]) -> bytes:
    """What both must have: how many of the first vectors have int8 copies instead is not specified."""
    count = min(len(array), len(other))
    if name.startswith("dense.copies"):
        return array[:count].tobytes()
    return array[len(array) - count :].tobytes() if name == "dense.vectors" else array.tobytes()


@pytest.mark.drawn
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [*POLICIES, "dated"])
async def test_random_histories_answer_the_same(tmp_path: Path, kind: str, seed: int) -> None:
    clock, drawn = SettableClock(), random.Random(seed)
    async with opened(tmp_path, clock=Clock(now_us=clock.now_us)) as parts:
        policy = {**POLICIES, "dated": DATED}[kind]
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, policy))
        walked = Walk(parts.engine, clock, random.Random(seed))
        for _ in range(12):
            for _ in range(drawn.randint(1, 6)):
                await walked.step()
                await parts.engine.recall(NAMESPACE, "joy", Query(walked.text()))
                clock.offset_us += STEP_US
            await leave_ram(parts.engine)
            if files(tmp_path):
                await check_same(parts.engine)
        assert reads(parts)["hit"] > 12


class Unedited(Walk):
    """Random changes that keep images: no content or attribute of a fragment is replaced."""

    async def step(self) -> None:
        live, forgotten = await listed(self.engine, False), await listed(self.engine, True)
        choices: list[Callable[..., Awaitable[None]]] = [self.observe, self.observe, self.repeat]
        if live:
            choices += [self.forget, self.recollect, self.supersede, self.restore_live]
        if forgotten:
            choices.append(self.restore)
        await self.random.choice(choices)(live, forgotten)
        await self.engine.wait_for_reinforcement()


async def check_loads(engine: PartsEngine) -> bool:
    """Whether an image was used. The load equals one from rows in any case."""
    record, embedding = await engine.memories.get(NAMESPACE, "joy"), engine.models.embeddings.in_force
    working = WorkingSet(embedding, 1_000_000, engine.models.analyzer, engine.storage.images)
    working.finish_load(await engine.journal.load_memory(record.uid, embedding.name, 1_000_000, working))
    if working.image_revision < 0:
        return False
    await check_same(engine, revision=working.image_revision)
    return True


@pytest.mark.drawn
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [*POLICIES, "dated", "int8"])
async def test_later_rows_on_top_of_an_image_answer_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    if kind == "int8":
        monkeypatch.setattr(arrays, "BLOCK", 4)
        monkeypatch.setattr(dense, "QUANTIZED_BYTES", 0)
    clock, drawn, used = SettableClock(), random.Random(seed), 0
    async with opened(tmp_path, clock=Clock(now_us=clock.now_us)) as parts:
        engine, policy = parts.engine, {**POLICIES, "dated": DATED, "int8": SMALL}[kind]
        await engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, policy))
        walks = [made(engine, clock, random.Random(seed)) for made in (Walk, Unedited)]
        for round_ in range(6):
            for _ in range(6):
                await walks[0].step()
            await leave_ram(engine)
            for _ in range(drawn.randint(2, 8)):
                await walks[round_ % 3 > 0].step()
                clock.offset_us += 1_000_000
                await until_all_idle(engine)
                await engine.write_accesses()
                used += await check_loads(engine)
    assert used > (0 if kind == "merging" else 4)  # merged contents end images


async def until_all_idle(engine: PartsEngine) -> None:
    for actor in engine.actors.list_actors():
        await until_idle(actor)


async def test_a_killed_process_leaves_an_image_for_later_rows(tmp_path: Path) -> None:
    async with opened(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, SMALL))
        ids = await observe(parts.engine, *[f"Ann sold garden {number}" for number in range(20)])
        await leave_ram(parts.engine)
        revision = (await parts.engine.memories.get(NAMESPACE, "joy")).revision
        for number in range(20):
            await observe(parts.engine, f"Bob likes tea {number}")
        await parts.engine.fragments.forget(NAMESPACE, "joy", ids[:3])
        monday = {file: file.read_bytes() for file in files(tmp_path)}
    for file in files(tmp_path):  # a stop writes images, a kill does not
        file.unlink()
    for file, data in monday.items():
        file.write_bytes(data)
    async with opened(tmp_path) as parts:
        await check_same(parts.engine, revision=revision)


@pytest.mark.parametrize("way", ["too many", "another history", "pruned log"])
async def test_an_image_that_does_not_fit_the_log_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    async with opened(tmp_path) as parts:
        engine = parts.engine
        await engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, DEFAULT))
        await observe(engine, observation("Bob likes tea"))
        await leave_ram(engine)
        revision = (await engine.memories.get(NAMESPACE, "joy")).revision
        await observe(engine, observation("Ann sold the garden"))
        await until_all_idle(engine)
        await check_same(engine, revision=revision)
        record = await engine.memories.get(NAMESPACE, "joy")
        if way == "too many":
            monkeypatch.setattr(image_changes, "CHANGED_MIN", 0)
        elif way == "pruned log":
            await engine.journal.prune_events(record.uid, NOW_US * 2, revision)
        else:
            statement = "UPDATE events SET time_us = time_us - 1 WHERE (key & 4294967295) = CAST(? AS bigint)"
            change_rows(tmp_path, statement, revision)
        with pytest.raises(AssertionError):
            await check_same(engine, revision=revision)
        await engine.storage.images.remove("nobody")
    async with opened(tmp_path) as parts:
        await check_same(parts.engine)


async def test_a_replaced_fragment_ends_the_image(tmp_path: Path) -> None:
    async with opened(tmp_path) as parts:
        engine = parts.engine
        await engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, DEFAULT))
        (old,) = await observe(engine, observation("Bob likes tea"))
        await leave_ram(engine)
        (later,) = await observe(engine, observation("Ann sold the garden"))
        await engine.fragments.update(NAMESPACE, "joy", FragmentChange(id=later, content="Ann sold a bike"))
        assert len(files(tmp_path)) == 1  # the image does not hold what was replaced
        await engine.fragments.update(NAMESPACE, "joy", FragmentChange(id=old, content="Bob likes coffee"))
        assert files(tmp_path) == []


class OneDirection(ScriptedEmbedder):
    """A space in which all vectors are equal."""

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        return np.tile(np.array([1, 0], np.float32), (len(texts), 1))


async def test_a_switch_of_the_embedding_space_removes_all_images(tmp_path: Path) -> None:
    following = Models(ScriptedEmbedder(), next=Candidate(OneDirection(dimension=2)))
    async with opened(tmp_path, models=following) as parts:
        engine = parts.engine
        for name in ("joy", "joan"):
            await engine.memories.create(NewMemory(NAMESPACE, name, MemoryKind.LONG_TERM, DEFAULT))
            await engine.observe_batch(NAMESPACE, name, "", 1, [observation("Bob likes tea")], AckLevel.STORED)
            await leave_ram(engine, name)
        assert len(files(tmp_path)) == 2
        await until_done(engine, (await engine.reindexing.start(embed=True)).id)
        assert files(tmp_path) == []
        await engine.recall(NAMESPACE, "joy", Query("tea"))
        await leave_ram(engine)
        await check_same(engine)


async def test_large_memories_answer_the_same(tmp_path: Path) -> None:
    assert PAGE_ROWS == BLOCK
    drawn = random.Random(5)

    async def add(count: int) -> list[str]:
        made = [observation(" ".join(drawn.choices(WORDS, k=5)) + f" {drawn.random()}") for _ in range(count)]
        return await observe(parts.engine, *made)

    async with opened(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, SMALL))
        ids = await add(1_500)
        await leave_ram(parts.engine)
        ids += await add(700)  # their blocks of vectors begin elsewhere than the pages of the rows
        await parts.engine.fragments.forget(NAMESPACE, "joy", ids[::7])
        change = FragmentChange(id=ids[3], content="Bob sold the blue bike")
        await parts.engine.fragments.update(NAMESPACE, "joy", change)
        await leave_ram(parts.engine)
        await check_same(parts.engine)


async def test_image_with_int8_copies_answers_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "BLOCK", 4)
    monkeypatch.setattr(dense, "QUANTIZED_BYTES", 0)
    drawn = random.Random(6)
    queries = [replace(query, reinforce=False) for query in QUERIES]

    async def answers() -> list[str]:
        found = [await parts.engine.recall(NAMESPACE, "joy", query) for query in queries]
        return [re.sub(r"access_(time_us|count)=\d+", "", repr(replace(each, timings_s={}))) for each in found]

    async with assembled(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, SMALL))
        for round_ in range(1, 4):
            texts = [" ".join(drawn.choices(WORDS, k=5)) + f" {round_} {number}" for number in range(30)]
            ids = [id_ for at in range(0, 30, 5) for id_ in await observe(parts.engine, *texts[at : at + 5])]
            await parts.engine.fragments.forget(NAMESPACE, "joy", ids[::7])
            change = FragmentChange(id=ids[3], content=f"Bob sold the blue bike {round_}")
            await parts.engine.fragments.update(NAMESPACE, "joy", change)
            expected = await answers()
            await leave_ram(parts.engine)
            assert await answers() == expected
            assert reads(parts)["hit"] == round_
            async with parts.actors.use(NAMESPACE, "joy") as actor:
                assert actor.working.dense is not None
                assert actor.working.dense.quantized >= 8
                assert actor.working.image_revision > 0


async def test_a_stop_writes_images_that_the_next_start_reads(tmp_path: Path) -> None:
    async with opened(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, DEFAULT))
        await observe(parts.engine, observation("Bob likes tea"), observation("Ann sold the garden", session="s"))
        assert files(tmp_path) == []
    (image,) = files(tmp_path)
    written = image.stat().st_ino
    assert (image.stat().st_mode & 0o777, image.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    async with opened(tmp_path) as parts:
        await check_same(parts.engine)
        answer = await parts.engine.recall(NAMESPACE, "joy", Query("who likes tea"))
        assert answer.recollections[0].fragment.content == "Bob likes tea"
        assert reads(parts) == {"hit": 2}
        earlier = answer.recollections[0].fragment.id
        await observe(parts.engine, observation("Bob likes tea no more", supersedes=(earlier,)))
        assert [file.stat().st_ino for file in files(tmp_path)] == [written]
        revision = (await parts.engine.memories.get(NAMESPACE, "joy")).revision
        await check_same(parts.engine, revision=revision - 1)
    async with opened(tmp_path) as parts:
        await check_same(parts.engine)


async def test_an_unchanged_memory_writes_no_second_image(tmp_path: Path) -> None:
    async with opened(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, DEFAULT))
        await observe(parts.engine, observation("Bob likes tea"))
        await leave_ram(parts.engine)
        before = files(tmp_path)[0].stat()
        for _ in range(2):
            await parts.engine.recall(NAMESPACE, "joy", Query("tea"))
            await leave_ram(parts.engine)
        after = files(tmp_path)[0].stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
        await check_same(parts.engine)


async def test_an_unusable_folder_stops_no_server(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(b"no folder")
    async with opened(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, DEFAULT))
        await observe(parts.engine, observation("Bob likes tea"))
        await leave_ram(parts.engine)
        answer = await parts.engine.recall(NAMESPACE, "joy", Query("tea"))
        assert len(answer.recollections) == 1


async def test_a_bound_of_zero_removes_all_images(tmp_path: Path) -> None:
    async with opened(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, DEFAULT))
        await observe(parts.engine, observation("Bob likes tea"))
    assert len(files(tmp_path)) == 1
    async with opened(tmp_path, images_bytes_max=0) as parts:
        await parts.engine.recall(NAMESPACE, "joy", Query("tea"))
    assert not (tmp_path / "images").exists()


async def test_an_activation_waits_for_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "IMAGE_WAIT_S", 30.0)
    async with opened(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, DEFAULT))
        await observe(parts.engine, observation("Bob likes tea"))
        before = reads(parts)
        actor = parts.actors.peek((await parts.engine.memories.get(NAMESPACE, "joy")).uid)
        assert actor is not None
        await until_idle(actor)
        parts.actors._evict_actor(actor)
        await parts.engine.recall(NAMESPACE, "joy", Query("tea"))
        assert reads(parts) == {**before, "hit": 1}


@pytest.mark.parametrize("fault", Fault)
async def test_a_failed_commit_leaves_a_right_image(tmp_path: Path, fault: Fault) -> None:
    async with opened(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, DEFAULT))
        await observe(parts.engine, observation("Bob likes tea"))
        await leave_ram(parts.engine)
        (fragment,) = await listed(parts.engine, False)
        revision = (await parts.engine.memories.get(NAMESPACE, "joy")).revision
        parts.journal.fail_at(1, fault, "commit")
        with pytest.raises(EngineError):
            await parts.engine.fragments.forget(NAMESPACE, "joy", [fragment.id])
        parts.journal.disarm()
        await parts.engine.recall(NAMESPACE, "joy", Query("tea", reinforce=False))  # waits until the memory is back
        await check_same(parts.engine, revision=revision)
        await leave_ram(parts.engine)
        await check_same(parts.engine)


@pytest.mark.parametrize("way", ["erase", "clear", "purge", "delete"])
async def test_no_image_keeps_what_leaves_for_good(tmp_path: Path, way: str) -> None:
    async with opened(tmp_path) as parts:
        engine = parts.engine
        await engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, DEFAULT))
        secret, _ = await observe(engine, SAID, observation("Bob likes tea"))
        where = f"JOIN fragments f ON f.key = v.key WHERE f.id = '{secret}'"
        ((terms,),) = query_rows(tmp_path, f"SELECT terms FROM vectors v {where}")
        needles = needles_of(secret, await read_vector(engine, secret), terms)
        await leave_ram(engine)
        assert {name for name, needle in needles.items() if needle in files(tmp_path)[0].read_bytes()} == needles.keys()
        if way == "erase":
            operation = await engine.erasing.start(NAMESPACE, "joy", [secret])
            await until_done(engine, operation.id)
        elif way == "clear":
            await engine.fragments.clear(NAMESPACE, "joy", ())
            await observe(engine, observation("Ann sold the garden"))
        elif way == "purge":
            await engine.memories.update(NAMESPACE, "joy", MemoryChange(policy=AT_ONCE))
            await engine.fragments.forget(NAMESPACE, "joy", [secret])
            await until_done(engine, (await engine.purging.start(NAMESPACE, "joy")).id)
        else:
            await engine.memories.delete(NAMESPACE, "joy")
        assert files(tmp_path) == []
        if way == "delete":
            return
        await leave_ram(engine)
        await check_same(engine)
        assert [name for name, needle in needles.items() if needle in files(tmp_path)[0].read_bytes()] == []
