"""Vectors keep every bit in the form in which they are stored, or are computed from the text."""

from __future__ import annotations

import numpy as np
import pytest

from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.core.events import Event, EventType
from memstream_server.core.rendering import indexed_text
from memstream_server.core.values import Enhancement, Fragment, Tier, round_vectors
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import MemoryScan
from memstream_server.ports.journal.records import IndexEntry, Made, Space, Spaces
from memstream_server.ports.journal.rows import Anchor, Origin, Row
from memstream_server.ports.journal.writing import Replaced
from tests.journal.samples import MODEL, fragment, row, transition, vector

COMPUTED = "hashing-1"


def hashed(text: str) -> bytes:
    return bytes(HashingEmbedder().vectors([text])[0].astype("<f4").tobytes())


def computed_row(one: Fragment) -> Row:
    return Row(one, row(one).terms, hashed(indexed_text(one)), computed=COMPUTED)


class Vectors:
    """See suite.py."""

    async def test_a_stored_vector_keeps_every_bit(self, journal: Journal) -> None:
        drawn = np.random.default_rng(7).normal(size=(40, 16)).astype(np.float32)
        drawn[30:] = round_vectors(drawn[30:])
        drawn[0, :4] = -0.0, 1e-30, 1e30, 2.0**-24
        drawn[31, :4] = -0.0, 2.0**-24, 65_504.0, 0.0
        given = {fragment(place).id: each.tobytes() for place, each in enumerate(drawn)}
        rows = [Row(fragment(place), None, each) for place, each in enumerate(given.values())]
        await journal.commit(transition(1, rows=tuple(rows)))
        assert await journal.get_vectors("u1", MODEL, list(given)) == given
        assert [one.vector for one in (await journal.load_memory("u1", MODEL, 100)).rows] == list(given.values())

    async def test_a_computed_vector_is_read_everywhere(self, journal: Journal) -> None:
        said = [fragment(place, model=COMPUTED, observe_time_us=place * 10**12) for place in range(3)]
        own = fragment(3, model=COMPUTED, own_vector=True)
        rows = [*map(computed_row, said), Row(own, None, np.arange(384, dtype="<f4").tobytes())]
        entered = tuple(IndexEntry("u1", one.id) for one in (*said, own))
        await journal.set_space(Space(COMPUTED, 384, 1))
        await journal.commit(transition(1, rows=tuple(rows), index=entered))
        wanted = {one.fragment.id: one.vector for one in rows}
        assert await journal.get_vectors("u1", COMPUTED, list(wanted)) == wanted
        assert [one.vector for one in (await journal.load_memory("u1", COMPUTED, 9)).rows] == list(wanted.values())
        waiting = await journal.read_outbox(10)
        assert [there.vector for _, there in waiting if there is not None] == list(wanted.values())

        def visited(scan: MemoryScan) -> list[bytes | None]:
            return [packed for page in scan.pages() for _, packed in page]

        assert await journal.scan_memory("u1", True, visited) == list(wanted.values())

    async def test_a_version_computes_its_vector_from_its_text(self, journal: Journal) -> None:
        before = fragment(0, model=COMPUTED)
        after = before.but(content="something else", version=2)
        await journal.commit(transition(1, rows=(computed_row(before),)))
        replaced = (Replaced(before.id, EventType.UPDATED, "", COMPUTED),)
        events = (Event(EventType.UPDATED, before.id),)
        changed = Row(after, None, hashed(indexed_text(after)), replaces=True, computed=COMPUTED)
        await journal.commit(transition(2, rows=(changed,), events=events, replaced=replaced, versions_max=9))
        (kept,) = (await journal.get_versions("u1", {before.id: 3})).values()
        assert kept.vector == hashed(indexed_text(before))
        assert await journal.get_vectors("u1", COMPUTED, [before.id]) == {before.id: changed.vector}

    async def test_an_anchor_refers_to_vectors_and_texts(self, journal: Journal) -> None:
        one, two, three = (fragment(place, Tier.SHORT_TERM, model=COMPUTED) for place in range(3))
        rows = tuple(map(computed_row, (one, two, three)))
        first, second, third = hashed(one.content), hashed(indexed_text(two)), vector(5)
        anchors = (
            Anchor(one.id, first, (), COMPUTED, origin=Origin.CONTENT),
            Anchor(two.id, second, (), COMPUTED, origin=Origin.INDEXED),
            Anchor(three.id, third, (), COMPUTED),
        )
        await journal.commit(transition(1, rows=rows, anchors=anchors))
        assert await held_vectors(journal, COMPUTED) == [first, second, third]
        enhanced = (Enhancement("a", "text a"),)
        kept = [Anchor(each.id, each.vector, enhanced, COMPUTED, origin=Origin.KEPT) for each in anchors]
        await journal.commit(transition(2, anchors=tuple(kept)))
        assert await held_vectors(journal, COMPUTED) == [first, second, third]
        loaded = await journal.load_memory("u1", COMPUTED, 9)
        assert [held.enhancements for held in loaded.short_term] == [enhanced] * 3

    async def test_a_kept_anchor_has_the_vector_of_its_new_space(self, journal: Journal) -> None:
        held = fragment(0, Tier.SHORT_TERM)
        await journal.set_space(Space(MODEL, 4, 1))
        await journal.commit(transition(1, rows=(row(held),), anchors=(Anchor(held.id, vector(9), (), MODEL),)))
        made = Made(held.id, 0, hashed(indexed_text(held)), hashed(held.content), computed=True)
        await journal.set_spaces(Spaces(Space(MODEL, 4, 1), next=Space(COMPUTED, 384, 1)))
        assert await journal.add_vectors("u1", COMPUTED, [made]) == 1
        kept = Anchor(held.id, hashed(held.content), (Enhancement("a", "a"),), COMPUTED, origin=Origin.KEPT)
        await journal.commit(transition(2, anchors=(kept,)))
        assert await held_vectors(journal, COMPUTED) == [hashed(held.content)]
        assert await held_vectors(journal, MODEL) == [None]

    @pytest.mark.parametrize("limit", [1, 2, 100])
    async def test_old_vectors_are_converted_in_slices(self, journal: Journal, limit: int) -> None:
        drawn = np.random.default_rng(7).normal(size=(3, 384)).astype(np.float32)
        remote = [fragment(place, Tier.SHORT_TERM) for place in range(3)]
        local = [fragment(place, Tier.SHORT_TERM, model=COMPUTED) for place in range(3, 6)]
        given = {one.id: each.tobytes() for one, each in zip(remote, drawn, strict=True)}
        given |= {one.id: hashed(indexed_text(one)) for one in local[:2]}
        given[local[2].id] = drawn[0].tobytes()  # no text gives it
        rows = [Row(one, row(one).terms, given[one.id]) for one in (*remote, *local)]
        beside = Row(remote[0], None, None, beside=(COMPUTED, hashed(indexed_text(remote[0]))))
        anchors = (
            Anchor(remote[0].id, given[remote[0].id], (), MODEL),
            Anchor(local[0].id, hashed(local[0].content), (), COMPUTED),
            Anchor(local[1].id, given[local[1].id], (), COMPUTED),
        )
        await journal.commit(transition(1, rows=(*rows, beside), anchors=anchors))
        after: int | None = -1
        rounded = 0
        while after is not None:
            after, _, is_rounded = await journal.compact_vectors("u1", after, limit)
            rounded += is_rounded
        assert rounded
        assert await journal.compact_vectors("u1", -1, 100) == (None, False, False)
        kept = await journal.get_vectors("u1", COMPUTED, list(given))
        assert kept == {one.id: given[one.id] for one in local} | {remote[0].id: hashed(indexed_text(remote[0]))}
        halves = {one.id: round_vectors(each).tobytes() for one, each in zip(remote, drawn, strict=True)}
        assert await journal.get_vectors("u1", MODEL, list(given)) == halves
        held = [hashed(local[0].content), given[local[1].id], None]
        assert await held_vectors(journal, COMPUTED) == [None, None, None, *held]
        assert (await held_vectors(journal, MODEL))[0] == halves[remote[0].id]

    async def test_the_conversion_of_a_store_is_remembered(self, journal: Journal) -> None:
        assert await journal.compacted_up_to() == ""
        for after in ("u1", None):
            await journal.set_compacted(after)
            assert await journal.compacted_up_to() == after


async def held_vectors(journal: Journal, model: str) -> list[bytes | None]:
    loaded = await journal.load_memory("u1", model, 9)
    return [None if held.vector is None else held.vector.astype("<f4").tobytes() for held in loaded.short_term]
