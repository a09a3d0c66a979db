"""Loading a memory at one revision, with its vectors and held fragments."""

from __future__ import annotations

import asyncio

import numpy as np

from memstream_server.core.values import Enhancement, Tier
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import MemoryScan
from memstream_server.ports.journal.records import IndexEntry, Made, Space, Spaces
from memstream_server.ports.journal.rows import Anchor, Row, Terms
from tests.journal.samples import MODEL, Gathered, fragment, image, row, transition, vector


class Images:
    """See suite.py."""

    async def test_held_fragments_load_in_order_with_anchors(self, journal: Journal) -> None:
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

    async def test_image_has_vectors_of_requested_space_only(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0)), row(fragment(1)))))
        await journal.commit(transition(2, rows=(Row(fragment(1, model="other-2"), None, b"12345678"),)))
        assert [one.vector for one in (await image(journal, 2)).rows] == [vector(0), vector(1)]
        assert [one.vector for one in (await image(journal, 1)).rows] == [None, None]
        assert [one.vector for one in (await journal.load_memory("u1", "other-2", 1)).rows] == [None, b"12345678"]
        ids = [fragment(1).id, "nobody", fragment(0).id]
        assert await journal.get_vectors("u1", MODEL, ids) == {fragment(0).id: vector(0), fragment(1).id: vector(1)}
        assert await journal.get_vectors("u1", "other-2", ids) == {fragment(1).id: b"12345678"}

    async def test_terms_keep_the_version_of_their_analyzer(self, journal: Journal) -> None:
        kept = [row(fragment(place)).terms for place in range(4)]
        terms = [
            Terms(one.hashes, one.counts, version) for one, version in zip(kept, (0, 7, 0, 65_535), strict=True) if one
        ]
        rows = [Row(fragment(place), one) for place, one in enumerate(terms)]
        await journal.commit(transition(1, rows=tuple(rows)))
        assert [one.terms for one in (await image(journal)).rows] == terms

    async def test_scan_has_content_vectors_of_space_in_force(self, journal: Journal) -> None:
        def visited(scan: MemoryScan) -> bytes | None:
            return scan.anchors[held.id].vector

        held = fragment(0, Tier.SHORT_TERM)
        await journal.commit(transition(1, rows=(row(held),), anchors=(Anchor(held.id, vector(9), (), MODEL),)))
        made = Made(held.id, 0, b"12345678", b"87654321")
        assert await journal.add_vectors("u1", "other-2", [made]) == 1
        before, after = Space(MODEL, 4, 1), Space("other-2", 2, 1)
        await journal.set_spaces(Spaces(in_force=before, next=after, old=None))
        assert await journal.scan_memory("u1", True, visited) == vector(9)
        await journal.set_spaces(Spaces(in_force=after, next=None, old=before))
        assert await journal.scan_memory("u1", True, visited) == b"87654321"
        assert await journal.drop_vectors(MODEL, -1, 10) is not None
        assert await journal.drop_vectors(MODEL, 1 << 40, 10) is None
        assert await journal.scan_memory("u1", True, visited) == b"87654321"

    async def test_large_image_has_only_vectors_missing_in_index(self, journal: Journal) -> None:
        rows = (row(fragment(0)), row(fragment(1)), row(fragment(2, Tier.SHORT_TERM)))
        await journal.commit(transition(1, rows=rows, index=(IndexEntry("u1", fragment(1).id),)))
        image = await journal.load_memory("u1", fragment(0).model, 2)
        assert [one.vector is not None for one in image.rows] == [False, True, True]
        image = await journal.load_memory("u1", fragment(0).model, 3)
        assert [one.vector is not None for one in image.rows] == [True, True, True]

    async def test_gathering_gets_all_blocks_one_by_one(self, journal: Journal) -> None:
        count = 2_100
        rows = [Row(fragment(at, model="")) if at % 700 == 3 else row(fragment(at)) for at in range(count)]
        rows[1_500] = row(fragment(1_500, Tier.SHORT_TERM))
        await journal.commit(transition(1, rows=tuple(rows)))
        vectored = sum(one.vector is not None for one in rows)
        for vectors_max, told in ((vectored, True), (vectored - 1, False)):
            whole, gathered = await image(journal, vectors_max), Gathered()
            found = await journal.load_memory("u1", MODEL, vectors_max, gathered)
            assert gathered.told == [told, "end"]
            assert len(gathered.blocks) > 1
            assert [one for block in gathered.blocks for one in block.iterate_rows()] == list(whole.rows)
            assert [one.fragment for one in whole.rows] == [one.fragment for one in rows]
            assert sum(one.vector is not None for one in whole.rows) == (vectored if told else 1)
            assert (found.blocks, found.record, found.next_position) == ((), whole.record, whole.next_position)
            assert [held.fragment.position for held in found.short_term] == [1_500]

    async def test_reads_see_earlier_writes_in_one_snapshot(self, journal: Journal) -> None:
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
