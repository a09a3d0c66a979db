"""Transactions over messages, state and fragments: whole or not at all, at every fault; refused ones change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event

import memstream
from memstream import (
    AppendMessages,
    DeleteConversation,
    DeleteState,
    NewMessage,
    Observation,
    PutFragment,
    RemoveMessages,
    ReplaceMessage,
    SetState,
    StateScope,
    TransactionWrite,
    UpdateConversation,
)
from memstream_server.adapters.journal.database import sqlite
from memstream_server.core.filters import Listing
from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.conversations import Conversations, Transaction, Written
from memstream_server.engine.errors import EngineError, JournalUnavailable
from memstream_server.engine.requests import NewMemory
from memstream_server.engine.runtime.clock import Clock
from memstream_server.ports.blocks import BlockContent, BlockName, MemoryName, Writing
from memstream_server.ports.conversation_records import AppendMessages as Appending
from memstream_server.ports.conversation_records import SetState as Setting
from memstream_server.ports.conversation_records import StateName
from memstream_server.ports.conversation_records import StateScope as Scope
from memstream_server.ports.conversations import ConversationName, Message, MessageQuery, Plan, PlanQuery, Precondition
from memstream_server.ports.journal.errors import StorageFull
from memstream_server.ports.journal.records import Answer
from tests.engine.assembled import Assembled, assembled, hasty
from tests.engine.memory import observation
from tests.server.conftest import QUICK, check_log
from tests.support.faulty_journal import Fault
from tests.support.journals import DATABASE
from tests.support.seeds import rounds
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

__all__ = ["hasty"]


@pytest.fixture
async def space(client: memstream.Client) -> str:
    """A namespace of the test's own, with the memory joy."""
    name = f"t-{uuid.uuid4().hex[:12]}"
    await client.create_memory(f"{name}/joy")
    return name


def said(*texts: str, **condition: Any) -> AppendMessages:
    return AppendMessages("talk", [NewMessage(role="user", content=text) for text in texts], **condition)


def keyed(key: str, content: str, **condition: Any) -> PutFragment:
    return PutFragment(Observation(content, external_id=key), **condition)


async def look(client: memstream.Client, space: str) -> dict[str, Any]:
    """All that the transactions of these tests can change."""
    seen: dict[str, Any] = {}
    try:
        seen["talk"] = await client.conversation(f"{space}/talk").describe()
        seen["messages"] = [one async for one in client.conversation(f"{space}/talk").messages()]
    except memstream.ConversationNotFound:
        seen["talk"] = None
    seen["others"] = [one async for one in client.list_conversations(space)]
    for scope in StateScope:
        try:
            seen[scope] = await client.get_state(space, scope, "talk")
        except memstream.ConversationNotFound:
            seen[scope] = None
    joy = client.memory(f"{space}/joy")
    seen["fragments"] = [(one.external_id, one.content, one.etag) async for one in joy.list_fragments()]
    return seen


async def test_a_transaction_writes_all_kinds(client: memstream.Client, space: str) -> None:
    await client.conversation(f"{space}/talk").append_messages([NewMessage(content="first")])
    wrote = await client.write_together(
        space,
        [
            said("second", "third", last_number=1),
            ReplaceMessage("talk", 1, NewMessage(content="FIRST")),
            UpdateConversation("talk", labels={"user": "bob"}),
            SetState(StateScope.SESSION, "talk", '{"step": 1}', absent=True),
            keyed("a", "Bob likes tea", absent=True),
            keyed("b", "Bob has a cat"),
        ],
        memory="joy",
    )
    appended, replaced, updated, state, put, other = cast("Sequence[Any]", wrote)
    assert (appended.numbers, replaced.content, updated.labels, state.document) == (
        (2, 3),
        "FIRST",
        {"user": "bob"},
        '{"step": 1}',
    )
    assert (put.created, put.fragment.content, other.fragment.content) == (True, "Bob likes tea", "Bob has a cat")
    seen = await look(client, space)
    assert [one.content for one in seen["messages"]] == ["FIRST", "second", "third"]
    assert (seen["talk"].labels, seen[StateScope.SESSION]) == ({"user": "bob"}, state)
    assert seen["fragments"] == [("a", "Bob likes tea", put.fragment.etag), ("b", "Bob has a cat", other.fragment.etag)]
    assert put.revision == other.revision == (await client.memory(f"{space}/joy").stats()).revision


