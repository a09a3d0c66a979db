"""How many memories a query with scopes may select, and what merged answers keep."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import count
from operator import add
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.fragment_pb2 import FragmentFilter
from memstream.v1.scope_pb2 import RecallScope
from memstream_server.core.filters import Listing
from memstream_server.core.policy import Policy
from memstream_server.core.ranking import Stage
from memstream_server.core.values import MemoryKind
from memstream_server.engine.engine import Engine
from memstream_server.engine.errors import InvalidField
from memstream_server.engine.recall import scopes
from memstream_server.engine.recall.answers import list_fragments
from memstream_server.engine.requests import AckLevel, NewMemory, NewObservation, RecallAnswer
from memstream_server.rpc.scopes import ScopedCall
from tests.rpc.conftest import LIMITS
from tests.support.seeds import rounds


async def fill(opened: Engine, count: int) -> None:
    for number in range(count):
        await opened.memories.create(NewMemory("ns", f"m{number}", MemoryKind.LONG_TERM, Policy()))
        said = [NewObservation(f"tea of memory {number}"), NewObservation(f"tea with {'milk ' * number}")]
        await opened.observe_batch("ns", f"m{number}", "", 1, said, AckLevel.STORED)


def scoped(opened: Engine, *asked: RecallScope, **fields: Any) -> ScopedCall:
    query = pb.RecallQuery(text="tea", reinforce=False, scopes=asked, **fields)
    return ScopedCall(opened, None, LIMITS, query, "", None)  # type: ignore[arg-type]  # no other server is asked


async def test_a_selection_of_too_many_is_refused(real: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "MEMORIES_MAX", 3)
    await fill(real, 4)
    for prefix, most in (("ns/", False), ("ns/m", False), ("ns/m1", True)):
        query = scoped(real, RecallScope(prefix=prefix))
        if most:
            assert len(await query.find_memories()) == 1
        else:
            with pytest.raises(InvalidField, match=r"query\.scopes"):
                await query.find_memories()


async def test_the_merge_keeps_the_best_of_every_limit(real: Engine) -> None:
    await fill(real, 4)
    asked = [RecallScope(memory=f"ns/m{number}", weight=1 + number / 10) for number in range(4)]
    whole = scoped(real, *asked, limit=8)
    everything = (await whole.recall(await whole.find_memories(), None, now_us=2 * 10**15)).recollections
    assert len(everything) == 8
    for limit in range(1, 8):
        some = scoped(real, *asked, limit=limit)
        found = (await some.recall(await some.find_memories(), None, now_us=2 * 10**15)).recollections
        assert [(one.memory, one.fragment.id, one.scored.score) for one in found] == [
            (one.memory, one.fragment.id, one.scored.score) for one in everything[:limit]
        ]


_WORDS = ("tea", "milk", "kettle", "bicycle", "green", "tea tea")
_said = st.lists(
    st.tuples(st.lists(st.sampled_from(_WORDS), min_size=1, max_size=4), st.sampled_from(("ann", "out", "over"))),
    min_size=1,
    max_size=6,
)
_numbers = count()
_several = st.lists(st.tuples(_said, st.sampled_from((0.25, 1.0, 3.0))), min_size=1, max_size=3)
NOW_US = 2 * 10**15
ENDED_US = 10**15
"""In the past by the server's clock, which decides validity."""


@pytest.mark.drawn
@settings(max_examples=rounds(60, 6), deadline=None, suppress_health_check=list(HealthCheck))
@given(several=_several, limit=st.integers(1, 12), suspect=st.booleans())
async def test_laws_of_several_memories(
    real: Engine,
    several: list[tuple[list[tuple[list[str], str]], float]],
    limit: int,
    suspect: bool,
) -> None:
    """`out` is excluded by the filter, `over` by its validity: neither is ranked or counted."""
    namespace, allowed = f"laws-{next(_numbers)}", dict[str, set[str]]()
    policy = replace(Policy(), conflicts=replace(Policy().conflicts, suspect=suspect))
    for number, (said, _) in enumerate(several):
        await real.memories.create(NewMemory(namespace, f"m{number}", MemoryKind.LONG_TERM, policy))
        new = [
            NewObservation(
                f"{' '.join(words)} {place}",
                speaker=speaker,
                observe_time_us=ENDED_US - 1,
                valid_until_us=ENDED_US if speaker == "over" else None,
            )
            for place, (words, speaker) in enumerate(said)
        ]
        await real.observe_batch(namespace, f"m{number}", "", 1, new, AckLevel.STORED)
        listed, *_ = await real.fragments.list_page(namespace, f"m{number}", Listing(), -1, 99)
        allowed[f"{namespace}/m{number}"] = {one.id for one in listed if one.speaker == "ann"}
    weights = {path: weight for path, (_, weight) in zip(allowed, several, strict=True)}
    asked = [RecallScope(memory=path, weight=weight) for path, weight in weights.items()]
    chosen = FragmentFilter(none_of=[FragmentFilter(speakers=["out"])])

    async def ask(limit: int) -> RecallAnswer:
        query = scoped(real, *asked, filter=chosen, limit=limit, near_misses=50, omit_working_memory=True)
        return await query.recall(await query.find_memories(), None, now_us=NOW_US)

    answer, everything = await ask(limit), await ask(99)
    names = {"": next(iter(allowed))}  # one memory is asked as if alone
    seen = {path: set[str]() for path in allowed}
    for one in answer.recollections:
        seen[names.get(one.memory, one.memory)] |= {each.id for each in list_fragments(one)}
    for miss in answer.near_misses:
        if miss.stage not in (Stage.FILTER, Stage.VALIDITY):  # a near miss may say that it is excluded
            seen[names.get(miss.memory, miss.memory)].add(miss.scored.id)
    for path, ids in allowed.items():
        assert seen[path] <= ids
    counts = {path: len(ids) for path, ids in allowed.items()}
    assert {each.memory: each.answer.eligible for each in answer.memories} == (counts if len(several) > 1 else {})
    assert answer.eligible == sum(counts.values())
    merged = [(one.memory or names[""], one.fragment.id, one.scored.score) for one in everything.recollections]
    assert [one.fragment.id for one in answer.recollections] == [id_ for _, id_, _ in merged][:limit]

    query = scoped(real, *asked, filter=chosen, limit=99, omit_working_memory=True)
    found = await query.find_memories()
    counted = [await real.scopes.count_words(each.namespace, each.name, each.scope.query) for each in found]
    words = (reduce(add, counted),) if len(found) > 1 else ()
    single = []
    for each in found:
        alone = structs.replace(each.scope.query, now_us=NOW_US, words=words)
        ranked = (await real.recall(each.namespace, each.name, alone)).recollections
        single += [(each.path, one.fragment.id, one.scored.score) for one in ranked]
    assert sorted(merged) == sorted(single)
    if not suspect:
        assert merged == sorted(single, key=lambda one: -one[2] * weights[one[0]])
    led: dict[str, float] = {}  # a later twin has the place of the best of the twins that follow it
    for one, (path, _, score) in zip(everything.recollections, merged, strict=True):
        leader = one.later_id or one.fragment.id
        assert not one.later_id or leader == next(reversed(led)), "an earlier statement follows its later twin"
        led[leader] = max(led.get(leader, 0.0), score * weights[path])
    assert list(led.values()) == sorted(led.values(), reverse=True)
