"""The sessions of a memory: against the plain reading, and page by page."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.columns import Columns, Mask
from memstream_server.core.session_summaries import SPEAKERS_MAX, SessionQuery, SessionSummary, summarize_sessions
from memstream_server.core.values import Fragment, Tier

FRAGMENTS = st.lists(
    st.builds(
        Fragment,
        id=st.just("replaced"),
        content=st.just(""),
        tier=st.sampled_from(Tier),
        speaker=st.sampled_from(["", "Ann", "Bob"]),
        session=st.sampled_from(["", "a", "ab", "b"]),
        observe_time_us=st.integers(-2, 3),
        forget_time_us=st.none() | st.just(1),
    ),
    max_size=12,
)
BOUND = st.none() | st.integers(-3, 4)


def fill(fragments: list[Fragment]) -> tuple[Columns, list[Fragment]]:
    columns = Columns()
    numbered = [each.but(id=str(number), position=number) for number, each in enumerate(fragments)]
    for each in numbered:
        columns.append(each)
    return columns, numbered


def summarize_plainly(fragments: list[Fragment], query: SessionQuery) -> list[SessionSummary]:
    found = []
    for session in {each.session for each in fragments} - {""}:
        of_it = [each for each in fragments if each.session == session]
        times = [each.observe_time_us for each in of_it]
        speakers = Counter(each.speaker for each in of_it if each.speaker)
        starts = query.until_us is None or min(times) < query.until_us
        if session.startswith(query.prefix) and starts and (query.from_us is None or max(times) >= query.from_us):
            position = min(each.position for each in of_it)
            names = tuple(sorted(speakers))
            found.append(SessionSummary(session, min(times), max(times), len(of_it), names, len(speakers), position))
    return sorted(found, key=lambda one: (-one.last_us, one.position))


@given(FRAGMENTS, st.sampled_from(["", "a", "ab", "x"]), BOUND, BOUND)
def test_summaries_equal_the_plain_reading(
    fragments: list[Fragment], prefix: str, from_us: int | None, until_us: int | None
) -> None:
    columns, numbered = fill(fragments)
    query = SessionQuery(prefix, from_us, until_us)
    found = summarize_sessions(columns, columns.alive, query)
    live = [each for each in numbered if each.forget_time_us is None]
    assert [replace(one, speakers=tuple(sorted(one.speakers))) for one in found] == summarize_plainly(live, query)


@given(FRAGMENTS, st.integers(1, 3))
def test_pages_join_to_the_whole(fragments: list[Fragment], size: int) -> None:
    columns, _ = fill(fragments)
    whole = summarize_sessions(columns, columns.alive, SessionQuery())
    joined: list[SessionSummary] = []
    query = SessionQuery(limit=size)
    while page := summarize_sessions(columns, columns.alive, query):
        joined += page
        query = replace(query, after=(page[-1].last_us, page[-1].position))
    assert joined == whole


def test_speakers_with_most_fragments_come_first() -> None:
    many = [f"s{number}" for number in range(SPEAKERS_MAX + 2)]
    columns, _ = fill([Fragment("", "", Tier.SENSORY, session="a", speaker=each) for each in [*many, many[-1]]])
    (found,) = summarize_sessions(columns, columns.alive, SessionQuery())
    assert found.speakers[0] == many[-1]
    assert (len(found.speakers), found.speaker_count) == (SPEAKERS_MAX, len(many))


def test_memory_without_sessions_has_no_summary() -> None:
    nothing: Mask = np.zeros(0, np.bool_)
    assert summarize_sessions(Columns(), nothing, SessionQuery()) == []