async def test_a_transaction_deletes(client: memstream.Client, space: str) -> None:
    talk = client.conversation(f"{space}/talk")
    await talk.append_messages([NewMessage(content=f"{n}", client_id=f"m{n}") for n in range(1, 6)])
    state = await client.set_state(space, StateScope.APP, "talk", "1")
    await client.set_state(space, StateScope.SESSION, "other", "1")
    wrote = await client.write_together(
        space,
        [
            RemoveMessages("talk", [2, 3], last_number=5),
            RemoveMessages("talk", oldest=1),
            DeleteState(StateScope.APP, "talk", etag=state.etag),
            DeleteState(StateScope.USER, "talk"),
            DeleteConversation("other", last_number=0),
            keyed("a", "tea"),
        ],
        memory="joy",
    )
    assert wrote[:-1] == (2, 1, True, False, 0)
    assert [one.content async for one in talk.messages()] == ["4", "5"]
    assert [one.name async for one in client.list_conversations(space)] == ["talk"]
    again = [RemoveMessages("talk", from_number=1, last_number=5), said("fresh")]
    assert [getattr(one, "numbers", one) for one in await client.write_together(space, again)] == [2, (6,)]
    assert [(one.number, one.content) async for one in talk.messages()] == [(6, "fresh")]
    with pytest.raises(memstream.ConversationNotFound):
        await talk.message(client_id="m4")


async def test_a_transaction_removes_all_of_a_long_one(client: memstream.Client, space: str) -> None:
    talk = client.conversation(f"{space}/talk")
    for _ in range(2):
        await talk.append_messages([NewMessage(content="x")] * 600)
    with pytest.raises(memstream.InvalidRequest, match="more than 1000 messages"):
        await client.write_together(space, [RemoveMessages("talk", from_number=2)])
    assert await client.write_together(space, [RemoveMessages("talk", oldest=9_000), said("y")])
    assert [(one.number, one.content) async for one in talk.messages()] == [(1_201, "y")]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (said("x", last_number=7), memstream.EtagMismatch),
        (said("x", absent=True), memstream.AlreadyExists),
        (AppendMessages("talk", [NewMessage(content="other", client_id="m1")]), memstream.RequestIdConflict),
        (ReplaceMessage("talk", 99, NewMessage(content="x")), memstream.ConversationNotFound),
        (ReplaceMessage("nobody", 1, NewMessage(content="x")), memstream.ConversationNotFound),
        (UpdateConversation("nobody", labels={}), memstream.ConversationNotFound),
        (UpdateConversation("talk", absent=True), memstream.AlreadyExists),
        (SetState(StateScope.APP, "talk", "9", etag="12345"), memstream.EtagMismatch),
        (SetState(StateScope.APP, "talk", "9", absent=True), memstream.EtagMismatch),
        (RemoveMessages("talk", [99]), memstream.ConversationNotFound),
        (RemoveMessages("talk", from_number=1, last_number=7), memstream.EtagMismatch),
        (DeleteConversation("nobody"), memstream.ConversationNotFound),
        (DeleteConversation("talk", last_number=7), memstream.EtagMismatch),
        (DeleteState(StateScope.APP, "talk", etag="12345"), memstream.EtagMismatch),
        (keyed("a", "x", absent=True), memstream.EtagMismatch),
        (keyed("a", "x", etag="01ARZ3NDEKTSV4RRFFQ69G5FAV-1"), memstream.EtagMismatch),
    ],
)
async def test_one_failed_condition_changes_nothing(
    client: memstream.Client, space: str, wrong: TransactionWrite, error: type[memstream.MemstreamError]
) -> None:
    first = NewMessage(content="first", client_id="m1")
    before = [AppendMessages("talk", [first]), SetState(StateScope.APP, "talk", "1"), keyed("a", "tea")]
    await client.write_together(space, before, memory="joy")
    seen = await look(client, space)
    others: list[TransactionWrite] = [
        said("second"),
        UpdateConversation("new", create=True),
        SetState(StateScope.USER, "talk", "2"),
        keyed("b", "cat"),
    ]
    for writes in ([wrong, *others], [*others, wrong]):
        with pytest.raises(error):
            await client.write_together(space, writes, memory="joy")
        assert await look(client, space) == seen
    if not isinstance(wrong, PutFragment):  # without a fragment no memory takes part
        with pytest.raises(error):
            await client.write_together(space, [*others[:3], wrong])
        assert await look(client, space) == seen
    await client.write_together(space, others, memory="joy")


