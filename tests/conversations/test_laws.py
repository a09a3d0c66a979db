"""Laws of a conversation's messages: any sequence of writes leaves what a list in RAM would hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstream_server.adapters.journal import SqlJournal
from memstream_server.adapters.journal.sql.messages import BODY_INLINE_BYTES
from memstream_server.ports.conversations import (
    ClientIdTaken,
    ConversationExists,
    ConversationName,
    LastNumberDiffers,
    Message,
    MessageQuery,
    NotThere,
    Precondition,
    Removal,
)
from memstream_server.ports.journal.errors import JournalError
from tests.support import journals
from tests.support.seeds import rounds

NOW_US = 1_700_000_000_000_000
SIZES = (2, BODY_INLINE_BYTES, BODY_INLINE_BYTES + 1, 9_000)
REFUSED = (ClientIdTaken, ConversationExists, LastNumberDiffers, NotThere)


@dataclass
class Model:
    """What the conversation holds."""

    messages: dict[int, Message] = field(default_factory=dict)
    last_ever: int = 0
    exists: bool = False
    time_us: int = 0

    @property
    def last(self) -> int:
        return max(self.messages, default=0)

    def find(self, client_id: str) -> int:
        return next((n for n, one in self.messages.items() if client_id and one.client_id == client_id), 0)

    def append(self, batch: list[Message], condition: Precondition, now_us: int) -> None:
        for one in batch:
            found = self.messages.get(self.find(one.client_id))
            if found and replace(found, number=0, create_time_us=0, update_time_us=0) != one:
                raise ClientIdTaken("")
        fresh = [one for one in batch if not self.find(one.client_id)]
        if fresh and condition.absent and self.exists:
            raise ConversationExists(ConversationName("", ""))
        if fresh and condition.last_number not in (None, self.last):
            raise LastNumberDiffers("", self.last)
        if fresh:
            self.exists, self.time_us = True, max(self.time_us, now_us)
        for one in fresh:
            self.last_ever += 1
            self.messages[self.last_ever] = replace(
                one, number=self.last_ever, create_time_us=self.time_us, update_time_us=self.time_us
            )

    def remove(self, removal: Removal) -> None:
        if removal.numbers and not set(removal.numbers) <= set(self.messages):
            raise NotThere("", ConversationName("", ""))
        gone = set(removal.numbers)
        if removal.oldest is not None:
            gone = set(sorted(self.messages)[: removal.oldest])
        if removal.from_number is not None:
            gone = {n for n in self.messages if n >= removal.from_number}
        self.messages = {n: one for n, one in self.messages.items() if n not in gone}

    def replace(self, message: Message, now_us: int) -> None:
        if message.number not in self.messages:
            raise NotThere("", ConversationName("", ""))
        if self.find(message.client_id) not in (0, message.number):
            raise ClientIdTaken("")
        created = self.messages[message.number].create_time_us
        self.messages[message.number] = replace(message, create_time_us=created, update_time_us=max(now_us, created))


def _message(size: int, fill: int, client_id: str) -> Message:
    body = b'"' + bytes([97 + fill]) * (size - 2) + b'"'
    return Message(role="user", body=body, body_size_bytes=size, client_id=client_id)


_ids = st.sampled_from(["", "", "a", "b", "c"])
_messages = st.builds(_message, st.sampled_from(SIZES), st.integers(0, 1), _ids)
_batches = st.lists(_messages, min_size=1, max_size=4).filter(
    lambda batch: len({one.client_id for one in batch if one.client_id}) == sum(bool(one.client_id) for one in batch)
)
_conditions = st.one_of(
    st.just(Precondition()),
    st.just(Precondition(absent=True)),
    st.builds(Precondition, last_number=st.integers(0, 9)),
)
_removals = st.one_of(
    st.builds(lambda n: Removal(numbers=tuple(n)), st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True)),
    st.builds(lambda n: Removal(oldest=n), st.integers(1, 4)),
    st.builds(lambda n: Removal(from_number=n), st.integers(1, 9)),
)
_steps = st.one_of(
    st.tuples(st.just("append"), _batches, _conditions),
    st.tuples(st.just("append"), _batches, _conditions),
    st.tuples(st.just("remove"), _removals, st.none()),
    st.tuples(st.just("replace"), st.integers(1, 9), _messages),
    st.tuples(st.just("pop"), st.none(), st.none()),
    st.tuples(st.just("reopen"), st.none(), st.none()),
)


Step = tuple[str, object, object]
"""What to do, and two values that fit."""


class Bench:
    """A journal that may be reopened, and the next free conversation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.journal: SqlJournal

    async def open(self) -> None:
        self.journal = await journals.open_test_journal(self.folder, lambda: NOW_US, reserve_bytes=0)

    def take_name(self) -> ConversationName:
        self.count += 1
        return ConversationName("laws", f"talk-{self.count}")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "data")
    await made.open()
    yield made
    await made.journal.close()


