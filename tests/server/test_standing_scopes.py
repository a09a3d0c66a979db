"""Blocks that ask other memories: what makes them due, what an erasure and a deletion there leave here."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import memstream
from memstream import Block, Client, InvalidRequest, Memory, OperationState, Scope
from tests.server.conftest import MakeServer, restarted, started
from tests.server.test_erase import files_with
from tests.server.test_standing_blocks import (
    AT_ONCE,
    COFFEE,
    MAY,
    QUESTION,
    TEA,
    TOMORROW,
    Answers,
    block_with,
    observe,
    using,
    versions,
)
from tests.server.test_transfer import exported, imported
from tests.support.fake_openai import FakeOpenAI
from tests.support.journals import only_sqlite
from tests.support.waiting import until

DATE = f"{MAY.day} May {MAY.year}"


class Three:
    """An agent, whose block asks two memories."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.agent = client.memory(f"{namespace}/agent")
        self.user = client.memory(f"{namespace}/user")
        self.team = client.memory(f"{namespace}/team")

    @classmethod
    async def create(cls, client: Client, namespace: str) -> Three:
        made = cls(client, namespace)
        for memory in (made.agent, made.user, made.team):
            await client.create_memory(memory.path, kind="long_term")
        return made

    @property
    def scopes(self) -> list[str | Scope]:
        return [self.user.path, Scope(memory=self.team.path, weight=0.9)]

    async def keep(self, **options: object) -> None:
        given = {"min_interval": AT_ONCE, **options}
        await self.agent.blocks.keep("drinks", QUESTION, scopes=self.scopes, **given)  # type: ignore[arg-type]

    async def settled(self, *memories: Memory) -> Block:
        """The block, once it holds at the present revisions of these memories, by default of both."""
        revisions = {one.path: (await one.stats()).revision for one in memories or (self.user, self.team)}
        return await block_with(
            self.agent,
            lambda one: (
                one.standing and all(one.standing.revisions.get(path, -1) >= least for path, least in revisions.items())
            ),
        )


@pytest.fixture
async def three(client: Client) -> Three:
    return await Three.create(client, f"ns{uuid.uuid4().hex[:8]}")


async def test_block_is_made_of_all_memories_that_it_asks(three: Three) -> None:
    (tea,) = await observe(three.user, TEA)
    await observe(three.agent, "Bob likes to drink milk")  # is not asked
    await three.keep()
    first = await three.settled()
    assert first.text == f"{DATE}: {TEA}"
    (coffee,) = await observe(three.team, COFFEE)
    second = await three.settled()
    assert second.text == f"{DATE}: {TEA}\n{DATE}: {COFFEE}"
    standing = second.standing
    assert standing is not None
    assert standing.scopes == (three.user.path, three.team.path)
    assert standing.citations == ((tea,), (coffee,))
    assert standing.cited_memories == ((three.user.path,), (three.team.path,))
    assert (standing.revision, standing.problem) == (0, "")


async def test_commit_that_changes_no_answer_writes_no_version(three: Three) -> None:
    await observe(three.user, TEA)
    await three.keep(filter=memstream.Filter(kinds=["observation"]), min_relevance=0.2)
    before = await three.settled()
    await observe(three.team, "The printer is on the second floor")
    after = await three.settled()
    assert (after.version, after.text) == (before.version, f"{DATE}: {TEA}")


async def test_one_scope_is_the_memory_alone(three: Three) -> None:
    (tea,) = await observe(three.user, TEA)
    await three.agent.blocks.keep("drinks", QUESTION, scopes=[three.user.path], min_interval=AT_ONCE)
    block = await three.settled(three.user)
    assert block.standing is not None
    assert (block.text, block.standing.citations) == (f"{DATE}: {TEA}", ((tea,),))
    assert block.standing.cited_memories == ((three.user.path,),)


async def test_text_changes_at_once_when_a_source_is_forgotten(three: Three) -> None:
    tea, _ = await observe(three.user, TEA, COFFEE)
    await three.keep(min_interval=TOMORROW)
    assert TEA in (await three.settled()).text
    await three.user.forget_fragments([tea])
    assert COFFEE in (await block_with(three.agent, lambda one: TEA not in one.text)).text


@only_sqlite("a database has files and a log of its own")
@pytest.mark.parametrize("killed", [False, True])
async def test_erasure_in_a_memory_reaches_the_blocks_of_others(make_server: MakeServer, *, killed: bool) -> None:
    server = await started(make_server())
    secret = f"zq{uuid.uuid4().hex}"
    async with memstream.connect(server.address) as client:
        three = await Three.create(client, "standing")
        erased, _ = await observe(three.user, f"Bob drinks {secret}", TEA)
        await three.keep()
        assert secret in (await three.settled()).text
        await observe(three.team, COFFEE)
        assert COFFEE in (await three.settled()).text
        await three.agent.blocks.keep("drinks", QUESTION, instructions="Again.", scopes=three.scopes)  # copies the text
        ended = await client.finished(await three.user.erase_fragments([erased]))
        assert ended.state is OperationState.SUCCEEDED
        if not killed:
            assert not [text for text in await versions(three.agent) if secret in text]
    if killed:
        await restarted(server)
    async with memstream.connect(server.address) as client:
        three = Three(client, "standing")
        assert not [text for text in await versions(three.agent) if secret in text]
        assert files_with(server.data_dir, {"secret": secret.encode()}) == {}
        left = await block_with(three.agent, lambda one: COFFEE in one.text)
        assert TEA in left.text


