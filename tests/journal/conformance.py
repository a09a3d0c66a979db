"""What every Journal must do, written against the port alone.

A store passes by a module with a class that inherits `JournalConformance` and a fixture `opener`: a coroutine
function that opens the same, at first empty, store each time it is called. `now` is the clock it is opened with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from memstream_server.adapters.journal import writes
from memstream_server.core.events import Event, EventType, Reason
from memstream_server.core.policy import DBGPT, DEFAULT, with_value
from memstream_server.core.values import Enhancement, Fragment, FragmentKind, MemoryKind, Structured, Tier
from memstream_server.ports.journal.errors import AlreadyExists, Conflict, NamespaceFull
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import FragmentQuery, Image
from memstream_server.ports.journal.records import (
    Answer,
    Counts,
    Indexable,
    IndexEntry,
    Job,
    MemoryRecord,
    Producer,
    Recorded,
)
from memstream_server.ports.journal.rows import Anchor, Block, Row, Terms
from memstream_server.ports.journal.spaces import Space
from memstream_server.ports.journal.writing import Access, Commit, Receipt, Rejection

Opener = Callable[[], Awaitable[Journal]]
MODEL = "hashing-4"
DAY_US = 24 * 3600 * 1_000_000


@dataclass
class Now:
    """A clock a test moves by hand."""

    us: int = 1_700_000_000_000_000

    def __call__(self) -> int:
        return self.us


def record(uid: str = "u1", name: str = "joy", namespace: str = "comedy") -> MemoryRecord:
    return MemoryRecord(
        uid=uid,
        namespace=namespace,
        name=name,
        kind=MemoryKind.HYBRID,
        policy=DEFAULT,
        seed=b"0123456789abcdef",
        labels=(("team", "writers"),),
        create_time_us=1,
        update_time_us=2,
    )


def fragment(position: int, tier: Tier = Tier.LONG_TERM, **changes: object) -> Fragment:
    plain = Fragment(
        id=f"F{position:025d}",
        content=f"turn {position}: 我叫 Bob",
        tier=tier,
        session="monday",
        speaker="user",
        create_time_us=1_000 + position,
        access_time_us=1_000 + position,
        model=MODEL,
        position=position,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # the test names fields of Fragment


def vector(position: int) -> bytes:
    return np.array([position, 1, 2, 3], dtype="<f4").tobytes()


def row(one: Fragment) -> Row:
    return Row(one, Terms(np.arange(3, dtype="<u8").tobytes(), np.ones(3, dtype="<u2").tobytes()), vector(one.position))


def digest(sequence: int) -> bytes:
    return sequence.to_bytes(16, "big")


def receipt(first: int, count: int, position: int, *, epoch: int = 1, rejected: tuple[int, ...] = ()) -> Receipt:
    numbers = range(first, first + count)
    kept = [number for number in numbers if number not in rejected]
    fragments = tuple(fragment(position + place, Tier.SENSORY) for place in range(len(kept)))
    return Receipt(
        memory="u1",
        epoch=1,
        producer="p",
        producer_epoch=epoch,
        first_sequence=first,
        hashes=tuple(digest(number) for number in numbers),
        fragments=fragments,
        sequences=tuple(kept),
        importances=tuple(0.25 if number % 2 else None for number in kept),
        vectors={one.id: vector(one.position) for one in fragments[:1]},
        rejections=tuple(Rejection(number, 3, "CONTENT_EMPTY", "empty", {"limit": "1"}) for number in rejected),
        position=position,
    )


def transition(revision: int, **parts: object) -> Commit:
    return Commit(memory="u1", epoch=1, revision=revision, time_us=revision * 10, **parts)  # type: ignore[arg-type]


class Gathered:
    """A Gathering that keeps what it is given."""

    def __init__(self) -> None:
        self.told: list[int | str | None] = []
        self.blocks: list[Block] = []

    def begin(self, vectors: int | None) -> None:
        self.told.append(vectors)

    def add(self, block: Block) -> None:
        self.blocks.append(block)

    def end(self) -> None:
        self.told.append("end")


async def image(journal: Journal, vectors_max: int = 100) -> Image:
    return await journal.load("u1", MODEL, vectors_max)


class JournalConformance:
    """Inherit it, and every test below is run against the store of `opener`."""

    @pytest.fixture
    async def journal(self, opener: Opener) -> AsyncIterator[Journal]:
        opened = await opener()
        await opened.create_memory(record(), (Event(EventType.MEMORY_CREATED, ""),))
        await opened.own("u1")
        await opened.open_producer("u1", 1, "p")
        yield opened
        await opened.close()

    # ---- memories

    async def test_a_memory_reads_back_as_it_was_created(self, journal: Journal) -> None:
        assert await journal.get_memory("comedy", "joy") == replace(record(), epoch=1, revision=1)
        assert await journal.get_memory("comedy", "jo") is None
        assert await journal.get_memory("tragedy", "joy") is None
        assert await journal.events("u1", 0, 10) == [Recorded(1, 1, (Event(EventType.MEMORY_CREATED, ""),))]

    async def test_a_name_is_taken_once_in_a_namespace(self, journal: Journal) -> None:
        with pytest.raises(AlreadyExists, match="comedy/joy"):
            await journal.create_memory(record("u2"), ())
        await journal.create_memory(record("u2", namespace="drama"), ())
        assert await journal.list_namespaces("", 10) == [("comedy", 1), ("drama", 1)]

    async def test_of_two_creations_at_once_one_is_refused_and_the_others_stand(self, journal: Journal) -> None:
        made = [journal.create_memory(record(f"x{place}", f"m{place // 2}"), ()) for place in range(6)]
        results = await asyncio.gather(*made, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), AlreadyExists] * 3
        assert [one.uid for one in await journal.list_memories("comedy", "joy", 9)] == ["x0", "x2", "x4"]

    async def test_a_full_namespace_takes_no_other_however_many_come_at_once(self, journal: Journal) -> None:
        made = [journal.create_memory(record(f"x{place}", f"m{place}"), (), None, 3) for place in range(6)]
        results = await asyncio.gather(*made, return_exceptions=True)
        assert [type(result) for result in results] == [type(None)] * 2 + [NamespaceFull] * 4
        with pytest.raises(AlreadyExists):
            await journal.create_memory(record("y", "m0"), (), None, 3)
        await journal.create_memory(record("y", namespace="drama"), (), None, 1)
        await journal.own("y")
        renaming = replace(transition(1, name=("comedy", "moved"), namespace_max=3), memory="y")
        with pytest.raises(NamespaceFull):
            await journal.commit(renaming)
        await journal.delete_memory("x0")
        await journal.commit(renaming)
        assert await journal.list_namespaces("", 10) == [("comedy", 3)]

    async def test_memories_and_namespaces_are_listed_in_pages(self, journal: Journal) -> None:
        for name in ("b", "a", "c"):
            await journal.create_memory(record(f"d-{name}", name, "drama"), ())
        assert [one.name for one in await journal.list_memories("drama", "", 2)] == ["a", "b"]
        assert [one.name for one in await journal.list_memories("drama", "b", 2)] == ["c"]
        assert await journal.list_namespaces("comedy", 5) == [("drama", 3)]
        assert await journal.list_namespaces("", 1) == [("comedy", 1)]

    async def test_memories_are_listed_by_the_beginning_of_their_name(self, journal: Journal) -> None:
        for name in ("n.bob", "n.bob.x", "n.bob~2d", "n.boc", "n.Bob", "n"):
            await journal.create_memory(record(f"e-{name}", name, "epos"), ())
        listed = await journal.list_memories("epos", "", 9, "n.bob")
        assert [one.name for one in listed] == ["n.bob", "n.bob.x", "n.bob~2d"]
        assert [one.name for one in await journal.list_memories("epos", "n.bob", 1, "n.bob")] == ["n.bob.x"]
        assert await journal.list_memories("epos", "n.boc", 9, "n.bob") == []

    async def test_taking_ownership_raises_the_epoch_and_ends_the_older_owner(self, journal: Journal) -> None:
        assert (await journal.own("u1")).epoch == 2
        for write in (
            journal.commit(transition(1)),
            journal.receive(receipt(1, 1, 0)),
            journal.open_producer("u1", 1, "q"),
        ):
            with pytest.raises(Conflict):
                await write
        with pytest.raises(Conflict):
            await journal.own("nobody")
        with pytest.raises(Conflict):
            await journal.load("nobody", MODEL, 0)

    async def test_a_deleted_memory_is_gone_with_everything_but_its_index_work(self, journal: Journal) -> None:
        rows = (row(fragment(0)), row(fragment(1, Tier.SHORT_TERM)))
        await journal.commit(transition(1, rows=rows, jobs=(Job("j", "u1", "reflection", "{}"),)))
        await journal.receive(receipt(1, 2, 2))
        await journal.delete_memory("u1")
        assert await journal.get_memory("comedy", "joy") is None
        assert await journal.fragments("u1", [fragment(0).id]) == []
        assert await journal.list_fragments("u1", FragmentQuery()) == []
        assert await journal.events("u1", 0, 9) == []
        assert await journal.jobs(9) == []
        assert await journal.pending_memories() == []
        assert [(entry.memory, entry.fragment, found) for entry, found in await journal.outbox(9)] == [
            ("u1", fragment(0).id, None)
        ]
        with pytest.raises(Conflict):
            await journal.delete_memory("u1")

    async def test_a_memory_made_anew_has_nothing_of_the_old(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0)),)))
        await journal.receive(receipt(1, 1, 1))
        await journal.delete_memory("u1")
        await journal.create_memory(record("u9"), ())
        await journal.own("u9")
        found = await journal.load("u9", MODEL, 100)
        assert (found.rows, found.pending, found.producers, found.next_position) == ((), (), (), 0)

    async def test_deleting_a_large_memory_leaves_its_neighbours_whole(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "sad"), ())
        await journal.own("u2")
        mine = tuple(row(fragment(position)) for position in range(2_500))
        await journal.commit(transition(1, rows=mine))
        await journal.commit(replace(transition(1, rows=mine[:3]), memory="u2"))
        deletion = asyncio.ensure_future(journal.delete_memory("u1"))
        await journal.commit(replace(transition(2, rows=(row(fragment(3)),)), memory="u2"))
        await deletion
        assert await journal.outbox_size() == 2_500
        assert (await journal.counts("u2")).long_term == 4
        assert len(await journal.vectors("u2", MODEL, [one.fragment.id for one in mine])) == 4
        assert [one.revision for one in await journal.events("u2", 0, 9)] == [1, 2, 3]

    # ---- the way in

    async def test_a_receipt_is_pending_with_all_it_had_until_it_is_stored(self, journal: Journal) -> None:
        first, second = receipt(1, 3, 0, rejected=(2,)), receipt(4, 2, 2)
        await asyncio.gather(journal.receive(first), journal.receive(second))
        found = await image(journal)
        assert found.pending == (first, second)
        assert found.next_position == 4
        assert found.producers == (Producer("p", 1, received=5, stored=0),)
        assert (await journal.counts("u1")).pending == 4
        assert await journal.pending_memories() == ["u1"]
        await journal.commit(transition(1, stored_positions=(0,), producers=(("p", 3),)))
        found = await image(journal)
        assert found.pending == (second,)
        assert found.producers == (Producer("p", 1, received=5, stored=3),)
        await journal.commit(transition(2, stored_positions=(2,), producers=(("p", 5),)))
        assert (await image(journal)).pending == ()
        assert await journal.pending_memories() == []

    @pytest.mark.parametrize("wrong", [receipt(2, 1, 0), receipt(0, 1, 0), receipt(1, 1, 0, epoch=2)])
    async def test_a_gap_a_repeat_and_an_older_stream_are_refused(self, journal: Journal, wrong: Receipt) -> None:
        with pytest.raises(Conflict):
            await journal.receive(wrong)
        assert (await image(journal)).pending == ()
        await journal.receive(receipt(1, 1, 0))

    async def test_opening_a_producer_again_ends_its_older_stream(self, journal: Journal) -> None:
        await journal.receive(receipt(1, 2, 0))
        assert await journal.open_producer("u1", 1, "p") == Producer("p", 2, received=2, stored=0)
        with pytest.raises(Conflict):
            await journal.receive(receipt(3, 1, 2))
        await journal.receive(receipt(3, 1, 2, epoch=2))
        assert await journal.open_producer("u1", 1, "q") == Producer("q", 1)

    @pytest.mark.parametrize("refused", [False, True])
    async def test_what_waits_of_several_memories_is_as_if_written_one_by_one(
        self, journal: Journal, refused: bool
    ) -> None:
        for uid, name in (("u2", "sad"), ("u3", "calm")):
            await journal.create_memory(record(uid, name), ())
            await journal.own(uid)
            await journal.open_producer(uid, 1, "p")
        ada = Answer("comedy\nPut\nr1", b"digest", b"response", 7)
        stored = {"stored_positions": (0,), "producers": (("p", 2),)}
        more = {"rows": (row(fragment(5)),), "policy": replace(DEFAULT, language="german"), "answer": ada}
        writes: list[Awaitable[None]] = [
            journal.receive(receipt(1, 2, 0)),
            journal.receive(replace(receipt(1, 1, 0), memory="u2")),
            journal.receive(replace(receipt(1, 3, 0, rejected=(2,)), memory="u3")),
            journal.commit(transition(1, rows=(row(fragment(0)), row(fragment(1))), **stored)),
            journal.commit(replace(transition(1, rows=(row(fragment(0)),)), memory="u3")),
            journal.touch("u1", [Access(fragment(1).id, 2, 9_999)]),
            journal.commit(transition(2, removed=(fragment(0).id,), **more)),
            journal.receive(receipt(3, 1, 2)),
            journal.commit(replace(transition(2, reflection_aggregate=0.5), memory="u3")),
        ]
        if refused:
            writes[5:5] = [
                journal.receive(replace(receipt(7, 1, 9), memory="u2")),
                journal.commit(replace(transition(7, rows=(row(fragment(8)),)), memory="u2")),
            ]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(one) for one in outcomes if one is not None] == [Conflict] * 2 * refused
        for uid, revision, ids, pending, received in (
            ("u1", 3, [1, 5], (receipt(3, 1, 2),), 3),
            ("u2", 1, [], (replace(receipt(1, 1, 0), memory="u2"),), 1),
            ("u3", 3, [0], (replace(receipt(1, 3, 0, rejected=(2,)), memory="u3"),), 3),
        ):
            found = await journal.load(uid, MODEL, 100)
            assert (found.record.revision, found.pending) == (revision, pending)
            assert [one.fragment.id for one in found.rows] == [fragment(each).id for each in ids]
            assert found.producers == (Producer("p", 1, received=received, stored=2 if uid == "u1" else 0),)
            assert len(await journal.events(uid, 0, 9)) == revision
        (known,) = await journal.fragments("u1", [fragment(1).id])
        assert (known.access_count, known.access_time_us) == (2, 9_999)
        assert (await image(journal)).record.policy.language == "german"
        assert (await journal.load("u3", MODEL, 0)).record.reflection_aggregate == 0.5

    async def test_unsequenced_writes_keep_no_sequence(self, journal: Journal) -> None:
        one = replace(receipt(1, 2, 0), producer="", producer_epoch=0)
        await journal.receive(one)
        await journal.receive(replace(one, position=2, fragments=(fragment(2), fragment(3))))
        found = await image(journal)
        assert [pending.position for pending in found.pending] == [0, 2]
        assert found.producers == (Producer("p", 1),)

    async def test_a_batch_of_rejections_is_stored_when_all_before_it_is(self, journal: Journal) -> None:
        await journal.receive(receipt(1, 1, 0, rejected=(1,)))
        assert (await image(journal)).producers == (Producer("p", 1, received=1, stored=1),)
        await journal.receive(receipt(2, 1, 1))
        await journal.receive(receipt(3, 2, 2, rejected=(3, 4)))
        found = await image(journal)
        assert [pending.first_sequence for pending in found.pending] == [2]
        assert found.producers == (Producer("p", 1, received=4, stored=1),)
        assert found.next_position == 3
        await journal.commit(transition(1, stored_positions=(1,), producers=(("p", 2),)))
        assert (await image(journal)).producers == (Producer("p", 1, received=4, stored=4),)
        assert (await journal.open_producer("u1", 1, "p")).stored == 4

    async def test_hashes_and_rejections_answer_repeats_also_after_storing(self, journal: Journal) -> None:
        await journal.receive(receipt(1, 3, 0, rejected=(2,)))
        await journal.receive(receipt(4, 3, 2))
        await journal.commit(transition(1, stored_positions=(0, 2), producers=(("p", 6),)))
        refused = Rejection(2, 3, "CONTENT_EMPTY", "empty", {"limit": "1"})
        assert await journal.received_hashes("u1", "p", 2, 4) == [
            (2, digest(2), refused),
            (3, digest(3), None),
            (4, digest(4), None),
        ]
        assert await journal.received_hashes("u1", "p", 6, 99) == [(6, digest(6), None)]
        assert await journal.received_hashes("u1", "p", 7, 99) == []
        assert await journal.received_hashes("u1", "other", 1, 9) == []

    async def test_a_producer_of_one_call_is_kept_for_a_day(self, journal: Journal, now: Now) -> None:
        await journal.open_producer("u1", 1, "request:r", one_call=True)
        await journal.receive(replace(receipt(1, 2, 0), producer="request:r"))
        assert [one.name for one in (await image(journal)).producers] == ["p", "request:r"]
        now.us += DAY_US + 1
        assert await journal.prune_producers(9) == 0  # something of it is pending
        await journal.commit(transition(1, stored_positions=(0,), producers=(("request:r", 2),)))
        assert [one.name for one in (await image(journal)).producers] == ["p"]
        assert await journal.prune_producers(9) == 1
        assert await journal.received_hashes("u1", "request:r", 1, 9) == []
        assert await journal.open_producer("u1", 1, "request:r", one_call=True) == Producer("request:r", 1)
        assert await journal.prune_producers(9) == 0
        assert (await journal.open_producer("u1", 1, "p")).epoch == 2

    async def test_a_stream_that_stays_open_lets_old_hashes_go(
        self, journal: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writes, "SEQUENCES_KEPT", 20)
        monkeypatch.setattr(writes, "COMPACT_EVERY", 10)
        for number in range(1, 101):
            await journal.receive(receipt(number, 1, number))
        kept = [number for number, _, _ in await journal.received_hashes("u1", "p", 1, 200)]
        assert kept == list(range(81, 101))

    # ---- transitions

    async def test_every_field_of_a_fragment_survives(self, journal: Journal) -> None:
        full = Fragment(
            id="Z",
            content="q\nt",
            tier=Tier.LONG_TERM,
            kind=FragmentKind.INSIGHT,
            structured=Structured(question="q", thought="t"),
            speaker="Joy",
            session="s",
            importance=0.75,
            observe_time_us=1,
            create_time_us=2,
            access_time_us=3,
            access_count=4,
            enhancement_count=5,
            duplicate_count=1,
            sources=("a", "b"),
            metadata=(("f", 1.0), ("i", 1), ("ok", True), ("s", "x")),
            expire_time_us=9,
            pinned=True,
            external_id="ext",
            model=MODEL,
            position=7,
            version=2,
            forget_time_us=11,
        )
        await journal.commit(transition(1, rows=(row(full),)))
        (read,) = await journal.fragments("u1", ["Z"])
        assert read == full
        assert [type(value) for _, value in read.metadata] == [float, int, bool, str]
        found = await image(journal)
        assert found.rows == (row(full),)
        assert found.next_position == 8

    async def test_a_commit_at_another_revision_or_epoch_changes_nothing(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0)),)))
        for stale in (
            transition(1),
            transition(3),
            replace(transition(2), epoch=2),
            replace(transition(2), memory="x"),
        ):
            with pytest.raises(Conflict):
                await journal.commit(replace(stale, removed=(fragment(0).id,)))
        found = await image(journal)
        assert (found.record.revision, len(found.rows)) == (2, 1)

    async def test_of_commits_at_one_revision_exactly_one_wins(self, journal: Journal) -> None:
        attempts = [journal.commit(transition(1, rows=(row(fragment(place)),))) for place in range(8)]
        results = await asyncio.gather(*attempts, return_exceptions=True)
        assert [result is None for result in results] == [True] + [False] * 7
        assert all(isinstance(result, Conflict) for result in results[1:])
        assert [one.fragment.position for one in (await image(journal)).rows] == [0]

    async def test_a_refused_write_fails_alone_in_its_group(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "sad"), ())
        await journal.own("u2")
        named = row(fragment(0, external_id="same"))
        writes = [
            journal.commit(transition(1, rows=(named,))),
            journal.commit(transition(2, rows=(row(fragment(1)), row(fragment(2, external_id="same"))))),
            journal.commit(transition(2, rows=(row(fragment(3)),))),
            journal.commit(replace(transition(1, rows=(named,)), memory="u2")),
        ]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), AlreadyExists, type(None), type(None)]
        assert [one.fragment.position for one in (await image(journal)).rows] == [0, 3]
        assert [one.revision for one in await journal.events("u1", 0, 9)] == [1, 2, 3]
        assert len((await journal.load("u2", MODEL, 9)).rows) == 1

    async def test_a_value_that_cannot_be_written_fails_alone_and_the_writer_lives(self, journal: Journal) -> None:
        broken = fragment(0, metadata=(("x", object()),))
        results = await asyncio.gather(
            journal.commit(transition(1, rows=(row(broken),))),
            journal.commit(transition(1, rows=(row(fragment(1)),))),
            return_exceptions=True,
        )
        assert isinstance(results[0], TypeError)
        assert results[1] is None
        assert [one.fragment.position for one in (await image(journal)).rows] == [1]

    async def test_rows_replace_but_keep_terms_and_vectors_they_do_not_bring(self, journal: Journal) -> None:
        before = row(fragment(0, Tier.SHORT_TERM))
        await journal.commit(transition(1, rows=(before,)))
        promoted = replace(before.fragment, tier=Tier.LONG_TERM, importance=1.0)
        await journal.commit(transition(2, rows=(Row(promoted),)))
        assert (await image(journal)).rows == (Row(promoted, before.terms, before.vector),)

    async def test_a_fragment_that_names_no_model_loses_its_vector(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0)),)))
        await journal.commit(transition(2, rows=(Row(fragment(0, content="other words", model="")),)))
        assert (await image(journal)).rows[0].vector is None
        assert await journal.vectors("u1", MODEL, [fragment(0).id]) == {}

    async def test_what_is_removed_leaves_nothing(self, journal: Journal) -> None:
        held = row(fragment(0, Tier.SHORT_TERM, external_id="e"))
        await journal.commit(
            transition(1, rows=(held, row(fragment(1))), anchors=(Anchor(held.fragment.id, None, ()),))
        )
        await journal.commit(transition(2, removed=(held.fragment.id,)))
        found = await image(journal)
        assert [one.fragment.position for one in found.rows] == [1]
        assert found.short_term == ()
        assert found.next_position == 2, "a position is never given twice"
        assert await journal.vectors("u1", MODEL, [held.fragment.id]) == {}
        await journal.commit(transition(3, rows=(row(fragment(2, external_id="e")),)))

    async def test_many_rows_of_every_number_up_to_a_few_statements(self, journal: Journal) -> None:
        position, revision = 0, 1
        for count in (1, 2, 3, 7, 255, 256, 257, 600):
            rows = tuple(row(fragment(position + place)) for place in range(count))
            await journal.commit(transition(revision, rows=rows))
            position, revision = position + count, revision + 1
        rows = (await image(journal, 2_000)).rows
        assert [one.fragment.position for one in rows] == list(range(position))
        assert all(one == row(one.fragment) for one in rows)
        gone = tuple(one.fragment.id for one in rows[::2])
        await journal.commit(transition(revision, removed=gone))
        assert [one.fragment.position for one in (await image(journal)).rows] == list(range(1, position, 2))

    async def test_what_is_held_comes_back_in_order_with_its_anchors(self, journal: Journal) -> None:
        enhancements = (Enhancement("a", "text a"), Enhancement("b", "text b", recollection=True))
        sensory, first, second = fragment(0, Tier.SENSORY), fragment(1, Tier.SHORT_TERM), fragment(2, Tier.SHORT_TERM)
        gone = fragment(3, Tier.SHORT_TERM, forget_time_us=5)
        rows = tuple(row(one) for one in (second, first, sensory, gone, fragment(4)))
        anchors = (Anchor(second.id, vector(9), enhancements, MODEL), Anchor(first.id, None, enhancements[:1]))
        await journal.commit(transition(1, rows=rows, anchors=anchors))
        found = await image(journal)
        assert [one.fragment.position for one in found.rows] == [0, 1, 2, 3, 4]
        assert [held.fragment for held in found.sensory] == [sensory]
        assert [held.fragment for held in found.short_term] == [first, second]
        assert found.short_term[0].vector is None
        np.testing.assert_array_equal(found.short_term[1].vector, np.array([9, 1, 2, 3], dtype=np.float32))
        assert [held.enhancements for held in found.short_term] == [enhancements[:1], enhancements]
        await journal.commit(transition(2, anchors=(Anchor(second.id, vector(9), (), MODEL),), released=(first.id,)))
        assert [held.enhancements for held in (await image(journal)).short_term] == [(), ()]

    async def test_vectors_come_all_or_none_and_only_of_the_space_asked_for(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0)), row(fragment(1)))))
        await journal.commit(transition(2, rows=(Row(fragment(1, model="other-2"), None, b"12345678"),)))
        assert [one.vector for one in (await image(journal, 2)).rows] == [vector(0), vector(1)]
        assert [one.vector for one in (await image(journal, 1)).rows] == [None, None]
        assert [one.vector for one in (await journal.load("u1", "other-2", 1)).rows] == [None, b"12345678"]
        ids = [fragment(1).id, "nobody", fragment(0).id]
        assert await journal.vectors("u1", MODEL, ids) == {fragment(0).id: vector(0), fragment(1).id: vector(1)}
        assert await journal.vectors("u1", "other-2", ids) == {fragment(1).id: b"12345678"}

    async def test_policy_labels_and_aggregate_change_only_when_given(self, journal: Journal) -> None:
        policy = with_value(DBGPT, "recall.alpha", 0.125)
        changed = transition(1, policy=policy, labels=(("a", "b"),), reflection_aggregate=2.5)
        await journal.commit(changed)
        expected = replace(
            record(),
            epoch=1,
            revision=2,
            policy=policy,
            labels=(("a", "b"),),
            reflection_aggregate=2.5,
            update_time_us=10,
        )
        assert await journal.get_memory("comedy", "joy") == expected
        await journal.commit(transition(2))
        assert await journal.get_memory("comedy", "joy") == replace(expected, revision=3)
        assert (await image(journal)).record == replace(expected, revision=3)

    async def test_events_are_read_in_order_after_a_revision(self, journal: Journal) -> None:
        happened = (
            Event(EventType.ENHANCED, "a", other="b", cosine=0.5, draw=0.25, importance=1.0),
            Event(EventType.PROMOTED, "a", from_tier=Tier.SHORT_TERM, to_tier=Tier.LONG_TERM, sources=("b", "c")),
            Event(EventType.DROPPED, "d", reason=Reason.CAPACITY),
        )
        await journal.commit(transition(1, events=happened))
        await journal.commit(transition(2))
        assert await journal.events("u1", 1, 10) == [Recorded(2, 10, happened), Recorded(3, 20, ())]
        assert [one.revision for one in await journal.events("u1", 0, 2)] == [1, 2]
        assert await journal.events("u1", 3, 10) == []

    async def test_numpy_numbers_are_written_as_what_they_mean(self, journal: Journal) -> None:
        seen = Event(EventType.ENHANCED, "a", cosine=np.float32(0.5), draw=np.float64(0.25))  # type: ignore[arg-type]
        await journal.commit(transition(1, events=(seen,), rows=(row(fragment(0, importance=np.float64(0.5))),)))
        ((recorded,),) = [one.events for one in await journal.events("u1", 1, 1)]
        assert (recorded.cosine, recorded.draw) == (0.5, 0.25)
        assert type((await image(journal)).rows[0].fragment.importance) is float

    async def test_pruned_events_are_the_oldest_and_leave_no_gap(self, journal: Journal) -> None:
        for revision in range(1, 6):
            await journal.commit(transition(revision))
        kept = [one.revision for one in await journal.events("u1", 0, 10)]
        assert kept == [1, 2, 3, 4, 5, 6]
        assert await journal.prune_events("u1", 30, 2) == 2  # the memory's creation, at 1 µs, and revision 2, at 10
        assert await journal.prune_events("u1", 30, 10) == 1
        assert await journal.prune_events("u1", 30, 10) == 0
        assert [one.revision for one in await journal.events("u1", 0, 10)] == [4, 5, 6]
        await journal.commit(replace(transition(6), time_us=5))  # the clock was set back
        assert await journal.prune_events("u1", 45, 10) == 2
        assert [one.revision for one in await journal.events("u1", 0, 10)] == [6, 7]
        assert await journal.prune_events("u1", 100, 10) == 2
        assert await journal.events("u1", 0, 10) == []
        assert (await image(journal)).record.revision == 7
        with pytest.raises(Conflict):
            await journal.prune_events("nobody", 100, 10)

    # ---- what is due

    async def test_expiring_are_live_and_unpinned_most_overdue_first(self, journal: Journal) -> None:
        rows = [
            fragment(0, expire_time_us=300),
            fragment(1, expire_time_us=100),
            fragment(2, expire_time_us=100, pinned=True),
            fragment(3, expire_time_us=100, forget_time_us=9),
            fragment(4),
            fragment(5, expire_time_us=301),
        ]
        await journal.commit(transition(1, rows=tuple(row(one) for one in rows)))
        await journal.create_memory(record("u2", "sad"), ())
        await journal.own("u2")
        await journal.commit(replace(transition(1, rows=(row(fragment(0, expire_time_us=200)),)), memory="u2"))
        due = [("u1", rows[1].id), ("u2", fragment(0).id), ("u1", rows[0].id)]
        assert await journal.expiring(300, 10) == due
        assert await journal.expiring(300, 2) == due[:2]
        assert await journal.expiring(99, 10) == []
        changed = (Row(replace(rows[1], expire_time_us=None)), Row(replace(rows[2], pinned=False)))
        await journal.commit(transition(2, rows=changed))
        assert await journal.expiring(100, 10) == [("u1", rows[2].id)]
        await journal.delete_memory("u2")
        assert await journal.expiring(300, 10) == [("u1", rows[2].id), ("u1", rows[0].id)]

    async def test_purgeable_are_forgotten_the_oldest_first(self, journal: Journal) -> None:
        rows = [fragment(0, forget_time_us=30), fragment(1, forget_time_us=10), fragment(2), fragment(3)]
        await journal.commit(transition(1, rows=tuple(row(one) for one in rows)))
        await journal.create_memory(record("u2", "sad"), ())
        assert await journal.oldest_forgotten() == [("u1", 10)]
        assert await journal.purgeable("u1", 30, 10) == [rows[1].id, rows[0].id]
        assert await journal.purgeable("u1", 30, 1) == [rows[1].id]
        assert await journal.purgeable("u1", 29, 10) == [rows[1].id]
        assert await journal.purgeable("nobody", 30, 10) == []
        await journal.commit(transition(2, rows=(Row(replace(rows[0], forget_time_us=None)),), removed=(rows[1].id,)))
        assert await journal.oldest_forgotten() == []

    async def test_all_memories_come_by_uid_whatever_their_namespace(self, journal: Journal) -> None:
        await journal.create_memory(record("u0", "joy", "tragedy"), ())
        await journal.create_memory(record("u2", "sad"), ())
        assert [one.uid for one in await journal.all_memories("", 10)] == ["u0", "u1", "u2"]
        assert [one.uid for one in await journal.all_memories("u0", 1)] == ["u1"]
        assert await journal.all_memories("u2", 10) == []

    # ---- access statistics

    async def test_touches_add_up_and_no_commit_undoes_them(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0, access_count=2)), row(fragment(1)))))
        await journal.touch("u1", [Access(fragment(0).id, 1, 5_000), Access(fragment(0).id, 2, 4_000)])
        await journal.touch("u1", [Access(fragment(0).id, 1, 10), Access("nobody", 1, 1)])
        await journal.commit(transition(2, rows=(Row(fragment(0, importance=0.9)),)))
        touched, other = await journal.fragments("u1", [fragment(0).id, fragment(1).id])
        assert (touched.access_count, touched.access_time_us, touched.importance) == (6, 5_000, 0.9)
        assert (other.access_count, other.access_time_us) == (0, 1_001)
        assert [one.fragment.access_count for one in (await image(journal)).rows] == [6, 0]
        assert (await image(journal)).record.revision == 3

    # ---- reading fragments

    async def test_fragments_come_in_the_order_asked_for(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=tuple(row(fragment(place)) for place in range(700))))
        wanted = [fragment(place).id for place in (699, 3, 0)]
        assert [one.id for one in await journal.fragments("u1", [*wanted, "nobody"])] == wanted
        everything = [fragment(place).id for place in reversed(range(700))]
        assert [one.id for one in await journal.fragments("u1", everything)] == everything
        assert await journal.fragments("u2", wanted) == []
        assert await journal.fragments("u1", []) == []

    async def test_a_neighbour_with_the_same_ids_is_another_matter(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "sad"), ())
        await journal.own("u2")
        await journal.commit(transition(1, rows=(row(fragment(0)),)))
        theirs = row(fragment(0, content="theirs"))
        await journal.commit(replace(transition(1, rows=(theirs,)), memory="u2"))
        await journal.commit(transition(2, removed=(fragment(0).id,)))
        assert await journal.fragments("u1", [fragment(0).id]) == []
        assert await journal.fragments("u2", [fragment(0).id]) == [theirs.fragment]
        assert len(await journal.vectors("u2", MODEL, [fragment(0).id])) == 1

    async def test_list_selects_and_pages(self, journal: Journal) -> None:
        rows = [
            fragment(0, Tier.SENSORY),
            fragment(1, Tier.SHORT_TERM, session="tuesday"),
            fragment(2, speaker="Joy"),
            fragment(3, kind=FragmentKind.INSIGHT),
            fragment(4, forget_time_us=9),
        ]
        await journal.commit(transition(1, rows=tuple(row(one) for one in rows)))

        async def listed(**query: object) -> list[int]:
            wanted = FragmentQuery(**query)  # type: ignore[arg-type]  # the test names fields of FragmentQuery
            return [one.position for one in await journal.list_fragments("u1", wanted)]

        assert await listed() == [0, 1, 2, 3]
        assert await listed(limit=2) == [0, 1]
        assert await listed(after=1, limit=2) == [2, 3]
        assert await listed(tiers=(Tier.SENSORY, Tier.SHORT_TERM)) == [0, 1]
        assert await listed(sessions=("tuesday",)) == [1]
        assert await listed(speakers=("Joy", "nobody")) == [2]
        assert await listed(kinds=("insight",), tiers=(Tier.LONG_TERM,)) == [3]
        assert await listed(forgotten=True) == [4]
        assert await listed(limit=0) == []

    async def test_counts(self, journal: Journal) -> None:
        rows = [
            fragment(0, Tier.SENSORY),
            fragment(1, Tier.SHORT_TERM),
            fragment(2),
            fragment(3, kind=FragmentKind.INSIGHT),
            fragment(4, forget_time_us=9),
        ]
        work = (IndexEntry("u1", fragment(2).id),)
        await journal.commit(transition(1, rows=tuple(row(one) for one in rows), index=work))
        await journal.receive(receipt(1, 3, 5, rejected=(2,)))
        assert await journal.counts("u1") == Counts(1, 1, 2, insights=1, forgotten=1, pending=2, unindexed=1)
        assert await journal.counts("nobody") == Counts()

    # ---- answers

    async def test_an_answer_is_kept_for_a_day_and_given_once(self, journal: Journal, now: Now) -> None:
        answer = Answer("comedy\nPut\nr1", b"digest", b"response", now.us)
        await journal.commit(transition(1, answer=answer))
        assert await journal.answer(answer.request) == answer
        assert await journal.answer("comedy\nPut\nr2") is None
        with pytest.raises(Conflict):
            await journal.commit(transition(2, rows=(row(fragment(0)),), answer=replace(answer, digest=b"other")))
        assert (await image(journal)).rows == ()
        now.us += DAY_US + 1
        assert await journal.answer(answer.request) is None
        again = replace(answer, time_us=now.us)
        await journal.commit(transition(2, answer=again))
        assert await journal.answer(answer.request) == again

    async def test_creating_and_deleting_keep_their_answers(self, journal: Journal, now: Now) -> None:
        made, gone = Answer("made", b"d", b"1", now.us), Answer("gone", b"d", b"2", now.us)
        await journal.create_memory(record("u2", "sad"), (), made)
        await journal.delete_memory("u2", gone)
        assert [await journal.answer(request) for request in ("made", "gone")] == [made, gone]

    async def test_an_erasure_empties_answers_that_name_it_and_drops_hashes(self, journal: Journal, now: Now) -> None:
        gone, kept = "01J" + "A" * 23, "01J" + "B" * 23
        answers = [
            Answer(f"{namespace}\nPut\n{name}", b"digest", b"AB" + name.encode() + b"secret", now.us)
            for namespace, name in (("comedy", gone), ("comedy", kept), ("comedy2", gone))
        ]
        for revision, answer in enumerate(answers, 1):
            await journal.commit(transition(revision, answer=answer))
        await journal.open_producer("u1", 1, "q")
        await journal.receive(receipt(1, 3, 0))
        await journal.receive(receipt(4, 3, 3))
        await journal.receive(replace(receipt(1, 1, 6), producer="q"))
        stored = transition(4, stored_positions=(0,), producers=(("p", 3),), erased=(gone,))
        await journal.commit(stored)
        assert await journal.answer(answers[0].request) == replace(answers[0], digest=b"", response=b"")
        assert [await journal.answer(answer.request) for answer in answers[1:]] == answers[1:]
        assert [number for number, _, _ in await journal.received_hashes("u1", "p", 1, 9)] == [4, 5, 6]
        assert [number for number, _, _ in await journal.received_hashes("u1", "q", 1, 9)] == [1]

    async def test_scrubbing_changes_nothing_that_can_be_read_or_written(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=tuple(row(fragment(number)) for number in range(50))))
        await journal.commit(transition(2, removed=tuple(fragment(number).id for number in range(0, 50, 2))))
        before = await image(journal)
        _, load, _ = await asyncio.gather(journal.scrub(), image(journal), journal.commit(transition(3)))
        assert load.rows == before.rows
        await asyncio.gather(journal.scrub(), journal.scrub())
        assert (await image(journal)).rows == before.rows
        await journal.commit(transition(4, rows=(row(fragment(50)),)))
        assert len((await image(journal)).rows) == 26

    # ---- the index's outbox and jobs

    async def test_the_outbox_gives_rows_as_they_are_now_until_they_are_done(self, journal: Journal) -> None:
        live, forgotten, erased = fragment(0), fragment(1), fragment(2)
        entries = tuple(IndexEntry("u1", one.id) for one in (live, forgotten, erased))
        await journal.commit(transition(1, rows=(row(live), row(forgotten), row(erased)), index=entries))
        later = replace(forgotten, forget_time_us=5)
        await journal.commit(transition(2, rows=(Row(later),), removed=(erased.id,)))
        found = await journal.outbox(10)
        assert [(entry.memory, entry.fragment, entry.delete) for entry, _ in found] == [
            ("u1", one.id, False) for one in (live, forgotten, erased)
        ]
        assert [what for _, what in found] == [Indexable(MODEL, vector(0)), None, None]
        assert await journal.outbox_size() == 3
        assert await journal.outbox_last() == found[2][0].id
        assert [entry for entry, _ in await journal.outbox(1)] == [found[0][0]]
        await journal.outbox_done([found[1][0].id])
        assert [entry for entry, _ in await journal.outbox(9)] == [found[0][0], found[2][0]]
        await journal.outbox_done([found[0][0].id, found[2][0].id])
        assert (await journal.outbox_size(), await journal.outbox_last()) == (0, 0)

    async def test_of_several_entries_for_a_fragment_the_last_decides(self, journal: Journal) -> None:
        upsert, deletion = IndexEntry("u1", fragment(0).id), IndexEntry("u1", fragment(0).id, delete=True)
        await journal.commit(transition(1, rows=(row(fragment(0)),), index=(deletion, upsert)))
        expected = Indexable(MODEL, vector(0))
        assert [what for _, what in await journal.outbox(9)] == [expected, expected]
        await journal.commit(transition(2, index=(deletion,)))
        assert [what for _, what in await journal.outbox(9)] == [None, None, None]

    async def test_a_refill_enters_every_live_long_term_fragment_with_a_vector(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "sad"), ())
        await journal.own("u2")
        rows = (
            row(fragment(0)),
            Row(fragment(1, model="")),
            row(fragment(2, Tier.SHORT_TERM)),
            row(fragment(3, forget_time_us=5)),
        )
        await journal.commit(transition(1, rows=rows, index=(IndexEntry("u1", fragment(0).id),)))
        await journal.commit(replace(transition(1, rows=(row(fragment(7)),)), memory="u2"))
        assert await journal.outbox_refill() == 2
        found = await journal.outbox(9)
        assert sorted((entry.memory, entry.fragment) for entry, _ in found) == [
            ("u1", fragment(0).id),
            ("u2", fragment(7).id),
        ]
        assert all(what is not None for _, what in found)

    async def test_what_a_reconciliation_found_is_entered(self, journal: Journal) -> None:
        rows = (row(fragment(0)), row(fragment(1)), row(fragment(2, Tier.SHORT_TERM)), Row(fragment(3, model="")))
        await journal.commit(transition(1, rows=rows))
        assert await journal.indexable("u1") == [fragment(0).id, fragment(1).id]
        assert await journal.indexable("nobody") == []
        await journal.outbox_enter([IndexEntry("u1", fragment(1).id), IndexEntry("u1", "orphan", delete=True)])
        found = [(entry.fragment, what is None) for entry, what in await journal.outbox(9)]
        assert found == [(fragment(1).id, False), ("orphan", True)]

    async def test_a_large_image_has_only_the_vectors_that_the_index_lacks(self, journal: Journal) -> None:
        rows = (row(fragment(0)), row(fragment(1)), row(fragment(2, Tier.SHORT_TERM)))
        await journal.commit(transition(1, rows=rows, index=(IndexEntry("u1", fragment(1).id),)))
        image = await journal.load("u1", fragment(0).model, 2)
        assert [one.vector is not None for one in image.rows] == [False, True, True]
        image = await journal.load("u1", fragment(0).model, 3)
        assert [one.vector is not None for one in image.rows] == [True, True, True]

    async def test_who_gathers_gets_a_block_at_a_time_and_all_of_the_image(self, journal: Journal) -> None:
        count = 2_100
        rows = [Row(fragment(at, model="")) if at % 700 == 3 else row(fragment(at)) for at in range(count)]
        rows[1_500] = row(fragment(1_500, Tier.SHORT_TERM))
        await journal.commit(transition(1, rows=tuple(rows)))
        vectored = sum(one.vector is not None for one in rows)
        for vectors_max, told in ((vectored, vectored), (vectored - 1, None)):
            whole, gathered = await image(journal, vectors_max), Gathered()
            found = await journal.load("u1", MODEL, vectors_max, gathered)
            assert gathered.told == [told, "end"]
            assert len(gathered.blocks) > 1
            assert [one for block in gathered.blocks for one in block.rows()] == list(whole.rows)
            assert [one.fragment for one in whole.rows] == [one.fragment for one in rows]
            assert sum(one.vector is not None for one in whole.rows) == (told or 1)
            assert (found.blocks, found.record, found.next_position) == ((), whole.record, whole.next_position)
            assert [held.fragment.position for held in found.short_term] == [1_500]

    async def test_jobs_wait_oldest_first_until_a_commit_finishes_them(self, journal: Journal) -> None:
        jobs = (Job("j2", "u1", "insight", '{"a":1}', 20, 1), Job("j1", "u1", "reflection", "{}", 10))
        await journal.commit(transition(1, jobs=jobs))
        assert await journal.jobs(9) == [jobs[1], jobs[0]]
        assert await journal.jobs(1) == [jobs[1]]
        await journal.commit(transition(2, finish_jobs=("j1",)))
        assert await journal.jobs(9) == [jobs[0]]

    # ---- the store itself

    async def test_the_space_is_set_and_replaced(self, journal: Journal) -> None:
        assert await journal.space() is None
        await journal.set_space(Space(MODEL, 4, 64))
        await journal.set_space(Space("other", 8, 256))
        assert await journal.space() == Space("other", 8, 256)

    async def test_everything_is_there_after_reopening(self, journal: Journal, opener: Opener) -> None:
        await journal.set_space(Space(MODEL, 4, 64))
        await journal.receive(receipt(1, 2, 0))
        kept = row(fragment(2, Tier.SHORT_TERM))
        await journal.commit(transition(1, rows=(kept,), anchors=(Anchor(kept.fragment.id, vector(1), (), MODEL),)))
        before = await image(journal)
        await journal.close()
        again = await opener()
        try:
            after = await again.load("u1", MODEL, 100)
            assert (after.record, after.rows, after.pending) == (before.record, before.rows, before.pending)
            assert after.producers == before.producers
            assert await again.space() == Space(MODEL, 4, 64)
            assert (await again.own("u1")).epoch == 2
        finally:
            await again.close()

    async def test_close_finishes_what_was_submitted(self, journal: Journal, opener: Opener) -> None:
        writes = [asyncio.ensure_future(journal.receive(receipt(n, 1, n - 1))) for n in range(1, 51)]
        await asyncio.sleep(0)
        await journal.close()
        assert [write.exception() for write in writes] == [None] * 50
        again = await opener()
        try:
            assert len((await again.load("u1", MODEL, 0)).pending) == 50
        finally:
            await again.close()

    async def test_a_cancelled_caller_leaves_the_others_alone(self, journal: Journal) -> None:
        first = asyncio.ensure_future(journal.receive(receipt(1, 1, 0)))
        await asyncio.sleep(0)
        first.cancel()
        await journal.receive(receipt(2, 1, 1))
        assert [pending.first_sequence for pending in (await image(journal)).pending] == [1, 2]

    async def test_reads_see_what_returned_before_them_and_one_snapshot(self, journal: Journal) -> None:
        async def write() -> None:
            for revision in range(1, 41):
                rows = tuple(row(fragment(place, version=revision)) for place in range(20))
                await journal.commit(transition(revision, rows=rows))
                assert (await image(journal)).record.revision == revision + 1

        async def read() -> None:
            while not writing.done():
                found = await image(journal)
                assert {one.fragment.version for one in found.rows} <= {found.record.revision - 1}

        writing = asyncio.ensure_future(write())
        await asyncio.gather(writing, read(), read())
