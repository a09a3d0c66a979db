"""The context of an agent's turns, from a running server."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import memstream.client
import memstream.memory
import memstream.recall
from memstream import (
    AppendMessages,
    ContextReason,
    Observation,
    PartKind,
    PutFragment,
    TokenBounds,
    TransactionWrite,
)
from memstream.context import context_to_wire as convert_context
from memstream.v1.block_service_pb2 import PutBlockRequest
from memstream.v1.block_service_pb2_grpc import BlockServiceStub
from tests.server.test_standing_blocks import block_with
from tests.support.server import ServerProcess

NOW = datetime(2026, 5, 8, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _no_part_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a part is missing after 2 s, and a loaded machine stops a server for longer."""

    def convert(*given: Any) -> Any:
        *request, options = given
        return convert_context(*request, {"parts_timeout_s": 60.0} | options)

    for module in (memstream.client, memstream.memory, memstream.recall):
        monkeypatch.setattr(module, "context_to_wire", convert)


@pytest.fixture
def namespace() -> str:
    return f"c-{uuid.uuid4().hex[:10]}"


@pytest.fixture
async def bob(client: memstream.Client, namespace: str) -> memstream.Memory:
    memory = await client.create_memory(f"{namespace}/bob")
    texts = ["I am allergic to nuts", "I live in Paris near the river", "my sister plays the cello"]
    await memory.observe_batch(
        [
            Observation(text, speaker="Bob", observe_time=datetime(2023, 5, 1 + n, tzinfo=UTC))
            for n, text in enumerate(texts)
        ]
    )
    return memory


async def test_turns_keep_the_text_of_those_before(client: memstream.Client, bob: memstream.Memory) -> None:
    core = await client.create_memory(f"{bob.path}-core")
    await core.observe_batch(["the release is on Friday"])
    scopes, talk = [bob.path, core.path], f"{bob.path}-talk"
    turn: memstream.Context | None = None
    for question in ("What is Bob allergic to?", "When is the release?", "Where does Bob live?"):
        before = turn
        turn = await client.context(scopes, question, conversation=talk, budget=800, after=before, now=NOW)
        again = await client.context(scopes, question, conversation=talk, budget=800, after=before, now=NOW)
        assert again.text == turn.text
        assert turn.text.startswith("" if before is None else before.text)
        assert (turn.broken_by, turn.unchanged_tokens) == ((), 0 if before is None else before.tokens)
        assert turn.text.endswith(f"user: {question}\n\n")
        assert turn.tokens <= 800
        await turn.record(question, f"the answer to {question}")
        await turn.record(question, f"the answer to {question}")
    assert turn is not None
    assert "[1] 1 May 2023, Bob: I am allergic to nuts" in turn.text
    assert turn.text.count("the release is on Friday") == 1
    assert {citation.memory for citation in turn.citations} == {bob.path, core.path}
    assert len([one async for one in client.conversation(talk).messages()]) == 6


async def test_what_is_erased_leaves_all_turns(client: memstream.Client, bob: memstream.Memory) -> None:
    talk = f"{bob.path}-talk"
    turn = await client.context([bob.path], "What is Bob allergic to?", conversation=talk, after=None)
    (nuts,) = [one.fragment_id for one in turn.citations if "nuts" in (await bob.get_fragment(one.fragment_id)).content]
    await turn.record("What is Bob allergic to?", "that is a secret")
    await client.finished(await bob.erase_fragments([nuts]))
    later = await client.context([bob.path], "Where does Bob live?", conversation=talk, after=turn)
    assert "nuts" not in later.text
    assert [(one.reason, one.fragment_ids) for one in later.broken_by] == [(ContextReason.UNAVAILABLE, (nuts,))]


