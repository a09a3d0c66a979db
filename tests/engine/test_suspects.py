"""The fragments that a newcomer is compared with: the same as by plain loops over a memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.lexical import idf
from memstream_server.core.pick_best import expand_spans, pick_best, sort_items
from memstream_server.core.policy import DEFAULT
from memstream_server.core.suspicions import CANDIDATES_MAX, COMMON_MIN, COMMON_SHARE, Suspicion
from memstream_server.core.values import Fragment, MemoryKind
from memstream_server.engine.engine import Engine
from memstream_server.engine.memory import actor, suspects
from memstream_server.engine.memory.enrich import EnrichedFragment
from memstream_server.engine.memory.working_set import WorkingSet
from memstream_server.engine.requests import AckLevel, NewMemory
from memstream_server.engine.runtime.dependencies import Storage
from memstream_server.ports.models import Analyzer
from tests.engine.memory import observation

Triple = tuple[int, int, float]
TRIPLES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from([0.1, 0.2, 0.3, 1.0])))


@given(TRIPLES)
def test_the_best_are_those_of_plain_loops(given: list[Triple]) -> None:
    owners, items = (np.array([one[place] for one in given], int) for place in (0, 1))
    weights = np.array([weight for _, _, weight in given], float)
    expected = []
    for owner in range(4):
        sums: dict[int, float] = {}
        for one, item, weight in given:
            if one == owner:
                sums[item] = sums.get(item, 0.0) + weight
        expected.append(sorted(sums, key=lambda item: (-sums[item], -item))[:3])
    assert pick_best(owners, items, weights, 4, 3) == expected
    assert sort_items(owners, items).tolist() == [item for _, item in sorted((one, two) for one, two, _ in given)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4))))
def test_spans_expand_to_all_their_places(given: list[tuple[int, int]]) -> None:
    starts, lengths = np.array([one for one, _ in given], int), np.array([one for _, one in given], int)
    which, places = expand_spans(starts, starts + lengths)
    expected = [(index, start + step) for index, (start, length) in enumerate(given) for step in range(length)]
    assert list(zip(which.tolist(), places.tolist(), strict=True)) == expected


def candidates_by_loops(working: WorkingSet, one: suspects._Read) -> list[str]:
    columns, lexical = working.columns, working.lexical
    sums: dict[int, float] = {}
    for term in sorted({term for claim in one.claims for term in claim.terms}):
        slots = np.sort(lexical.sharing(np.array([term], np.uint64))[1]).tolist()
        (weight,) = idf(lexical.live, np.array([len(slots)]))
        for slot in slots[-suspects.LATEST_PER_TERM :]:
            sums[slot] = sums.get(slot, 0.0) + float(weight)
    codes = columns.speakers.find_codes([one.fragment.speaker])
    same = [slot for slot in sums if columns.speaker[slot] in codes and not columns.asks[slot]]
    return [columns.ids[slot] for slot in sorted(same, key=lambda slot: (-sums[slot], -slot))[:CANDIDATES_MAX]]


def common_by_loops(working: WorkingSet, new: Sequence[suspects._Read]) -> set[int]:
    terms = {term for one in new for claim in one.claims for term in claim.terms}
    counts = {term: len(working.lexical.sharing(np.array([term], np.uint64))[1]) for term in terms}
    return {term for term, count in counts.items() if count > max(COMMON_MIN, COMMON_SHARE * working.lexical.live)}


def group_by_loops(gathered: Sequence[EnrichedFragment], one: suspects._Read) -> list[Fragment]:
    wanted = {term for claim in one.claims for term in claim.terms}
    shared: Counter[int] = Counter()
    for number, part in enumerate(gathered):
        if part.fragment.id == one.fragment.id:
            break
        if part.fragment.speaker == one.fragment.speaker and suspects.may_be_suspected(part.fragment):
            shared[number] = len(wanted.intersection(np.frombuffer(part.terms.hashes, "<u8").tolist()))
    best = sorted((number for number in shared if shared[number]), key=lambda number: (-shared[number], -number))
    return [gathered[number].fragment for number in best[:CANDIDATES_MAX]]


PARTS = (
    ("I live in", "I moved to", "My sister lives in", "My rent is", "I am no longer in", "We like", "Is my home in"),
    ("Munich", "Berlin", "Oslo", "900 euros", "the river", "a red house"),
    ("near the river", "last month", "with my cat", "in May", "", "and work for Acme"),
)


async def test_compared_fragments_are_those_of_plain_loops(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    await engine.memories.create(NewMemory("ns", "m", MemoryKind.HYBRID, DEFAULT))
    monkeypatch.setattr(suspects, "LATEST_PER_TERM", 5)
    find, seen = suspects.find_suspicions, 0

    async def compared(
        working: WorkingSet, gathered: Sequence[EnrichedFragment], storage: Storage, analyzer: Analyzer
    ) -> list[Suspicion]:
        nonlocal seen
        read = [
            suspects._Read(part.fragment, analyzer.claims(part.fragment.content, "english", "ns", pointed=True))
            for part in gathered
            if suspects.may_be_suspected(part.fragment)
        ]
        if new := [one for one in read if one.claims]:
            wanted = suspects._list_wanted(new)
            candidates, common = suspects._find_candidates(working, new, wanted)
            assert [list(ids) for ids in candidates] == [candidates_by_loops(working, one) for one in new]
            assert common == common_by_loops(working, new)
            assert suspects._find_in_group(gathered, new, wanted) == [group_by_loops(gathered, one) for one in new]
            seen += sum(map(len, candidates))
        return await find(working, gathered, storage, analyzer)

    monkeypatch.setattr(actor, "find_suspicions", compared)
    draw, number = random.Random(7), 0
    for size in (1, 40, 1, 3, 60, 9, 1, 80):
        said = []
        for _ in range(size):
            number += 1
            text = f"{' '.join(map(draw.choice, PARTS))} {draw.randrange(9)}".strip()
            until = draw.choice([None, None, None, number])
            said.append(
                observation(text, speaker=draw.choice("AB"), observe_time_us=number * 60_000_000, valid_until_us=until)
            )
        await engine.observe_batch("ns", "m", "p", number - size + 1, said, AckLevel.STORED)
    assert seen > 100
