"""Invariants of every memory, under any sequence of commands."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream_server.core import tiers
from memstream_server.core.events import EventType
from memstream_server.core.policy import Profile
from memstream_server.core.replay_events import fold_all
from memstream_server.core.tiers import TIERS
from memstream_server.core.transition import Transition, anchors_changed, join_all, join_transitions
from memstream_server.core.values import Fragment, Held, MemoryKind, State, Tier, Vector
from tests.core.memory import SIMILARITY_MIN, CoreMemory
from tests.support.replay import Runner
from tests.support.scenario import Block, Said, parse_command, spec_of
from tests.support.seeds import rounds

GONE = {EventType.FILTERED, EventType.DROPPED, EventType.MERGED, EventType.ERASED}
NEW = {EventType.OBSERVED, EventType.REFLECTED}


def nan(vector: Vector | None) -> Vector:
    """A vector, or an array of NaN for a missing one, so that both compare."""
    return np.array([np.nan], dtype=np.float32) if vector is None else vector


class CheckedMemory(CoreMemory):
    """Checks the invariants after every transition."""

    transitions: list[Transition]
    anchors: dict[str, Held]

    def apply(self, transition: Transition) -> Transition:
        before = self.state
        transition = super().apply(transition)
        self.transitions.append(transition)
        self._keep_anchors(before, transition.state)
        self._check_writes(transition)
        self._check_tiers(transition.state)
        self._check_enhancements()
        self._check_links()
        return transition

    def _keep_anchors(self, before: State, after: State) -> None:
        changed, released = anchors_changed(before, after)
        for now, was in changed:
            known = self.anchors.get(now.fragment.id)
            assert (known is None) == (was is None)
            self.anchors[now.fragment.id] = now
        for gone in released:
            del self.anchors[gone.fragment.id]
        held = self.held()
        assert self.anchors.keys() == held.keys()
        for id_, anchor in self.anchors.items():
            assert anchor.enhancements == held[id_].enhancements
            assert np.array_equal(nan(anchor.vector), nan(held[id_].vector), equal_nan=True)

    def _check_writes(self, transition: Transition) -> None:
        ids = [fragment.id for fragment in transition.puts]
        assert len(ids) == len(set(ids))
        assert not set(ids) & set(transition.removed)
        assert set(transition.merged) <= set(ids)

    def _check_tiers(self, state: State) -> None:
        assert len(state.sensory) <= self.policy.sensory.capacity
        assert len(state.short_term) <= self.policy.short_term.capacity
        for tier in (state.sensory, state.short_term):
            positions = [held.fragment.last_position for held in tier]
            assert positions == sorted(set(positions))
        live = {id_: one for id_, one in self.known.items() if one.forget_time_us is None}
        long_term = [one for one in live.values() if one.tier is Tier.LONG_TERM]
        assert len(live) == len(state.sensory) + len(state.short_term) + len(long_term)
        assert all(live[id_] == held.fragment for id_, held in self.held().items())
        assert {one.tier for one in live.values()} <= set(TIERS[state.kind])

    def _check_enhancements(self) -> None:
        for id_, held in self.held().items():
            enhancers = [done.id for done in held.enhancements]
            assert len(enhancers) == len(set(enhancers))
            assert id_ not in enhancers
            assert held.fragment.enhancement_count == len(enhancers) + held.fragment.duplicate_count
            assert all(self.known[enhancer].forget_time_us is None for enhancer in enhancers)

    def _check_links(self) -> None:
        """A chain has one current end, and no link names a fragment that has left."""
        for id_, fragment in self.known.items():
            if fragment.superseded_by:
                over = self.known[fragment.superseded_by]
                assert over.forget_time_us is None
                assert id_ in over.supersedes
                assert fragment.supersede_time_us is not None
            assert fragment.supersedes == self.links.older(id_)
            assert fragment.superseded_by == self.links.newer(id_)
            for older in fragment.supersedes:
                if fragment.forget_time_us is None:
                    assert self.known[older].superseded_by == id_
                assert older in self.known
            passed = {id_}
            while fragment.superseded_by:
                fragment = self.known[fragment.superseded_by]
                assert fragment.id not in passed
                passed.add(fragment.id)
        for held in self.held().values():
            assert not any(self.known[done.id].superseded_by for done in held.enhancements)

    def check_history(self) -> None:
        """Every observed fragment is in one place or left by one event; a replay gives the same places."""
        new = [event.fragment for event in self.history if event.type in NEW]
        gone = [event.fragment for event in self.history if event.type in GONE]
        assert len(new) == len(set(new))
        assert len(gone) == len(set(gone))
        assert set(new) == set(gone) | self.known.keys()
        assert not set(gone) & self.known.keys()
        counted = [event.other for event in self.history if event.type in (EventType.REPEATED, EventType.ECHOED)]
        assert not set(counted) & set(new)
        assert len(new) + len(counted) == self.position
        assert fold_all(self.history) == self.places()


# ---- what may be done, as scenario commands

VECTORS = st.sampled_from(
    ["", " vector=[1,0]", " vector=[1,0.1]", " vector=[1,0.2]", " vector=[1,-0.4]", " vector=[0,1]", " vector=[-1,0]"]
)
IMPORTANCES = st.sampled_from([0, 0.005, 0.3, 0.5, 0.9])
FRAGMENTS = st.integers(0, 20).map("#{}".format)
"""A fragment that is there when the command is run: see `named`."""


def choice(name: str, *values: object) -> st.SearchStrategy[str]:
    return st.sampled_from(values).map(lambda value: f"{name}={value}")


POLICIES = st.tuples(
    choice("sensory.capacity", 0, 0, 0, 1, 3),
    choice("sensory.threshold", 0, 0, 0.4),
    choice("short_term.capacity", 1, 2, 4),
    choice("short_term.enhance_threshold", 1, 2, 3),
).map(" ".join)
MEMORIES = st.tuples(
    choice("memory kind", *MemoryKind, "hybrid", "hybrid", "hybrid"),
    choice("profile", *Profile),
    choice("short_term.kind", "enhanced", "enhanced", "fifo"),
    choice("short_term.similarity_rule", "cosine", "cosine", "sigmoid_draw"),
    choice("short_term.overflow", "promote", "drop"),
    choice("reflection.threshold", 0, 1.5),
    POLICIES,
).map(" ".join)
OBSERVATIONS = st.builds(
    lambda text, speaker, importance, vector: f'observe "{text}" speaker={speaker} importance={importance}{vector}',
    st.sampled_from(["tea", "more tea", "rain", "snow", "wind", "hail"]),
    st.sampled_from(["bob", "joy"]),
    IMPORTANCES,
    VECTORS,
)
REQUESTS = st.one_of(
    st.builds('recall "tea" limit={}{}'.format, st.integers(1, 3), VECTORS),
    st.builds("recollect {} {}".format, FRAGMENTS, FRAGMENTS),
    st.builds("clear {}".format, st.sampled_from(["sensory", "short_term", "long_term", "sensory long_term"])),
    st.builds("{} {} {}".format, st.sampled_from(["forget", "expire", "restore", "erase"]), FRAGMENTS, FRAGMENTS),
    st.builds("{} {}".format, st.sampled_from(["pin", "unpin"]), FRAGMENTS),
    st.builds('update {} text="changed" importance={}{}'.format, FRAGMENTS, IMPORTANCES, VECTORS),
    st.builds("vector {} vector=[1,0]".format, FRAGMENTS),
    st.builds('insight "so" sources={} importance={}{}'.format, FRAGMENTS, IMPORTANCES, VECTORS),
    st.builds("policy {}".format, POLICIES),
    st.builds("supersede {} by={}".format, FRAGMENTS, FRAGMENTS),
    st.builds("fade {}".format, FRAGMENTS),
    st.builds('observe "{}" supersedes={}{}'.format, st.sampled_from(["tea", "rain"]), FRAGMENTS, VECTORS),
)
MIXED = st.tuples(st.integers(0, 2), OBSERVATIONS, REQUESTS).map(lambda drawn: drawn[2] if drawn[0] == 1 else drawn[1])
"""Two observations to a request; `one_of` would choose among all its branches alike."""
COMMANDS = st.lists(MIXED, min_size=8, max_size=30)


async def play(memory: str, commands: Sequence[str]) -> CheckedMemory:
    driver = CheckedMemory()
    driver.transitions, driver.anchors = [], {}
    runner = Runner(driver)
    await runner.run(Block((), (memory,), ()))
    for command in commands:
        if line := named(driver, command):
            await runner.run(Block((), (line,), ()))
    return driver


def named(driver: CoreMemory, command: str) -> str:
    """The command with ids for its numbers; empty where there is nothing to name, or no place for an insight."""
    if command.startswith("insight") and Tier.LONG_TERM not in TIERS[driver.state.kind]:
        return ""
    ids = sorted(driver.known)
    if "#" in command and not ids:
        return ""
    return re.sub(r"#(\d+)", lambda number: ids[int(number[1]) % len(ids)], command)


@settings(max_examples=rounds(250, 80))
@given(MEMORIES, COMMANDS)
def test_every_fragment_is_accounted_for(memory: str, commands: list[str]) -> None:
    asyncio.run(play(memory, commands)).check_history()


def shown(transition: Transition) -> tuple[object, ...]:
    """A transition as plain values, to be compared."""
    state = transition.state
    held = [(one.fragment, one.enhancements) for one in (*state.sensory, *state.short_term)]
    rest = [getattr(transition, item.name) for item in fields(transition) if item.name != "state"]
    return (held, state.reflection_aggregate, *rest)


@settings(max_examples=rounds(75, 40))
@given(MEMORIES, COMMANDS, st.integers(0, 25), st.integers(0, 25))
def test_joining_is_associative_and_loses_nothing(memory: str, commands: list[str], one: int, other: int) -> None:
    played = asyncio.run(play(memory, commands))
    steps = played.transitions
    if len(steps) < 3:
        return
    places = range(1, len(steps))
    cuts = sorted({places[one % len(places)], places[other % len(places)]})
    a, b, c = steps[: cuts[0]], steps[cuts[0] : cuts[-1]], steps[cuts[-1] :]
    whole = join_all(steps)
    if b:
        assert shown(join_transitions(join_transitions(join_all(a), join_all(b)), join_all(c))) == shown(whole)
        assert shown(join_transitions(join_all(a), join_transitions(join_all(b), join_all(c)))) == shown(whole)
    assert shown(join_transitions(join_all(a + b), join_all(c))) == shown(whole)
    stored: dict[str, Fragment] = {fragment.id: fragment for fragment in whole.puts}
    assert stored == played.known
    assert whole.events == tuple(played.history)


@settings(max_examples=rounds(75, 40))
@given(MEMORIES, COMMANDS, OBSERVATIONS)
def test_decisions_are_deterministic_and_pure(memory: str, commands: list[str], observation: str) -> None:
    played = asyncio.run(play(memory, commands))
    parsed = parse_command(observation)
    said = Said(parsed.words[0], None, "bob", "", parsed.number("importance"), "", parsed.vector())
    newcomer, before = played.newcomer(said), played.state
    held = (before.sensory, before.short_term, before.reflection_aggregate)
    once = tiers.observe(before, newcomer, played.policy, SIMILARITY_MIN)
    again = tiers.observe(before, newcomer, played.policy, SIMILARITY_MIN)
    assert shown(once) == shown(again)
    assert held == (before.sensory, before.short_term, before.reflection_aggregate)


def test_generated_memories_are_of_every_kind() -> None:
    """The strategy's commands parse into memories of every kind."""
    spec = spec_of(parse_command("memory kind=hybrid profile=dbgpt short_term.kind=fifo sensory.capacity=3"))
    assert spec.kind is MemoryKind.HYBRID
    assert spec.policy().sensory.capacity == 3
    assert spec.policy().sensory.threshold == 0.01
