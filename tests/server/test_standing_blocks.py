"""Blocks that keep themselves: what they are made of, when they are written again, and what an erasure leaves."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import memstream
from memstream import Block, Client, EventType, Filter, InvalidRequest, Memory, Observation, OperationState
from tests.server.conftest import MakeServer, restarted, started
from tests.server.listing import history
from tests.server.test_erase import files_with
from tests.server.test_transfer import exported, imported
from tests.support.fake_openai import JSON, FakeOpenAI, Fault
from tests.support.journals import only_sqlite
from tests.support.server import ServerProcess
from tests.support.waiting import until

AT_ONCE = timedelta(0)
TOMORROW = timedelta(days=1)
MAY = datetime(2026, 5, 8, tzinfo=UTC)
QUESTION = "What does Bob drink?"
TEA, COFFEE = "Bob likes to drink tea", "Bob likes to drink coffee"


@pytest.fixture
async def bob(client: Client, path: str) -> Memory:
    return await client.create_memory(path, kind="long_term")


async def block_with(memory: Memory, check: Callable[[Block], Any], name: str = "drinks") -> Block:
    async def look() -> Block | None:
        block = await memory.blocks.get(name)
        return block if check(block) else None

    found = await until(look)
    assert found is not None
    return found


async def settled(memory: Memory, name: str = "drinks") -> Block:
    """The block, once it holds at the memory's present revision."""
    revision = (await memory.stats()).revision
    return await block_with(memory, lambda one: one.standing and one.standing.revision >= revision, name)


async def observe(memory: Memory, *texts: str) -> list[str]:
    observations = [Observation(text, observe_time=MAY) for text in texts]
    return [one.fragment_id for one in (await memory.observe_batch(observations)).outcomes]


async def versions(memory: Memory, name: str = "drinks") -> list[str]:
    return [one.text async for one in memory.blocks.versions(name)]


async def test_block_holds_what_its_question_finds(bob: Memory) -> None:
    (tea,) = await observe(bob, TEA)
    put = await bob.blocks.keep("drinks", QUESTION, min_interval=AT_ONCE)
    assert (put.standing is not None and put.standing.question, put.tokens) == (QUESTION, 0)
    first = await settled(bob)
    assert first.text == f"8 May 2026: {TEA}"
    assert first.standing is not None
    assert (first.standing.citations, first.standing.model, first.standing.problem) == (((tea,),), "", "")
    (coffee,) = await observe(bob, COFFEE)
    second = await settled(bob)
    assert second.standing is not None
    assert second.standing.citations == ((tea,), (coffee,))
    assert second.text == f"8 May 2026: {TEA}\n8 May 2026: {COFFEE}"


async def test_commit_that_changes_no_answer_writes_no_version(bob: Memory) -> None:
    await observe(bob, TEA)
    await bob.blocks.keep("drinks", QUESTION, filter=Filter(sessions=["kitchen"]), min_interval=AT_ONCE)
    before = await settled(bob)
    await observe(bob, COFFEE)
    after = await settled(bob)
    assert after.version == before.version
    assert (after.text, after.standing and after.standing.filtered) == ("", True)


async def test_text_stays_within_its_tokens(bob: Memory) -> None:
    await observe(bob, *(f"Bob likes to drink {drink}" for drink in ("tea", "milk", "water", "juice", "wine")))
    await bob.blocks.keep("drinks", QUESTION, max_tokens=20, min_interval=AT_ONCE)
    block = await settled(bob)
    assert 0 < block.tokens <= 20
    assert block.standing is not None
    assert len(block.standing.citations) == len(block.text.split("\n"))


async def test_forgotten_memory_leaves_the_text_before_the_interval(bob: Memory) -> None:
    tea, _ = await observe(bob, TEA, COFFEE)
    await bob.blocks.keep("drinks", QUESTION, min_interval=TOMORROW)
    assert TEA in (await settled(bob)).text
    await bob.forget_fragments([tea])
    assert TEA not in (await block_with(bob, lambda one: TEA not in one.text)).text


async def test_new_memory_waits_for_the_interval(bob: Memory) -> None:
    await observe(bob, TEA)
    await bob.blocks.keep("drinks", QUESTION, min_interval=TOMORROW)
    first = await settled(bob)
    await observe(bob, COFFEE)
    await bob.blocks.keep("other", QUESTION, min_interval=AT_ONCE)
    await settled(bob, "other")
    assert (await bob.blocks.get("drinks")).version == first.version


