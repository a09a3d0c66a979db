"""The token budget: order of leaving, the cut top hit, and what holds for any input."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.budget import Fit, Item, estimated_tokens, fit
from tests.support.arbitrary import UNICODE


def items(*sizes: int, prefix: str = "r") -> list[Item]:
    return [Item(f"{prefix}{place}", "x" * (4 * size)) for place, size in enumerate(sizes)]


def kept(answer: Fit) -> tuple[list[str], list[str]]:
    return [item.id for item in answer.ranked], [item.id for item in answer.working]


def test_tokens_are_utf8_bytes_over_four_rounded_up() -> None:
    assert [estimated_tokens(text) for text in ("", "a", "abcd", "abcde", "日本")] == [0, 1, 1, 2, 2]


def test_what_fits_stays_and_no_budget_is_no_limit() -> None:
    ranked, working = items(5, 5), items(5, prefix="w")
    assert fit(ranked, working, 15) == Fit(tuple(ranked), tuple(working), tokens=15)
    assert fit(ranked, working, 0).tokens == 15


def test_budget_removes_lowest_rank_first() -> None:
    ranked, working = items(5, 5, 5), items(5, 5, prefix="w")
    assert kept(fit(ranked, working, 20)) == (["r0", "r1"], ["w0", "w1"])
    assert kept(fit(ranked, working, 14)) == (["r0"], ["w1"])
    answer = fit(ranked, working, 5)
    assert kept(answer) == (["r0"], [])
    assert answer.removed == ("r2", "r1", "w0", "w1")
    assert not answer.top_cut


def test_the_top_hit_is_cut_and_flagged() -> None:
    answer = fit(items(10, 5), items(5, prefix="w"), 4)
    assert kept(answer) == (["r0"], [])
    assert (answer.ranked[0].text, answer.top_cut, answer.tokens) == ("x" * 16, True, 4)


def test_a_cut_never_splits_a_character() -> None:
    answer = fit([Item("a", "日本語日本語")], [], 2)
    assert answer.ranked[0].text == "日本"


def test_a_fragment_in_both_counts_once() -> None:
    shared = Item("both", "x" * 40)
    ranked, working = [Item("top", "x" * 40), shared], [shared]
    assert fit(ranked, working, 20).tokens == 20
    answer = fit(ranked, working, 19)
    assert kept(answer) == (["top"], [])
    assert answer.removed == ("both",)


def test_a_top_hit_that_is_working_keeps_both_places() -> None:
    top = Item("top", "x" * 40)
    answer = fit([top], [top, *items(5, prefix="w")], 10)
    assert kept(answer) == (["top"], ["top"])
    assert answer.removed == ("w0",)


def test_the_clients_own_count_is_used() -> None:
    answer = fit([Item("a", "x" * 100, tokens=10), Item("b", "y" * 100, tokens=3)], [], 5)
    assert kept(answer) == (["a"], [])
    assert (answer.top_cut, len(answer.ranked[0].text), answer.tokens) == (True, 50, 5)


ITEMS = st.lists(st.integers(0, 9), max_size=6, unique=True)
TEXTS = st.lists(st.text(UNICODE, max_size=30), min_size=10, max_size=10)


@given(ITEMS, ITEMS, TEXTS, st.integers(1, 60))
def test_the_budget_holds_and_everything_is_accounted_for(
    ranked: list[int], working: list[int], texts: list[str], budget: int
) -> None:
    def made(places: list[int]) -> list[Item]:
        return [Item(str(place), texts[place]) for place in places]

    answer = fit(made(ranked), made(working), budget)
    left = {item.id: item for item in (*answer.ranked, *answer.working)}
    assert answer.tokens == sum(item.cost for item in left.values()) <= budget
    assert {*left, *answer.removed} == {str(place) for place in (*ranked, *working)}
    assert len(answer.removed) == len(set(answer.removed))
    assert not left.keys() & set(answer.removed)
    assert [item.id for item in answer.ranked] == [str(place) for place in ranked[: len(answer.ranked)]]
    assert not ranked or answer.ranked
