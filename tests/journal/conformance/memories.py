"""Memories and namespaces: create, list, own, delete."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from memstream_server.adapters.journal.sql import codec
from memstream_server.core.events import Event, EventType
from memstream_server.core.values import Tier
from memstream_server.ports.journal.errors import AlreadyExists, NamespaceFull, StaleWrite
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import Job, Labels, Recorded
from tests.journal.samples import MODEL, fragment, receipt, record, row, transition


class Memories:
    """See suite.py."""

    async def test_created_memory_reads_back(self, journal: Journal) -> None:
        assert await journal.get_memory("comedy", "joy") == replace(record(), epoch=1, revision=1)
        assert await journal.get_memory("comedy", "jo") is None
        assert await journal.get_memory("tragedy", "joy") is None
        assert await journal.list_events("u1", 0, 10) == [Recorded(1, 1, (Event(EventType.MEMORY_CREATED, ""),))]

    async def test_name_is_unique_in_namespace(self, journal: Journal) -> None:
        with pytest.raises(AlreadyExists, match="comedy/joy"):
            await journal.create_memory(record("u2"), ())
        await journal.create_memory(record("u2", namespace="drama"), ())
        assert await journal.list_namespaces("", 10) == [("comedy", 1), ("drama", 1)]

    async def test_concurrent_creation_refuses_duplicate_only(self, journal: Journal) -> None:
        made = [journal.create_memory(record(f"x{place}", f"m{place // 2}"), ()) for place in range(6)]
        results = await asyncio.gather(*made, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), AlreadyExists] * 3
        assert [one.uid for one in await journal.list_memories("comedy", "joy", 9)] == ["x0", "x2", "x4"]

    async def test_namespace_limit_holds_under_concurrency(self, journal: Journal) -> None:
        made = [journal.create_memory(record(f"x{place}", f"m{place}"), (), None, 3) for place in range(6)]
        results = await asyncio.gather(*made, return_exceptions=True)
        assert [type(result) for result in results] == [type(None)] * 2 + [NamespaceFull] * 4
        with pytest.raises(AlreadyExists):
            await journal.create_memory(record("y", "m0"), (), None, 3)
        await journal.create_memory(record("y", namespace=""), (), None, 1)
        await journal.own_memory("y")
        renaming = replace(transition(1, name=("comedy", "moved"), namespace_max=3), memory="y")
        with pytest.raises(NamespaceFull):
            await journal.commit(renaming)
        await journal.delete_memory("x0")
        await journal.commit(renaming)
        assert await journal.list_namespaces("", 10) == [("comedy", 3)]

    async def test_memories_and_namespaces_are_paged(self, journal: Journal) -> None:
        for name in ("b", "a", "c"):
            await journal.create_memory(record(f"d-{name}", name, "drama"), ())
        assert [one.name for one in await journal.list_memories("drama", "", 2)] == ["a", "b"]
        assert [one.name for one in await journal.list_memories("drama", "b", 2)] == ["c"]
        assert await journal.list_namespaces("comedy", 5) == [("drama", 3)]
        assert await journal.list_namespaces("", 1) == [("comedy", 1)]

    async def test_memories_are_listed_by_prefix(self, journal: Journal) -> None:
        for name in ("n.bob", "n.bob.x", "n.bob~2d", "n.boc", "n.Bob", "n"):
            await journal.create_memory(record(f"e-{name}", name, "epos"), ())
        listed = await journal.list_memories("epos", "", 9, "n.bob")
        assert [one.name for one in listed] == ["n.bob", "n.bob.x", "n.bob~2d"]
        assert [one.name for one in await journal.list_memories("epos", "n.bob", 1, "n.bob")] == ["n.bob.x"]
        assert await journal.list_memories("epos", "n.boc", 9, "n.bob") == []

    async def test_memories_are_listed_by_labels(self, journal: Journal) -> None:
        labels = {
            "a": (("team", "core"), ("tier", "gold")),
            "b": (("team", "core"),),
            "c": (("tier", "gold"), ("x", "core")),
            "d": (("team", "Core"),),
            "e": (("core", "team"),),
            "f": (("team", 'co"re\\\x00茶%_'),),
            "g": (("],[", "v"), ("x[", ",")),
        }
        for name, pairs in labels.items():
            await journal.create_memory(replace(record(f"l-{name}", name, "epos"), labels=pairs), ())

        async def named(*pairs: tuple[str, str], after: str = "", limit: int = 9, prefix: str = "") -> str:
            return "".join(one.name for one in await journal.list_memories("epos", after, limit, prefix, pairs))

        assert await named(("team", "core")) == "ab"
        assert await named(("team", "core"), ("tier", "gold")) == "a"
        assert await named(("tier", "gold")) == "ac"
        assert await named(("tier", "gold"), limit=1) == "a"
        assert await named(("tier", "gold"), limit=1, after="a") == "c"
        assert await named(("tier", "gold"), prefix="c") == "c"
        assert await named(*labels["f"]) == "f"
        assert await named(*labels["g"]) == "g"
        assert await named(("team", "co")) == ""
        assert await named(("team", "%")) == ""
        assert await named(("team", "")) == ""

    async def test_text_of_a_label_inside_others_does_not_match(self, journal: Journal) -> None:
        # Written as JSON, the labels of the first six contain the text of the pair that is searched.
        inside, wanted = (("x[", ","), ("]", "y")), (",", "],[")
        for number in range(6):
            await journal.create_memory(replace(record(f"i{number}", f"m{number}", "epos"), labels=inside), ())
        await journal.create_memory(replace(record("i6", "m6", "epos"), labels=(wanted,)), ())
        assert codec.encode_labels((wanted,))[1:-1] in codec.encode_labels(inside)
        for limit in (1, 2, 9):
            assert [one.name for one in await journal.list_memories("epos", "", limit, "", (wanted,))] == ["m6"]

    async def test_labels_of_a_commit_are_those_that_are_listed(self, journal: Journal) -> None:
        await journal.commit(transition(1, labels=(("team", "core"),)))
        assert [one.name for one in await journal.list_memories("comedy", "", 9, "", (("team", "core"),))] == ["joy"]

    async def test_a_label_finds_a_memory_by_its_present_name(self, journal: Journal) -> None:
        blue, red = (("team", "blue"),), (("team", "red"),)

        async def named(namespace: str, labels: Labels) -> list[str]:
            return [one.name for one in await journal.list_memories(namespace, "", 9, "", labels)]

        await journal.create_memory(replace(record("u0", "staged", ""), labels=blue), ())
        await journal.own_memory("u0")
        renaming = transition(1, name=("drama", "sorrow"), namespace_max=0)
        await journal.commit(replace(renaming, memory="u0"))
        assert (await named("", blue), await named("drama", blue)) == ([], ["sorrow"])
        await journal.commit(replace(transition(2, labels=red), memory="u0"))
        assert (await named("drama", blue), await named("drama", red)) == ([], ["sorrow"])
        await journal.delete_memory("u0")
        await journal.create_memory(replace(record("u2", "sorrow", "drama"), labels=blue), ())
        assert (await named("drama", blue), await named("drama", red)) == (["sorrow"], [])

    async def test_taking_ownership_fences_older_owner(self, journal: Journal) -> None:
        assert (await journal.own_memory("u1")).epoch == 2
        for write in (
            journal.commit(transition(1)),
            journal.receive(receipt(1, 1, 0)),
            journal.open_producer("u1", 1, "q"),
        ):
            with pytest.raises(StaleWrite):
                await write
        with pytest.raises(StaleWrite):
            await journal.own_memory("nobody")
        with pytest.raises(StaleWrite):
            await journal.load_memory("nobody", MODEL, 0)

    async def test_deleted_memory_leaves_only_outbox_entries(self, journal: Journal) -> None:
        rows = (row(fragment(0)), row(fragment(1, Tier.SHORT_TERM)))
        await journal.commit(transition(1, rows=rows, jobs=(Job("j", "u1", "reflection", "{}"),)))
        await journal.receive(receipt(1, 2, 2))
        await journal.delete_memory("u1")
        assert await journal.get_memory("comedy", "joy") is None
        assert await journal.get_fragments("u1", [fragment(0).id]) == []
        assert await journal.list_fragments("u1", FragmentQuery()) == []
        assert await journal.list_events("u1", 0, 9) == []
        assert await journal.list_jobs(9) == []
        assert await journal.pending_memories() == []
        assert [(entry.memory, entry.fragment, found) for entry, found in await journal.read_outbox(9)] == [
            ("u1", fragment(0).id, None)
        ]
        with pytest.raises(StaleWrite):
            await journal.delete_memory("u1")

    async def test_recreated_memory_is_empty(self, journal: Journal) -> None:
        await journal.commit(transition(1, rows=(row(fragment(0)),)))
        await journal.receive(receipt(1, 1, 1))
        await journal.delete_memory("u1")
        await journal.create_memory(record("u9"), ())
        await journal.own_memory("u9")
        found = await journal.load_memory("u9", MODEL, 100)
        assert (found.rows, found.pending, found.producers, found.next_position) == ((), (), (), 0)

    async def test_deleting_large_memory_keeps_others(self, journal: Journal) -> None:
        await journal.create_memory(record("u2", "sad"), ())
        await journal.own_memory("u2")
        mine = tuple(row(fragment(position)) for position in range(2_500))
        await journal.commit(transition(1, rows=mine))
        await journal.commit(replace(transition(1, rows=mine[:3]), memory="u2"))
        deletion = asyncio.ensure_future(journal.delete_memory("u1"))
        await journal.commit(replace(transition(2, rows=(row(fragment(3)),)), memory="u2"))
        await deletion
        assert await journal.outbox_size() == 2_500
        assert (await journal.count_fragments("u2")).long_term == 4
        assert len(await journal.get_vectors("u2", MODEL, [one.fragment.id for one in mine])) == 4
        assert [one.revision for one in await journal.list_events("u2", 0, 9)] == [1, 2, 3]

    async def test_epochs_are_read_of_memories_that_exist(self, journal: Journal) -> None:
        await journal.create_memory(record("u0", "tragedy"), ())
        before = (await journal.read_epochs(["u0", "u1"]))["u1"]
        taken = await journal.own_memory("u1")
        many = [f"none{number}" for number in range(600)]
        assert await journal.read_epochs(["u0", *many, "u1"]) == {"u0": 0, "u1": before + 1}
        assert taken.epoch == before + 1
        assert await journal.read_epochs([]) == {}

    async def test_all_memories_are_ordered_by_uid(self, journal: Journal) -> None:
        await journal.create_memory(record("u0", "joy", "tragedy"), ())
        await journal.create_memory(record("u2", "sad"), ())
        assert [one.uid for one in await journal.all_memories("", 10)] == ["u0", "u1", "u2"]
        assert [one.uid for one in await journal.all_memories("u0", 1)] == ["u1"]
        assert await journal.all_memories("u2", 10) == []
