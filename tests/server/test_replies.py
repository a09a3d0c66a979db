"""Roles of speakers, and replies as the companions of the messages that they answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

import memstream
from memstream import Filter, Observation, Role
from memstream.agent import AgentMemory
from memstream.mcp.tools import Tools
from tests.server.listing import fragments


async def _stream(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_role_is_kept_by_every_way_in(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    async with memory.observe("p") as stream:
        await stream.send("where is the ladder?", speaker="Ann", role=Role.USER)
    await memory.observe_batch([Observation("in the shed", role=Role.ASSISTANT)])
    put = await memory.put_fragment("ls: shed", role=Role.TOOL, external_id="k")
    seen = await Tools(client, path).observe("answer in one sentence", role="system")
    assert put.fragment is not None
    roles = {one.content: one.role for one in await fragments(memory)}
    assert list(roles.values()) == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.SYSTEM]
    assert (await memory.update_fragment(seen.id, role=Role.USER)).role is Role.USER
    assert (await memory.update_fragment(seen.id, speaker="Bob")).role is Role.USER
    (replaced,) = (await memory.observe_batch([Observation("df: shed", external_id="k")])).outcomes
    assert (await memory.get_fragment(replaced.fragment_id)).role is None


async def test_role_survives_export_and_import(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch([Observation("in the shed", role=Role.ASSISTANT), "without a role"])
    namespace, _, name = path.partition("/")
    parts = [part.lines async for part in client.export(namespace, name)]
    await client.finished(await client.import_(f"{namespace}-copy", _stream(parts)))
    copied = client.memory(f"{namespace}-copy/{name}")
    assert [one.role for one in await fragments(copied)] == [Role.ASSISTANT, None]


async def test_unknown_role_is_refused_by_name(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    with pytest.raises(memstream.InvalidArgument, match="role"):
        await memory.observe_batch([Observation("hello", role=cast("Any", "butler"))])
    assert await fragments(memory) == []


CHAT = [
    Observation("how do I reach the harbour?", speaker="Ann", role=Role.USER),
    Observation("take the tram over the iron bridge", speaker="Lex", role=Role.ASSISTANT),
    Observation("and when is the market?", speaker="Ann", role=Role.USER),
    Observation("on Saturday, next to the harbour", speaker="Lex", role=Role.ASSISTANT),
]
HARBOUR = ["how do I reach the harbour?", "take the tram over the iron bridge"]


async def test_reply_comes_with_its_message_on_every_road(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch(CHAT, session="s")

    def pairs(answer: memstream.Answer) -> list[list[str]]:
        return [[one.content for one in hit.fragments] for hit in answer]

    once = await memory.recall_once("which tram reaches the harbour?", explain=True, receipt=True)
    assert pairs(once)[0] == HARBOUR
    assert len(once) == 2, "replies take no place"
    assert [one.content for one in once.working_memory] == [each.body for each in CHAT]
    (reply,) = (hit.companion for hit in once[:1])
    assert reply is not None
    assert reply.rank == 0
    assert reply.explanation is not None
    assert sum(each.contribution for each in reply.explanation.parts) == pytest.approx(reply.score)
    async with memory.recall() as recalls:
        assert pairs(await recalls.query("which tram reaches the harbour?"))[0] == HARBOUR
        async with recalls.subscribe("which tram reaches the harbour?") as standing:
            assert pairs((await anext(standing)).answer)[0] == HARBOUR
            await memory.update_fragment(reply.fragment.id, content="take the boat")
            changed = await anext(standing)
            assert [one.fragments[1].content for one in changed.changed] == ["take the boat"]
    (seen, *_) = (await Tools(client, path).recall("which tram reaches the harbour?")).recollections
    assert [seen.content, *(one.content for one in seen.replies)] == ["how do I reach the harbour?", "take the boat"]
    (receipt,) = [one async for one in memory.list_receipts()]
    assert [one.companion for one in receipt.ranking] == [False, True, False, True]


async def test_replay_repeats_the_scores_of_replies(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch(CHAT, session="s")
    kept = await memory.recall_once("which tram reaches the harbour?", receipt=True)
    await memory.observe_batch([Observation("thanks", role=Role.USER)] * 1, session="s")
    replayed = await memory.replay(kept.receipt_id)
    assert replayed.same, replayed.differences
    assert replayed.answer is not None
    assert [hit.companion is not None for hit in replayed.answer] == [True, True]


async def test_token_budget_drops_companions_first(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch(CHAT, session="s")
    asked = "which tram reaches the harbour?"
    whole = await memory.recall_once(asked, token_budget=1_000, omit_working_memory=True)
    tight = await memory.recall_once(asked, token_budget=whole.tokens - 1, omit_working_memory=True, near_misses=5)
    assert [hit.companion is not None for hit in tight] == [True, False]
    assert [each.stage for each in tight.near_misses] == ["budget"]
    bare = await memory.recall_once(asked, token_budget=15, omit_working_memory=True)
    assert [hit.companion is not None for hit in bare] == [False, False]


async def test_prompt_of_an_agent_has_replies_after_messages(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=memstream.MemoryKind.LONG_TERM)
    await memory.observe_batch(CHAT, session="s")
    prompt = await AgentMemory(memory).read_memories("which tram reaches the harbour?")
    assert prompt.splitlines()[:2] == HARBOUR


async def test_mcp_shows_a_reply_under_its_message_and_once(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch(CHAT, session="s")
    await memory.observe_batch([Observation("the rain has stopped", speaker="Ann", role=Role.USER)], session="t")
    shown = (await Tools(client, path).recall("which tram reaches the harbour?", limit=1)).text().splitlines()
    assert [line.partition(": ")[2] for line in shown[:2]] == HARBOUR
    assert [line.startswith("  ") for line in shown[:2]] == [False, True]
    assert [line.partition(": ")[2] for line in shown[2:]] == [
        "",
        *(str(each.body) for each in CHAT[2:]),
        "the rain has stopped",
    ]


async def test_a_filter_takes_replies_from_working_memory_too(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch(CHAT, session="s")
    asked = "which tram reaches the harbour?"
    of_ann = await memory.recall_once(asked, filter=Filter(speakers=["Ann"]))
    assert {hit.companion for hit in of_ann} == {None}
    assert [one.content for one in of_ann.working_memory] == [CHAT[0].body, CHAT[2].body]
    (reply,) = [one.id for one in await fragments(memory) if one.content == HARBOUR[1]]
    await memory.forget_fragments([reply])
    left = await memory.recall_once(asked)
    assert [hit.companion for hit in left if hit.fragment.content == HARBOUR[0]] == [None]
    assert [one.content for one in left.working_memory] == [CHAT[0].body, CHAT[2].body, CHAT[3].body]


async def test_a_context_has_a_reply_until_it_is_forgotten(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch(CHAT, session="s")
    asked = "which tram reaches the harbour?"

    async def lines() -> list[str]:
        made = await client.context([path], asked, parts_timeout_s=60.0)
        return [line.partition(": ")[2] for line in made.text.splitlines() if line.startswith("[")]

    assert (await lines())[:2] == HARBOUR
    (reply,) = [one.id for one in await fragments(memory) if one.content == HARBOUR[1]]
    await memory.forget_fragments([reply])
    assert (await lines())[0] == HARBOUR[0]
    assert HARBOUR[1] not in await lines()