_conditions = st.sampled_from([{}, {}, {"last_number": 0}, {"last_number": 2}, {"absent": True}])
_writes = st.one_of(
    st.builds(
        lambda texts, condition: said(*texts, **condition), st.lists(st.just("x"), min_size=1, max_size=2), _conditions
    ),
    st.builds(lambda n: ReplaceMessage("talk", n, NewMessage(content="y")), st.integers(1, 4)),
    st.builds(lambda absent: SetState(StateScope.SESSION, "talk", "1", absent=absent), st.booleans()),
    st.builds(lambda n, last: RemoveMessages("talk", [n], last_number=last), st.integers(1, 3), st.none() | st.just(3)),
    st.sampled_from([RemoveMessages("talk", oldest=1), RemoveMessages("talk", from_number=2)]),
    st.builds(lambda: DeleteState(StateScope.SESSION, "talk")),
    st.builds(lambda key, absent: keyed(key, f"the {key}", absent=absent), st.sampled_from("ab"), st.booleans()),
)
_transactions = st.lists(_writes, min_size=1, max_size=4).filter(
    lambda writes: (
        len({one.observation.external_id for one in writes if isinstance(one, PutFragment)})
        == sum(isinstance(one, PutFragment) for one in writes)
    )
)


@settings(max_examples=rounds(40, 8), deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(_transactions, min_size=1, max_size=5))
async def test_a_transaction_does_what_its_writes_do(
    client: memstream.Client, steps: list[list[TransactionWrite]]
) -> None:
    """Against a namespace that gets the same writes one by one, unless one of them would be refused."""
    together, single = (f"t-{uuid.uuid4().hex[:12]}" for _ in range(2))
    for name in (together, single):
        await client.create_memory(f"{name}/joy")
    for writes in steps:
        memory = "joy" if any(isinstance(one, PutFragment) for one in writes) else ""
        before = await look(client, together)
        try:
            await client.write_together(together, writes, memory=memory)
        except (memstream.Conflict, memstream.AlreadyExists, memstream.ConversationNotFound):
            assert await look(client, together) == before
            continue
        ordered = [one for one in writes if isinstance(one, PutFragment)]
        for one in [*ordered, *(one for one in writes if not isinstance(one, PutFragment))]:
            await client.write_together(single, [one], memory="joy" if isinstance(one, PutFragment) else "")
    seen, expected = await look(client, together), await look(client, single)
    assert contents(seen) == contents(expected)


def contents(seen: dict[str, Any]) -> list[Any]:
    messages = [(one.number, one.content) for one in seen.get("messages", [])]
    state = seen[StateScope.SESSION]
    return [messages, state and state.document, [one[:2] for one in seen["fragments"]], len(seen["others"])]


# ---- faults


NAME = ConversationName("test", "talk")


