"""A memory made of the pure core alone: applies transitions and keeps the fragments that left the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from memstream_server.core import lifecycle, tiers
from memstream_server.core.departures import find_linked, restore_as_current, settle_links
from memstream_server.core.enhancement import compute_cosine, merged_text
from memstream_server.core.events import Event, Reason
from memstream_server.core.identity import is_repeat
from memstream_server.core.policy import RankingRule, Truth
from memstream_server.core.replay_events import Place, place_of
from memstream_server.core.supersession import Links, SupersessionCycle, find_ends, supersede_fragments
from memstream_server.core.transition import InsightRequest, Transition
from memstream_server.core.values import (
    Enhancement,
    Fragment,
    FragmentKind,
    Held,
    MemoryKind,
    State,
    Tier,
    TruthStatus,
    Vector,
)
from tests.support.scenario import Change, Command, MemorySpec, Query, Said, override_policy

SIMILARITY_MIN = 0.5
"""The hashing model's."""
SEED = b"scenario"


def fragment_id(number: int) -> str:
    """Ids of the core driver: fixed, and ordered like ULIDs."""
    return f"{number:026d}"


class CoreMemory:
    """The core driver: no time but `advance`, no model but the vectors given, recall by cosine alone."""

    def __init__(self) -> None:
        self.history: list[Event] = []

    # ---- what a store would do

    def apply(self, transition: Transition) -> Transition:
        """Take a transition's state, puts and removals, as the engine does after a commit."""
        linked = {id_: self.known[id_] for id_ in find_linked(transition, self.links) if id_ in self.known}
        transition = settle_links(transition, self.links, linked, self.now_s * 1_000_000)
        self.state = transition.state
        self.known |= {fragment.id: fragment for fragment in transition.puts}
        for id_ in transition.removed:
            self.known.pop(id_, None)
            self.links.remove(id_)
        for fragment in transition.puts:
            self.links.note(fragment)
        self.history += transition.events
        self.requests += transition.insight_requests
        self.reflections += transition.reflect
        return transition

    def held(self) -> dict[str, Held]:
        return {held.fragment.id: held for held in (*self.state.sensory, *self.state.short_term)}

    def places(self) -> dict[str, Place]:
        """The places read from state and listing, to compare with a replay of the events."""
        held = self.held()
        return {
            id_: place_of(fragment, held[id_].enhancements if id_ in held else ())
            for id_, fragment in self.known.items()
        }

    def values(self, ids: Iterable[str]) -> list[Fragment]:
        return [self.known[id_] for id_ in ids]

    def with_vectors(self, ids: Iterable[str]) -> list[Held]:
        return [Held(self.known[id_], self.vectors.get(id_)) for id_ in ids]

    # ---- the Driver protocol

    async def create(self, spec: MemorySpec) -> None:
        self.policy = spec.policy()
        self.state = State(spec.kind, SEED)
        self.known: dict[str, Fragment] = {}
        self.links = Links()
        self.vectors: dict[str, Vector | None] = {}
        self.recalled: dict[tuple[str, str], tuple[str, int]] = {}
        self.history, self.told = [], 0
        self.requests: list[InsightRequest] = []
        self.reflections = 0
        self.position = self.now_s = 0

    async def set_policy(self, overrides: Mapping[str, object]) -> None:
        self.policy = override_policy(self.policy, overrides)
        self.apply(tiers.settle_held(self.state, self.policy, SIMILARITY_MIN))

    def newcomer(self, said: Said) -> tiers.Newcomer:
        """Give id, position and time, and look up what was recalled: the facts the engine fetches."""
        self.position += 1
        now_us = self.now_s * 1_000_000
        ttl_us = None if said.ttl_s is None else int(said.ttl_s * 1e6)
        fragment = Fragment(
            id=fragment_id(self.position),
            content=said.content,
            structured=said.structured,
            speaker=said.speaker,
            session=said.session,
            importance=self.policy.importance_default if said.importance is None else said.importance,
            own_importance=said.importance is not None,
            external_id=said.external_id,
            observe_time_us=now_us if said.observe_time_s is None else int(said.observe_time_s * 1e6),
            create_time_us=now_us,
            metadata=said.metadata,
            ttl_us=ttl_us,
            expire_time_us=None if ttl_us is None else now_us + ttl_us,
            position=self.position,
            model="given" if said.vector is not None else "",
            valid_from_us=None if said.valid_from_s is None else int(said.valid_from_s * 1e6),
            valid_until_us=None if said.valid_until_s is None else int(said.valid_until_s * 1e6),
        )
        self.vectors[fragment.id] = said.vector
        recalled, time_s = self.recalled.get((said.session, said.content), ("", 0))
        fresh = self.now_s - time_s <= self.policy.short_term.echo_window_s
        held = self.held()
        known = [one for id_, one in self.known.items() if id_ not in held and is_repeat(fragment, one)]
        return tiers.Newcomer(
            fragment,
            said.vector,
            self.known.get(recalled) if fresh else None,
            next((one for one in known if one.forget_time_us is None), None),
            corrects=bool(said.supersedes),
            supersedes=tuple(self.values(find_ends(said.supersedes, fragment.id, self.links.newer))),
        )

    async def observe(self, said: Said) -> str:
        newcomer = self.newcomer(said)
        self.apply(tiers.observe(self.state, newcomer, self.policy, SIMILARITY_MIN))
        return newcomer.fragment.id

    async def recall(self, query: Query) -> list[str]:
        found = [fragment for fragment in self.known.values() if self._recallable(fragment)]
        if self.state.kind not in (MemoryKind.SENSORY, MemoryKind.SHORT_TERM):
            found.sort(key=lambda fragment: -self._relevance(fragment, query.vector))
            found = found[: query.limit or self.policy.recall.limit]
        for fragment in found:
            self.recalled[query.session, fragment.content] = (fragment.id, self.now_s)
        if self.policy.recall.reinforce:
            self.recollect([fragment.id for fragment in found])
        return [fragment.id for fragment in found]

    def recollect(self, ids: Iterable[str]) -> Transition:
        """Offer fragments to short-term as recollections."""
        live = [one for one in self.values(ids) if one.forget_time_us is None and not one.superseded_by]
        found = [tiers.Recollected(one.id, one.content, self.vectors.get(one.id), one.structured) for one in live]
        return self.apply(tiers.recollect(self.state, found, self.policy, SIMILARITY_MIN))

    async def supersede(self, olds: Sequence[str], new: str) -> str:
        try:
            ends = find_ends(olds, new, self.links.newer)
        except SupersessionCycle as error:
            return f"cycle {error.older}"
        step = supersede_fragments(self.state, self.values(ends), self.known[new], self.now_s * 1_000_000)
        self.apply(step)
        return f"superseded {len(ends)}"

    def _recallable(self, fragment: Fragment) -> bool:
        current = fragment.status_at(self.now_s * 1_000_000) is TruthStatus.CURRENT
        if self.policy.recall.truth is Truth.CURRENT and not current:
            return False
        if self.state.kind is MemoryKind.HYBRID and self.policy.recall.ranking is RankingRule.DBGPT:
            return fragment.forget_time_us is None and fragment.tier is Tier.LONG_TERM
        return fragment.forget_time_us is None

    def _relevance(self, fragment: Fragment, vector: Vector | None) -> float:
        own = self.vectors.get(fragment.id)
        return 0.0 if own is None or vector is None else compute_cosine(own, vector)

    async def clear(self, tiers: Sequence[Tier]) -> None:
        present = self.known | {id_: held.fragment for id_, held in self.held().items()}
        leaving = [fragment for fragment in present.values() if fragment.tier in tiers]
        self.apply(lifecycle.clear_fragments(self.state, leaving, resets=Tier.LONG_TERM in tiers))

    async def forget(self, ids: Sequence[str], reason: Reason = Reason.REQUESTED) -> None:
        self.apply(lifecycle.forget_fragments(self.state, self.values(ids), self.now_s * 1_000_000, reason))

    async def restore(self, ids: Sequence[str]) -> None:
        newer = self.values(newer for id_ in ids if (newer := self.links.newer(id_)))
        self.apply(restore_as_current(self.state, self.with_vectors(ids), newer, self.policy))

    async def erase(self, ids: Sequence[str]) -> None:
        self.apply(lifecycle.erase_fragments(self.state, self.values(ids)))

    async def update(self, change: Change) -> None:
        fragment = self.known[change.id]
        if change.content is not None:
            fragment = fragment.but(content=change.content)
            self.vectors[change.id] = change.vector
        if change.importance is not None:
            fragment = fragment.but(importance=change.importance)
        if change.pinned is not None:
            self.apply(lifecycle.update_fragment(self.state, fragment.but(pinned=change.pinned)))
        else:
            self.apply(lifecycle.update_fragment(self.state, fragment, change.vector))

    async def events(self) -> list[Event]:
        new, self.told = self.history[self.told :], len(self.history)
        return new

    async def fragments(self) -> list[Fragment]:
        return sorted(self.known.values(), key=lambda fragment: fragment.position)

    async def extra(self, command: Command) -> list[str]:
        """recollect, insight, expire, fade, advance, vector, refuse, asks, reflections, aggregate, merged."""
        match command.name:
            case "recollect":
                self.recollect(command.words)
            case "insight":
                self.insight(command)
            case "expire":
                await self.forget(command.words, Reason.EXPIRED)
            case "fade":
                await self.forget(command.words, Reason.RETENTION)
            case "advance":
                self.now_s += int(command.words[0])
            case "vector":
                self.fill(command)
            case "refuse":
                self.refuse(command)
            case "asks":
                asked, self.requests = self.requests, []
                return [f"asks {one.anchor}: {' | '.join(one.texts)}" for one in asked]
            case "reflections":
                return [f"reflections {self.reflections}, aggregate {self.state.reflection_aggregate:g}"]
            case "merged":
                return [self._merged(id_) for id_ in command.words]
            case name:
                raise ValueError(f"the core driver does not know {name}")
        return []

    def insight(self, command: Command) -> None:
        """An insight as reflection would bring it."""
        self.position += 1
        sources = tuple(command.text("sources").split(","))
        fragment = Fragment(
            id=fragment_id(self.position),
            content=command.words[0],
            kind=FragmentKind.INSIGHT,
            importance=command.number("importance") or self.policy.importance_default,
            sources=sources,
            position=self.position,
            model=command.text("model", "given"),
        )
        self.vectors[fragment.id] = command.vector()
        others = [fragment for fragment in self.known.values() if fragment.kind is FragmentKind.INSIGHT]
        held = self.with_vectors(fragment.id for fragment in others)
        self.apply(lifecycle.insert_insight(self.state, Held(fragment, command.vector()), held, self.policy))

    def fill(self, command: Command) -> None:
        """A vector that was missing arrives."""
        self.vectors[command.words[0]] = command.vector()
        fragment = self.known[command.words[0]].but(model="given")
        self.apply(lifecycle.fill_vectors(self.state, [Held(fragment, command.vector())]))

    def refuse(self, command: Command) -> None:
        """An observation whose text the embedding model refuses."""
        said = Said(command.words[0], None, "", "", None, "", None)
        newcomer = replace(self.newcomer(said), refused=True)
        self.apply(tiers.observe(self.state, newcomer, self.policy, SIMILARITY_MIN))

    def _merged(self, id_: str) -> str:
        enhancers = [Enhancement(source, self.known[source].content) for source in self.known[id_].sources]
        return f"merged {id_}: {merged_text(self.known[id_], enhancers)}"
