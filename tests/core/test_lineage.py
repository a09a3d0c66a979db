"""The effect of an erasure on insights, merged contents and sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from memstream_server.core import lineage
from memstream_server.core.events import Event, EventType
from memstream_server.core.replay_events import fold_event, place_of
from memstream_server.core.values import Fragment, FragmentKind, Held, MemoryKind, State, Tier

EMPTY = State(MemoryKind.HYBRID, b"seed")


def told(id: str, content: str, *sources: str, count: int | None = None) -> Fragment:
    """A long-term fragment; the sources of a promoted one are its enhancers."""
    hits = len(sources) if count is None else count
    return Fragment(id=id, content=content, tier=Tier.LONG_TERM, sources=sources, enhancement_count=hits)


def insight(id: str, content: str, *sources: str) -> Fragment:
    return told(id, content, *sources, count=0).but(kind=FragmentKind.INSIGHT)


def followed(named: Sequence[str], *fragments: Fragment, merges: bool = False) -> tuple[set[str], dict[str, str]]:
    """(erased ids, contents of redacted fragments by id)."""
    erasure = lineage.trace_erasure(named, fragments, merges=merges)
    return {one.id for one in erasure.leaving}, {one.id: one.content for one in erasure.retold}


def test_nothing_derives_from_a_lone_fragment() -> None:
    assert followed(["a"], told("a", "tea"), told("b", "rain")) == ({"a"}, {})
    assert followed(["unknown"], told("b", "rain")) == (set(), {})


def test_erasure_follows_chains_of_insights() -> None:
    chain = [told("a", "tea"), told("b", "rain"), insight("i", "tea!", "a", "b"), insight("j", "tea?", "i")]
    assert followed(["a"], *chain, insight("k", "rain!", "b")) == ({"a", "i", "j"}, {})
    assert followed(["i"], *chain) == ({"i", "j"}, {})


@pytest.mark.parametrize("merges", [False, True])
def test_merged_words_are_cut_out(merges: bool) -> None:
    merged = told("f", "tea;more tea;green tea", "a", "b")
    parts = [told("a", "more tea"), told("b", "green tea"), merged]
    assert followed(["a"], *parts, merges=merges) == ({"a"}, {"f": "tea;green tea"})
    assert followed(["b"], *parts, merges=merges) == ({"b"}, {"f": "tea;more tea"})
    assert followed(["a", "b"], *parts, merges=merges) == ({"a", "b"}, {"f": "tea"})


def test_redacted_fragment_keeps_other_sources() -> None:
    merged = told("f", "tea;more", "a", "b", count=3).but(token_count=9)
    (after,) = lineage.trace_erasure(["a"], [told("a", "more"), merged], merges=False).retold
    assert (after.sources, after.enhancement_count, after.token_count, after.content) == (("b",), 2, 0, "tea")


def test_erasure_keeps_the_fragments_own_words() -> None:
    assert followed(["a"], told("a", "tea"), told("f", "tea;teapot;tea", "a")) == ({"a"}, {"f": "tea;teapot"})
    assert followed(["a"], told("a", "tea"), told("f", "tea", "a"), merges=True) == ({"a"}, {"f": "tea"})
    assert followed(["a"], told("a", "x;y"), told("f", "own;x;y;z", "a")) == ({"a"}, {"f": "own;z"})


def test_an_unmerged_fragment_only_loses_the_source() -> None:
    (after,) = lineage.trace_erasure(["a"], [told("a", "tea"), told("f", "rain", "a")], merges=False).retold
    assert (after.content, after.sources) == ("rain", ())


@pytest.mark.parametrize("source", [(), (told("a", "changed since"),)])
def test_unlocatable_words_erase_the_fragment(source: tuple[Fragment, ...]) -> None:
    merged = told("f", "tea;more tea", "a")
    assert followed(["a"], *source, merged, merges=True)[0] >= {"f"}
    assert followed(["a"], *source, merged, merges=False)[1] == {"f": "tea;more tea"}


def test_merged_structured_steps_are_erased_whole() -> None:
    merged = told("f", '[{"thought": "tea"}, {"thought": "secret"}]', "a")
    assert followed(["a"], told("a", "secret"), merged, merges=True) == ({"a", "f"}, {})


def test_erasure_follows_merged_contents() -> None:
    fragments = [
        told("a", "secret"),
        told("f", "tea;secret", "a"),
        told("g", "rain;tea;secret", "f"),
        insight("i", "of f", "f"),
        insight("j", "of g", "g"),
        insight("k", "of tea", "t"),
        told("t", "tea"),
    ]
    assert followed(["a"], *fragments, merges=True) == ({"a", "i", "j"}, {"f": "tea", "g": "rain;tea"})


def test_insight_on_unchanged_content_stays() -> None:
    assert followed(["a"], told("a", "x"), told("f", "tea", "a"), insight("i", "tea!", "f"))[0] == {"a"}


def test_erasure_events_replay_to_remaining() -> None:
    merged, plain = told("f", "tea;secret", "a", "b"), told("g", "rain", "a", count=4)
    held = Held(told("h", "snow", "a").but(tier=Tier.SHORT_TERM))
    before = {one.id: one for one in (told("a", "secret"), merged, plain, held.fragment, insight("i", "!", "a"))}
    erasure = lineage.trace_erasure(["a"], before.values(), merges=False)
    step = lineage.apply_erasure(replace(EMPTY, short_term=(held,)), erasure, before, {})
    places = {id_: place_of(one) for id_, one in before.items()}
    for event in step.events:
        fold_event(places, event)
    after = {id_: one for id_, one in before.items() if id_ not in step.removed} | {one.id: one for one in step.puts}
    assert places == {id_: place_of(one) for id_, one in after.items()}
    assert after["f"].content == "tea"
    assert after["f"].sources == ("b",)
    assert step.state.short_term[0].fragment == after["h"]
    assert Event(EventType.UPDATED, "f", importance=0.5) in step.events
    assert [event.fragment for event in step.events if event.type is EventType.UPDATED] == ["f"]
