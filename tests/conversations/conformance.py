"""The contract of every ConversationStore, tested through the port only.

A store passes by a module with a class that inherits `ConversationConformance` and a fixture `opener`: a coroutine
function that opens the same, at first empty, store each time it is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Protocol

import pytest

from memstream_server.ports.conversation_records import (
    ConversationChange,
    ConversationQuery,
    SessionStore,
    StateDiffers,
    StateName,
    StateScope,
)
from memstream_server.ports.conversations import (
    NEVER,
    ConversationExists,
    ConversationName,
    Message,
    MessageQuery,
    NotThere,
    Plan,
    PlanChange,
    PlanQuery,
    PlanState,
    Precondition,
    Removal,
    Removed,
    Status,
)
from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Answer


class Store(Journal, Protocol):
    """A journal with its conversations."""

    conversations: SessionStore


Opener = Callable[[], Awaitable[Store]]
NOW_US = 1_700_000_000_000_000
"""The suite opens its stores with a clock that stops at this time."""
TALK = ConversationName("comedy", "monday")
OTHER = ConversationName("comedy", "tuesday")
FULL = Message(
    sender="joy",
    receiver="user",
    role="assistant",
    content="Why? \0 Because.",
    rounds=3,
    success=False,
    app_code="c",
    app_name="n",
    current_goal="laugh\nloud",
    context='{"a": 1}',
    review_info="{}",
    action_report="[]",
    model_name="m",
    resource_info="null",
)


def answering(request: str) -> Callable[[object], Answer]:
    return lambda done: Answer(request, b"d", repr(done).encode(), NOW_US)


async def numbers(store: SessionStore, **query: object) -> list[int]:
    found = await store.list_messages(TALK, MessageQuery(**query))  # type: ignore[arg-type]  # each test gives what fits
    return [message.number for message in found]


class ConversationConformance:
    """Subclass it in a module with the fixture `opener`."""

    @pytest.fixture
    async def journal(self, opener: Opener) -> AsyncIterator[Store]:
        opened = await opener()
        yield opened
        await opened.close()

    @pytest.fixture
    def store(self, journal: Store) -> SessionStore:
        return journal.conversations

    async def test_unknown_conversation_is_empty(self, store: SessionStore) -> None:
        assert await store.get_status(TALK) == NEVER
        for work in (
            store.list_messages(TALK, MessageQuery()),
            store.last_message(TALK),
            store.delete_messages(TALK, 1),
            store.list_plans(TALK, PlanQuery()),
            store.change_plan(TALK, 1, PlanChange(PlanState.FAILED), 1),
            store.remove_plans(TALK),
        ):
            with pytest.raises(NotThere) as caught:
                await work
            assert caught.value.conversation == TALK

    async def test_message_fields_round_trip(self, store: SessionStore) -> None:
        kept = await store.append_message(TALK, FULL, 7)
        assert kept == replace(FULL, number=1, create_time_us=7, update_time_us=7)
        assert await store.list_messages(TALK, MessageQuery()) == [kept]
        assert await store.last_message(TALK) == kept

    async def test_numbers_ascend_in_each_conversation(self, store: SessionStore) -> None:
        made = await asyncio.gather(*(store.append_message(TALK, Message("a"), 1) for _ in range(20)))
        assert sorted(message.number for message in made) == list(range(1, 21))
        assert (await store.append_message(OTHER, Message("a"), 1)).number == 1
        assert await numbers(store, after=5, limit=3) == [6, 7, 8]
        assert await numbers(store, after=2**32 - 1) == []

    async def test_messages_are_found_by_agent_pair_and_goal(self, store: SessionStore) -> None:
        for sender, receiver, goal in (
            ("user", "joy", "g1"),
            ("joy", "user", "g1"),
            ("joy", "bob", "g2"),
            ("bob", "ann", "g2"),
            ("joy", "joy", "g2"),
        ):
            await store.append_message(TALK, Message(sender, receiver, current_goal=goal), 1)
        assert await numbers(store, agent="joy") == [1, 2, 3, 5]
        assert await numbers(store, agent="joy", other_agent="user") == [1, 2]
        assert await numbers(store, agent="user", other_agent="joy") == [1, 2]
        assert await numbers(store, agent="joy", other_agent="joy") == [5]
        assert await numbers(store, current_goal="g2") == [3, 4, 5]
        assert await numbers(store, agent="bob", current_goal="g2", after=3) == [4]

    async def test_deleted_numbers_are_not_reused(self, store: SessionStore) -> None:
        for _ in range(3):
            await store.append_message(TALK, Message("a"), 1)
        await store.append_message(OTHER, Message("a"), 1)
        assert await store.delete_messages(TALK, 1) == 3
        assert await store.list_messages(TALK, MessageQuery()) == []
        with pytest.raises(NotThere):
            await store.last_message(TALK)
        assert (await store.append_message(TALK, Message("a"), 1)).number == 4
        assert len(await store.list_messages(OTHER, MessageQuery())) == 1

    async def test_completed_conversation_can_be_reopened(self, store: SessionStore) -> None:
        await store.append_message(TALK, Message("a"), 1)
        await store.complete_conversation(TALK, 1)
        await store.complete_conversation(TALK, 1)
        assert await store.get_status(TALK) == Status(1, True, 1, 1)
        await store.append_message(TALK, Message("a"), 1)
        assert await store.get_status(TALK) == Status(2, False, 1, 1)
        await store.complete_conversation(OTHER, 1)
        assert await store.get_status(OTHER) == Status(0, True, 1, 0)

    async def test_plans_are_saved_replaced_and_removed(self, store: SessionStore) -> None:
        first = Plan(2, "t", "c", "joy", "r", "1", "m", 1, 3, PlanState.WAITING, "x")
        saved = await store.save_plans(TALK, [first, Plan(1)], 5)
        assert saved == (
            replace(first, create_time_us=5, update_time_us=5),
            Plan(1, create_time_us=5, update_time_us=5),
        )
        assert await store.list_plans(TALK, PlanQuery()) == [saved[1], saved[0]]
        (again,) = await store.save_plans(TALK, [Plan(2, "new")], 6)
        assert await store.list_plans(TALK, PlanQuery((2,))) == [again]
        await store.save_plans(OTHER, [Plan(1)], 5)
        assert await store.remove_plans(TALK) == 2
        assert await store.list_plans(TALK, PlanQuery()) == []
        assert len(await store.list_plans(OTHER, PlanQuery())) == 1

    async def test_plans_are_found_by_number_and_state(self, store: SessionStore) -> None:
        await store.save_plans(TALK, [Plan(n, state=state) for n, state in enumerate(PlanState, 1)], 1)
        to_do = await store.list_plans(TALK, PlanQuery(to_do=True))
        assert [plan.state for plan in to_do] == [PlanState.TODO, PlanState.RETRYING]
        some = await store.list_plans(TALK, PlanQuery((6, 4, 99), after=4, limit=1))
        assert [plan.number for plan in some] == [6]
        both = await store.list_plans(TALK, PlanQuery((1, 2), to_do=True))
        assert [plan.number for plan in both] == [1]

    async def test_change_keeps_other_fields(self, store: SessionStore) -> None:
        await store.save_plans(TALK, [Plan(1, "t", agent="joy", retry_times=1, result="r")], 5)
        changed = await store.change_plan(TALK, 1, PlanChange(state=PlanState.RETRYING, retry_times=2), 6)
        assert changed == Plan(
            1,
            "t",
            agent="joy",
            retry_times=2,
            state=PlanState.RETRYING,
            result="r",
            create_time_us=5,
            update_time_us=6,
        )
        emptied = await store.change_plan(TALK, 1, PlanChange(agent="", agent_model="m", result=""), 7)
        assert (emptied.agent, emptied.agent_model, emptied.result, emptied.state) == ("", "m", "", PlanState.RETRYING)
        assert await store.list_plans(TALK, PlanQuery(to_do=True)) == [emptied]
        with pytest.raises(NotThere):
            await store.change_plan(TALK, 2, PlanChange(result="x"), 7)

    async def test_answer_is_stored_with_its_write(self, journal: Store, store: SessionStore) -> None:
        made = await store.append_message(TALK, Message("a"), 1, answering("r1"))
        stored = await journal.get_answer("r1")
        assert stored is not None
        assert stored.response == repr(made).encode()
        for work in (
            store.append_message(TALK, Message("a"), 1, answering("r1")),
            store.complete_conversation(TALK, 1, answering("r1")),
            store.save_plans(TALK, [Plan(1)], 1, answering("r1")),
            store.delete_messages(TALK, 1, answering("r1")),
        ):
            with pytest.raises(StaleWrite):
                await work
        assert await store.list_messages(TALK, MessageQuery()) == [made]
        assert await store.list_plans(TALK, PlanQuery()) == []
        assert not (await store.get_status(TALK)).completed

    async def test_reopened_store_has_everything(self, opener: Opener) -> None:
        first = await opener()
        made = await first.conversations.append_message(TALK, FULL, 1)
        plans = await first.conversations.save_plans(TALK, [Plan(1)], 1)
        await first.conversations.complete_conversation(TALK, 1)
        await first.close()
        second = await opener()
        assert await second.conversations.list_messages(TALK, MessageQuery()) == [made]
        assert tuple(await second.conversations.list_plans(TALK, PlanQuery())) == plans
        assert (await second.conversations.get_status(TALK)).completed
        await second.close()

    async def test_lists_select_by_name_label_and_time(self, store: SessionStore) -> None:
        for place, name in enumerate(("b-1", "a-1", "b-2")):
            labels = (("app", "x"), ("user", "ann" if place else "bob"))
            change = ConversationChange(labels, ttl_us=50 * place, absent=True)
            await store.update_conversation(ConversationName("comedy", name), change, 10 * place)

        async def names(limit: int = 9, **query: object) -> list[str]:
            wanted = ConversationQuery("comedy", limit, **query)  # type: ignore[arg-type]  # each call gives what fits
            return [one.conversation.name for one in await store.list_conversations(wanted)]

        assert await names(1) == ["a-1"]
        assert await names(after_name="a-1") == ["b-1", "b-2"]
        assert await names(prefix="b-") == ["b-1", "b-2"]
        assert await names(labels=(("user", "ann"),)) == ["a-1", "b-2"]
        assert await names(labels=(("app", "x"), ("user", "ann")), latest_first=True) == ["b-2", "a-1"]
        assert await names(latest_first=True) == ["b-2", "a-1", "b-1"]
        middle = await store.get_conversation(ConversationName("comedy", "a-1"))
        assert await names(latest_first=True, before=(middle.update_time_us, middle.number)) == ["b-1"]
        with pytest.raises(ConversationExists):
            await store.update_conversation(middle.conversation, ConversationChange(absent=True), 1)

    async def test_expired_conversations_are_deleted(self, store: SessionStore) -> None:
        await store.update_conversation(TALK, ConversationChange(ttl_us=50, allow_missing=True), 0)
        await store.append_message(TALK, FULL, 30)
        await store.update_conversation(OTHER, ConversationChange(allow_missing=True), 0)
        assert await store.prune_conversations(79, 10) == 0
        assert await store.prune_conversations(80, 10) == 1
        assert await store.list_names("comedy", "", 9) == [OTHER.name]

    async def test_fork_copies_messages_labels_and_state(self, store: SessionStore) -> None:
        large = Message(client_id="m1", body=b"1" * 5_000, body_size_bytes=5_000)
        await store.update_conversation(TALK, ConversationChange((("user", "bob"),), 90, allow_missing=True), 1)
        for one in (large, Message(client_id="m2"), Message()):
            await store.append_message(TALK, one, 2)
        await store.set_state(StateName("comedy", StateScope.SESSION, TALK.name), b"1", None, 3)
        made = await store.fork_conversation(TALK, OTHER, 2, 9)
        assert (made.message_count, made.last_number, made.labels, made.ttl_us) == (2, 2, (("user", "bob"),), 90)
        found = await store.list_messages(OTHER, MessageQuery())
        assert found == (await store.list_messages(TALK, MessageQuery()))[:2]
        assert (await store.get_state(StateName("comedy", StateScope.SESSION, OTHER.name))).document == b"1"
        assert await store.delete_conversation(TALK) == 3
        assert await store.list_messages(OTHER, MessageQuery()) == found

    async def test_what_takes_many_writes_leaves_nothing(self, journal: Store, store: SessionStore) -> None:
        large = Message(body=b"1" * 300_000, body_size_bytes=300_000)
        await store.append_messages(TALK, [large, *[Message()] * 600], Precondition(), 1)
        made = await store.fork_conversation(TALK, OTHER, None, 2)
        assert (made.message_count, await store.get_message(OTHER, 1)) == (601, await store.get_message(TALK, 1))
        assert await store.remove_messages(TALK, Removal(oldest=599), 3) == Removed(599, 601)
        assert await numbers(store) == [600, 601]
        assert (await store.get_message(OTHER, 1)).body == large.body
        assert await store.list_names("comedy", "", 9) == [TALK.name, OTHER.name]
        assert await store.delete_messages(OTHER, 4) == 601
        assert [await store.delete_conversation(one) for one in (TALK, OTHER)] == [2, 0]
        assert await journal.read_bytes(["comedy"]) == {}

    async def test_states_change_only_from_their_version(self, store: SessionStore) -> None:
        app = StateName("comedy", StateScope.APP, "x")
        with pytest.raises(NotThere):
            await store.get_state(app)
        first = await store.set_state(app, b"1", 0, 5)
        for wrong in (0, first.version + 1):
            with pytest.raises(StateDiffers) as caught:
                await store.set_state(app, b"2", wrong, 6)
            assert caught.value.version == first.version
        second = await store.set_state(app, b"3", first.version, 5)
        assert second.version > first.version
        assert await store.list_states("comedy", ("", ""), 9) == [(app, second)]
        assert await store.list_states("comedy", ("app", "x"), 9) == []
        assert [await store.delete_state(app) for _ in range(2)] == [True, False]

    async def test_states_are_read_together(self, store: SessionStore) -> None:
        names = [StateName("comedy", StateScope.USER, name) for name in "abcd"]
        made = [await store.set_state(name, b'"' + b"x" * 98 + b'"', None, 5) for name in names[:3]]
        assert await store.get_states(names, 1_000) == [*made, None]
        assert await store.get_states(names, 250) == made[:2]
        assert await store.get_states(names[1:2], 1) == made[1:2]
        assert await store.delete_state(names[0], made[0].version)
        with pytest.raises(StateDiffers):
            await store.delete_state(names[1], made[1].version + 1)
        assert await store.get_states(names, 1_000) == [None, *made[1:], None]

    async def test_many_states_are_read_in_the_order_asked(self, store: SessionStore) -> None:
        scopes = StateScope.APP, StateScope.USER
        names = [StateName("comedy", scope, f"n{number}") for number in range(60) for scope in scopes]
        made = {name: await store.set_state(name, b"1", None, 5) for name in names[::7]}
        asked = names[::-1]
        assert await store.get_states(asked, 1_000) == [made.get(name) for name in asked]

    async def test_large_states_are_one_document(self, journal: Store, store: SessionStore) -> None:
        """They are written in parts, shared with a fork, replaced and deleted."""
        mine, of_fork = (StateName("comedy", StateScope.SESSION, one.name) for one in (TALK, OTHER))
        large, larger = (b'"' + fill * 300_000 + b'"' for fill in (b"x", b"y"))
        first = await store.set_state(mine, large, 0, 5)
        await store.fork_conversation(TALK, OTHER, None, 6)
        with pytest.raises(StateDiffers):
            await store.set_state(mine, larger, first.version + 1, 7)
        await store.set_state(mine, larger, first.version, 8)
        assert [(await store.get_state(name)).document for name in (mine, of_fork)] == [larger, large]
        assert (await store.set_state(of_fork, larger, None, 9)).document == larger
        assert await store.delete_conversation(TALK) == 0
        assert (await store.get_state(of_fork)).document == larger
        assert await store.delete_state(of_fork)
        assert await store.delete_conversation(OTHER) == 0
        assert await journal.read_bytes(["comedy"]) == {}

    async def test_erasing_a_user_leaves_no_answer(self, journal: Store, store: SessionStore) -> None:
        bob = ConversationChange((("user", "bob"),), allow_missing=True)
        await store.update_conversation(
            TALK, bob, 1, lambda done: Answer("comedy\nUpdateConversationRequest\nr1", b"d", b"\x06monday", NOW_US)
        )
        another = Answer("comedy\nUpdateConversationRequest\nr2", b"d", b"\x0blast monday", NOW_US)
        await store.update_conversation(OTHER, ConversationChange(allow_missing=True), 1, lambda done: another)
        await store.set_state(StateName("comedy", StateScope.USER, "bob"), b"1", None, 1)
        assert await store.erase_user("comedy", "bob") == (1, True)
        assert await store.erase_user("comedy", "bob") == (0, False)
        assert await store.list_names("comedy", "", 9) == [OTHER.name]
        answer = await journal.get_answer("comedy\nUpdateConversationRequest\nr1")
        assert answer is not None
        assert (answer.digest, answer.response) == (b"", b"")
        assert await journal.get_answer(another.request) == another
