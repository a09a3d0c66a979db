"""Status and validity as columns, compared with the fragments' own answers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.columns import NEVER_US, Columns
from memstream_server.core.identity import fold_key
from memstream_server.core.supersession import CHAIN_MAX, Links
from memstream_server.core.values import Fragment, TruthStatus

TIMES = st.none() | st.integers(0, 10)
FRAGMENTS = st.lists(st.tuples(st.sampled_from(["", "newer"]), TIMES, TIMES), min_size=1, max_size=12)


def fragments_of(drawn: list[tuple[str, int | None, int | None]]) -> list[Fragment]:
    return [
        Fragment(id=str(number), content="tea", superseded_by=by, valid_from_us=begin, valid_until_us=end)
        for number, (by, begin, end) in enumerate(drawn)
    ]


@given(FRAGMENTS, FRAGMENTS, st.integers(0, 11))
def test_columns_say_what_the_fragments_say(
    first: list[tuple[str, int | None, int | None]], then: list[tuple[str, int | None, int | None]], now_us: int
) -> None:
    columns = Columns()
    known = fragments_of(first)
    columns.extend(known)
    for fragment in fragments_of(then)[: len(known)]:
        columns.update(fragment, says_else=False)
        known[int(fragment.id)] = fragment
    statuses = [fragment.status_at(now_us) for fragment in known]
    assert [columns.status_at(slot, now_us) for slot in range(len(known))] == statuses
    current = columns.is_current(now_us)
    expected = [status is TruthStatus.CURRENT for status in statuses]
    assert (np.ones(len(known), np.bool_) if current is None else current).tolist() == expected
    assert columns.words.tolist() == [fold_key(fragment) for fragment in known]
    bounds = [time for one in known for time in (one.valid_from_us, one.valid_until_us) if time is not None]
    assert columns.next_validity_us(now_us) == min((time for time in bounds if now_us < time < NEVER_US), default=None)


def test_memory_without_links_and_validity_compares_nothing() -> None:
    columns = Columns()
    columns.extend(fragments_of([("", None, None)] * 3))
    assert columns.is_current(5) is None
    assert columns.next_validity_us(5) is None


def test_fragments_of_another_truth_do_not_fold() -> None:
    known = fragments_of([("", None, None), ("newer", None, None), ("", 1, None), ("", None, 1)])
    assert len({fold_key(fragment) for fragment in known}) == len(known)


def test_long_chain_is_cut_to_its_newest() -> None:
    links = Links()
    count = CHAIN_MAX + 10
    for number in range(count):
        newer = str(number + 1) if number + 1 < count else ""
        links.note(
            Fragment(id=str(number), content="", superseded_by=newer, supersedes=(str(number - 1),) * (number > 0))
        )
    newest = [str(number) for number in range(10, count)]
    assert links.chain("0") == links.chain(str(count - 1)) == newest
    links.remove(str(count - 1))
    assert not Links().chain("0")