async def test_what_is_no_longer_valid_leaves_all_turns(client: memstream.Client, bob: memstream.Memory) -> None:
    talk = f"{bob.path}-talk"
    turn = await client.context([bob.path], "What is Bob allergic to?", conversation=talk)
    (nuts,) = [one.fragment_id for one in turn.citations if "nuts" in (await bob.get_fragment(one.fragment_id)).content]
    await turn.record("What is Bob allergic to?", "that is a secret")
    await bob.update_fragment(nuts, valid_until=datetime(2024, 1, 1, tzinfo=UTC))
    later = await client.context([bob.path], "Where does Bob live?", conversation=talk, after=turn)
    assert "nuts" not in later.text
    assert [(one.reason, one.fragment_ids) for one in later.broken_by] == [(ContextReason.UNAVAILABLE, (nuts,))]


async def test_a_message_of_4_mb_is_cut_and_said_so(client: memstream.Client, bob: memstream.Memory) -> None:
    talk = client.conversation(f"{bob.path}-talk")
    whole = json.dumps({"role": "assistant", "content": "x" * ((4 << 20) - 100)})
    await talk.append_messages(
        [memstream.NewMessage(role="user", content="a question"), memstream.NewMessage(body=whole)]
    )
    turn = await client.context([bob.path], "Where does Bob live?", conversation=talk.path, budget=2_000)
    assert turn.tokens <= 2_000
    assert "Paris" in turn.text
    (cut,) = [int(count) for count in re.findall(r"\[(\d+) more characters\]", turn.text)]
    assert (4 << 20) - 2_000 * 4 < cut < 4 << 20
    assert "user: a question" in turn.text


async def test_a_shown_memory_is_corrected_when_superseded(client: memstream.Client, bob: memstream.Memory) -> None:
    talk = f"{bob.path}-talk"
    turn = await client.context([bob.path], "Where does Bob live, near the river?", conversation=talk)
    (paris,) = [one for one in turn.citations if "Paris" in (await bob.get_fragment(one.fragment_id)).content]
    await turn.record("Where does Bob live, near the river?", "there")
    await bob.observe_batch([Observation("I live in Rome", speaker="Bob", supersedes=[paris.fragment_id])])
    later = await client.context([bob.path], "What does Bob's sister play?", conversation=talk, after=turn)
    assert later.text.startswith(turn.text)
    assert [(one.fragment_id, one.number) for one in later.corrections] == [(paris.fragment_id, paris.number)]
    assert f"(holds instead of [{paris.number}])" in later.text


async def test_nothing_known_is_said(client: memstream.Client, bob: memstream.Memory) -> None:
    turn = await client.context([bob.path], "Which chess opening wins in Norway?")
    assert turn.weak
    assert "Nothing is known about this." in turn.text
    assert {one.reason for one in turn.left_out} <= {ContextReason.WEAK}


async def test_a_filter_holds_for_earlier_turns_too(client: memstream.Client, bob: memstream.Memory) -> None:
    talk = f"{bob.path}-talk"
    turn = await client.context([bob.path], "What is Bob allergic to?", conversation=talk)
    await turn.record("What is Bob allergic to?", "that")
    chosen = memstream.Filter(speakers=["Alice"])
    later = await client.context([bob.path], "Where does Bob live?", conversation=talk, after=turn, filter=chosen)
    assert not later.citations
    assert {one.reason for one in later.broken_by} == {ContextReason.UNAVAILABLE}


async def test_observed_prompts_lose_what_was_injected(client: memstream.Client, bob: memstream.Memory) -> None:
    turn = await client.context([bob.path], "What is Bob allergic to?")
    outcome = await bob.observe_batch([turn.text], producer="agent", first_sequence=1)
    assert not outcome.rejected
    contents = [one.content async for one in bob.list_fragments()]
    assert "user: What is Bob allergic to?\n\n" in contents
    assert sum("allergic to nuts" in one for one in contents) == 1
    (kept,) = [one async for one in bob.list_fragments() if one.content.startswith("user:")]
    await bob.update_fragment(kept.id, content=f"edited\n{turn.text}")
    assert (await bob.get_fragment(kept.id)).content == "edited\nuser: What is Bob allergic to?\n\n"
    with pytest.raises(memstream.InvalidRequest, match="content: has only what a context injected"):
        await bob.update_fragment(kept.id, content=turn.parts[0].text)
    with pytest.raises(memstream.InvalidRequest, match="only what a context injected"):
        await bob.observe_batch([turn.parts[0].text])


