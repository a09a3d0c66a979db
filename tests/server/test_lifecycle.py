"""Lifecycle through the SDK and a real server: changes by request and by age, and responses to repeats."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

import memstream
from memstream import EventReason, EventType, Filter, Memory, MemoryKind, Observation, Tier
from memstream.v1 import fragment_pb2, memory_pb2
from memstream.v1 import memory_service_pb2 as pb
from tests.server.conftest import MakeServer, restarted, started
from tests.server.listing import contents, fragments, history
from tests.support.server import ServerProcess
from tests.support.waiting import until


async def told(memory: Memory, *lines: str, session: str = "monday") -> list[str]:
    """Ids of the observations."""
    result = await memory.observe_batch([Observation(line, session=session) for line in lines])
    return [outcome.fragment_id for outcome in result.outcomes]


async def found(memory: Memory, words: str) -> list[str]:
    return [hit.fragment.content for hit in await memory.recall_once(words, min_relevance=0.2, reinforce=False)]


# ---- by request
async def test_the_server_says_that_it_has_it(client: memstream.Client) -> None:
    assert memstream.Capability.LIFECYCLE in (await client.server_info()).capabilities


async def test_put_keeps_one_fragment_a_key(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    first = await memory.put_fragment("Bob lives in Leeds", external_id="home")
    second = await memory.put_fragment("Bob lives in York", external_id="home", importance=0.9)
    assert first.fragment is not None
    assert second.fragment is not None
    assert (first.created, second.created) == (True, False)
    assert second.fragment.id == first.fragment.id
    assert await contents(memory) == ["Bob lives in York"]
    assert await memory.get_fragment(external_id="home") == second.fragment
    with pytest.raises(memstream.EtagMismatch):
        await memory.put_fragment("Bob lives in Hull", external_id="home", etag=first.fragment.etag)
    hits = await memory.recall_once("Where does Bob live?", min_revision=second.revision)
    assert [hit.fragment.content for hit in hits] == ["Bob lives in York"]


async def test_what_is_updated_is_found_by_its_new_words(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    (id_,) = await told(memory, "the ferry leaves at noon")
    before = await memory.get_fragment(id_)
    later = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    changed = await memory.update_fragment(
        id_,
        content="the ferry leaves at dusk",
        importance=0.9,
        metadata={"port": "north", "berth": 4},
        expire_time=later,
        pinned=True,
        speaker="harbourmaster",
        etag=before.etag,
    )
    assert (changed.content, changed.importance, changed.metadata) == (
        "the ferry leaves at dusk",
        0.9,
        {"port": "north", "berth": 4},
    )
    assert (changed.expire_time, changed.pinned, changed.speaker) == (later, True, "harbourmaster")
    assert await memory.get_fragment(id_) == changed
    assert await found(memory, "dusk") == ["the ferry leaves at dusk"]
    assert await found(memory, "noon") == []
    assert (await memory.update_fragment(id_, expire_time="never")).expire_time is None
    stepped = await memory.update_fragment(id_, content=memstream.Structured(thought="it leaves at dawn"))
    assert (stepped.structured, await found(memory, "dawn")) == (
        memstream.Structured(thought="it leaves at dawn"),
        [stepped.content],
    )
    with pytest.raises(memstream.EtagMismatch):
        await memory.update_fragment(id_, pinned=False, etag=changed.etag)


@pytest.mark.parametrize("kind", [MemoryKind.LONG_TERM, MemoryKind.HYBRID])
async def test_forgotten_is_recalled_only_after_restore(client: memstream.Client, path: str, kind: MemoryKind) -> None:
    memory = await client.create_memory(path, kind=kind)
    ids = await told(memory, "a heron by the canal", "an umbrella in the hall")
    assert await memory.forget_fragments(ids[:1]) == 1
    assert await found(memory, "heron") == []
    assert [one.id for one in await fragments(memory, forgotten=True)] == ids[:1]
    assert await memory.forget_fragments(ids[:1]) == 0
    assert await memory.restore_fragments(ids) == 1
    assert (await found(memory, "heron"))[0] == "a heron by the canal"
    assert await fragments(memory, forgotten=True) == []


async def test_more_ids_than_a_call_takes_are_split(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    ids = await told(memory, "a heron by the canal", "an umbrella in the hall")
    unknown = ["0" * 26] * 999
    assert await memory.forget_fragments([ids[0], *unknown, ids[1]]) == 2
    assert await fragments(memory) == []
    assert await memory.restore_fragments([ids[0], *unknown, *unknown, ids[1]]) == 2
    assert len(await fragments(memory)) == 2


def test_scripts_split_more_ids_than_a_call_takes(shared: ServerProcess, path: str) -> None:
    with memstream.sync.connect(shared.address) as client:
        memory = client.create_memory(path, kind=MemoryKind.LONG_TERM)
        ids = [one.fragment_id for one in memory.observe_batch(["a heron", "an umbrella"]).outcomes]
        unknown = ["0" * 26] * 999
        assert memory.forget_fragments([ids[0], *unknown, *unknown, ids[1]]) == 2
        assert memory.restore_fragments([ids[0], *unknown, ids[1]]) == 2


async def test_forgetting_by_filter(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await told(memory, *(f"monday's line {n}" for n in range(30)))
    await told(memory, "tuesday's line", session="tuesday")
    assert await memory.forget_fragments(filter=Filter(sessions=["monday"])) == 30
    assert await contents(memory) == ["tuesday's line"]
    assert await memory.restore_fragments(filter=Filter(sessions=["monday"], tiers=[Tier.LONG_TERM])) > 0
    for given in ({}, {"filter": Filter()}, {"ids": ["0" * 26], "filter": Filter(sessions=["monday"])}):
        with pytest.raises(memstream.InvalidRequest):
            await memory.forget_fragments(**given)  # type: ignore[arg-type]  # invalid on purpose


async def test_clear_and_clone(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, policy={"recall": {"limit": 3}}, labels={"team": "writers"})
    ids = await told(memory, *(f"line {n}" for n in range(15)))
    await memory.forget_fragments(ids[:2])
    copy = await memory.clone(f"{path}-copy")
    ours, theirs = await memory.describe(), await copy.describe()
    assert (theirs.kind, theirs.policy, theirs.labels) == (ours.kind, ours.policy, ours.labels)
    assert await contents(copy) == []
    assert await memory.clear([Tier.LONG_TERM]) == 5
    assert {one.tier for one in await fragments(memory)} == {Tier.SHORT_TERM}
    assert await memory.clear() == 10
    assert await contents(memory) == await contents(copy) == []
    assert await fragments(memory, forgotten=True) == []
    with pytest.raises(memstream.MemoryExists):
        await memory.clone(f"{path}-copy")


# ---- by age
async def test_expired_fragments_are_erased_after_grace(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, policy={"retention": {"forget_grace": timedelta(seconds=1)}})
    await memory.observe_batch([Observation("for a moment", ttl=timedelta(milliseconds=50)), Observation("for good")])
    await until(lambda: _reasons(memory, EventType.ERASED))
    assert await _reasons(memory, EventType.FORGOTTEN) == [EventReason.EXPIRED]
    assert await _reasons(memory, EventType.ERASED) == [EventReason.EXPIRED]
    assert await contents(memory) == ["for good"]
    assert await fragments(memory, forgotten=True) == []


async def test_memory_over_capacity_forgets_the_weakest(client: memstream.Client, path: str) -> None:
    policy = {"retention": {"long_term_capacity": 5}}
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM, policy=policy)
    await memory.observe_batch([Observation(f"line {n}", importance=n / 20) for n in range(20)])

    async def five() -> bool:
        return (await memory.stats()).long_term == 5

    await until(five)
    assert await contents(memory) == [f"line {n}" for n in range(15, 20)]
    assert set(await _reasons(memory, EventType.FORGOTTEN)) == {EventReason.CAPACITY}


async def test_watch_before_kept_events_is_refused(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, policy={"retention": {"event_retention": timedelta(seconds=1)}})
    await told(memory, "one", "two")
    revision = (await memory.describe()).revision

    async def refused() -> bool:
        try:
            async with memory.watch("beginning") as watch:
                await anext(watch)
        except memstream.CursorCompacted as error:
            return error.details["oldest_revision"] == str(revision)
        return False

    await until(refused)
    assert await contents(memory) == ["one", "two"]


async def _reasons(memory: Memory, type_: EventType) -> list[EventReason | None]:
    return [event.reason for event in await history(memory) if event.type is type_]


# ---- repeats
async def test_every_mutation_is_idempotent_across_kill(make_server: MakeServer) -> None:
    """The response to a request_id is committed with the change: after a crash the client repeats and gets it."""
    server = await started(make_server())
    answers: list[tuple[str, Message, Message]] = []
    named = {"namespace": "ns", "memory": "m"}

    async def ask(client: memstream.Client, rpc: str, request: Message) -> Message:
        return await getattr(client._link.memories, rpc)(request)  # type: ignore[no-any-return]

    async with memstream.connect(server.address) as client:

        async def first(rpc: str, request: Message) -> Message:
            answers.append((rpc, request, await ask(client, rpc, request)))
            return answers[-1][2]

        await first("CreateMemory", pb.CreateMemoryRequest(**named, request_id="r"))
        labels = memory_pb2.Memory(namespace="ns", name="m", labels={"a": "b"})
        mask = FieldMask(paths=["labels"])
        await first("UpdateMemory", pb.UpdateMemoryRequest(memory=labels, update_mask=mask, request_id="r"))
        said = fragment_pb2.Observation(content="tea at four", external_id="tea", session="monday")
        made = await first("PutFragment", pb.PutFragmentRequest(**named, observation=said, request_id="r"))
        assert isinstance(made, pb.PutFragmentResponse)
        changed = fragment_pb2.Fragment(id=made.fragment.id, importance=0.9, etag=made.fragment.etag)
        masked = FieldMask(paths=["importance"])
        await first(
            "UpdateFragment", pb.UpdateFragmentRequest(**named, fragment=changed, update_mask=masked, request_id="r")
        )
        monday = fragment_pb2.FragmentFilter(sessions=["monday"])
        await first("ForgetFragments", pb.ForgetFragmentsRequest(**named, filter=monday, request_id="r"))
        await first("RestoreFragments", pb.RestoreFragmentsRequest(**named, filter=monday, request_id="r"))
        await first("ClearMemory", pb.ClearMemoryRequest(**named, request_id="r"))
        await first("CloneMemory", pb.CloneMemoryRequest(**named, new_memory="copy", request_id="r"))
        await first("DeleteMemory", pb.DeleteMemoryRequest(namespace="ns", memory="copy", request_id="r"))
    await restarted(server)
    async with memstream.connect(server.address) as client:
        before = await client.memory("ns/m").describe()
        for rpc, request, answer in answers:
            assert await ask(client, rpc, request) == answer, rpc
        assert await client.memory("ns/m").describe() == before
        assert [made.name async for made in client.list_memories("ns")] == ["m"]


async def test_of_concurrent_puts_of_a_new_key_one_wins(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    ended = await asyncio.gather(
        *(memory.put_fragment(f"Bob lives in {place}", external_id="home", absent=True) for place in range(6)),
        return_exceptions=True,
    )
    (kept,) = [one for one in ended if isinstance(one, memstream.Put)]
    assert kept.fragment is not None
    assert kept.created
    refused = [one for one in ended if isinstance(one, memstream.EtagMismatch)]
    assert [one.details["etag"] for one in refused] == [kept.fragment.etag] * 5
    assert (await memory.get_fragment(external_id="home")).content == kept.fragment.content
    await memory.forget_fragments([kept.fragment.id])
    assert (await memory.put_fragment("Bob lives in Hull", external_id="home", absent=True)).fragment is not None