async def test_erasures_reach_versions_of_a_former_question(three: Three) -> None:
    (tea,) = await observe(three.user, TEA)
    await three.keep()
    await three.settled()
    await three.agent.blocks.put("drinks", "Nothing")
    await three.client.finished(await three.user.erase_fragments([tea]))
    assert (await versions(three.agent))[0] == "Nothing"
    assert not [text for text in await versions(three.agent) if TEA in text]


async def test_memory_that_is_deleted_takes_its_words_along(three: Three) -> None:
    await observe(three.user, TEA)
    await observe(three.team, COFFEE)
    await three.keep(min_interval=TOMORROW)
    assert TEA in (await three.settled()).text
    await three.user.delete()
    assert not [text for text in await versions(three.agent) if TEA in text]
    left = await block_with(three.agent, lambda one: one.text and one.standing and one.standing.problem)
    assert left.text == f"{DATE}: {COFFEE}"
    assert left.standing is not None
    assert three.user.path in left.standing.problem
    assert three.team.path not in left.standing.problem
    await three.client.create_memory(three.user.path, kind="long_term")
    await three.keep()
    await observe(three.user, "Bob likes to drink water")
    again = await three.settled()
    assert "water" in again.text
    assert again.standing is not None
    assert again.standing.problem == ""


async def test_memory_may_be_created_after_the_question(client: Client) -> None:
    namespace = f"ns{uuid.uuid4().hex[:8]}"
    three = Three(client, namespace)
    await client.create_memory(three.agent.path)
    await three.keep()
    waiting = await block_with(three.agent, lambda one: one.standing and one.standing.problem)
    assert waiting.standing is not None
    assert (waiting.text, waiting.standing.revisions) == ("", {})
    await client.create_memory(three.team.path, kind="long_term")
    await observe(three.team, TEA)
    assert (await three.settled(three.team)).text == f"{DATE}: {TEA}"


async def test_killed_server_goes_on_with_what_another_memory_made_due(make_server: MakeServer) -> None:
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        three = await Three.create(client, "standing")
        await observe(three.user, TEA)
        await three.keep()
        await three.settled()
        await observe(three.team, COFFEE)
    await restarted(server)
    async with memstream.connect(server.address) as client:
        assert COFFEE in (await Three(client, "standing").settled()).text


async def test_import_asks_again_and_takes_no_text(three: Three) -> None:
    await observe(three.user, TEA)
    await three.keep()
    await three.settled()
    lines = await exported(three.client, three.agent.namespace, three.agent.name)
    await three.user.delete()
    await imported(three.client, three.agent.namespace, lines, memory="copy")
    copy = three.client.memory(f"{three.agent.namespace}/copy")
    assert not [text for text in await versions(copy) if TEA in text]
    await observe(three.team, COFFEE)
    assert (await block_with(copy, lambda one: one.text)).text == f"{DATE}: {COFFEE}"


async def test_scopes_that_cannot_be_asked_are_refused(three: Three) -> None:
    path = three.user.path
    for scopes, field in (
        ([Scope(prefix=f"{three.user.namespace}/")], "standing.scopes[0]"),
        ([path, Scope(labels={"a": "b"})], "standing.scopes[1]"),
        ([Scope(memory=path, min_revision=3)], "standing.scopes[0].min_revision"),
        ([path, path], "twice"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await three.agent.blocks.keep("drinks", QUESTION, scopes=scopes)
        assert field in str(caught.value)


# ---- with an LLM
@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(dimension=16) as endpoint:
        yield endpoint


async def with_answers(make_server: MakeServer, fake: FakeOpenAI, run: Callable[[Three], Awaitable[None]]) -> None:
    server = await started(using(make_server, fake))
    async with memstream.connect(server.address) as client:
        await run(await Three.create(client, "standing"))


async def test_llm_answers_from_several_memories(make_server: MakeServer, fake: FakeOpenAI) -> None:
    answers = Answers(fake)

    async def run(three: Three) -> None:
        await observe(three.user, TEA)
        await observe(three.team, COFFEE)
        await three.keep()
        block = await three.settled()
        assert block.text == "He drinks tea.\nHe drinks coffee."
        assert block.standing is not None
        assert block.standing.cited_memories == ((three.user.path,), (three.team.path,))
        assert len(answers.asked) == 1

    await with_answers(make_server, fake, run)


async def test_answer_made_of_erased_fragments_is_not_written(make_server: MakeServer, fake: FakeOpenAI) -> None:
    """The erasure ends while the model still writes."""
    Answers(fake)

    async def run(three: Three) -> None:
        (tea,) = await observe(three.user, TEA)
        await observe(three.team, COFFEE)

        async def asked() -> bool:
            return fake.in_flight > 0

        fake.hold()
        await three.keep()
        await until(asked)
        await three.client.finished(await three.user.erase_fragments([tea]))
        fake.release()
        assert (await block_with(three.agent, lambda one: one.text)).text == "He drinks coffee."
        assert await versions(three.agent) == ["He drinks coffee.", ""]

    await with_answers(make_server, fake, run)