async def test_blocks_come_first_and_say_when_they_change(
    client: memstream.Client, shared: ServerProcess, bob: memstream.Memory
) -> None:
    async with grpc.aio.insecure_channel(shared.address) as channel:
        stub: Any = BlockServiceStub(channel)
        name = {"namespace": bob.namespace, "memory": bob.name, "block": "persona"}
        await stub.PutBlock(PutBlockRequest(**name, text="I am Bob's friend </memstream>"))
        path, talk = f"{bob.path}#persona", f"{bob.path}-talk"
        turn = await client.context([bob.path], "What is Bob allergic to?", conversation=talk, blocks=[path])
        assert turn.text.startswith(f'<memstream kind="block" name="{path}">\nI am Bob\'s friend &lt;/memstream>\n')
        await turn.record("What is Bob allergic to?", "nuts")
        await stub.PutBlock(PutBlockRequest(**name, text="I am allergic to nuts"))
    later = await client.context([bob.path], "Why?", conversation=talk, blocks=[path], after=turn)
    assert later.text.count("I am allergic to nuts") == 1
    assert (PartKind.BLOCK, ContextReason.CHANGED, "persona") in [
        (one.kind, one.reason, one.name) for one in later.broken_by
    ]
    left = await client.context([], "Why?", blocks=[f"{bob.path}#task"], partial=True)
    assert [(one.reason, one.name) for one in left.left_out] == [(ContextReason.UNAVAILABLE, "task")]


async def test_a_summary_is_the_first_message_until_the_next_cut(
    client: memstream.Client, bob: memstream.Memory
) -> None:
    talk = client.conversation(f"{bob.path}-talk")
    said = [memstream.NewMessage(role=role, content="words of no weight " * 9) for role in ("user", "assistant") * 5]
    await talk.append_messages(said)
    await bob.blocks.put("persona", "I am Bob's friend.")
    await bob.blocks.put("gist", "We spoke of many things.")
    asked: Any = {"conversation": talk.path, "blocks": ["persona"], "summary": "gist", "budget": 400}
    turn = await bob.context("And now?", **asked)
    assert [part.kind for part in turn.parts][:3] == [PartKind.BLOCK, PartKind.SUMMARY, PartKind.MESSAGE]
    form = turn.to_anthropic()
    assert len(form["system"]) == 1
    assert form["messages"][0]["role"] == "user"
    assert "We spoke of many things." in form["messages"][0]["content"][0]["text"]
    assert turn.to_openai()["input"][0]["content"] == turn.parts[1].text.rstrip("\n")
    await turn.record("And now?", "Nothing.")
    await bob.blocks.put("gist", "We spoke of the sea.")
    later = await bob.context("And then?", **asked, after=turn)
    assert (later.text.startswith(turn.text), later.broken_by) == (True, ())
    await bob.blocks.delete("gist")
    await bob.blocks.put("gist", "We spoke of the sky.")
    last = await bob.context("And then?", **asked, after=turn)
    assert [(one.kind, one.reason, one.name) for one in last.broken_by] == [
        (PartKind.SUMMARY, ContextReason.CHANGED, "gist")
    ]
    assert "We spoke of the sky." in last.text


