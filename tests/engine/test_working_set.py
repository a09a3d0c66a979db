"""The search structures are the same whether they are refreshed after every commit or once after many."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.core.filters import Listing
from memstream_server.core.lexical import query_terms
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.memory import working_set
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.memory.working_set import WorkingSet
from memstream_server.engine.requests import AckLevel
from memstream_server.ports.journal.writing import Commit
from tests.engine.assembled import NAMESPACE, Assembled, assembled
from tests.engine.memory import observation
from tests.engine.test_producers import create

NAME = (NAMESPACE, "joy")
WORDS = ["apple", "plum", "bread", "river", "stone", "lamp", "letter", "window", "garden", "music", "night", "rain"]


class Twins:
    """Applies a memory's commits to two more working sets: one refreshed after each commit, one never."""

    def __init__(self, patch: pytest.MonkeyPatch, vectors: bool) -> None:
        self.looked_at: WorkingSet | None = None
        self.left_alone: WorkingSet | None = None
        self.waiting: list[int] = []
        """Pending rows after each commit."""
        apply = WorkingSet.apply_commit

        def also(working: WorkingSet, commit: Commit, decision: Decision) -> None:
            if self.looked_at is None:
                self.looked_at, self.left_alone = _like(working, vectors), _like(working, vectors)
            apply(working, commit, decision)
            for twin in (self.looked_at, self.left_alone):
                assert twin is not None
                apply(twin, commit, decision)
            self.looked_at.refresh_search()
            assert self.left_alone is not None
            _same_answers(self.looked_at, self.left_alone, [row.fragment.id for row in commit.rows])
            self.waiting.append(len(self.left_alone._pending))

        patch.setattr(WorkingSet, "apply_commit", also)


def _like(working: WorkingSet, vectors: bool) -> WorkingSet:
    twin = WorkingSet(working.embedding, 1_000, working._analyzer)
    twin.begin(working.record, vectors)
    twin.state = working.state
    return twin


def _same_answers(one: WorkingSet, other: WorkingSet, ids: Sequence[str]) -> None:
    """The queries of decisions, which must not wait for a refresh."""
    for id_ in (*ids, "unknown"):
        assert one.tier_of(id_) == other.tier_of(id_)
        assert one.is_forgotten(id_) == other.is_forgotten(id_)
    assert one.list_unsettled() == other.list_unsettled()
    assert one.insights == other.insights
    assert all(one.id_of(f"key-{number}") == other.id_of(f"key-{number}") for number in range(5))


def _same_searches(one: WorkingSet, other: WorkingSet) -> None:
    """By id, whatever their slots."""
    assert one.fragment_count == other.fragment_count > 0
    ids = sorted(one.columns.live_ids())
    assert ids == sorted(other.columns.live_ids())
    mine, theirs = one.columns.slots(ids), other.columns.slots(ids)
    held = ("alive", "session", "speaker", "role", "characters", "importance", "observe_us", "create_us", "asks")
    for column in held:
        assert getattr(one.columns, column)[mine].tolist() == getattr(other.columns, column)[theirs].tolist(), column
    analyzer, embedder = SnowballAnalyzer(), HashingEmbedder()
    for word in WORDS:
        terms = query_terms(analyzer.terms(f"{word} stone", "english").hashes)
        legs, same = one.legs(terms), other.legs(terms)
        np.testing.assert_allclose(legs.alone.shares[mine], same.alone.shares[theirs], rtol=1e-5)
        np.testing.assert_allclose(legs.around.shares[mine], same.around.shares[theirs], rtol=1e-5)
        following, asked = legs.after_questions(mine, one.columns.asks)
        same_following, same_asked = same.after_questions(theirs, other.columns.asks)
        assert following.tolist() == same_following.tolist()
        assert [one.columns.ids[slot] for slot in asked] == [other.columns.ids[slot] for slot in same_asked]
        assert legs.dialogue is not None
        assert same.dialogue is not None
        assert legs.dialogue.context[mine].tolist() == same.dialogue.context[theirs].tolist()
        for name in ("messages", "replies"):
            each, its = getattr(legs.dialogue, name)[mine], getattr(same.dialogue, name)[theirs]
            assert [one.columns.ids[slot] if slot >= 0 else "" for slot in each] == [
                other.columns.ids[slot] if slot >= 0 else "" for slot in its
            ], name
        if one.dense is not None and other.dense is not None:
            query = embedder.vectors([word])[0]
            np.testing.assert_array_equal(one.dense.cosines(query)[mine], other.dense.cosines(query)[theirs])
    assert one.get_vectors(ids).keys() == other.get_vectors(ids).keys()


async def _live(parts: Assembled, chance: random.Random) -> None:
    """One change of a memory."""
    engine = parts.engine
    words = " ".join(chance.choices(WORDS, k=4))
    kind = chance.choice(["new"] * 6 + ["keyed", "change", "forget", "restore"])
    fragments = (await engine.fragments.list_page(*NAME, Listing(forgotten=kind == "restore"), -1, 100))[0]
    if kind == "change" and fragments:
        await engine.fragments.update(*NAME, FragmentChange(chance.choice(fragments).id, content=words))
    elif kind == "forget" and fragments:
        await engine.fragments.forget(*NAME, [chance.choice(fragments).id])
    elif kind == "restore":
        await engine.fragments.restore(*NAME, [one.id for one in fragments[:1]])
    else:
        key = f"key-{chance.randrange(5)}" if kind == "keyed" else ""
        session, speaker = chance.choice(["a", "b", ""]), chance.choice(["Ada", "Bob", "AI"])
        said = observation(words, session=session, speaker=speaker, external_id=key)
        await engine.observe_batch(*NAME, "", 1, [said], AckLevel.STORED)


@pytest.mark.parametrize("vectors", [True, False], ids=["vectors in RAM", "vectors in the index"])
@pytest.mark.parametrize("seed", range(4))
async def test_late_refresh_shows_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, vectors: bool
) -> None:
    monkeypatch.setattr(working_set, "UNSHOWN_MAX", 10_000)
    twins, chance = Twins(monkeypatch, vectors), random.Random(seed)
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        for _ in range(60):
            await _live(parts, chance)
    assert max(twins.waiting) > 30, "the one really had to look late"
    assert twins.looked_at is not None
    assert twins.left_alone is not None
    _same_searches(twins.looked_at, twins.left_alone)


@pytest.mark.parametrize("size", [1, working_set.SHOWN_PER_SLICE * 3])
async def test_pending_rows_stay_bounded(tmp_path: Path, size: int) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        async with parts.actors.use(*NAME) as actor:
            waiting = list[int]()
            for number in range(working_set.UNSHOWN_MAX * 3):
                batch = [observation(f"line {number} {place}") for place in range(size)]
                await parts.engine.observe_batch(*NAME, "", 1, batch, AckLevel.STORED)
                await actor.run(lambda now: waiting.append(len(now.working._pending)))  # after the batch's commit
                if size > 1 and number == 2:
                    break
            assert max(waiting) <= working_set.UNSHOWN_MAX
            assert len(actor.working.columns) == size * len(waiting)
