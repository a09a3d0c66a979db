"""Lifecycle by request where values given from outside meet what the state holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memstream_server.core import lifecycle
from memstream_server.core.enhancement import merged_text
from memstream_server.core.events import Event, EventType, ModelUse, Purpose, Reason
from memstream_server.core.policy import DEFAULT
from memstream_server.core.replay_events import Place, fold_all
from memstream_server.core.tiers import Newcomer, observe
from memstream_server.core.values import Fragment, Held, MemoryKind, State, Tier, Vector

EAST: Vector = np.array([1, 0], dtype=np.float32)
SMALL = replace(DEFAULT, short_term=replace(DEFAULT.short_term, capacity=1))


def held(*ids: str) -> State:
    """A hybrid memory that observed these, alike to each other."""
    state = State(MemoryKind.HYBRID, b"seed")
    for position, id_ in enumerate(ids):
        newcomer = Newcomer(Fragment(id=id_, content=id_, position=position), EAST)
        state = observe(state, newcomer, DEFAULT, 0.8).state
    return state


def test_updated_enhancer_text_is_used_on_promotion() -> None:
    state = held("tea", "more tea")
    changed = state.short_term[1].fragment.but(content="coffee")
    anchor = lifecycle.update_fragment(state, changed, EAST).state.short_term[0]
    assert merged_text(anchor.fragment, anchor.enhancements) == "tea;coffee"


def test_a_change_without_new_content_keeps_the_vector() -> None:
    state = held("tea")
    pinned = lifecycle.update_fragment(state, state.short_term[0].fragment.but(pinned=True)).state.short_term[0]
    assert pinned.fragment.pinned
    assert pinned.vector is EAST


def test_restore_to_long_term_counts_importance() -> None:
    """A fragment forgotten in short-term was not counted before; one forgotten in long-term was."""
    gone = lifecycle.forget_fragments(held("tea"), [held("tea").short_term[0].fragment], 7, Reason.REQUESTED)
    full = replace(gone.state, short_term=held("rain").short_term)
    back = lifecycle.restore_fragments(full, [Held(gone.puts[0])], SMALL)
    assert back.puts[0].tier is Tier.LONG_TERM
    assert back.state.reflection_aggregate == 0.5
    old = Fragment(id="old", content="old", tier=Tier.LONG_TERM, forget_time_us=7)
    assert lifecycle.restore_fragments(full, [Held(old)], SMALL).state.reflection_aggregate == 0


def test_a_held_fragment_is_forgotten_as_it_is_now() -> None:
    """A value read before the last enhancement must not overwrite the newer one."""
    state = held("tea")
    stale = state.short_term[0].fragment
    now = lifecycle.update_fragment(state, stale.but(importance=0.9)).state
    assert lifecycle.forget_fragments(now, [stale], 7, Reason.REQUESTED).puts[0].importance == 0.9


def test_naming_a_fragment_twice_does_nothing_twice() -> None:
    state = held("tea")
    twice = [state.short_term[0].fragment] * 2
    gone = lifecycle.forget_fragments(state, twice, 7, Reason.REQUESTED)
    assert len(gone.events) == 1
    assert len(lifecycle.erase_fragments(state, twice).events) == 1
    assert len(lifecycle.restore_fragments(gone.state, [Held(gone.puts[0])] * 2, DEFAULT).events) == 1


def test_late_importance_reaches_held_fragment() -> None:
    state = held("tea", "rain")
    rated = lifecycle.set_importances(state, [state.short_term[0].fragment.but(importance=0.9)])
    assert [one.fragment.importance for one in rated.state.short_term] == [0.9, 0.5]
    assert rated.state.short_term[0].enhancements == state.short_term[0].enhancements
    observed = Event(EventType.OBSERVED, "tea", to_tier=Tier.SHORT_TERM, importance=0.5)
    asked = Event(EventType.MODEL_ASKED, "", use=ModelUse(Purpose.IMPORTANCE, "m", 1, 10, 1))
    places = fold_all([observed, *rated.events, asked])
    assert places == {"tea": Place(Tier.SHORT_TERM, importance=0.9)}
