"""Laws of a conversation's messages: any sequence of writes leaves what a list in RAM would hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstream_server.adapters.journal.sql import hidden_conversations as hidden
from memstream_server.adapters.journal.sql.hidden_conversations import BODY_INLINE_BYTES
from memstream_server.adapters.journal.store import SqlJournal
from memstream_server.ports.conversation_records import StateDiffers, StateName, StateScope
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
from memstream_server.ports.journal.errors import StorageFull
from tests.support import journals
from tests.support.seeds import rounds
from tests.support.waiting import until

NOW_US = 1_700_000_000_000_000
SIZES = (2, BODY_INLINE_BYTES, BODY_INLINE_BYTES + 1, 9_000)
REFUSED = (ClientIdTaken, ConversationExists, LastNumberDiffers, NotThere, StateDiffers)


@dataclass
class Model:
    """What the conversation holds."""

    messages: dict[int, Message] = field(default_factory=dict)
    last_ever: int = 0
    exists: bool = False
    time_us: int = 0
    state: tuple[bytes, int] = (b"", 0)
    """The document and its version; 0: there is none."""

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
    st.tuples(st.just("set state"), st.sampled_from([2, 9_000, 9_001]), st.sampled_from(["", "right", "wrong"])),
    st.tuples(st.just("delete state"), st.none(), st.sampled_from(["", "right", "wrong"])),
    st.tuples(st.just("fork"), st.integers(1, 9) | st.none(), st.none()),
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


def _do_in_model(talk: ConversationName, model: Model, step: Step, now_us: int) -> object:
    """What a pop or a fork shows. Raises what the store raises."""
    kind, first, second = step
    if kind == "append":
        model.append(first, second, now_us)  # type: ignore[arg-type]  # each step has what fits
    elif kind == "remove" and model.exists:
        model.remove(first)  # type: ignore[arg-type]
    elif kind == "replace" and model.exists:
        model.replace(replace(second, number=first), now_us)  # type: ignore[type-var]
    elif kind == "pop" and model.messages:
        return model.messages.pop(model.last)
    elif kind == "fork" and model.exists and (first is None or first in model.messages):
        return [one for number, one in sorted(model.messages.items()) if first is None or number <= first]  # type: ignore[operator]
    elif kind.endswith("state"):
        if second == "wrong":
            raise StateDiffers("", model.state[1])
        if kind == "set state":
            model.exists, model.state = True, (_document(first), model.state[1] + 1)
        else:
            model.state = (b"", 0)
    elif kind != "reopen":
        raise NotThere("", talk)
    return None


def _document(size: object) -> bytes:
    return _message(size, 0, "").body or b""  # type: ignore[arg-type]


async def _find_state(bench: Bench, talk: ConversationName) -> tuple[bytes, int]:
    (found,) = await bench.journal.conversations.get_states([_state_of(talk)], 1)
    return (b"", 0) if found is None else (found.document, found.version)


def _state_of(talk: ConversationName) -> StateName:
    return StateName(talk.namespace, StateScope.SESSION, talk.name)


async def _do_in_store(bench: Bench, talk: ConversationName, step: Step, now_us: int) -> object:
    """What a pop or a fork shows."""
    store, (kind, first, second) = bench.journal.conversations, step
    if kind == "append":
        await store.append_messages(talk, first, second, now_us)  # type: ignore[arg-type]
    elif kind == "remove":
        await store.remove_messages(talk, first, now_us)  # type: ignore[arg-type]
    elif kind == "replace":
        await store.replace_message(talk, replace(second, number=first), now_us)  # type: ignore[type-var]
    elif kind == "pop":
        return await store.pop_message(talk)
    elif kind.endswith("state"):
        _, present = await _find_state(bench, talk)
        version = {"": None, "right": present, "wrong": present + 1}[str(second)]
        if kind == "set state":
            await store.set_state(_state_of(talk), _document(first), version, now_us)
        else:
            await store.delete_state(_state_of(talk), version)
    elif kind == "fork":
        fork = replace(talk, name=f"{talk.name}-fork")
        made = await store.fork_conversation(talk, fork, first, now_us)  # type: ignore[arg-type]
        found = await store.list_messages(fork, MessageQuery(limit=99))
        assert await store.delete_conversation(fork) == made.message_count
        return found
    else:
        await bench.journal.close()
        await bench.open()
    return None


async def _do(bench: Bench, talk: ConversationName, model: Model, step: Step, now_us: int) -> None:
    """The step in the store and in the model: both refuse it, or neither does."""
    expected: object
    found: object
    try:
        expected = _do_in_model(talk, model, step, now_us)
    except REFUSED as error:
        expected = type(error)
    try:
        found = await _do_in_store(bench, talk, step, now_us)
    except REFUSED as error:
        found = type(error)
    assert found == expected


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
    assert (await _find_state(bench, talk))[0] == model.state[0]


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, or 3,000 bytes, a transaction."""
    monkeypatch.setattr(hidden, "SLICE_ROWS", 2)
    monkeypatch.setattr(hidden, "SLICE_BYTES", 3_000)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=rounds(60, 25), deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(_steps, min_size=1, max_size=14), clock=st.lists(st.integers(0, 9), min_size=14, max_size=14))
