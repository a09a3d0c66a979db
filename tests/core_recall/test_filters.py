"""Columns and filters: each condition, and the mask against the plain reading for any fragments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from memstream_server.core.arrays import Parts
from memstream_server.core.columns import GONE, Columns
from memstream_server.core.filters import (
    Filter,
    Listing,
    Order,
    Unmatched,
    find_unmatched,
    mask,
    order_slots,
    passes,
    search_metadata,
    visible,
)
from memstream_server.core.metadata import Condition
from memstream_server.core.values import Fragment, FragmentKind, MetadataValue, Tier

SCALARS: st.SearchStrategy[MetadataValue] = st.sampled_from(
    ["a", "ab", "2026-05-08", "2026-05-08T01:00:00+02:00", 1, 0, 1.0, True, False, 2.5, None]
)
VALUES: st.SearchStrategy[MetadataValue] = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(st.sampled_from("xn"), SCALARS, max_size=2)
)
METADATA = st.dictionaries(st.sampled_from("xy"), VALUES, max_size=2).map(lambda each: tuple(sorted(each.items())))
FRAGMENTS = st.builds(
    Fragment,
    id=st.just("replaced"),
    content=st.just(""),
    tier=st.sampled_from(Tier),
    kind=st.sampled_from(FragmentKind),
    speaker=st.sampled_from(["", "Ann", "ANN ", "Bob"]),
    session=st.sampled_from(["", "s", "t"]),
    importance=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    observe_time_us=st.integers(0, 4),
    create_time_us=st.integers(0, 4),
    expire_time_us=st.none() | st.integers(0, 4),
    forget_time_us=st.none() | st.just(1),
    metadata=METADATA,
    external_id=st.sampled_from(["", "doc/1", "x"]),
)
BOUND = st.none() | st.integers(0, 4)
SHARE = st.none() | st.sampled_from([0.0, 0.3, 0.5, 1.0])
MIDNIGHT_US = 1_778_198_400_000_000
"""2026-05-08T00:00:00Z."""
LIMITS: st.SearchStrategy[str | float | None] = st.none() | st.sampled_from(["a", "ab", 1, 1.0, 2.5])
CONDITIONS = st.builds(
    Condition,
    key=st.sampled_from("xyz"),
    values=st.lists(VALUES, max_size=2).map(tuple),
    path=st.lists(st.sampled_from("xn"), max_size=1).map(tuple),
    at_least=LIMITS,
    below=LIMITS,
    time_from_us=st.none() | st.just(MIDNIGHT_US),
    prefix=st.none() | st.just("a"),
    exists=st.none() | st.booleans(),
    any=st.booleans(),
) | st.builds(Condition, key=st.sampled_from("xyz"), values=st.lists(VALUES, min_size=1, max_size=2).map(tuple))


def filters_of(inside: st.SearchStrategy[tuple[Filter, ...]]) -> st.SearchStrategy[Filter]:
    return st.builds(
        Filter,
        sessions=st.lists(st.sampled_from(["", "s", "unseen"]), max_size=2).map(tuple),
        speakers=st.lists(st.sampled_from(["", "ann", "unseen"]), max_size=2).map(tuple),
        kinds=st.lists(st.sampled_from(FragmentKind), max_size=1).map(tuple),
        tiers=st.lists(st.sampled_from(Tier), max_size=2).map(tuple),
        observe_from_us=BOUND,
        observe_until_us=BOUND,
        create_from_us=BOUND,
        create_until_us=BOUND,
        importance_min=SHARE,
        importance_max=SHARE,
        metadata=st.lists(CONDITIONS, max_size=2).map(tuple),
        external_id_prefixes=st.sampled_from([(), (), ("doc/",), ("doc/", "x")]),
        excluded=st.lists(st.sampled_from(["0", "1", "nobody"]), max_size=2).map(tuple),
        all_of=inside,
        any_of=inside,
        none_of=inside,
    )


FILTERS = filters_of(st.lists(filters_of(st.just(())), max_size=2).map(tuple))


def columns_of(*fragments: Fragment) -> Columns:
    columns = Columns()
    for fragment in fragments:
        columns.append(fragment)
    return columns


def found(columns: Columns, chosen: Filter, now_us: int = 0) -> list[str]:
    return [columns.ids[slot] for slot in np.flatnonzero(mask(columns, chosen, now_us))]


@given(st.lists(st.tuples(FRAGMENTS, FRAGMENTS), max_size=6), FILTERS, st.integers(0, 4))
def test_the_mask_is_what_the_filter_says_of_each(
    pairs: list[tuple[Fragment, Fragment]], chosen: Filter, now_us: int
) -> None:
    """Each fragment is appended in one state and updated to another: only the last one counts."""
    befores = [before.but(id=str(place)) for place, (before, _) in enumerate(pairs)]
    afters = [after.but(id=str(place)) for place, (_, after) in enumerate(pairs)]
    columns = columns_of(*befores)
    for fragment in afters:
        columns.update(fragment)
    alive = [
        each.forget_time_us is None and (each.expire_time_us is None or each.expire_time_us > now_us) for each in afters
    ]
    assert visible(columns, now_us).tolist() == alive
    expected = [each.id for each, lives in zip(afters, alive, strict=True) if lives and passes(each, chosen)]
    assert found(columns, chosen, now_us) == expected
    slots = np.array([slot for slot in range(len(afters)) if slot % 2 == 0], np.int64)
    columns.keep(slots)
    expected = [each for each in expected if int(each) % 2 == 0]
    assert found(columns, chosen, now_us) == expected
    restored = Columns()
    packed = columns.pack()
    restored.unpack(Parts(packed.arrays, msgpack.decode(msgpack.encode(packed.values))))  # as an image keeps them
    assert found(restored, chosen, now_us) == expected
    assert restored.ids == columns.ids


@given(st.lists(st.tuples(FRAGMENTS, FRAGMENTS), min_size=1, max_size=6), FILTERS, st.data())
def test_tests_of_metadata_before_a_change_still_hold(
    pairs: list[tuple[Fragment, Fragment]], chosen: Filter, data: st.DataObject
) -> None:
    """Fragments are changed, appended or renumbered before, while and after their metadata are tested."""
    columns = columns_of(*(before.but(id=str(place)) for place, (before, _) in enumerate(pairs)))

    def change() -> None:
        kind = data.draw(st.sampled_from(["none", "update", "append", "keep"]))
        _, after = data.draw(st.sampled_from(pairs))
        if kind == "update":
            columns.update(after.but(id=data.draw(st.sampled_from([each for each in columns.ids if each != GONE]))))
        elif kind == "append":
            columns.append(after.but(id=f"new {len(columns)} {data.draw(st.integers())}"))
        elif kind == "keep":
            columns.keep(np.arange(data.draw(st.integers(0, 1)), len(columns)))
            columns.append(after.but(id=f"kept {data.draw(st.integers())}"))

    change()
    testing = search_metadata(columns, chosen)
    tested = None
    while tested is None:
        try:
            next(testing)
        except StopIteration as end:
            tested = end.value
        change()
    change()
    assert mask(columns, chosen, 0, tested=tested).tolist() == mask(columns, chosen, 0).tolist()


def test_parts_of_other_lengths_are_refused() -> None:
    packed = columns_of(Fragment("a", ""), Fragment("b", "")).pack()
    for values, arrays in (
        ({"ids": ["a"]}, {}),
        ({}, {"_importance": np.zeros(1, np.float32)}),
    ):
        with pytest.raises(ValueError, match=r"values|longer|shorter"):
            Columns().unpack(Parts({**packed.arrays, **arrays}, {**packed.values, **values}))


def test_true_is_not_one() -> None:
    columns = columns_of(
        Fragment("bool", "", metadata=(("paid", True),)), Fragment("number", "", metadata=(("paid", 1),))
    )
    assert found(columns, Filter(metadata=(Condition("paid", (True,)),))) == ["bool"]
    assert found(columns, Filter(metadata=(Condition("paid", (1.0,)),))) == ["number"]
    assert found(columns, Filter(metadata=(Condition("paid", (1, True)),))) == ["bool", "number"]


def test_a_condition_on_what_was_never_seen_finds_nothing() -> None:
    columns = columns_of(Fragment("a", ""))
    assert found(columns, Filter(sessions=("x",))) == []
    assert found(columns, Filter(metadata=(Condition("x", ("y",)),))) == []
    assert found(columns, Filter()) == ["a"]


SPELLINGS = [
    ("Ann Lee", "ann  lee"),
    ("José", "JOSE\u0301"),
    ("Straße", "STRASSE"),
    ("\uff22\uff4f\uff42", "bob"),
    ("\tBob\u00a0", "Bob"),
    ("ΑΣ", "ας"),
]
DIFFERENT = [("Ann", "Anne"), ("Ann Lee", "AnnLee"), ("José", "Jose"), ("Bob", "")]


@pytest.mark.parametrize(("speaker", "asked"), SPELLINGS)
def test_spellings_of_a_speaker_are_one_name(speaker: str, asked: str) -> None:
    one = Fragment("a", "", speaker=speaker)
    for name in (speaker, asked):
        chosen = Filter(speakers=(name,))
        columns = columns_of(one)
        assert (found(columns, chosen), passes(one, chosen)) == (["a"], True)
        assert find_unmatched(columns, chosen, 0) == ()


@pytest.mark.parametrize(("speaker", "asked"), DIFFERENT)
def test_other_names_stay_other_names(speaker: str, asked: str) -> None:
    one, chosen = Fragment("a", "", speaker=speaker), Filter(speakers=(asked,))
    columns = columns_of(one)
    assert (found(columns, chosen), passes(one, chosen)) == ([], False)
    assert find_unmatched(columns, chosen, 0) == (Unmatched("speakers", asked),)


def test_a_spelling_that_arrives_later_is_found() -> None:
    columns = columns_of(Fragment("a", "", speaker="Ann"))
    assert found(columns, Filter(speakers=("ann",))) == ["a"]
    columns.append(Fragment("b", "", speaker="ANN"))
    assert found(columns, Filter(speakers=("ann",))) == ["a", "b"]


def test_what_no_visible_fragment_has_is_unmatched() -> None:
    columns = columns_of(
        Fragment("a", "", speaker="Ann", session="s", metadata=(("x", 1),)),
        Fragment("b", "", speaker="Bob", session="t", metadata=(("y", 1),), forget_time_us=1),
        Fragment("c", "", speaker="Cy", session="u", metadata=(("z", 1),), expire_time_us=5),
    )
    names = Filter(
        sessions=("s", "t", "u"),
        speakers=("ANN", "Bob", "Cy"),
        metadata=tuple([Condition(key, (1 + (key == "x"),)) for key in "xyz"]),
    )
    gone = [("speakers", "Bob"), ("sessions", "t"), ("metadata", "y")]
    assert find_unmatched(columns, names, 0) == tuple(Unmatched(*each) for each in gone)
    expired = [("speakers", "Cy"), ("sessions", "u"), ("metadata", "z")]
    later = [each for both in zip(gone, expired, strict=True) for each in both]
    assert find_unmatched(columns, names, 9) == tuple(Unmatched(*each) for each in later)
    columns.update(Fragment("a", "", speaker="Dan"))
    assert find_unmatched(columns, Filter(metadata=(Condition("x", (1,)),)), 0) == (Unmatched("metadata", "x"),)


def test_slots_are_found_by_id_until_the_fragment_is_gone() -> None:
    columns = columns_of(Fragment("a", ""), Fragment("b", ""))
    assert (columns.slot("b"), columns.slot("c")) == (1, None)
    with pytest.raises(ValueError, match="slot already"):
        columns.append(Fragment("a", ""))
    columns.update(Fragment("a", "", forget_time_us=1))
    assert columns.slot("a") == 0
    columns.remove(0)
    columns.remove(0)
    assert columns.slot("a") is None
    assert columns.ids == [GONE, "b"]
    assert found(columns, Filter()) == ["b"]
    with pytest.raises(KeyError):
        columns.update(Fragment("a", ""))
    assert columns.append(Fragment("a", "")) == 2


def test_access_time_never_moves_backwards() -> None:
    columns = columns_of(*(Fragment(id_, "", create_time_us=5) for id_ in "abc"))
    columns.touch(columns.slots(["a", "c"]), 9)
    columns.touch(columns.slots(["c", "gone", "a"]), 7)
    assert columns.access_us.tolist() == [9, 5, 9]


def test_bytes_grow() -> None:
    assert columns_of(*(Fragment(str(number), "") for number in range(500))).bytes > Columns().bytes


KEYS = {
    Order.RECEIPT: lambda one: one.position,
    Order.OBSERVE_TIME: lambda one: one.observe_time_us,
    Order.IMPORTANCE: lambda one: one.importance,
    Order.ACCESS_TIME: lambda one: one.access_time_us,
    Order.LENGTH: lambda one: len(one.content),
    Order.SPEAKER: lambda one: one.speaker,
    Order.SESSION: lambda one: one.session,
    Order.TIER: lambda one: list(Tier).index(one.tier),
}


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("descending", [False, True])
def test_lists_are_ordered_by_each_attribute(order: Order, descending: bool) -> None:
    fragments = [
        Fragment(
            f"{at:02}",
            "x" * (at * 7 % 4),
            tier=list(Tier)[at % len(Tier)],
            speaker=("Bob", "", "Ann")[at % 3],
            session=("t", "s")[at % 2],
            importance=at * 5 % 7 / 7,
            observe_time_us=at * 3 % 5,
            access_time_us=at * 11 % 6,
            position=at,
        )
        for at in range(12)
    ]
    columns = columns_of(*fragments)
    slots = order_slots(columns, np.ones(len(fragments), bool), order, descending).tolist()
    expected = sorted(range(len(fragments)), key=lambda slot: KEYS[order](fragments[slot]), reverse=descending)
    assert slots == expected
    assert Listing(order=order, descending=descending).is_plain is (order is Order.RECEIPT and not descending)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", True),
        ("BOB'S", True),
        ("no word", False),
        ("note-7", True),
        ("note", False),
        ("t9xyzw", True),
        ("9xyzw", False),
        ("w", True),
    ],
)
def test_text_of_a_list_is_in_content_or_an_id(text: str, found: bool) -> None:
    one = Fragment("01J8ABCDEFGHJKMNPQRST9XYZW", "Bob's new phone", external_id="note-7")
    assert Listing(text=text).has_text(one) is found
    assert Listing(text=text).has(one, 0) is found
