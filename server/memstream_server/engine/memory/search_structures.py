"""What of an active memory is searched: attributes, postings and vectors of every fragment, by slot. No content.

Rule 1. Slots are for use between two awaits: `remove` may renumber them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from memstream_server.core.columns import GONE, Columns
from memstream_server.core.dense import DenseMatrix
from memstream_server.core.identity import IdentityIndex, identity_hash
from memstream_server.core.lexical import LexicalIndex
from memstream_server.core.values import Vector
from memstream_server.ports.journal.rows import Block, Row

_DEAD_MIN = 1_024
"""Empty slots before they are given back (and at least a quarter of all)."""


class Searched:
    """Of one memory. `dense` is None where there are too many vectors for RAM; `fresh` overlays the index then."""

    def __init__(self, dimension: int, all_vectors: bool) -> None:
        self.columns = Columns()
        self.lexical = LexicalIndex()
        self.identities = IdentityIndex()
        self.dense = DenseMatrix(dimension) if all_vectors else None
        self.fresh: dict[str, Vector] = {}

    @property
    def size_bytes(self) -> int:
        """Memory held, about."""
        held = self.columns.bytes + self.lexical.bytes + (self.dense.bytes if self.dense is not None else 0)
        held += self.identities.nbytes
        return held + sum(vector.nbytes for vector in self.fresh.values())

    def vectors(self, ids: Iterable[str]) -> dict[str, Vector]:
        """Those of these fragments' vectors that are in RAM."""
        if self.dense is None:
            return {id_: self.fresh[id_] for id_ in ids if id_ in self.fresh}
        slots = {id_: slot for id_ in ids if (slot := self.columns.slot(id_)) is not None}
        found = {id_: self.dense.vector(slot) for id_, slot in slots.items()}
        return {id_: vector for id_, vector in found.items() if vector is not None}

    def extend(self, block: Block, later: bool = False) -> None:
        """Fragments that are new here. All at once: one by one they cost five times as much.

        `later`: there are more to come, and the postings are settled after them.
        """
        fragments = block.fragments
        if not fragments:
            return
        first = self.columns.extend(fragments)
        self.identities.extend([identity_hash(each) for each in fragments], later)
        sessions: list[int] = self.columns.session[first:].tolist()
        characters = [len(each.content) for each in fragments]
        self.lexical.extend(block.hashes, block.counts, block.sizes, sessions, characters, later)
        for slot, each in enumerate(fragments, first):
            if each.forget_time_us is not None:
                self.lexical.remove(slot)
        if self.dense is not None:
            self.dense.extend(block.vectors, block.vectored, adopt=later)
        else:
            which = np.flatnonzero(block.vectored).tolist()
            self.fresh |= {fragments[at].id: vector.copy() for at, vector in zip(which, block.vectors, strict=True)}

    def settle(self) -> None:
        """Do now, after the last of `later`, what the next look would have to wait for."""
        self.lexical.settle()
        self.identities.settle()

    def find_alike(self, identity: int) -> list[str]:
        """Ids of the fragments with that identity hash, forgotten ones included."""
        ids = [self.columns.ids[slot] for slot in self.identities.find(identity)]
        return [id_ for id_ in ids if id_ != GONE]

    def enter(self, rows: Sequence[Row]) -> None:
        """What commits wrote, in order; of a fragment that is new here the first row has all, and later ones what
        changed."""
        changes: list[Row] = []
        new: dict[str, Row] = {}
        for row in rows:
            known = row.fragment.id in new or row.fragment.id in self.columns
            if known:
                changes.append(row)
            else:
                new[row.fragment.id] = row
        if new:
            self.extend(Block.from_rows(list(new.values())))
        for row in changes:
            self._change(row)

    def _change(self, row: Row) -> None:
        fragment = row.fragment
        slot = int(self.columns.slots([fragment.id])[0])
        was_alive = bool(self.columns.alive[slot])
        self.columns.update(fragment, says_else=row.terms is not None)
        self.identities.set(slot, identity_hash(fragment))
        self.lexical.move(slot, int(self.columns.session[slot]))
        if row.terms is not None:
            self.lexical.replace(slot, row.terms.hashes, row.terms.counts, len(fragment.content))
            self._vector(slot, fragment.id, row.vector)
        elif row.vector is not None:
            self._vector(slot, fragment.id, row.vector)
        if was_alive and fragment.forget_time_us is not None:
            self.lexical.remove(slot)
        elif not was_alive and fragment.forget_time_us is None:
            self.lexical.restore(slot)

    def _vector(self, slot: int, fragment_id: str, packed: bytes | None) -> None:
        vector = None if packed is None else np.frombuffer(packed, dtype="<f4")
        if self.dense is not None:
            self.dense.set(slot, vector)
        elif vector is not None:
            self.fresh[fragment_id] = vector
        else:
            self.fresh.pop(fragment_id, None)

    def outgrown(self, dense_max: int, unsettled: Iterable[str]) -> None:
        """Past the bound the vectors leave RAM; the index takes over, and the overlay for those it may not have.

        Twice the bound and not the bound itself, so that a memory at the edge does not go to and fro.
        """
        if self.dense is not None and len(self.dense) > 2 * dense_max:
            self.fresh = self.vectors(unsettled)
            self.dense = None

    def remove(self, ids: Iterable[str]) -> None:
        """These fragments left the memory for good."""
        for id_ in ids:
            slot = self.columns.slot(id_)
            if slot is not None:
                self.columns.remove(slot)
                self.lexical.remove(slot)
                if self.dense is not None:
                    self.dense.set(slot, None)
                self.fresh.pop(id_, None)
        self._compact()

    def _compact(self) -> None:
        dead = len(self.columns) - len(self.columns.live_ids())
        if dead < _DEAD_MIN or dead * 4 < len(self.columns):
            return
        kept = np.array([slot for slot, id_ in enumerate(self.columns.ids) if id_ != GONE], np.int64)
        self.columns.keep(kept)
        self.lexical.keep(kept)
        self.identities.keep(kept)
        if self.dense is not None:
            self.dense.keep(kept)