async def test_any_writes_leave_what_a_list_holds(bench: Bench, steps: list[Step], clock: list[int]) -> None:
    talk, model = bench.take_name(), Model()
    for step, ticks in zip(steps, clock, strict=False):  # the clock may go back
        await _do(bench, talk, model, step, NOW_US + ticks)
        await _check(bench, talk, model)
    if model.exists:
        await bench.journal.conversations.delete_conversation(talk)
        assert await bench.journal.read_bytes(["laws"]) == {}


async def test_pages_without_bodies_beyond_the_bound(bench: Bench) -> None:
    talk, store = bench.take_name(), bench.journal.conversations
    await store.append_messages(talk, [_message(9_000, 0, "") for _ in range(5)], Precondition(), NOW_US)
    found = await store.list_messages(talk, MessageQuery(bodies_max=20_000))
    assert [one.is_whole for one in found] == [True, True, False, False, False]
    (first, *rest) = await store.list_messages(talk, MessageQuery(bodies_max=1, newest_first=True))
    assert (first.is_whole, {one.is_whole for one in rest}) == (True, {False})


async def test_pages_end_at_a_bound_of_their_records(bench: Bench) -> None:
    talk, store = bench.take_name(), bench.journal.conversations
    long = [Message(content="x" * 10_000) for _ in range(5)]
    await store.append_messages(talk, long, Precondition(), NOW_US)
    for newest_first, numbers in ((False, [1, 2, 3]), (True, [5, 4, 3])):
        for bodies_max in (0, 4 << 20):
            query = MessageQuery(records_max=25_000, newest_first=newest_first, bodies_max=bodies_max)
            found = await store.list_messages(talk, query)
            assert [one.number for one in found] == numbers
            assert [(one.is_read, one.is_whole) for one in found] == [(True, True)] * 2 + [(False, False)]
            assert [len(one.content) for one in found] == [10_000, 10_000, 0]
    first, second = await store.list_messages(talk, MessageQuery(records_max=1))
    assert (first.content, first.number, second.is_read) == (long[0].content, 1, False)


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


