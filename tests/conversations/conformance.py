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

from memstream_server.ports.conversations import (
    NEVER,
    ConversationName,
    ConversationStore,
    Message,
    MessageQuery,
    NotThere,
    Plan,
    PlanChange,
    PlanQuery,
    PlanState,
    Status,
)
from memstream_server.ports.journal.errors import Conflict
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Answer


class Store(Journal, Protocol):
    """A journal with its conversations."""

    conversations: ConversationStore


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


async def numbers(store: ConversationStore, **query: object) -> list[int]:
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
    def store(self, journal: Store) -> ConversationStore:
        return journal.conversations

    async def test_unknown_conversation_is_empty(self, store: ConversationStore) -> None:
        assert await store.get_status(TALK) == NEVER
        for work in (
            store.list_messages(TALK, MessageQuery()),
            store.last_message(TALK),
            store.delete_messages(TALK),
            store.list_plans(TALK, PlanQuery()),
            store.change_plan(TALK, 1, PlanChange(PlanState.FAILED), 1),
            store.remove_plans(TALK),
        ):
            with pytest.raises(NotThere) as caught:
                await work
            assert caught.value.conversation == TALK

    async def test_message_fields_round_trip(self, store: ConversationStore) -> None:
        kept = await store.append_message(TALK, FULL, 7)
        assert kept == replace(FULL, number=1, create_time_us=7, update_time_us=7)
        assert await store.list_messages(TALK, MessageQuery()) == [kept]
        assert await store.last_message(TALK) == kept

    async def test_numbers_ascend_in_each_conversation(self, store: ConversationStore) -> None:
        made = await asyncio.gather(*(store.append_message(TALK, Message("a"), 1) for _ in range(20)))
        assert sorted(message.number for message in made) == list(range(1, 21))
        assert (await store.append_message(OTHER, Message("a"), 1)).number == 1
        assert await numbers(store, after=5, limit=3) == [6, 7, 8]
        assert await numbers(store, after=2**32 - 1) == []

    async def test_messages_are_found_by_agent_pair_and_goal(self, store: ConversationStore) -> None:
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

    async def test_deleted_numbers_are_not_reused(self, store: ConversationStore) -> None:
        for _ in range(3):
            await store.append_message(TALK, Message("a"), 1)
        await store.append_message(OTHER, Message("a"), 1)
        assert await store.delete_messages(TALK) == 3
        assert await store.list_messages(TALK, MessageQuery()) == []
        with pytest.raises(NotThere):
            await store.last_message(TALK)
        assert (await store.append_message(TALK, Message("a"), 1)).number == 4
        assert len(await store.list_messages(OTHER, MessageQuery())) == 1

    async def test_completed_conversation_can_be_reopened(self, store: ConversationStore) -> None:
        await store.append_message(TALK, Message("a"), 1)
        await store.complete_conversation(TALK, 1)
        await store.complete_conversation(TALK, 1)
        assert await store.get_status(TALK) == Status(1, True, 1, 1)
        await store.append_message(TALK, Message("a"), 1)
        assert await store.get_status(TALK) == Status(2, False, 1, 1)
        await store.complete_conversation(OTHER, 1)
        assert await store.get_status(OTHER) == Status(0, True, 1, 0)

    async def test_plans_are_saved_replaced_and_removed(self, store: ConversationStore) -> None:
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

    async def test_plans_are_found_by_number_and_state(self, store: ConversationStore) -> None:
        await store.save_plans(TALK, [Plan(n, state=state) for n, state in enumerate(PlanState, 1)], 1)
        to_do = await store.list_plans(TALK, PlanQuery(to_do=True))
        assert [plan.state for plan in to_do] == [PlanState.TODO, PlanState.RETRYING]
        some = await store.list_plans(TALK, PlanQuery((6, 4, 99), after=4, limit=1))
        assert [plan.number for plan in some] == [6]
        both = await store.list_plans(TALK, PlanQuery((1, 2), to_do=True))
        assert [plan.number for plan in both] == [1]

    async def test_change_keeps_other_fields(self, store: ConversationStore) -> None:
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

    async def test_answer_is_stored_with_its_write(self, journal: Store, store: ConversationStore) -> None:
        made = await store.append_message(TALK, Message("a"), 1, answering("r1"))
        stored = await journal.get_answer("r1")
        assert stored is not None
        assert stored.response == repr(made).encode()
        for work in (
            store.append_message(TALK, Message("a"), 1, answering("r1")),
            store.complete_conversation(TALK, 1, answering("r1")),
            store.save_plans(TALK, [Plan(1)], 1, answering("r1")),
            store.delete_messages(TALK, answering("r1")),
        ):
            with pytest.raises(Conflict):
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