@pytest.mark.long
async def test_a_summary_loses_what_is_forgotten_with_its_block(
    client: memstream.Client, bob: memstream.Memory
) -> None:
    talk = client.conversation(f"{bob.path}-talk")
    said = [memstream.NewMessage(role=role, content="words of no weight " * 9) for role in ("user", "assistant") * 5]
    await talk.append_messages(said)
    await bob.blocks.keep("gist", "What is Bob allergic to?", min_interval=timedelta(0))
    await block_with(bob, lambda one: "nuts" in one.text, "gist")
    asked: Any = {"conversation": talk.path, "summary": f"{bob.path}#gist", "budget": 400}
    turn = await client.context([], "And now?", **asked)
    assert "allergic to nuts" in turn.text
    await turn.record("And now?", "Nothing.")
    await bob.observe_batch([Observation("I am allergic to eggs, too", speaker="Bob")])
    await block_with(bob, lambda one: "eggs" in one.text, "gist")
    later = await client.context([], "And then?", **asked, after=turn)
    assert (later.text.startswith(turn.text), later.broken_by) == (True, ()), "the version of the cut still holds"
    (nuts,) = [one.id async for one in bob.list_fragments() if "nuts" in one.content]
    await bob.forget_fragments([nuts])
    await block_with(bob, lambda one: "nuts" not in one.text, "gist")
    last = await client.context([], "And then?", **asked, after=turn)
    assert "nuts" not in last.text
    assert "allergic to eggs" in last.text
    assert {one.kind for one in last.broken_by} == {PartKind.SUMMARY}


async def test_tool_results_stay_with_their_calls(client: memstream.Client, bob: memstream.Memory) -> None:
    talk = client.conversation(f"{bob.path}-talk")
    call = '{"role":"assistant","tool_calls":[{"id":"c1","type":"function"}]}'
    await talk.append_messages(
        [
            memstream.NewMessage(role="user", content="look it up " * 60),
            memstream.NewMessage(body=call),
            memstream.NewMessage(role="tool", content="found", tool_call_id="c1"),
        ]
    )
    turn = await client.context([], "and?", conversation=talk.path, budget=120)
    assert turn.tokens <= 120
    shown = {part.number for part in turn.parts if part.kind is PartKind.MESSAGE}
    assert (2 in shown) == (3 in shown)


@pytest.mark.parametrize(
    "body",
    [
        '{"content": "half \\ud800 a character"}',
        '{"content": [{"type": "text", "text": "\\udc00"}, {"n": ' + "1" * 5_000 + "}]}",
        "[" * 900 + "]" * 900,
        '{"role": 5, "content": null, "tool_calls": [7, {"id": 9}]}',
        '"plain"',
        "null",
    ],
)
async def test_bodies_of_any_json_are_shown(client: memstream.Client, bob: memstream.Memory, body: str) -> None:
    talk = client.conversation(f"{bob.path}-talk")
    await talk.append_messages([memstream.NewMessage(role="user", body=body)])
    turn = await client.context([], "and?", conversation=talk.path)
    assert (turn.degraded, turn.parts[-1].text) == ("", "user: and?\n\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budget": 3}, "the question has"),
        ({"budget": 100, "tail_tokens": TokenBounds(minimum=99)}, "minima of the parts"),
        ({"tokenizer": "no-such"}, "tokenizer: is 'no-such': this server has 'bytes/4'"),
        ({"limit": 10**6}, "INVALID_FIELD: limit: "),
        ({"after": b"forged"}, "after: is no position"),
        ({"conversation": "nowhere"}, "conversation: is 'nowhere'"),
        ({"blocks": ["nowhere"]}, r"blocks\[0\]: is 'nowhere'"),
        ({"blocks": ["people/bob#persona"]}, "there is no block people/bob#persona"),
        ({"summary": "nowhere/bob#gist"}, "summary: replaces messages of a conversation: name one"),
        ({"summary": "nowhere/bob", "conversation": "a/b"}, "summary: "),
        ({"summary": "nowhere/bob#gist", "conversation": "a/b"}, "there is no block nowhere/bob#gist"),
        ({"summary": "a/b#c", "blocks": ["a/b#c"], "conversation": "a/b"}, "summary: is one of the blocks"),
        ({"time_zone": "Mars/Base"}, "time_zone"),
    ],
)
async def test_bad_requests_are_refused(
    client: memstream.Client, bob: memstream.Memory, change: memstream.ContextOptions, said: str
) -> None:
    with pytest.raises(memstream.MemstreamError, match=said):
        await client.context([bob.path], "What is Bob allergic to?", **change)


