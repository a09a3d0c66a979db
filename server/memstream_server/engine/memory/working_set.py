"""An active memory in RAM: its tiers' state and what recall needs of every fragment, of content only the latest.

Rule 1. Changed only by `apply`, after the commit; a recall reads it between two awaits and so sees one revision.
Rule 2. What the tiers hold is there once `apply` returns; what is searched takes the rows of small commits together,
when somebody next looks. One by one they cost several times as much, and whoever waits for his observation to be stored
would wait for that as well.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

import numpy as np

from memstream_server.core.columns import Columns
from memstream_server.core.dense import DenseMatrix
from memstream_server.core.identity import identity_hash
from memstream_server.core.lexical import LexicalIndex
from memstream_server.core.values import Fragment, FragmentKind, Held, State, Tier, Vector
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.memory.fragment_cache import FRAGMENTS_MAX, Contents
from memstream_server.engine.memory.search_structures import Searched
from memstream_server.engine.runtime.embedding_spaces import Embedding
from memstream_server.ports.journal.reading import Image
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.rows import Block, Row
from memstream_server.ports.journal.writing import Commit

_RECALLED_MAX = 4_096
"""Recalled contents remembered for telling echoes, over all sessions."""
_UNSHOWN_MAX = 32
"""Rows that may wait for somebody to look; he waits half a millisecond for so many."""


class WorkingSet:
    """See the module.

    Made empty; then the journal adds what the memory holds (as to a Gathering), in a thread, for nobody else has it
    yet; then it is `woken`.
    """

    record: MemoryRecord
    state: State

    def __init__(self, embedding: Embedding, dense_max: int) -> None:
        self.embedding = embedding
        """The space of all its vectors."""
        self.contents = Contents()
        self.stale: dict[str, int] = {}
        """Revisions by id: what was read of that fragment before may hold erased words, and is not to be used."""
        self._dense_max = dense_max
        self._recalled: OrderedDict[tuple[str, bytes], tuple[int, str]] = OrderedDict()
        self.begin(False)

    # ---- what the journal reads
    def begin(self, all_vectors: bool) -> None:
        """See Gathering."""
        self._searched = Searched(self.embedding.model.dimension, all_vectors)
        self._unshown: dict[str, list[Row]] = {}
        """Committed rows by fragment that are not searched yet."""
        self._rows = 0
        """How many these are."""
        self._unshown_identities: dict[int, list[str]] = {}
        """Those of their fragments that are in long-term, by identity hash."""
        self.insights: set[str] = set()
        self._unsettled: set[str] = set()
        """Vectors the index may not have yet, also while all vectors are in RAM."""
        self._latest: list[Fragment] = []
        self._keys: dict[str, str] = {}
        self._key_of: dict[str, str] = {}

    def add(self, block: Block) -> None:
        """See Gathering."""
        self._searched.extend(block, later=True)
        for each in block.fragments:
            if each.external_id or each.kind is FragmentKind.INSIGHT:
                self._enter(each)
        self._unsettled.update([each.id for each in block.fragments if each.tier is not Tier.LONG_TERM])
        self._latest = [*self._latest, *block.fragments][-FRAGMENTS_MAX:]

    def end(self) -> None:
        """See Gathering."""
        self._searched.settle()
        self.contents.put(self._latest)  # as they were read: all of a small memory, which is not read again
        self._latest = []  # from here on they are the contents' alone, which gives up what is erased

    def woken(self, image: Image) -> None:
        """The rest of what was read."""
        self.record = image.record
        self.state = State(
            kind=image.record.kind,
            seed=image.record.seed,
            sensory=image.sensory,
            short_term=image.short_term,
            reflection_aggregate=image.record.reflection_aggregate,
        )

    def follow(self, earlier: WorkingSet) -> None:
        """Take over what an earlier reading of the same memory knew and the journal does not."""
        self._recalled, self.stale = earlier._recalled, earlier.stale
        known = [id_ for id_ in earlier.columns.live_ids() if id_ in self.columns]
        self.columns.touch(self.columns.slots(known), earlier.columns.access_us[earlier.columns.slots(known)])

    def overlay(self, vectors: Mapping[str, bytes]) -> None:
        """Vectors that the index may not show yet."""
        self.fresh.update({id_: np.frombuffer(raw, dtype="<f4") for id_, raw in vectors.items()})

    @property
    def size_bytes(self) -> int:
        """Memory held, about."""
        return self.show().size_bytes + self.contents.bytes

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def fragments(self) -> int:
        """How many it has, forgotten ones included."""
        return len(self.columns.live_ids())

    # ---- what is searched: to be asked for again after an await
    @property
    def columns(self) -> Columns:
        """What filters and ranking need of each fragment."""
        return self.show().columns

    @property
    def lexical(self) -> LexicalIndex:
        """The legs of words."""
        return self.show().lexical

    @property
    def dense(self) -> DenseMatrix | None:
        """All vectors; None for a memory too large to keep them in RAM."""
        return self.show().dense

    @property
    def fresh(self) -> dict[str, Vector]:
        """Where there is no `dense`, the vectors that overlay the index."""
        return self.show().fresh

    def vectors(self, ids: Iterable[str]) -> dict[str, Vector]:
        """Those of these fragments' vectors that are in RAM."""
        return self.show().vectors(ids)

    def show(self) -> Searched:
        """What is searched, with all that was committed."""
        if self._unshown:
            self._searched.enter([row for rows in self._unshown.values() for row in rows])
            self._unshown, self._rows, self._unshown_identities = (
                {},
                0,
                {},
            )  # not before: what is half entered must not pass for whole
            self._searched.outgrown(self._dense_max, self._unsettled)
        return self._searched

    # ---- what decisions ask
    def _latest_of(self, fragment_id: str) -> Fragment | None:
        rows = self._unshown.get(fragment_id)
        return None if rows is None else rows[-1].fragment

    def tier_of(self, fragment_id: str) -> Tier | None:
        """The fragment's tier; None when it is not in the memory."""
        latest = self._latest_of(fragment_id)
        if latest is not None:
            return latest.tier
        slot = self._searched.columns.slot(fragment_id)
        return None if slot is None else self._searched.columns.get_tier(slot)

    def forgotten(self, fragment_id: str) -> bool:
        """Whether the fragment is in the memory and out of recall."""
        latest = self._latest_of(fragment_id)
        if latest is not None:
            return latest.forget_time_us is not None
        slot = self._searched.columns.slot(fragment_id)
        return slot is not None and not self._searched.columns.alive[slot]

    def id_of(self, external_id: str) -> str:
        """The fragment of that external id; empty when there is none."""
        return self._keys.get(external_id, "")

    def held_ids(self) -> set[str]:
        """Ids in sensory and short-term."""
        return {held.fragment.id for held in (*self.state.sensory, *self.state.short_term)}

    def find_alike(self, identity: int) -> list[str]:
        """Ids of the live fragments in long-term with that identity hash."""
        found = self._searched.find_alike(identity)
        if identity in self._unshown_identities:
            found = [*found, *self._unshown_identities[identity]]
        return [id_ for id_ in dict.fromkeys(found) if self.tier_of(id_) is Tier.LONG_TERM and not self.forgotten(id_)]

    # ---- echoes
    def recalled(self, session: str, fragments: Iterable[Fragment], now_us: int) -> None:
        """Remember what a session was just told."""
        for fragment in fragments:
            key = (session, _digest(fragment.content))
            self._recalled[key] = (now_us, fragment.id)
            self._recalled.move_to_end(key)
        oldest_us = now_us - self.record.policy.short_term.echo_window_s * 1_000_000
        while self._recalled and (len(self._recalled) > _RECALLED_MAX or _told(self._recalled) < oldest_us):
            self._recalled.popitem(last=False)

    def echo_of(self, fragment: Fragment) -> str:
        """Id of the fragment with these words that this session recalled within the policy's window; empty for none.

        Whether it is an echo is for the core to say, see identity.py.
        """
        window_s = self.record.policy.short_term.echo_window_s
        if not window_s or not self._recalled:
            return ""
        told = self._recalled.get((fragment.session, _digest(fragment.content)))
        if told is None or fragment.create_time_us - told[0] > window_s * 1_000_000:
            return ""
        return told[1] if self.tier_of(told[1]) is not None and not self.forgotten(told[1]) else ""

    # ---- after a commit
    def apply(self, commit: Commit, decision: Decision) -> None:
        """Show what was committed."""
        if decision.transition is not None:
            changed = {row.fragment.id for row in commit.rows}
            self.state = _at_version(decision.transition.state, changed, commit.revision + 1)
        self.record = replace(
            self.record,
            revision=commit.revision + 1,
            policy=commit.policy or self.record.policy,
            labels=self.record.labels if commit.labels is None else commit.labels,
            namespace=self.record.namespace if commit.name is None else commit.name[0],
            name=self.record.name if commit.name is None else commit.name[1],
            update_time_us=commit.time_us if commit.policy or commit.labels is not None else self.record.update_time_us,
            reflection_aggregate=self.state.reflection_aggregate,
        )
        if decision.transition is None:
            return
        for row in commit.rows:
            fragment = row.fragment
            if row.vector is not None or row.terms is not None or self.tier_of(fragment.id) is None:
                self._unsettled.add(fragment.id)
            self._unshown.setdefault(fragment.id, []).append(row)
            if fragment.tier is Tier.LONG_TERM:
                self._unshown_identities.setdefault(identity_hash(fragment), []).append(fragment.id)
            self._enter(fragment)
        self._rows += len(commit.rows)
        self.contents.put([row.fragment for row in commit.rows])
        self._forget_words(commit)
        self._forget_changed({row.fragment.id: row.fragment.content for row in commit.rows if row.replaces})
        if commit.removed or self._rows > _UNSHOWN_MAX:
            self.show()
        if commit.removed:
            self._remove(commit.removed)

    def _forget_words(self, commit: Commit) -> None:
        if commit.erased:
            self.stale |= dict.fromkeys(commit.erased, commit.revision + 1)
            for key in [key for key, (_, id_) in self._recalled.items() if id_ in self.stale]:
                del self._recalled[key]

    def _forget_changed(self, contents: Mapping[str, str]) -> None:
        """Who says again what a fragment said before it was changed says something new."""
        if contents and self._recalled:
            digests = {id_: _digest(content) for id_, content in contents.items()}
            for key in [key for key, (_, id_) in self._recalled.items() if digests.get(id_, key[1]) != key[1]]:
                del self._recalled[key]

    def unsettled(self) -> list[str]:
        """Long-term fragments whose vectors the index may not have yet."""
        return [id_ for id_ in self._unsettled if self.tier_of(id_) is Tier.LONG_TERM]

    def flushed(self, ids: Iterable[str]) -> None:
        """These vectors are in the index and old enough for its readers to see."""
        fresh = self.fresh
        for id_ in ids:
            fresh.pop(id_, None)
            self._unsettled.discard(id_)

    def _remove(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            if self.tier_of(id_) is not None:
                self.contents.remove(id_)
            self._unsettled.discard(id_)
            self.insights.discard(id_)
            key = self._key_of.pop(id_, "")
            if key and self._keys.get(key) == id_:
                del self._keys[key]
        self._searched.remove(ids)

    def _enter(self, fragment: Fragment) -> None:
        if fragment.kind is FragmentKind.INSIGHT:
            self.insights.add(fragment.id)
        if fragment.external_id:
            self._keys[fragment.external_id] = fragment.id
            self._key_of[fragment.id] = fragment.external_id


def _at_version(state: State, changed: Set[str], version: int) -> State:
    """The state with the version its changed fragments have in the journal: it is their etag."""

    def stamped(tier: tuple[Held, ...]) -> tuple[Held, ...]:
        return tuple(
            Held(held.fragment.but(version=version), held.vector, held.enhancements)
            if held.fragment.id in changed
            else held
            for held in tier
        )

    return replace(state, sensory=stamped(state.sensory), short_term=stamped(state.short_term))


def _told(recalled: OrderedDict[tuple[str, bytes], tuple[int, str]]) -> int:
    """When the oldest was told."""
    return next(iter(recalled.values()))[0]


def _digest(content: str) -> bytes:
    return hashlib.blake2b(content.encode(), digest_size=16).digest()