@contextmanager
def failing_statement(number: int) -> Iterator[list[str]]:
    """The writer's statement of that number, in every try of a transaction, fails; yields those of the last try."""
    ran: list[str] = []
    run_statement = sqlite.run_statement

    def before(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if threading.current_thread().name != "journal-writer":
            return
        if "processes" in statement or "advisory_lock" in statement:
            return  # of the lease: a server without one gives its memories up, and the outcome of a write is unknown
        if statement == "SAVEPOINT one":
            ran.clear()
        ran.append(statement)
        if len(ran) == number:
            raise StorageFull("this statement finds no space")

    def run(connection: Any, statement: str, *values: Any) -> Any:  # SQLite's rows of one form, past SQLAlchemy
        before(None, None, statement)
        return run_statement(connection, statement, *values)

    event.listen(Engine, "before_cursor_execute", before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite, "run_statement", run)
        try:
            yield ran
        finally:
            event.remove(Engine, "before_cursor_execute", before)


def transaction(step: int) -> Transaction:
    large = b'"' + b"x" * 2_000 + b'"'
    message = Message(role="user", body=large, body_size_bytes=len(large), client_id=f"m{step}")
    return Transaction(
        "test",
        [
            Appending(NAME, [message], Precondition()),
            Setting(StateName("test", Scope.SESSION, "talk"), f"{step:<150000}".encode(), None),  # in parts
        ],
        "joy",
        [(observation(f"fact {step}", external_id=f"f{step}"), None)],
        f"test\nWriteTogetherRequest\nr{step}",
    )


async def steps_done(parts: Assembled) -> set[int]:
    """How many transactions are there; the parts of each agree."""
    store = parts.stored.conversations
    if not (await store.get_status(NAME)).last_number:
        found, state = [], 0
    else:
        found = [int(one.client_id[1:]) for one in await store.list_messages(NAME, MessageQuery(limit=99))]
        state = int((await store.get_state(StateName("test", Scope.SESSION, "talk"))).document)
    listed = (await parts.engine.fragments.list_page("test", "joy", Listing(), -1, 1_000))[0]
    assert found == [int(one.external_id[1:]) for one in listed]
    assert state == (found[-1] if found else 0)
    answers = [await parts.stored.get_answer(f"test\nWriteTogetherRequest\nr{n}") for n in range(1, 60)]
    assert [n for n, answer in enumerate(answers, 1) if answer is not None] == found
    return set(found)


@pytest.mark.usefixtures("hasty")
async def test_a_transaction_is_whole_at_every_statement(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, DEFAULT))
        talking = Conversations(parts.stored.conversations, parts.journal, Clock(), fragments=parts.engine.fragments)
        number, failed, done = 1, 0, set[int]()
        refused: EngineError | None = None
        while True:
            with failing_statement(number) as ran:
                try:
                    await talking.write_together(transaction(number), answer_of(number))
                except EngineError as error:
                    failed, refused = failed + 1, error
                    done = await steps_done(parts)
                    if done:  # a lease ends with its connection: then the outcome is unknown, but whole
                        break
                else:
                    assert len(ran) < number  # it has no statement of that number
                    break
            number += 1
        assert failed > 12
        assert not done or (DATABASE and isinstance(refused, JournalUnavailable))
        assert await steps_done(parts) == {number}


@pytest.mark.usefixtures("hasty")
async def test_plans_and_states_are_whole_at_every_statement(tmp_path: Path) -> None:
    """A failed call leaves what was there; the state is in parts."""
    name = StateName("test", Scope.SESSION, "talk")
    before, after = (f"{step:<150000}".encode() for step in (1, 2))
    async with assembled(tmp_path) as parts:
        store = parts.stored.conversations
        await store.set_state(name, before, None, 1)
        plans = await store.save_plans(NAME, [Plan(number, "first") for number in range(1, 4)], 1)

        async def save_plans() -> object:
            return await store.save_plans(NAME, [Plan(number, "second") for number in range(2, 9)], 2)

        async def set_state() -> object:
            return await store.set_state(name, after, None, 2)

        for write in (save_plans, set_state):
            number = 1
            while True:
                with failing_statement(number):
                    try:
                        await write()
                        break
                    except StorageFull:
                        assert (await store.get_state(name)).document == before
                        assert tuple(await store.list_plans(NAME, PlanQuery())) == plans
                number += 1
            assert number > 2
            plans = tuple(await store.list_plans(NAME, PlanQuery()))
        assert [plan.title for plan in plans] == ["first", *["second"] * 7]
        assert (await store.get_state(name)).document == after
        await store.prune_conversations(1 << 60, 9)
        await store.delete_conversation(NAME)
        assert (await parts.stored.read_bytes(["test"])).get("test") is None