async def test_put_text_ends_a_standing_answer(bob: Memory) -> None:
    await observe(bob, TEA)
    await bob.blocks.keep("drinks", QUESTION, min_interval=AT_ONCE)
    await settled(bob)
    with pytest.raises(InvalidRequest, match="keeps itself"):
        await bob.blocks.append("drinks", "and more")
    await bob.blocks.put("drinks", "Nothing")
    await observe(bob, COFFEE)
    await bob.blocks.keep("other", QUESTION, min_interval=AT_ONCE)
    await settled(bob, "other")
    block = await bob.blocks.get("drinks")
    assert (block.text, block.standing) == ("Nothing", None)


async def test_question_that_cannot_be_asked_is_refused(bob: Memory) -> None:
    for refused, field in (
        (bob.blocks.keep("drinks", " "), "standing.text"),
        (bob.blocks.keep("drinks", "x", limit=0), "standing.limit"),
        (bob.blocks.keep("drinks", "x", min_relevance=2), "standing.min_relevance"),
        (bob.blocks.keep("drinks", "x", min_interval=timedelta(days=2)), "standing.min_interval"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await refused
        assert field in str(caught.value)


@only_sqlite("a database has files and a log of its own")
async def test_erasure_reaches_text_and_versions(make_server: MakeServer) -> None:
    server = await started(make_server())
    secret = f"zq{uuid.uuid4().hex}"
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("standing/bob", kind="long_term")
        erased, _ = await observe(memory, f"Bob drinks {secret}", TEA)
        await memory.blocks.keep("drinks", QUESTION, min_interval=AT_ONCE)
        assert secret in (await settled(memory)).text
        await observe(memory, COFFEE)
        assert COFFEE in (await settled(memory)).text
        assert sum(secret in text for text in await versions(memory)) == 2
        ended = await client.finished(await memory.erase_fragments([erased]))
        assert ended.state is OperationState.SUCCEEDED
        assert not [text for text in await versions(memory) if secret in text]
        assert files_with(server.data_dir, {"secret": secret.encode()}) == {}
        left = await block_with(memory, lambda one: one.text)
        assert TEA in left.text
        assert secret not in left.text


async def test_killed_server_goes_on_with_what_is_due(make_server: MakeServer) -> None:
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("standing/bob", kind="long_term")
        await observe(memory, TEA)
        await memory.blocks.keep("drinks", QUESTION, min_interval=AT_ONCE)
        await settled(memory)
        await observe(memory, COFFEE)
    await restarted(server)
    async with memstream.connect(server.address) as client:
        assert COFFEE in (await settled(client.memory("standing/bob"))).text


async def test_export_keeps_question_and_sources(client: Client, bob: Memory) -> None:
    """An erasure in the imported memory reaches the text that the exporting server made."""
    erased, _ = await observe(bob, TEA, COFFEE)
    await bob.blocks.keep("drinks", QUESTION, filter=Filter(kinds=["observation"]), min_interval=AT_ONCE)
    await settled(bob)
    lines = await exported(client, bob.namespace, bob.name)
    await imported(client, bob.namespace, lines, memory="copy")
    copied = client.memory(f"{bob.namespace}/copy")
    before = await copied.blocks.get("drinks")
    assert TEA in before.text
    assert before.standing is not None
    assert (before.standing.question, before.standing.filtered) == (QUESTION, True)
    await client.finished(await copied.erase_fragments([erased]))
    assert not [text for text in await versions(copied) if TEA in text]


# ---- with an LLM
@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(dimension=16) as endpoint:
        yield endpoint


def using(make_server: MakeServer, fake: FakeOpenAI) -> ServerProcess:
    return make_server(
        llm_model="fake-llm",
        llm_base_url=fake.base_url,
        llm_api_key="sk-llm",
        llm_scoring="false",
        llm_retries=0,
        llm_timeout_s=60.0,
    )


class Answers:
    """The endpoint's standing answers: the last word of each text that it is shown."""

    def __init__(self, fake: FakeOpenAI) -> None:
        self.asked: list[Any] = []
        fake.complete = self

    def __call__(self, body: JSON) -> str:
        if body["response_format"]["json_schema"]["name"] != "cited_statements":
            return json.dumps({"insights": [], "questions": [], "scores": []})
        shown = json.loads(body["messages"][1]["content"])
        self.asked.append(shown)
        said = [
            {"statement": f"He drinks {one['text'].split()[-1]}.", "evidence": [one["number"]]}
            for one in shown["texts"]
        ]
        return json.dumps({"statements": said})


async def with_answers(
    make_server: MakeServer, fake: FakeOpenAI, run: Callable[[Client, Memory], Awaitable[None]]
) -> None:
    server = await started(using(make_server, fake))
    async with memstream.connect(server.address) as client:
        await run(client, await client.create_memory("standing/bob", kind="long_term"))


async def test_llm_answers_and_cites(make_server: MakeServer, fake: FakeOpenAI) -> None:
    answers = Answers(fake)

    async def run(_: Client, memory: Memory) -> None:
        tea, coffee = await observe(memory, TEA, COFFEE)
        await memory.blocks.keep("drinks", QUESTION, instructions="Be brief.", min_interval=AT_ONCE)
        block = await settled(memory)
        assert block.text == "He drinks tea.\nHe drinks coffee."
        assert block.standing is not None
        assert (block.standing.citations, block.standing.model) == (((tea,), (coffee,)), "fake-llm")
        assert [(one["question"], one["instructions"]) for one in answers.asked] == [(QUESTION, "Be brief.")]
        await memory.update_fragment(tea, pinned=True)  # changes nothing that the answer is made of
        await settled(memory)
        assert len(answers.asked) == 1

    await with_answers(make_server, fake, run)


async def test_history_has_the_cost_of_an_answer(make_server: MakeServer, fake: FakeOpenAI) -> None:
    """One event for each answer; the event itself asks for no further answer."""
    answers = Answers(fake)

    async def run(_: Client, memory: Memory) -> None:
        await observe(memory, TEA)
        await memory.blocks.keep("drinks", QUESTION, min_interval=AT_ONCE)
        await settled(memory)
        await observe(memory, COFFEE)
        await block_with(memory, lambda one: "coffee" in one.text)
        await settled(memory)
        uses = [one.model_use for one in await history(memory) if one.type is EventType.MODEL_ASKED]
        assert [(one.purpose, one.model, one.requests) for one in uses if one] == [("answer", "fake-llm", 1)] * 2
        assert len(answers.asked) == 2

    await with_answers(make_server, fake, run)


async def test_failing_llm_leaves_the_text_and_says_so(make_server: MakeServer, fake: FakeOpenAI) -> None:
    Answers(fake)

    async def run(_: Client, memory: Memory) -> None:
        await observe(memory, TEA)
        await memory.blocks.keep("drinks", QUESTION, min_interval=AT_ONCE)
        await settled(memory)
        fake.fail(*[Fault(hang_up=True)] * 10_000)
        await observe(memory, COFFEE)
        stale = await block_with(memory, lambda one: one.standing and one.standing.problem)
        assert stale.text == "He drinks tea."
        fake.heal()
        healed = await settled(memory)
        assert healed.text == "He drinks tea.\nHe drinks coffee."
        assert healed.standing is not None
        assert healed.standing.problem == ""

    await with_answers(make_server, fake, run)


async def test_failing_llm_keeps_no_forgotten_words(make_server: MakeServer, fake: FakeOpenAI) -> None:
    Answers(fake)

    async def run(_: Client, memory: Memory) -> None:
        tea, coffee = await observe(memory, TEA, COFFEE)
        await memory.blocks.keep("drinks", QUESTION, min_interval=TOMORROW)
        await settled(memory)
        fake.fail(*[Fault(hang_up=True)] * 10_000)
        await memory.forget_fragments([tea])
        block = await block_with(memory, lambda one: "tea" not in one.text)
        assert block.text.endswith(COFFEE)
        assert block.standing is not None
        assert (block.standing.model, block.standing.citations) == ("", ((coffee,),))

    await with_answers(make_server, fake, run)


async def test_answer_made_of_what_is_erased_is_not_written(make_server: MakeServer, fake: FakeOpenAI) -> None:
    """The erasure ends while the model still writes."""
    answers = Answers(fake)

    async def run(client: Client, memory: Memory) -> None:
        tea, _ = await observe(memory, TEA, COFFEE)

        async def asked() -> bool:
            return fake.in_flight > 0

        fake.hold()
        await memory.blocks.keep("drinks", QUESTION, min_interval=AT_ONCE)
        await until(asked)
        await client.finished(await memory.erase_fragments([tea]))
        fake.release()
        block = await block_with(memory, lambda one: one.text)
        assert block.text == "He drinks coffee."
        assert [len(one["texts"]) for one in answers.asked] == [2, 1]
        assert await versions(memory) == ["He drinks coffee.", ""]

    await with_answers(make_server, fake, run)