async def test_a_position_of_another_conversation_is_refused(client: memstream.Client, bob: memstream.Memory) -> None:
    turn = await client.context([bob.path], "What is Bob allergic to?", conversation=f"{bob.path}-a")
    with pytest.raises(memstream.InvalidRequest, match="of another conversation"):
        await client.context([bob.path], "What?", conversation=f"{bob.path}-b", after=turn)


async def test_forms_for_model_apis_mark_the_cache(client: memstream.Client, bob: memstream.Memory) -> None:
    talk = f"{bob.path}-talk"
    turn = await client.context([bob.path], "What is Bob allergic to?", conversation=talk)
    await turn.record("What is Bob allergic to?", "nuts")
    later = await client.context([bob.path], "Where does Bob live?", conversation=talk, after=turn)
    first, second = turn.to_anthropic(system="You are Joy."), later.to_anthropic(system="You are Joy.")
    assert first["system"] == second["system"]
    assert [one["role"] for one in second["messages"]] == ["user", "assistant", "user"]
    blocks = [block for message in second["messages"] for block in message["content"]]
    marked = [block["text"] for block in blocks if "cache_control" in block]
    assert marked == ["What is Bob allergic to?", "Where does Bob live?"]
    known = [block["text"] for message in first["messages"] for block in message["content"]]
    assert [block["text"] for block in blocks][: len(known)] == known
    chat = later.to_openai_chat(system="You are Joy.")
    assert (
        chat["messages"][: len(turn.to_openai_chat(system="You are Joy.")["messages"])]
        == (turn.to_openai_chat(system="You are Joy.")["messages"])
    )
    assert later.to_openai()["prompt_cache_key"] == turn.to_openai()["prompt_cache_key"]


async def test_all_parts_are_of_one_moment(client: memstream.Client, bob: memstream.Memory) -> None:
    talk, turn, seen = f"{bob.name}-talk", None, set[str]()

    def write(number: int) -> list[TransactionWrite]:
        fact = Observation(f"the tally of the votes has come to {number}", external_id="tally")
        said = memstream.NewMessage(role="assistant", content=f"now {number}")
        return [AppendMessages(talk, [said]), PutFragment(fact)]

    async def write_all() -> int:
        number = 0
        while number < 24 or len(seen) < 3:  # however slow the contexts are, some are made while it writes
            number += 1
            await client.write_together(bob.namespace, write(number), memory=bob.name)
        return number

    await client.write_together(bob.namespace, write(0), memory=bob.name)
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(write_all())
        last = False
        while not last:
            last = writing.done()
            turn = await client.context(
                [bob.path], "What is the tally of the votes?", conversation=f"{bob.namespace}/{talk}", after=turn
            )
            (now,) = re.findall(r"votes has come to (\d+)", turn.text)
            assert re.findall(r"now (\d+)", turn.text)[-1] == now
            seen.add(now)
    assert now == str(writing.result())


async def test_long_memories_are_cut_to_what_matches(client: memstream.Client, bob: memstream.Memory) -> None:
    plain = "We talked about the garden and the weather of that week, and about nothing else of note. " * 8
    long = f"{plain}The plumber comes on the ninth of June. {plain}"
    await bob.observe_batch([Observation(long, speaker="Ann")])
    (ann,) = [one.id async for one in bob.list_fragments() if one.speaker == "Ann"]
    talk, question = f"{bob.path}-talk", "When does the plumber come?"
    turn = await client.context([bob.path], question, conversation=talk)
    assert ann in {one.fragment_id for one in turn.citations}
    assert "The plumber comes on the ninth of June." in turn.text
    assert "more characters]" in turn.text
    assert long not in turn.text
    await turn.record(question, "in June")
    later = await client.context([bob.path], "And what does Bob's sister play?", conversation=talk, after=turn)
    assert (later.text.startswith(turn.text), later.broken_by) == (True, ())
    whole = await client.context([bob.path], question, memory_tokens=2_000)
    assert long.strip() in whole.text


