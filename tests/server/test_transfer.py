"""Export and import between real servers: transferred data, refusals, and the state after a crash or a cancel."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest

import memstream
from memstream import FragmentKind, Memory, MemoryKind, Observation, OperationState, Plan, Structured, Tier
from memstream.sync import connect as connect_sync
from memstream_server.adapters.journal.store import READERS
from memstream_server.core.replay_events import fold_all, place_of
from memstream_server.core.values import Enhancement
from tests.server.conftest import MakeServer, started
from tests.server.listing import fragments, history
from tests.server.memory import event_of, fragment_of
from tests.server.test_models import using
from tests.support.fake_openai import FakeOpenAI
from tests.support.metrics import all_indexed
from tests.support.processes import resident_mib
from tests.support.seeds import rounds
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until
from tests.transfer.exports import HEADER, ended, fragment, memory, ulid, whole

NOW = datetime(2026, 6, 1, tzinfo=UTC)
QUERIES = ("who keeps bees?", "when does the train leave?", "note 3", "same words", "it rains", "home", "insight")
SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "export.schema.json"


async def chunks(lines: Iterable[bytes]) -> AsyncIterator[bytes]:
    for line in lines:
        yield line


async def exported(client: memstream.Client, namespace: str, name: str = "", vectors: bool = False) -> list[bytes]:
    parts = [part async for part in client.export(namespace, name, include_vectors=vectors)]
    assert all(part.lines.endswith(b"\n") for part in parts)
    assert parts[-1].done == parts[-1].total
    return b"".join(part.lines for part in parts).splitlines(keepends=True)


async def imported(
    client: memstream.Client, namespace: str, lines: Iterable[bytes], **said: Any
) -> memstream.Operation:
    return await client.finished(await client.import_(namespace, chunks(lines), **said))


async def lived_in(client: memstream.Client, path: str) -> Memory:
    """A memory with something of everything."""
    made = await client.create_memory(path, labels={"team": "bees"})
    lines = [f"note {number} on bees and the train" for number in range(12)]
    said = [
        Observation(
            line,
            speaker="Bob" if number % 2 else "Ann",
            session=f"s{number % 3}",
            observe_time=NOW - timedelta(days=number),
            importance=number / 12,
            metadata={"page": number, "ok": True, "share": 0.5, "by": "Bob"},
            external_id=f"key {number}" if number % 4 == 0 else "",
        )
        for number, line in enumerate(lines)
    ]
    await made.observe_batch(said)
    await made.observe_batch([Observation(Structured(thought="it rains", action="stay at home"))])
    for _ in range(3):  # repeats
        await made.observe_batch([Observation("same words said again", session="s1")])
    await made.observe_batch([Observation(f"the bees of Bob live on the roof, he says {n} times") for n in range(6)])
    await made.observe_batch([Observation(Structured(thought="it rains again", action="stay at home"))])
    await made.observe_batch([Observation("a vector of my own", embedding=[1.0] + [0.0] * 383)])
    await made.observe_batch([Observation("note four was wrong", external_id="late", supersedes=["key 4", "key 8"])])
    corrected = Observation("so was this", supersedes=["late"], valid_from=NOW, valid_until=NOW + timedelta(days=9_999))
    await made.observe_batch([corrected])
    listed = await fragments(made)
    await made.update_fragment(listed[1].id, pinned=True)
    later = datetime.now(UTC) + timedelta(days=300)
    bounded = await made.update_fragment(listed[2].id, expire_time=later, valid_from=NOW, valid_until=later)
    assert (bounded.valid_from, bounded.valid_until) == (NOW, later)
    await made.update_fragment(listed[2].id, valid_until="unbounded")
    await made.forget_fragments([listed[3].id, listed[-5].id, listed[-2].id])
    await made.blocks.put("persona", "I am Joy", max_tokens=50, metadata={"by": "Bob", "ok": True})
    await made.blocks.append("persona", "and I joke")
    await made.blocks.put("task", "1")
    await made.blocks.delete("task")
    talk = client.conversation(path)
    for number in range(5):
        await talk.append("Ann", f"hello {number}", receiver="Bob")
    await talk.save_plans([Plan(number=1, title="buy honey"), Plan(number=2, title="sell honey")])
    await talk.complete()
    return made


def told(lines: Iterable[bytes], type_: str) -> list[dict[str, Any]]:
    return [line for raw in lines if (line := json.loads(raw))["type"] == type_]


def without(lines: Iterable[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in names} for line in lines]


async def recalled(made: Memory, words: str) -> list[tuple[str, float]]:
    hits = await made.recall_once(words, now=NOW, reinforce=False, limit=30)
    return [(hit.fragment.id, hit.score) for hit in hits]


async def places(made: Memory, since: set[str]) -> list[tuple[Any, ...]]:
    """Every fragment without what differs between two servers: ids assigned after `since`."""
    return [
        (one.content, one.tier, one.enhancement_count, one.duplicate_count, one.id if one.id in since else "")
        for one in [*await fragments(made), *await fragments(made, forgotten=True)]
    ]


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(dimension=16) as endpoint:
        yield endpoint


@pytest.fixture
async def other(make_server: MakeServer) -> AsyncIterator[memstream.Client]:
    """A client of a second, empty server."""
    with make_server("other") as server:
        async with memstream.connect(server.address) as client:
            yield client


@pytest.mark.parametrize("vectors", [False, True])
async def test_imported_memory_behaves_like_the_exported(
    client: memstream.Client, other: memstream.Client, path: str, vectors: bool
) -> None:
    namespace, _, name = path.partition("/")
    one = await lived_in(client, path)
    lines = await exported(client, namespace, name, vectors)
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    for line in lines:
        validator.validate(json.loads(line))
    exported_fragments = told(lines, "fragment")
    assert {line["tier"] for line in exported_fragments} == {"short_term", "long_term"}
    assert any(each.get("structured") for line in exported_fragments for each in line.get("enhancements", []))
    assert any(line.get("duplicate_count") for line in exported_fragments)
    assert sum("forget_time_us" in line for line in exported_fragments) == 3
    assert {"superseded_by", "supersedes", "valid_until_us"} <= {key for line in exported_fragments for key in line}
    assert ["vector" in line for line in exported_fragments] == [
        vectors or line.get("own_vector", False) for line in exported_fragments
    ]

    ended_ = await imported(other, namespace, lines)
    assert (ended_.state, ended_.type, ended_.done) == (OperationState.SUCCEEDED, "import", len(exported_fragments))
    two = other.memory(path)
    for words in QUERIES:
        assert await recalled(two, words) == await recalled(one, words)
    assert (await two.describe()).labels == {"team": "bees"}
    assert (await two.describe()).uid != (await one.describe()).uid
    again = await exported(other, namespace, name, vectors)
    differing = ("version", "uid", "revision", "time_us", "sha256", "access_count", "access_time_us")
    assert without(map(json.loads, again), *differing) == without(map(json.loads, lines), *differing)
    assert [message.content async for message in other.conversation(path).messages()] == [
        f"hello {number}" for number in range(5)
    ]

    known = {each["id"] for each in exported_fragments}
    for number in range(12):  # identical from now on
        for each in (one, two):
            await each.observe_batch([Observation(f"the bees of Bob live on the roof, he says {number} times over")])
    assert await places(two, known) == await places(one, known)


async def test_suspicions_and_decisions_come_over(client: memstream.Client, other: memstream.Client, path: str) -> None:
    namespace, _, name = path.partition("/")
    one = await client.create_memory(path, policy={"conflicts": {"ask_llm": True}})
    for number, text in enumerate(
        ["I live in Munich now.", "I live in Berlin now.", "My rent is 900 euros.", "My rent is 950 euros."]
    ):
        await one.observe_batch([Observation(text, speaker="Joy", observe_time=NOW + timedelta(days=number))])
    place, rent = [conflict.suspicion async for conflict in one.list_conflicts()]
    await one.resolve_conflict(rent.newer_id, rent.older_id, memstream.ConflictDecision.BOTH, note="two flats")
    await imported(other, namespace, await exported(client, namespace, name, False))
    two = other.memory(path)
    for decided, pair in ((False, place), (True, rent)):
        there = [each async for each in two.list_conflicts(decided=decided)]
        assert there == [each async for each in one.list_conflicts(decided=decided)]
        assert [(each.suspicion.newer_id, each.suspicion.older_id) for each in there] == [
            (pair.newer_id, pair.older_id)
        ]
    assert await recalled(two, "Where does Joy live?") == await recalled(one, "Where does Joy live?")


async def test_insights_and_their_sources_come_over(client: memstream.Client, path: str) -> None:
    namespace = path.partition("/")[0]
    lines = ended(
        [
            dict(HEADER),
            memory("joy", 2),
            fragment(1),
            fragment(2, kind="insight", sources=[ulid(1), ulid(77)], content="an insight into journeys"),
        ]
    )
    await imported(client, namespace, lines)
    (found,) = [
        one async for one in client.memory(f"{namespace}/joy").list_fragments() if one.kind is FragmentKind.INSIGHT
    ]
    assert found.sources == (ulid(1), ulid(77))
    assert (await client.memory(f"{namespace}/joy").stats()).insights == 1


async def test_imported_events_replay_into_listed_fragments(client: memstream.Client, path: str) -> None:
    namespace, _, name = path.partition("/")
    await lived_in(client, path)
    lines = await exported(client, namespace, name)
    await imported(client, namespace, lines, memory="sue")
    sue = client.memory(f"{namespace}/sue")
    await sue.observe_batch([Observation("the bees of Bob live on the roof, he says it again") for _ in range(4)])
    events = [event_of(event) for event in await history(sue) if event.fragment_id]
    listed = [fragment_of(one) for one in [*await fragments(sue), *await fragments(sue, forgotten=True)]]
    held = {
        line["id"]: [Enhancement(one["id"], one["text"]) for one in line.get("enhancements", [])]
        for line in told(await exported(client, namespace, "sue"), "fragment")
    }
    folded = {
        id_: place.__class__(**{**_fields(place), "importance": round(place.importance, 6)})
        for id_, place in fold_all(events).items()
    }
    assert folded == {one.id: place_of(one, held[one.id]) for one in listed}


def _fields(place: Any) -> dict[str, Any]:
    return {name: getattr(place, name) for name in place.__dataclass_fields__}


async def test_a_namespace_comes_over_with_all_it_has(
    client: memstream.Client, other: memstream.Client, path: str
) -> None:
    namespace = path.partition("/")[0]
    for name in ("joy", "sam"):
        await (await client.create_memory(f"{namespace}/{name}")).observe_batch([f"{name} likes honey"])
    await client.create_memory(f"{namespace}/empty", kind=MemoryKind.LONG_TERM)
    await client.conversation(f"{namespace}/talk").append("Ann", "hello")
    lines = await exported(client, namespace)
    assert [line["name"] for line in told(lines, "memory")] == ["empty", "joy", "sam"]
    await imported(other, "elsewhere", lines)
    assert [one.name async for one in other.list_memories("elsewhere")] == ["empty", "joy", "sam"]
    assert [one.name async for one in other.list_namespaces()] == ["elsewhere"]
    assert (await other.conversation("elsewhere/talk").last_message()).content == "hello"
    hits = await other.memory("elsewhere/sam").recall_once("honey")
    assert [hit.fragment.content for hit in hits] == ["sam likes honey"]
    with pytest.raises(memstream.InvalidRequest, match="second memory"):
        await other.import_("more", chunks(lines), memory="sue")


async def test_an_import_again_changes_nothing(client: memstream.Client, path: str) -> None:
    namespace, _, name = path.partition("/")
    one = await lived_in(client, path)
    lines = await exported(client, namespace, name)
    await imported(client, namespace, lines, memory="sue")
    sue = client.memory(f"{namespace}/sue")
    before = (await sue.describe()).revision
    assert (await imported(client, namespace, lines, memory="sue")).state is OperationState.SUCCEEDED
    assert (await sue.describe()).revision == before
    assert (await imported(client, namespace, lines)).state is OperationState.SUCCEEDED  # on the source server
    await one.observe_batch(["something new"])
    with pytest.raises(memstream.MemoryExists, match="another memory"):
        await client.import_(namespace, chunks(lines))


async def test_repeated_request_id_gets_same_operation(client: memstream.Client, path: str) -> None:
    namespace = path.partition("/")[0]
    lines, request = ended(whole()), uuid.uuid4().hex
    first = await client.import_(namespace, chunks(lines), request_id=request)
    await client.finished(first)
    again = await client.import_(namespace, chunks(lines), request_id=request)
    assert (again.id, again.state) == (first.id, OperationState.SUCCEEDED)
    with pytest.raises(memstream.RequestIdConflict):
        await client.import_(namespace, chunks(ended(whole()[:5])), request_id=request)


async def test_another_memory_of_that_name_is_left_alone(client: memstream.Client, path: str) -> None:
    namespace = path.partition("/")[0]
    made = await client.create_memory(f"{namespace}/sam")
    await made.observe_batch(["the honey is sold"])
    with pytest.raises(memstream.MemoryExists, match=f"{namespace}/sam"):
        await client.import_(namespace, chunks(ended(whole())))
    assert [one.name async for one in client.list_memories(namespace)] == ["sam"]
    assert [one.content for one in await fragments(made)] == ["the honey is sold"]


async def test_validate_only_writes_nothing(client: memstream.Client, path: str) -> None:
    namespace = path.partition("/")[0]
    checked = await client.import_(namespace, chunks(ended(whole())), validate_only=True)
    assert (checked.state, checked.total) == (OperationState.SUCCEEDED, 4)
    assert [one async for one in client.list_memories(namespace)] == []


async def test_invalid_lines_are_refused_without_trace(
    client: memstream.Client, shared: ServerProcess, path: str
) -> None:
    namespace = path.partition("/")[0]
    said = ended(whole())
    broken = [said[:kept] for kept in range(len(said))]
    broken += [[*said[:2], b"[" * 500_000 + b"\n"], [said[0][:50]], [b"\x00\xff" * 100], [*said, said[3]]]
    for lines in broken:
        with pytest.raises(memstream.InvalidRequest, match="line") as refused:
            await client.import_(namespace, chunks(lines))
        assert "line" in refused.value.details or "lines" in str(refused.value)
    assert [one async for one in client.list_memories(namespace)] == []

    await until_tidy(shared)


async def test_an_endless_stream_is_cut_off(make_server: MakeServer) -> None:
    with make_server(import_max_bytes=1_000_000) as server:
        async with memstream.connect(server.address) as client:

            async def endless() -> AsyncIterator[bytes]:
                yield b"".join(ended([dict(HEADER)])[:1])
                yield b"".join(ended([dict(HEADER), memory("joy", 10**9)])[1:2])
                number = 0
                while True:
                    number += 1
                    yield json.dumps(fragment(number)).encode() + b"\n"

            for _ in range(20):  # grpc.aio may lose the status of a call that ends during a write
                with pytest.raises((memstream.InvalidRequest, memstream.Unavailable)) as refused:
                    await client.import_("ns", endless())
                if refused.type is memstream.InvalidRequest:
                    break
            assert "1000000 bytes" in str(refused.value)
            await until_tidy(server)


def large(count: int, content: str = "note {} of a long journey") -> list[bytes]:
    return ended([dict(HEADER), memory("joy", count), *(fragment(n, content=content.format(n)) for n in range(count))])


async def until_tidy(server: ServerProcess) -> None:
    """Waits until the server has removed the files of all transfers."""

    async def tidy() -> bool:
        return not list((server.data_dir / "transfers").iterdir())

    await until(tidy)


async def begun(client: memstream.Client, operation: memstream.Operation) -> None:
    async def look() -> bool:
        return (await client.operation(operation.id)).done > 0

    await until(look)


def hold_after(fake: FakeOpenAI, texts: int) -> Callable[[], None]:
    """The endpoint answers until it has embedded this many texts, and then nothing until the returned call: an import
    that has begun is still running, however late the test checks it."""
    left, vector = iter(range(texts)), fake.vector

    def counted(text: str) -> npt.NDArray[np.float32]:
        if next(left, None) is None:
            fake.hold()
        return vector(text)

    def release() -> None:
        fake.vector = vector
        fake.release()

    fake.vector = counted
    return release


async def test_killed_import_resumes_after_restart(make_server: MakeServer, fake: FakeOpenAI) -> None:
    server = await started(using(make_server, fake, listen="127.0.0.1:0"))
    release = hold_after(fake, 1_000)
    async with memstream.connect(server.address) as client:
        operation = await client.import_("ns", chunks(large(2_500)))
        await begun(client, operation)
        assert [one async for one in client.list_memories("ns")] == []  # no part of it is visible
    server.kill()
    release()
    await started(server)
    async with memstream.connect(server.address) as client:
        ended_ = await client.finished(operation)
        assert (ended_.state, ended_.done) == (OperationState.SUCCEEDED, 2_500)
        listed = await fragments(client.memory("ns/joy"))
        assert [one.id for one in listed] == [ulid(number) for number in range(2_500)]
        events = [event for event in await history(client.memory("ns/joy")) if event.fragment_id]
        assert [event.fragment_id for event in events] == [one.id for one in listed]  # each once

        await until_tidy(server)


async def test_cancelled_import_leaves_nothing_and_can_restart(make_server: MakeServer, fake: FakeOpenAI) -> None:
    server = await started(using(make_server, fake))
    release = hold_after(fake, 1_000)
    async with memstream.connect(server.address) as client:
        lines, request = large(2_500), uuid.uuid4().hex
        operation = await client.import_("ns", chunks(lines), request_id=request)
        await begun(client, operation)
        await client.cancel_operation(operation.id)
        assert (await client.finished(operation)).state is OperationState.CANCELLED
        release()
        assert [one async for one in client.list_memories("ns")] == []

        await until_tidy(server)
        again = await client.import_("ns", chunks(lines), request_id=request)
        assert again.id != operation.id
        assert (await client.finished(again)).state is OperationState.SUCCEEDED
        assert (await client.memory("ns/joy").stats()).long_term == 2_500
        await client.memory("ns/joy").observe_batch(["said since"])
        once_more = await client.import_("ns", chunks(lines), request_id=request)
        assert once_more.id == again.id, "a repeat is of the operation that went on, too"


async def test_export_is_one_revision_with_all_received(client: memstream.Client, path: str) -> None:
    namespace, _, name = path.partition("/")
    made = await client.create_memory(path, kind=MemoryKind.LONG_TERM)

    exports = 0

    async def writing() -> None:
        number = 0
        while number < 40 or exports < 2:  # however slow the exports are, two of them are made while it writes
            await made.observe_batch([f"note {number}.{part}" for part in range(25)])
            number += 1

    writer = asyncio.create_task(writing())
    while not writer.done():
        received = (await made.stats()).long_term
        lines = await exported(client, namespace, name)
        (head,) = told(lines, "memory")
        numbers = [line["position"] for line in told(lines, "fragment")]
        assert numbers == list(range(head["fragments"]))
        assert head["fragments"] >= received
        assert max([line["version"] for line in told(lines, "fragment")], default=0) <= head["revision"]
        exports += 1
    await writer
    assert exports > 1


SLOWLY_READ = rounds(1_000, 640)


@pytest.mark.drawn
@pytest.mark.with_index
async def test_a_slow_reader_costs_the_server_no_memory(make_server: MakeServer) -> None:
    """20 or 32 MB wait to be read; the server holds one window of them."""
    metrics = free_address()
    with make_server(metrics_listen=metrics) as server:
        async with memstream.connect(server.address) as client:
            await imported(client, "ns", large(SLOWLY_READ, "{} " + "x" * 32_000))
            await until(lambda: all_indexed(metrics))  # the growth that follows is caused by the export alone
            for _ in range(2 * READERS):  # one-time growth of each thread that reads
                assert len(await exported(client, "ns", "joy")) == SLOWLY_READ + 3
            before_mib = resident_mib(server.pid)
            parts = client.export("ns", "joy")
            first = [await anext(parts) for _ in range(3)]
            assert first[-1].total == SLOWLY_READ
            assert resident_mib(server.pid) - before_mib < 16
            rest = [part async for part in parts]
            assert rest[-1].done == SLOWLY_READ


async def test_tiers_that_hold_are_held_again(client: memstream.Client, path: str) -> None:
    namespace = path.partition("/")[0]
    await imported(client, namespace, ended(whole()))
    listed = await fragments(client.memory(f"{namespace}/joy"))
    assert [one.tier for one in listed] == [Tier.LONG_TERM, Tier.SHORT_TERM]
    assert await client.memory(f"{namespace}/joy").get_fragment(external_id="a") == listed[0]


def test_the_facade_does_it_too(shared: ServerProcess, path: str, tmp_path: Path) -> None:
    namespace, _, name = path.partition("/")
    with connect_sync(shared.address) as client:
        client.create_memory(path).observe_batch(["bees"])
        file = tmp_path / "a.jsonl"
        file.write_bytes(b"".join(part.lines for part in client.export(namespace, name)))
        operation = client.import_(namespace, file, memory="sue")
        assert client.finished(operation).state is OperationState.SUCCEEDED
        assert client.memory(f"{namespace}/sue").stats().short_term == 1


async def test_missing_memory_cannot_be_exported(client: memstream.Client) -> None:
    with pytest.raises(memstream.MemoryNotFound):
        await exported(client, "nobody", "nothing")
    assert len(await exported(client, "nobody")) == 2
