"""Identity: what makes an observation a repeat or an echo, and the index that finds the candidates."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from memstream_server.core import identity
from memstream_server.core.identity import IdentityIndex, identity_hash, is_echo, is_repeat
from memstream_server.core.values import Fragment, FragmentKind, Structured

DAY_US = 86_400_000_000
SAID = Fragment(id="a", content="tea", speaker="bob", session="s", create_time_us=DAY_US, observe_time_us=DAY_US)
OWN: dict[str, dict[str, Any]] = {
    "content": {"content": "Tea"},
    "speaker": {"speaker": "joy"},
    "session": {"session": "t"},
    "external_id": {"external_id": "k"},
    "structured": {"structured": Structured(thought="tea")},
    "metadata": {"metadata": (("n", 1),)},
    "ttl": {"ttl_us": DAY_US, "expire_time_us": 2 * DAY_US},
    "expiry": {"expire_time_us": 2 * DAY_US},
    "importance": {"own_importance": True},
    "time": {"observe_time_us": 5},
    "vector": {"own_vector": True},
    "tokens": {"token_count": 7},
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_differing_fields_make_no_repeat(own: dict[str, Any]) -> None:
    other = SAID.but(id="b", **own)
    assert not is_repeat(other, SAID)
    assert is_repeat(SAID, other) is ("own_importance" in own)  # a repeat may leave out the importance
    assert is_repeat(other.but(id="c"), other)
    assert identity_hash(other.but(id="c")) == identity_hash(other)


def test_receipt_times_are_no_difference() -> None:
    later = SAID.but(id="b", create_time_us=DAY_US + 9, observe_time_us=DAY_US + 9)
    assert is_repeat(later, SAID)
    assert identity_hash(later) == identity_hash(SAID)


def test_same_ttl_repeats_whenever_it_came() -> None:
    first = SAID.but(ttl_us=100, expire_time_us=DAY_US + 100)
    later = SAID.but(create_time_us=DAY_US + 9, observe_time_us=DAY_US + 9, ttl_us=100, expire_time_us=DAY_US + 109)
    assert is_repeat(later, first)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, False), ("1", 1)])
def test_metadata_values_of_other_types_differ(one: Any, other: Any) -> None:
    assert not is_repeat(SAID.but(metadata=(("n", one),)), SAID.but(metadata=(("n", other),)))


def test_insight_is_not_repeated() -> None:
    assert not is_repeat(SAID, SAID.but(kind=FragmentKind.INSIGHT))


@pytest.mark.parametrize("name", ["structured", "metadata", "ttl", "expiry", "time", "external_id"])
def test_differing_fields_make_no_echo(name: str) -> None:
    assert not is_echo(SAID.but(**OWN[name]), SAID)


def test_echo_may_lack_what_the_recalled_has() -> None:
    recalled = SAID.but(metadata=(("n", 1),), ttl_us=9, expire_time_us=DAY_US + 9, own_importance=True, importance=0.9)
    assert is_echo(SAID, recalled)
    assert is_echo(SAID.but(speaker="joy", session="t"), recalled)
    assert is_echo(SAID.but(metadata=(("n", 1),)), recalled)
    assert not is_echo(SAID.but(metadata=(("n", 2),)), recalled)
    assert not is_echo(SAID.but(own_importance=True, importance=0.8), recalled)


@pytest.mark.parametrize("later", [False, True])
def test_index_finds_what_a_dict_would(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_RECENT_MAX", 16)
    chosen = random.Random(7)
    index, slots = IdentityIndex(), list[int]()
    for step in range(300):
        if slots and chosen.random() < 0.3:
            slot, value = chosen.randrange(len(slots)), chosen.randrange(-9, 9)
            index.set(slot, value)
            slots[slot] = value
        elif slots and chosen.random() < 0.02:
            kept = sorted(chosen.sample(range(len(slots)), len(slots) // 2))
            index.keep(np.array(kept, np.int64))
            slots = [slots[slot] for slot in kept]
        else:
            more = [chosen.randrange(-9, 9) for _ in range(chosen.randrange(1, 30))]
            index.extend(more, later and step < 5)
            slots += more
            if later and step < 5:
                index.settle()
        for value in range(-10, 10):
            assert index.find(value) == [slot for slot, held in enumerate(slots) if held == value]