@pytest.mark.usefixtures("hasty")
async def test_block_writes_are_whole_at_every_statement(tmp_path: Path) -> None:
    memory = MemoryName("test", "joy")
    name, writing = BlockName(memory, "persona"), Writing(1, "key:ann", blocks_max=9, versions_max=2)
    async with assembled(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, DEFAULT))
        blocks = parts.stored.blocks
        for text in ("first", "second"):
            await blocks.write_block(name, lambda _, text=text: BlockContent(text), writing)  # type: ignore[misc]

        async def write() -> object:
            return await blocks.write_block(name, lambda _: BlockContent("third"), writing)

        async def delete() -> object:
            return await blocks.delete_block(name, None)

        for change in (write, delete):
            before, number = await blocks.list_versions(name, None, 9), 1
            while True:
                with failing_statement(number):
                    try:
                        await change()
                        break
                    except StorageFull:
                        assert await blocks.list_versions(name, None, 9) == before
                number += 1
            assert number > 2
        assert [one.content.text for one in before] == ["third", "second"]
        assert await blocks.list_blocks(memory, "", 9) == []


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("fault", list(Fault))
async def test_repeats_of_a_failed_transaction_do_it_once(tmp_path: Path, fault: Fault) -> None:
    async with assembled(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, DEFAULT))
        talking = Conversations(parts.stored.conversations, parts.journal, Clock(), fragments=parts.engine.fragments)
        parts.journal.fail_at(1, fault, "commit")
        async with asyncio.timeout(60):
            while await talking.stored_answer(transaction(1).request) is None:
                with contextlib.suppress(EngineError):  # while the memory is loaded again
                    await talking.write_together(transaction(1), answer_of(1))
                await asyncio.sleep(0.01)
        for _ in range(3):
            with contextlib.suppress(EngineError):
                await talking.write_together(transaction(1), answer_of(1))
        assert parts.journal.failed == "commit"
        assert await steps_done(parts) == {1}


def answer_of(step: int) -> Any:
    def answer(_: Written) -> Answer:
        return Answer(transaction(step).request, b"d", b"r", Clock().now_us())

    return answer


SIZES = {"joy": 2, "bob": 150_000}
"""Of their states: bob's are written in parts."""


async def test_transactions_are_whole_after_kill(tmp_path: Path) -> None:
    """Two writers send transactions on condition of the last number; each kind of write tells the same count."""
    with ServerProcess(tmp_path / "data", free_address(), **QUICK) as server:
        done: dict[str, int] = {"joy": 0, "bob": 0}

        async def writing(name: str) -> None:
            once = memstream.Retry(calls_s=0)  # the first call after the kill is the last
            async with memstream.connect(server.address, retry=once) as client:
                for step in range(10_000):
                    writes = [
                        AppendMessages(name, [NewMessage(content=str(step))], last_number=step),
                        SetState(StateScope.SESSION, name, f"{step + 1:<{SIZES[name]}}"),
                        keyed(f"{name}-{step}", f"fact {step} of {name}", absent=True),
                    ]
                    try:
                        await client.write_together("comedy", writes, memory="joy")
                    except memstream.MemstreamError:
                        return
                    done[name] = step + 1

        async with memstream.connect(server.address) as client:
            await client.create_memory("comedy/joy")
        writers = [asyncio.create_task(writing(name)) for name in done]
        await until(lambda: reached(done, 15))
        server.kill()
        await asyncio.gather(*writers)
        await asyncio.to_thread(server.start)
        async with memstream.connect(server.address, keepalive_s=61.0) as client:
            keys = [one.external_id async for one in client.memory("comedy/joy").list_fragments()]
            for name, acknowledged in done.items():
                messages = [one.content async for one in client.conversation(f"comedy/{name}").messages()]
                count = len(messages)
                assert messages == [str(step) for step in range(count)]
                assert count in (acknowledged, acknowledged + 1)
                state = await client.get_state("comedy", StateScope.SESSION, name)
                assert (int(state.document), len(state.document)) == (count, SIZES[name])
                assert [key for key in keys if key.startswith(name)] == [f"{name}-{step}" for step in range(count)]
    check_log(server)


async def reached(done: dict[str, int], count: int) -> bool:
    return min(done.values()) >= count
