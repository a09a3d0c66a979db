"""Requirements of every store of operations, tested only through the ports.

A store passes by a module with a class that inherits `OperationConformance` and a fixture `opener`: a coroutine
function that opens the same, at first empty, store each time it is called.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Protocol

import pytest

from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.operations import Operation, OperationFailure, Operations, OperationState


class Store(Journal, Protocol):
    """A journal with its operations."""

    @property
    def operations(self) -> Operations: ...


Opener = Callable[[], Awaitable[Store]]
NOW_US = 1_700_000_000_000_000
"""The clock of the stores of this suite always returns this time."""


def made(number: int, namespace: str = "", memory: str = "") -> Operation:
    return Operation(
        f"01J{number:023d}", "reindex", namespace, memory, '{"a": "é\\u0000"}', unit="rows", create_time_us=NOW_US
    )


class OperationConformance:
    """Inherit it in a module with the fixture `opener`."""

    @pytest.fixture
    async def journal(self, opener: Opener) -> AsyncIterator[Store]:
        opened = await opener()
        yield opened
        await opened.close()

    @pytest.fixture
    def store(self, journal: Store) -> Operations:
        return journal.operations

    async def test_a_new_store_is_empty(self, store: Operations) -> None:
        assert await store.get("x") is None
        assert await store.ask_cancel("x") is None
        assert await store.list_page("", "", "", 10) == []
        assert await store.list_unfinished() == []
        assert await store.remove_ended(NOW_US) == 0
        assert await store.save(made(1)) is False
        assert await store.get(made(1).id) is None

    async def test_an_operation_is_stored_completely(self, store: Operations) -> None:
        await store.create(made(1, "ns", "joy"))
        assert await store.get(made(1).id) == made(1, "ns", "joy")
        ended = replace(
            made(1, "ns", "joy"),
            state=OperationState.FAILED,
            done=2**40,
            total=2**41,
            end_time_us=NOW_US + 1,
            error=OperationFailure(9, "MODEL_MISMATCH", "say ✓"),
        )
        await store.save(ended)
        assert await store.get(ended.id) == ended

    async def test_pages_have_the_newest_first_without_payload(self, store: Operations) -> None:
        where = [("", ""), ("a", ""), ("a", "joy"), ("b", "joy"), ("a", "joy")]
        all_ = [made(number, *place) for number, place in enumerate(where)]
        for each in all_:
            await store.create(each)
        listed = [replace(each, payload="") for each in all_]
        assert listed != all_
        assert await store.list_page("", "", "", 10) == listed[::-1]
        assert await store.list_page("", "", all_[3].id, 2) == [listed[2], listed[1]]
        assert await store.list_page("a", "", "", 10) == [listed[4], listed[2], listed[1]]
        assert await store.list_page("a", "joy", all_[4].id, 10) == [listed[2]]

    async def test_a_save_returns_the_request_to_cancel(self, store: Operations) -> None:
        await store.create(made(1))
        running = replace(made(1), state=OperationState.RUNNING, done=1)
        assert await store.save(running) is False
        assert await store.ask_cancel(running.id) == replace(running, cancel_asked=True)
        assert await store.save(replace(running, done=2)) is True
        ended = replace(running, state=OperationState.CANCELLED, end_time_us=5, cancel_asked=True)
        await store.save(ended)
        assert await store.get(ended.id) == ended

    async def test_an_ended_operation_cannot_be_cancelled(self, store: Operations) -> None:
        ended = replace(made(1), state=OperationState.SUCCEEDED, end_time_us=5)
        await store.create(ended)
        assert await store.ask_cancel(ended.id) == ended

    async def test_only_ended_operations_are_removed_when_old(self, store: Operations) -> None:
        for number, state in enumerate(OperationState):
            await store.create(replace(made(number), state=state, end_time_us=10 if number > 1 else 0))
        assert [each.id for each in await store.list_unfinished()] == [made(0).id, made(1).id]
        assert await store.remove_ended(10) == 0
        assert await store.remove_ended(11) == 3
        left = [replace(made(1), state=OperationState.RUNNING), made(0)]
        assert await store.list_page("", "", "", 10) == [replace(each, payload="") for each in left]

    async def test_one_process_claims_an_operation(self, store: Operations) -> None:
        await store.create(made(1))
        assert await store.claim(made(1).id, 7, None)
        assert not await store.claim(made(1).id, 8, None)
        assert not await store.claim(made(1).id, 9, 8)
        assert await store.get(made(1).id) == replace(made(1), process=7)
        assert await store.claim(made(1).id, 8, 7)  # 7 has ended
        assert await store.claim(made(1).id, None, 8)  # given away
        await store.save(replace(made(1), state=OperationState.SUCCEEDED, end_time_us=5))
        assert not await store.claim(made(1).id, 7, None)
        assert not await store.claim("x", 7, None)

    async def test_an_answer_is_stored_with_the_operation(self, journal: Store, store: Operations) -> None:
        answer = Answer("r1", b"d", b"response", NOW_US)
        await store.create(made(1), answer)
        assert await journal.get_answer("r1") == answer
        with pytest.raises(StaleWrite):
            await store.create(made(2), answer)
        assert await store.get(made(2).id) is None

    async def test_operations_survive_reopening(self, opener: Opener) -> None:
        first = await opener()
        await first.operations.create(made(1))
        await first.operations.ask_cancel(made(1).id)
        await first.close()
        second = await opener()
        assert await second.operations.list_unfinished() == [replace(made(1), cancel_asked=True)]
        await second.close()
