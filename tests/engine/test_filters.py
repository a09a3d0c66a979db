"""One filter selects the same in RAM, over the vector index, in the journal and in the past."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream_server.core.filters import Filter, Listing, Order, passes
from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import Fragment, MemoryKind, MetadataValue
from memstream_server.engine.requests import AckLevel, AsOf, NewMemory, Query
from tests.core_recall.test_filters import FILTERS, VALUES
from tests.engine.assembled import assembled
from tests.engine.memory import observation
from tests.support.scripted_models import VECTOR_BYTES
from tests.support.seeds import rounds

NAME = ("test", "tea")
METADATA = st.dictionaries(st.sampled_from("xy"), VALUES, max_size=2)


@pytest.mark.drawn
@settings(max_examples=rounds(30, 3), deadline=None)
@given(st.lists(METADATA, min_size=8, max_size=12), st.lists(FILTERS, min_size=8, max_size=8))
def test_all_evaluators_agree(metadata: list[dict[str, MetadataValue]], filters: list[Filter]) -> None:
    asyncio.run(compare(metadata, filters))


async def compare(metadata: list[dict[str, MetadataValue]], filters: list[Filter]) -> None:
    with tempfile.TemporaryDirectory() as place:
        async with assembled(Path(place), dense_bytes_max=4 * VECTOR_BYTES) as parts:
            engine = parts.engine
            await engine.memories.create(NewMemory(*NAME, MemoryKind.LONG_TERM, DEFAULT))
            said = [
                observation(
                    f"tea number {number}",
                    metadata=tuple(sorted(each.items())),
                    external_id=f"doc/{number}" if number % 2 else "",
                    speaker=("Ann", "ANN ", "Bob", "")[number % 4],
                    session=("", "s", "t")[number % 3],
                )
                for number, each in enumerate(metadata)
            ]
            await engine.observe_batch(*NAME, "", 1, said, AckLevel.STORED)
            whole = (await engine.fragments.list_page(*NAME, Listing(), -1, 100))[0]
            revision = (await engine.memories.get(*NAME)).revision
            for chosen in filters:
                expected = {one.content for one in whole if passes(one, chosen)}
                query = Query("tea number", limit=100, filter=chosen, fold=False, reinforce=False, min_relevance=0.0)
                answer = await engine.recall(*NAME, query)
                assert {one.fragment.content for one in answer.recollections} == expected
                assert answer.eligible == len(expected)
                for listing in (Listing(chosen), Listing(chosen, order=Order.IMPORTANCE)):
                    assert contents((await engine.fragments.list_page(*NAME, listing, -1, 100))[0]) == expected
                past = await engine.past.list_page(*NAME, AsOf(revision=revision), Listing(chosen), -1, 100)
                assert contents(past[0]) == expected


def contents(fragments: list[Fragment]) -> set[str]:
    return {one.content for one in fragments}
