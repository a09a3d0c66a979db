"""Repeats, folding, filters and expiry as a user sees them, through every kind of query."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import memstream
from memstream import Cursor, Filter, Observation, RecallOptions
from memstream.agent import AgentMemory
from memstream.mcp.tools import Tools
from tests.server.conftest import MakeServer, started
from tests.server.listing import contents, fragments
from tests.support.waiting import until

KEY = "the key is under the mat"
OURS = Filter(sessions=["ours"])


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_sentence_of_many_sessions_takes_one_place(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    for number in range(12):
        await memory.observe_batch([KEY, f"the key number {number} is lost"], session=f"s{number}")
    answer = await memory.recall_once("is the key under the mat?")
    said = [hit.fragment.content for hit in answer]
    assert len(said) == len(set(said)) == 10
    (hit,) = (hit for hit in answer if hit.fragment.content == KEY)
    assert len(hit.folded_ids) == 11
    async with memory.recall() as recalls:
        plain = await recalls.query("is the key under the mat?", fold=False)
    assert [one.fragment.content for one in plain].count(KEY) > 1
    assert not any(one.folded_ids for one in plain)
    await memory.update(policy={"recall": {"fold": False}})
    assert (await memory.describe()).policy.recall.fold is False
    unfolded = await memory.recall_once("is the key under the mat?")
    assert [one.fragment.id for one in unfolded] == [one.fragment.id for one in plain]


async def test_filter_binds_working_memory_on_every_road(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch(["our heron stands by the canal"], session="ours")
    await memory.observe_batch([Observation("their heron stands by the lake", session="theirs", speaker="bob")])
    ours = ["our heron stands by the canal"]

    def all_of(answer: memstream.Answer) -> list[str]:
        return sorted({one.content for one in (*answer.working_memory, *(hit.fragment for hit in answer))})

    assert len(all_of(await memory.recall_once("heron"))) == 2
    assert all_of(await memory.recall_once("heron", filter=OURS)) == ours
    assert all_of(await memory.recall_once("heron", filter=OURS, token_budget=100)) == ours
    assert all_of(await memory.recall_once("heron", filter=Filter(speakers=["bob"]))) != ours
    async with memory.recall() as recalls:
        assert all_of(await recalls.query("heron", filter=OURS)) == ours
        async with recalls.subscribe("heron", filter=OURS) as standing:
            assert all_of((await anext(standing)).answer) == ours
    told = await Tools(client, path).recall("heron", session="ours")
    assert [one.content for one in (*told.recollections, *told.working_memory)] == ours
    agent = AgentMemory(memory, options=RecallOptions(filter=OURS))
    assert "their heron" not in await agent.read_memories("heron")


async def test_what_expired_is_told_by_nobody(make_server: MakeServer) -> None:
    server = await started(make_server(maintenance_interval_s=3_600))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("expiry/joy")
        secret = Observation("the password is swordfish", ttl=timedelta(milliseconds=300), external_id="k")
        (gone,) = (one.fragment_id for one in (await memory.observe_batch([secret])).outcomes)
        await memory.observe_batch(["the password was herring"])
        uid = (await memory.describe()).uid

        async def left() -> bool:
            return await contents(memory) == ["the password was herring"]

        await until(left)
        assert await fragments(memory, forgotten=True) == []
        assert (await memory.stats()).short_term == 1
        answer = await memory.recall_once("password")
        assert [one.content for one in answer.working_memory] == ["the password was herring"]
        for key in ({"id": gone}, {"external_id": "k"}):
            with pytest.raises(memstream.FragmentNotFound):
                await memory.get_fragment(**key)
        exported = b"".join([part.lines async for part in client.export("expiry", "joy")])
        assert b"swordfish" not in exported
        await client.finished(await client.import_("expiry", _once(exported)))  # it exists, and changes nothing
        async with memory.watch(Cursor(uid, 0, 0), include_fragments=True) as watch:
            seen = [await anext(watch) for _ in range(3)]
        assert "swordfish" not in repr(seen)
        put = await memory.put_fragment("the password is a secret", external_id="k")
        assert put.created
        assert sorted(await contents(memory)) == ["the password is a secret", "the password was herring"]


async def test_identity_survives_an_export(client: memstream.Client, path: str) -> None:
    namespace, _, name = path.partition("/")
    memory = await client.create_memory(path)
    ttl = timedelta(hours=1)
    said = [
        Observation(KEY, session="s", ttl=ttl),
        Observation(KEY, session="s", importance=0.5),
        Observation("tea at four", session="s", speaker="bob", external_id="tea", metadata={"n": 1}),
    ]
    await memory.observe_batch(said)
    lines = [part.lines async for part in client.export(namespace, name)]

    await client.finished(await client.import_(namespace, _once(b"".join(lines)), memory="copy"))
    copy = client.memory(f"{namespace}/copy")
    await copy.observe_batch(said[:2])
    assert [one.duplicate_count for one in await fragments(copy)] == [1, 1, 0]
    put = await copy.put_fragment("tea at five", external_id="tea")
    assert not put.created
    assert put.fragment is not None
    assert (put.fragment.session, put.fragment.speaker, dict(put.fragment.metadata)) == ("", "", {})
