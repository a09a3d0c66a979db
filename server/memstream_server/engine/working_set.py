"""An active memory in RAM: its tiers' state and what recall needs of every fragment, of content only the latest.

Rule 1. Changed only by `apply`, after the commit; a recall reads it between two awaits and so sees one revision.
Rule 2. Slots are for use between two awaits: `apply` may renumber them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

import numpy as np

from memstream_server.core.columns import GONE, Columns
from memstream_server.core.dense import DenseMatrix
from memstream_server.core.lexical import LexicalIndex
from memstream_server.core.values import Fragment, FragmentKind, Held, State, Tier, Vector
from memstream_server.engine.contents import FRAGMENTS_MAX, Contents
from memstream_server.engine.decision import Decision
from memstream_server.engine.embeddings import Embedding
from memstream_server.ports.journal.reading import Image
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.rows import Block, Row
from memstream_server.ports.journal.writing import Commit

_RECALLED_MAX = 4_096
"""Recalled contents remembered for telling echoes, over all sessions."""
_DEAD_MIN = 1_024
"""Empty slots before they are given back (and at least a quarter of all)."""


class WorkingSet:
    """See the module. `dense` is None for a memory too large to keep vectors in RAM; `fresh` overlays the index.

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
        self.columns = Columns()
        self.lexical = LexicalIndex()
        self.dense = DenseMatrix(self.embedding.model.dimension) if all_vectors else None
        self.fresh: dict[str, Vector] = {}
        self.insights: set[str] = set()
        self._unsettled: set[str] = set()
        """Vectors the index may not have yet, also while all vectors are in RAM."""
        self._latest: list[Fragment] = []
        self._keys: dict[str, str] = {}
        self._key_of: dict[str, str] = {}

    def add(self, block: Block) -> None:
        """See Gathering."""
        self._extend(block, later=True)
        self._unsettled.update([each.id for each in block.fragments if each.tier is not Tier.LONG_TERM])
        self._latest = [*self._latest, *block.fragments][-FRAGMENTS_MAX:]

    def end(self) -> None:
        """See Gathering."""
        self.lexical.settle()
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
        self._recalled = earlier._recalled
        known = [id_ for id_ in earlier.columns.live_ids() if id_ in self.columns]
        self.columns.touch(self.columns.slots(known), earlier.columns.access_us[earlier.columns.slots(known)])

    def overlay(self, vectors: Mapping[str, bytes]) -> None:
        """Vectors that the index may not show yet."""
        self.fresh |= {id_: np.frombuffer(raw, dtype="<f4") for id_, raw in vectors.items()}

    @property
    def size_bytes(self) -> int:
        """Memory held, about."""
        held = self.columns.bytes + self.lexical.bytes + (self.dense.bytes if self.dense is not None else 0)
        return held + self.contents.bytes + sum(vector.nbytes for vector in self.fresh.values())

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def fragments(self) -> int:
        """How many it has, forgotten ones included."""
        return len(self.columns.live_ids())

    # ---- what decisions ask
    def tier_of(self, fragment_id: str) -> Tier | None:
        """The fragment's tier; None when it is not in the memory."""
        slot = self.columns.slot(fragment_id)
        return None if slot is None else self.columns.tier(slot)

    def forgotten(self, fragment_id: str) -> bool:
        """Whether the fragment is in the memory and out of recall."""
        slot = self.columns.slot(fragment_id)
        return slot is not None and not self.columns.alive[slot]

    def id_of(self, external_id: str) -> str:
        """The fragment of that external id; empty when there is none."""
        return self._keys.get(external_id, "")

    def held_ids(self) -> set[str]:
        """Ids in sensory and short-term."""
        return {held.fragment.id for held in (*self.state.sensory, *self.state.short_term)}

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

    def vectors(self, ids: Iterable[str]) -> dict[str, Vector]:
        """Those of these fragments' vectors that are in RAM."""
        if self.dense is None:
            return {id_: self.fresh[id_] for id_ in ids if id_ in self.fresh}
        slots = {id_: slot for id_ in ids if (slot := self.columns.slot(id_)) is not None}
        found = {id_: self.dense.vector(slot) for id_, slot in slots.items()}
        return {id_: vector for id_, vector in found.items() if vector is not None}

    def echo_of(self, fragment: Fragment) -> str:
        """Id of the fragment with these words that this session recalled within the policy's window; empty for none."""
        window_s = self.record.policy.short_term.echo_window_s
        if not window_s or not self._recalled:
            return ""
        told = self._recalled.get((fragment.session, _digest(fragment.content)))
        if told is None or fragment.create_time_us - told[0] > window_s * 1_000_000:
            return ""
        return told[1] if told[1] in self.columns and not self.forgotten(told[1]) else ""

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
        new = [row for row in commit.rows if row.fragment.id not in self.columns]
        known = [row for row in commit.rows if row.fragment.id in self.columns]
        self._extend(Block.of(new))
        self._unsettled.update([row.fragment.id for row in new])
        self._outgrown()
        for row in known:
            self._update(row)
        self.contents.put([row.fragment for row in commit.rows])
        self._forget_words(commit)
        for id_ in commit.removed:
            self._remove(id_)
        self._compact()

    def _forget_words(self, commit: Commit) -> None:
        if commit.erased:
            self.stale |= dict.fromkeys(commit.erased, commit.revision + 1)
            for key in [key for key, (_, id_) in self._recalled.items() if id_ in self.stale]:
                del self._recalled[key]

    def unsettled(self) -> list[str]:
        """Long-term fragments whose vectors the index may not have yet."""
        return [id_ for id_ in self._unsettled if self.tier_of(id_) is Tier.LONG_TERM]

    def flushed(self, ids: Iterable[str]) -> None:
        """These vectors are in the index and old enough for its readers to see."""
        for id_ in ids:
            self.fresh.pop(id_, None)
            self._unsettled.discard(id_)

    def _update(self, row: Row) -> None:
        fragment = row.fragment
        slot = int(self.columns.slots([fragment.id])[0])
        was_alive = bool(self.columns.alive[slot])
        self.columns.update(fragment)
        if row.terms is not None:
            self.lexical.replace(slot, row.terms.hashes, row.terms.counts, len(fragment.content))
            self._vector(slot, fragment.id, row.vector)
        elif row.vector is not None:
            self._vector(slot, fragment.id, row.vector)
        if was_alive and fragment.forget_time_us is not None:
            self.lexical.remove(slot)
        elif not was_alive and fragment.forget_time_us is None:
            self.lexical.restore(slot)
        self._enter(fragment)

    def _extend(self, block: Block, later: bool = False) -> None:
        """Fragments that are new here. All at once: one by one they cost five times as much."""
        fragments = block.fragments
        if not fragments:
            return
        first = self.columns.extend(fragments)
        sessions: list[int] = self.columns.session[first:].tolist()
        characters = [len(each.content) for each in fragments]
        self.lexical.extend(block.hashes, block.counts, block.sizes, sessions, characters, later)
        for slot, each in enumerate(fragments, first):
            if each.external_id or each.kind is FragmentKind.INSIGHT:
                self._enter(each)
            if each.forget_time_us is not None:
                self.lexical.remove(slot)
        if self.dense is not None:
            self.dense.extend(block.vectors, block.vectored, adopt=later)
        else:
            which = np.flatnonzero(block.vectored).tolist()
            self.fresh |= {fragments[at].id: vector.copy() for at, vector in zip(which, block.vectors, strict=True)}

    def _vector(self, slot: int, fragment_id: str, packed: bytes | None) -> None:
        vector = None if packed is None else np.frombuffer(packed, dtype="<f4")
        if self.dense is not None:
            self.dense.set(slot, vector)
        elif vector is not None:
            self.fresh[fragment_id] = vector
        else:
            self.fresh.pop(fragment_id, None)
        self._unsettled.add(fragment_id)

    def _outgrown(self) -> None:
        """Past the bound the vectors leave RAM; the index and the overlay take over.

        Twice the bound and not the bound itself, so that a memory at the edge does not go to and fro.
        """
        if self.dense is not None and len(self.dense) > 2 * self._dense_max:
            slots = {id_: slot for id_ in self._unsettled if (slot := self.columns.slot(id_)) is not None}
            vectors = {id_: self.dense.vector(slot) for id_, slot in slots.items()}
            self.fresh = {id_: vector for id_, vector in vectors.items() if vector is not None}
            self.dense = None

    def _remove(self, fragment_id: str) -> None:
        slot = self.columns.slot(fragment_id)
        if slot is None:
            return
        self.columns.remove(slot)
        self.lexical.remove(slot)
        self.contents.remove(fragment_id)
        if self.dense is not None:
            self.dense.set(slot, None)
        self.fresh.pop(fragment_id, None)
        self._unsettled.discard(fragment_id)
        self.insights.discard(fragment_id)
        key = self._key_of.pop(fragment_id, "")
        if key and self._keys.get(key) == fragment_id:
            del self._keys[key]

    def _enter(self, fragment: Fragment) -> None:
        if fragment.kind is FragmentKind.INSIGHT:
            self.insights.add(fragment.id)
        if fragment.external_id:
            self._keys[fragment.external_id] = fragment.id
            self._key_of[fragment.id] = fragment.external_id

    def _compact(self) -> None:
        dead = len(self.columns) - len(self.columns.live_ids())
        if dead < _DEAD_MIN or dead * 4 < len(self.columns):
            return
        kept = np.array([slot for slot, id_ in enumerate(self.columns.ids) if id_ != GONE], np.int64)
        self.columns.keep(kept)
        self.lexical.keep(kept)
        if self.dense is not None:
            self.dense.keep(kept)


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