@pytest.mark.usefixtures("small_slices")
async def test_no_reader_sees_half_of_a_large_write(bench: Bench) -> None:
    """Of a body, a removal, a deletion and a fork."""
    talk, fork, store = bench.take_name(), bench.take_name(), bench.journal.conversations
    seen: list[tuple[str, int, int]] = []

    async def read(named: ConversationName) -> tuple[str, int, int]:
        try:
            found = await store.list_messages(named, MessageQuery(limit=99))
        except NotThere:
            return named.name, 0, 0
        return named.name, len(found), sum(len(one.body or b"") for one in found)

    async def read_during(work: Coroutine[Any, Any, object], named: ConversationName) -> int:
        """How many transactions the work has had; `seen` has what was read meanwhile."""
        writing = asyncio.create_task(work)
        reads = 0
        while not writing.done():
            seen.append(await read(named))
            reads += 1
        await writing
        return reads

    given = [_message(9_000, place % 2, "") for place in range(12)]
    assert await read_during(store.append_messages(talk, given, Precondition(), NOW_US), talk) > 1
    assert await read_during(store.fork_conversation(talk, fork, None, NOW_US), fork) > 1
    assert await read_during(store.remove_messages(talk, Removal(oldest=5), NOW_US), talk) > 1
    assert await read_during(store.delete_conversation(talk), talk) > 1
    whole = {(talk.name, 0, 0), (fork.name, 0, 0), (talk.name, 7, 63_000)}
    whole |= {(named.name, 12, 108_000) for named in (talk, fork)}
    assert set(seen) <= whole
    assert await read(fork) == (fork.name, 12, 108_000)


@pytest.mark.usefixtures("small_slices")
async def test_fork_of_a_changing_conversation_is_one_state(bench: Bench) -> None:
    talk, store = bench.take_name(), bench.journal.conversations
    await store.append_messages(talk, [_message(2, 0, "") for _ in range(40)], Precondition(), NOW_US)
    fork = asyncio.create_task(store.fork_conversation(talk, bench.take_name(), None, NOW_US))
    await until(lambda: _is_hidden(bench))  # the copy has begun
    for number in (1, 39):
        await store.replace_message(talk, replace(_message(9, 1, ""), number=number), NOW_US)
    found = await store.list_messages((await fork).conversation, MessageQuery(limit=99))
    sizes = [one.body_size_bytes for one in found]
    assert (sizes[0], sizes[38]) in {(2, 2), (9, 2), (9, 9)}


@pytest.mark.usefixtures("small_slices")
async def test_parts_without_a_message_are_purged(bench: Bench) -> None:
    """A crash leaves them; a refused write does not."""
    talk, store = bench.take_name(), bench.journal.conversations
    async with store.store_bodies("laws", [_message(9_000, 0, "").body], NOW_US):
        await bench.journal.close()
    await bench.open()
    store = bench.journal.conversations
    assert await _is_hidden(bench)
    assert await store.list_names("laws", "", 9) == []
    assert await store.prune_conversations(NOW_US + hidden.WRITING_US - 1, 9) == 0
    assert await _is_hidden(bench)
    await store.prune_conversations(NOW_US + hidden.WRITING_US, 9)
    assert await bench.journal.read_bytes(["laws"]) == {}
    with pytest.raises(LastNumberDiffers):
        await store.append_messages(talk, [_message(9_000, 0, "")], Precondition(last_number=5), NOW_US)
    assert await bench.journal.read_bytes(["laws"]) == {}


EXPIRING = "SELECT name FROM conversations WHERE expire_time_us IS NOT NULL"


@pytest.mark.usefixtures("small_slices")
async def test_failed_cleanup_does_not_fail_a_stored_write(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repeat finds its message there, so its own parts are left over."""
    talk, store = bench.take_name(), bench.journal.conversations
    message = _message(9_000, 0, "m")

    def refuse(*_: object) -> list[int]:
        raise StorageFull("no space for a change")

    first = await store.append_message(talk, message, NOW_US)
    with monkeypatch.context() as patch:
        patch.setattr(hidden, "release_unused", refuse)
        assert await store.append_message(talk, message, NOW_US) == first
        assert len(journals.query_rows(bench.folder, EXPIRING)) == 1
    await store.prune_conversations(NOW_US + hidden.WRITING_US, 9)
    assert journals.query_rows(bench.folder, EXPIRING) == []
    assert await store.get_message(talk, "m") == first


async def _is_hidden(bench: Bench) -> bool:
    names = journals.query_rows(bench.folder, "SELECT name FROM conversations")
    return any(name.startswith(hidden.HIDDEN) for (name,) in names)