async def _do(
    bench: Bench, talk: ConversationName, model: Model, step: tuple[str, object, object], now_us: int
) -> None:
    """The step in the store and in the model: both refuse it, or neither does."""
    store, (kind, first, second) = bench.journal.conversations, step
    expected: type[JournalError] | None = None
    popped = model.messages.get(model.last)
    try:
        if kind == "append":
            model.append(first, second, now_us)  # type: ignore[arg-type]  # each step has what fits
        elif kind == "remove" and model.exists:
            model.remove(first)  # type: ignore[arg-type]
        elif kind == "replace" and model.exists:
            model.replace(replace(second, number=first), now_us)  # type: ignore[arg-type]
        elif kind == "pop" and model.messages:
            model.remove(Removal(numbers=(model.last,)))
        elif kind != "reopen":
            raise NotThere("", talk)
    except REFUSED as error:
        expected = type(error)
    try:
        if kind == "append":
            await store.append_messages(talk, first, second, now_us)  # type: ignore[arg-type]
        elif kind == "remove":
            await store.remove_messages(talk, first)  # type: ignore[arg-type]
        elif kind == "replace":
            await store.replace_message(talk, replace(second, number=first), now_us)  # type: ignore[arg-type]
        elif kind == "pop":
            assert await store.pop_message(talk) == popped
        else:
            await bench.journal.close()
            await bench.open()
        refused = None
    except REFUSED as error:
        refused = type(error)
    assert refused is expected


async def _check(bench: Bench, talk: ConversationName, model: Model) -> None:
    """All readers see the model, in order; the bytes that count are those that are there."""
    store = bench.journal.conversations
    held = [model.messages[number] for number in sorted(model.messages)]
    if not model.exists:
        return
    pages = await asyncio.gather(
        store.list_messages(talk, MessageQuery(limit=99)),
        store.list_messages(talk, MessageQuery(limit=99, newest_first=True)),
        store.list_messages(talk, MessageQuery(limit=99, bodies_max=0)),
        store.list_messages(talk, MessageQuery(limit=99, after_us=NOW_US + 3)),
        store.list_messages(talk, MessageQuery(limit=99, before_us=NOW_US + 3)),
    )
    assert pages[0] == held
    assert pages[1] == held[::-1]
    assert pages[2] == [replace(one, body=None) for one in held]
    assert pages[3] == [one for one in held if one.create_time_us > NOW_US + 3]
    assert pages[4] == [one for one in held if one.create_time_us < NOW_US + 3]
    assert (await store.get_status(talk)).last_number == model.last_ever


@settings(max_examples=rounds(60, 25), deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(_steps, min_size=1, max_size=14), clock=st.lists(st.integers(0, 9), min_size=14, max_size=14))
async def test_any_writes_leave_what_a_list_holds(bench: Bench, steps: list[Step], clock: list[int]) -> None:
    talk, model = bench.take_name(), Model()
    for step, ticks in zip(steps, clock, strict=False):  # the clock may go back
        await _do(bench, talk, model, step, NOW_US + ticks)
        await _check(bench, talk, model)


async def test_pages_without_bodies_beyond_the_bound(bench: Bench) -> None:
    talk, store = bench.take_name(), bench.journal.conversations
    await store.append_messages(talk, [_message(9_000, 0, "") for _ in range(5)], Precondition(), NOW_US)
    found = await store.list_messages(talk, MessageQuery(bodies_max=20_000))
    assert [one.is_whole for one in found] == [True, True, False, False, False]
    (first, *rest) = await store.list_messages(talk, MessageQuery(bodies_max=1, newest_first=True))
    assert (first.is_whole, {one.is_whole for one in rest}) == (True, {False})


async def test_bodies_count_for_their_namespace(bench: Bench) -> None:
    talk, store = bench.take_name(), bench.journal.conversations

    async def counted() -> int:
        return (await bench.journal.read_bytes(["laws"])).get("laws", None).conversations  # type: ignore[union-attr]

    await store.append_messages(talk, [_message(2, 0, "")], Precondition(), NOW_US)
    before = await counted()
    await store.append_messages(talk, [_message(300_000, 0, "")], Precondition(), NOW_US)
    assert 300_000 < await counted() - before < 301_000
    await store.replace_message(talk, replace(_message(200_000, 0, ""), number=2), NOW_US)
    assert 200_000 < await counted() - before < 201_000
    await store.pop_message(talk)
    assert await counted() == before
