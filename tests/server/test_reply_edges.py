"""Roles and replies at their edges: what is malformed, very long, very many, or alone."""

from __future__ import annotations

from typing import Any

import pytest

import memstream
from memstream import Observation, Role

CHAIN = 10_000


def said(text: str, role: Role = Role.USER, **fields: Any) -> Observation:
    return Observation(text, role=role, **fields)


async def fill(memory: memstream.Memory, texts: list[Observation], session: str = "s") -> None:
    async with memory.observe("p") as stream:
        for each in texts:
            await stream.send(each.body, role=each.role, speaker=each.speaker, session=session)


async def recall(memory: memstream.Memory, what: str, **options: Any) -> memstream.Answer:
    return await memory.recall_once(what, omit_working_memory=True, reinforce=False, explain=True, **options)


def check_sums(answer: memstream.Answer) -> None:
    for hit in answer:
        for one in (hit, hit.companion):
            if one is not None:
                assert one.explanation is not None
                assert sum(part.contribution for part in one.explanation.parts) == pytest.approx(one.score)


async def test_a_reply_to_nothing_has_its_own_place(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await fill(memory, [said("take the tram over the iron bridge", Role.ASSISTANT)])
    await fill(memory, [said("tram tickets are sold here", Role.ASSISTANT), said("thanks")], session="t")
    answer = await recall(memory, "which tram?")
    assert {hit.fragment.content for hit in answer[:2]} == {
        "take the tram over the iron bridge",
        "tram tickets are sold here",
    }
    assert [hit.companion for hit in answer] == [None] * len(answer)
    assert not answer.weak
    check_sums(answer)


async def test_only_the_first_of_many_replies_is_a_companion(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    replies = [said(f"stop {number} of the tram", Role.ASSISTANT) for number in range(CHAIN)]
    await fill(memory, [said("which stops has the tram?"), *replies])
    answer = await recall(memory, "which stops has the tram?", limit=5)
    assert answer[0].companion is not None
    assert answer[0].companion.fragment.content == "stop 0 of the tram"
    assert [hit.companion for hit in answer[1:]] == [None] * 4
    (last,) = await recall(memory, f"stop {CHAIN - 1}", limit=1)
    assert last.fragment.content == f"stop {CHAIN - 1} of the tram"
    check_sums(answer)


async def test_tool_outputs_without_end_keep_no_reply(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    outputs = [said(f"output {number}", Role.TOOL) for number in range(1_000)]
    await fill(memory, [said("list the stops"), *outputs, said("there are many stops", Role.ASSISTANT)])
    answer = await recall(memory, "many stops", limit=2)
    assert [hit.companion for hit in answer] == [None, None]
    assert answer[0].fragment.content == "there are many stops"


@pytest.mark.parametrize("role", list(Role))
async def test_a_memory_of_one_fragment_answers(client: memstream.Client, path: str, role: Role) -> None:
    memory = await client.create_memory(path)
    await fill(memory, [said("the ladder is in the shed", role)])
    found, strange = await recall(memory, "where is the ladder?"), await recall(memory, "who won the race?")
    assert ([hit.fragment.content for hit in found], found.weak) == (["the ladder is in the shed"], False)
    assert strange.weak
    check_sums(found)


@pytest.mark.parametrize("text", ["yes", "yes " * 16_000, "\U0001f642" * 16_000, "\u5929" * 20_000, "+ # . & " * 8_000])
async def test_one_word_repeated_is_found_and_ranked(client: memstream.Client, path: str, text: str) -> None:
    memory = await client.create_memory(path)
    roles = (Role.USER, Role.ASSISTANT)
    for session in range(20):
        await fill(memory, [said(text, roles[at % 2]) for at in range(4)], session=f"s{session}")
    answer = await recall(memory, text[:200])
    assert answer[0].fragment.content == text
    assert all(-1 < hit.score < 10 for hit in answer)
    check_sums(answer)


async def test_long_replies_in_passages_leave_the_message_first(client: memstream.Client, path: str) -> None:
    """Assistant texts of 300 kB in passages of 60 kB, next to short messages."""
    memory = await client.create_memory(path)
    passage = "the history of trams and of bridges, from the first rails to the last wire. " * 760
    for number in range(8):
        parts = [said(f"part {part} of {number}: {passage}", Role.ASSISTANT) for part in range(5)]
        await fill(memory, [said(f"tell me about tram {number}"), *parts], session=f"s{number}")
    answer = await recall(memory, "tell me about tram 3", limit=3)
    assert answer[0].fragment.content == "tell me about tram 3"
    assert answer[0].companion is not None
    assert answer[0].companion.fragment.content.startswith("part 0 of 3")
    short = await recall(memory, "tell me about tram 3", limit=3, token_budget=200)
    assert short[0].fragment.content == "tell me about tram 3"
    assert short.tokens <= 200
    check_sums(answer)
    with pytest.raises(memstream.InvalidRequest, match="bytes, this rpc takes at most"):
        await memory.put_fragment(passage * 6, role=Role.ASSISTANT, external_id="k")
