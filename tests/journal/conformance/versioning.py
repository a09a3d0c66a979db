"""Versions: what a commit keeps of the rows that it replaces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memstream_server.core.events import Event, EventType
from memstream_server.core.policy import DEFAULT, with_value
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.writing import Commit, Replaced
from tests.journal.samples import MODEL, fragment, row, transition, vector


def changing(revision: int, content: str, position: int = 1, **parts: object) -> Commit:
    """A commit that replaces the content of a fragment, and keeps at most ten versions."""
    changed = fragment(position, content=content, version=revision + 1)
    replaced = Replaced(changed.id, EventType.UPDATED, "key:ann", MODEL)
    given: dict[str, object] = {
        "events": (Event(EventType.UPDATED, changed.id),),
        "rows": (replace(row(changed), replaces=True),),
        "replaced": (replaced,),
        "versions_max": 10,
    }
    return transition(revision, **given | parts)


ID = fragment(1).id


class Versioning:
    """See the module."""

    async def kept(self, journal: Journal) -> list[str]:
        return [version.fragment.content for version in await journal.list_versions("u1", ID)]

    async def filled(self, journal: Journal, changes: int = 2) -> None:
        """A fragment with content "0", then "1" and so on, and another fragment."""
        rows = tuple(row(fragment(position, content="0")) for position in (0, 1))
        await journal.commit(transition(1, rows=rows))
        for number in range(changes):
            await journal.commit(changing(2 + number, str(number + 1)))

    async def test_version_is_the_row_that_was_replaced(self, journal: Journal) -> None:
        await self.filled(journal)
        latest, first = await journal.list_versions("u1", ID)
        assert (first.fragment.content, latest.fragment.content) == ("0", "1")
        assert (first.replaced, first.time_us, first.event, first.principal) == (3, 20, EventType.UPDATED, "key:ann")
        assert await journal.version_keys("u1") == {ID: [3, 4]}
        assert await journal.get_versions("u1", {ID: 9, fragment(0).id: 3}) == {}
        found = (await journal.get_versions("u1", {ID: 3}))[ID]
        assert (found.vector, found.model, found.terms) == (vector(1), MODEL, row(fragment(1)).terms)
        assert found.fragment == first.fragment
        (now,) = await journal.get_fragments("u1", [ID])
        assert now.content == "2"

    async def test_versions_beyond_the_limits_are_deleted(self, journal: Journal) -> None:
        await self.filled(journal, 4)
        assert await self.kept(journal) == ["3", "2", "1", "0"]
        await journal.commit(changing(6, "5", versions_max=2))
        assert await self.kept(journal) == ["4", "3"]
        await journal.commit(changing(7, "6", versions_since_us=65))
        assert await self.kept(journal) == ["5"]
        assert await journal.prune_versions("u1", 70) == 0
        assert await journal.prune_versions("u1", 71) == 1
        assert await self.kept(journal) == []

    async def test_versions_leave_with_their_fragment(self, journal: Journal) -> None:
        await self.filled(journal)
        await journal.commit(transition(4, removed=(ID,)))
        assert await journal.version_keys("u1") == {}

    async def test_versions_with_erased_words_are_deleted(self, journal: Journal) -> None:
        await self.filled(journal)
        await journal.commit(transition(4, forgotten_versions=(ID, fragment(0).id)))
        assert await self.kept(journal) == []
        assert len(await journal.get_fragments("u1", [ID])) == 1

    async def test_policy_that_is_off_deletes_all_versions(self, journal: Journal) -> None:
        await self.filled(journal)
        await journal.commit(transition(4, policy=DEFAULT))
        assert len(await self.kept(journal)) == 2
        await journal.commit(transition(5, policy=with_value(DEFAULT, "history.versions", 0)))
        assert await self.kept(journal) == []

    @pytest.mark.parametrize(("time_us", "revision"), [(0, None), (9, 1), (10, 2), (19, 2), (20, 3), (99, 4)])
    async def test_time_finds_the_last_revision(self, journal: Journal, time_us: int, revision: int | None) -> None:
        await self.filled(journal)
        assert await journal.find_revision("u1", time_us) == revision

    async def test_deleted_memory_has_no_versions(self, journal: Journal) -> None:
        await self.filled(journal)
        await journal.delete_memory("u1")
        assert await journal.version_keys("u1") == {}
        assert await journal.list_versions("u1", ID) == []
        assert await journal.get_versions("u1", {ID: 3}) == {}
        assert await journal.find_revision("u1", 99) is None
        assert await journal.prune_versions("u1", 99) == 0