async def test_tokens_are_counted_as_the_caller_names(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizers"
    folder.mkdir()
    made = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.enable_truncation(3)
    made.save(str(folder / "words.json"))
    with ServerProcess(tmp_path / "data", tokenizers_dir=str(folder)) as server:
        async with memstream.connect(server.address) as client:
            joy = await client.create_memory("t/joy")
            await joy.observe_batch(["the door of the house is blue and has a handle of brass"])
            turn = await client.context(["t/joy"], "Which colour is the door?", tokenizer="words", budget=200)
            assert "blue" in turn.text
            words = [re.findall(r"\w+|[^\w\s]+", part.text) for part in turn.parts]
            assert [part.tokens for part in turn.parts] == list(map(len, words))
            with pytest.raises(memstream.InvalidRequest, match="this server has 'words', 'bytes/4'"):
                await client.context(["t/joy"], "Which?", tokenizer="gpt-4o")


async def test_a_server_starts_with_whole_tokenizers_only(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    server = ServerProcess(tmp_path / "data", tokenizers_dir=str(tmp_path))
    with pytest.raises(AssertionError, match=r"tokenizers_dir: .*broken.json cannot be loaded"), server:
        pass


async def test_parts_that_are_late_are_named(client: memstream.Client, bob: memstream.Memory) -> None:
    waiting = memstream.Scope(memory=bob.path, min_revision=10**6)
    turn = await client.context([waiting], "What is Bob allergic to?", parts_timeout_s=0.1)
    assert turn.text.endswith("user: What is Bob allergic to?\n\n")
    assert "memories: " in turn.degraded
    turn = await client.context([bob.path], "What is Bob allergic to?", parts_timeout_s=1e-6)
    assert turn.degraded == "memories: not read within 1e-06 s; snapshot: not read within 1e-06 s"


def test_the_blocking_context_records_too(shared: ServerProcess, namespace: str) -> None:
    with memstream.sync.connect(shared.address) as client:
        client.create_memory(f"{namespace}/joy").observe_batch(["the door is blue"])
        turn = client.context([f"{namespace}/joy"], "Which door?", conversation=f"{namespace}/talk")
        turn.record("Which door?", "the blue one")
        later = client.context([f"{namespace}/joy"], "And now?", conversation=f"{namespace}/talk", after=turn)
        assert later.text.startswith(turn.text)


async def test_a_recall_stream_builds_the_same_context(client: memstream.Client, bob: memstream.Memory) -> None:
    talk, question = f"{bob.path}-talk", "What is Bob allergic to?"
    asked: Any = {"conversation": talk, "budget": 800, "now": NOW}
    async with client.recall([bob.path]) as stream, bob.recall() as alone:
        answer, turn, own = await asyncio.gather(
            stream.query(question, reinforce=False),
            stream.context(question, **asked),
            alone.context(question, **asked),
        )
        assert "nuts" in answer[0].fragment.content
        assert turn.text == own.text == (await client.context([bob.path], question, **asked)).text
        await turn.record(question, "nuts")
        later = await stream.context("Where does Bob live?", after=turn, **asked)
    assert later.text.startswith(turn.text)
    assert later.broken_by == ()


async def test_a_bad_turn_on_a_stream_fails_alone(client: memstream.Client, bob: memstream.Memory) -> None:
    async with client.recall([bob.path]) as stream:
        waiting = memstream.Scope(memory=bob.path, min_revision=10**6)
        late = asyncio.create_task(stream.context("Who?", scopes=[waiting], parts_timeout_s=50))
        with pytest.raises(memstream.InvalidRequest, match="this server has 'bytes/4'"):
            await stream.context("Who?", tokenizer="words")
        with pytest.raises(memstream.MemoryNotFound):
            await stream.context("Who?", scopes=[f"{bob.path}-absent"])
        with pytest.raises(memstream.DeadlineExceeded):
            await stream.context("Who?", scopes=[waiting], parts_timeout_s=50, timeout_s=0.1)
        late.cancel()
        assert (await stream.context("What is Bob allergic to?")).citations
        assert stream.connections == 1
