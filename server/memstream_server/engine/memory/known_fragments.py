"""Fragments that a group of observations may repeat, echo or update: read before the decision, kept current during
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memstream_server.core.identity import identity_hash, is_repeat
from memstream_server.core.policy import RetentionPolicy
from memstream_server.core.retention import is_expired
from memstream_server.core.supersession import find_end
from memstream_server.core.transition import Transition
from memstream_server.core.values import Fragment, State, Tier
from memstream_server.engine.runtime.turns import pause_if_due

if TYPE_CHECKING:
    from memstream_server.engine.memory.enrich import EnrichedFragment
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.dependencies import Storage

READ_PER_SLICE = 64
"""Observations looked up between two pauses."""
ALIKE_MAX = 8
"""Candidates for one repeat; usually there is at most one."""


@dataclass(slots=True)
class KnownFragments:
    """The fragments of one memory that matter to one group."""

    by_key: dict[str, Fragment] = field(default_factory=dict)
    """Long-term fragments with an external id that occurs in the group, by external id."""
    by_id: dict[str, Fragment] = field(default_factory=dict)
    """Fragments that the group may repeat or echo."""
    recalled: dict[str, str] = field(default_factory=dict)
    """By observation id: the fragment with the same words that its session has recalled."""
    alike: dict[int, list[str]] = field(default_factory=dict)
    """Ids of long-term fragments by identity hash."""

    def find(self, state: State, key: str) -> Fragment | None:
        """The fragment with that id or else that external id, if it is held, in the group, or was read for it."""
        for held in (*state.sensory, *state.short_term):
            if held.fragment.id == key:
                return held.fragment
        return self.by_id.get(key) or self.find_by_key(state, key)

    def find_by_key(self, state: State, external_id: str) -> Fragment | None:
        """The fragment of that external id: held in a tier, decided in this group, or in long-term."""
        if not external_id:
            return None
        for held in (*state.sensory, *state.short_term):
            if held.fragment.external_id == external_id:
                return held.fragment
        return self.by_key.get(external_id)

    def find_recalled(self, fragment: Fragment) -> Fragment | None:
        """The fragment that this one may echo."""
        return self.by_id.get(self.recalled[fragment.id]) if fragment.id in self.recalled else None

    def find_repeated(self, fragment: Fragment, retention: RetentionPolicy) -> Fragment | None:
        """The long-term fragment that this one repeats, neither forgotten nor expired."""
        for id_ in self.alike.get(identity_hash(fragment), ()) if self.alike else ():
            found = self.by_id.get(id_)
            if found is None or found.tier is not Tier.LONG_TERM or found.forget_time_us is not None:
                continue
            if is_repeat(fragment, found) and not is_expired(found, fragment.create_time_us, retention):
                return found
        return None

    def apply_step(self, step: Transition) -> None:
        """Apply a step's changes and removals, for the next observation of the group."""
        gone = set(step.removed)
        if gone:
            for key in [key for key, one in self.by_key.items() if one.id in gone]:
                del self.by_key[key]
            for id_ in gone:
                self.by_id.pop(id_, None)
        for put in step.puts:
            if put.external_id:
                self.by_key[put.external_id] = put
            if put.tier is Tier.LONG_TERM:
                self.by_id[put.id] = put
                self.alike.setdefault(identity_hash(put), []).append(put.id)
            elif put.id in self.by_id:
                self.by_id[put.id] = put


async def read_known(working: WorkingSet, gathered: Iterable[EnrichedFragment], storage: Storage) -> KnownFragments:
    """Read the fragments that matter to the group. They cannot change before its decision, which runs in the memory's
    order.
    """
    policy = working.record.policy.short_term
    keyed: set[str] = set()
    others: dict[str, None] = {}
    known = KnownFragments()
    for number, part in enumerate(gathered):
        if number % READ_PER_SLICE == READ_PER_SLICE - 1:
            await pause_if_due()
        fragment = part.fragment
        for key in fragment.supersedes:
            if id_ := working.find_id(key):
                others |= dict.fromkeys((id_, find_end(id_, working.links.newer)))
                keyed.update({id_} if id_ != key else ())
        if fragment.external_id:
            keyed.add(working.id_of(fragment.external_id))
            continue
        if policy.repeats:
            identity = identity_hash(fragment)
            if alike := working.find_alike(identity)[-ALIKE_MAX:]:
                known.alike[identity] = alike
                others.update(dict.fromkeys(alike))
        if recalled := working.echo_of(fragment):
            known.recalled[fragment.id] = recalled
            others[recalled] = None
    keyed.discard("")
    if keyed or others:
        found = await storage.journal.get_fragments(working.record.uid, sorted({*keyed, *others}))
        held = {one.fragment.id: one.fragment for one in (*working.state.sensory, *working.state.short_term)}
        known.by_id = {one.id: held.get(one.id, one) for one in found if one.id in others}
        known.by_key = {one.external_id: one for one in found if one.id in keyed}
    return known
