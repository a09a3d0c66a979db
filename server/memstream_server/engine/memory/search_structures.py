"""The search structures of an active memory: attributes, postings and vectors of every fragment by slot, no content.

Rule 1. Slots are valid until the next await: `remove_fragments` may renumber them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Parts
from memstream_server.core.columns import GONE, Columns
from memstream_server.core.dense import DenseMatrix
from memstream_server.core.dialogue import Dialogue, find_dialogue
from memstream_server.core.identity import IdentityIndex, identity_hash
from memstream_server.core.lexical import Legs, LexicalIndex, WordStatistics
from memstream_server.core.postings import Hashes
from memstream_server.core.values import Fragment, Vector
from memstream_server.ports.journal.rows import Row, RowBlock

_DEAD_MIN = 1_024
"""Compact when at least this many slots, and a quarter of all, are empty."""


class SearchStructures:
    """Those of one memory. If it has too many vectors for RAM, `dense` is None and `fresh` overlays the index."""

    def __init__(self, dimension: int, all_vectors: bool, quantizes: bool = True) -> None:
        """`quantizes`: may keep int8 copies of the vectors of a large memory; the caller reads exact ones."""
        self.columns = Columns()
        self.lexical = LexicalIndex()
        self.identities = IdentityIndex()
        self.dense = DenseMatrix(dimension, quantizes) if all_vectors else None
        self.fresh: dict[str, Vector] = {}
        self._dialogue: Dialogue | None = None

    def legs(self, terms: Hashes, of_several: WordStatistics | None = None) -> Legs:
        """The lexical legs of a query, and the dialogue."""
        if self._dialogue is None:
            self._dialogue = find_dialogue(self.columns, self.lexical.neighbours)
        return self.lexical.legs(terms, self._dialogue, of_several)

    def count_words(self, terms: Hashes) -> WordStatistics:
        """How often the words of a query occur."""
        if self._dialogue is None:
            self._dialogue = find_dialogue(self.columns, self.lexical.neighbours)
        return self.lexical.count_words(terms, self._dialogue)

    @property
    def size_bytes(self) -> int:
        """Approximate RAM."""
        held = self.columns.bytes + self.lexical.bytes + (self.dense.bytes if self.dense is not None else 0)
        held += self.identities.nbytes
        return held + sum(vector.nbytes for vector in self.fresh.values())

    def get_vectors(self, ids: Iterable[str]) -> dict[str, Vector]:
        """The vectors of these fragments that are in RAM."""
        if self.dense is None:
            return {id_: self.fresh[id_] for id_ in ids if id_ in self.fresh}
        slots = {id_: slot for id_ in ids if (slot := self.columns.slot(id_)) is not None}
        found = {id_: self.dense.vector(slot) for id_, slot in slots.items()}
        return {id_: vector for id_, vector in found.items() if vector is not None}

    def extend(self, block: RowBlock, later: bool = False) -> None:
        """Add new fragments, all at once: one by one costs five times as much.

        `later`: more will follow; the caller then calls `settle_postings`.
        """
        fragments = block.fragments
        if not fragments:
            return
        first = self.columns.extend(fragments)
        self.identities.extend([identity_hash(each) for each in fragments], later)
        self._dialogue = None
        sessions: list[int] = self.columns.linked_sessions(first).tolist()
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

    def settle_postings(self) -> None:
        """Do the deferred work after the last block that was added with `later`."""
        self.lexical.settle()
        self.identities.settle()
        self.legs(np.empty(0, np.uint64))  # the dialogue and the length norms

    @property
    def vector_count(self) -> int:
        """Number of vectors in RAM."""
        return len(self.fresh) if self.dense is None else int(self.dense.present.sum())

    def find_alike(self, identity: int) -> list[str]:
        """Ids of the fragments with that identity hash, forgotten ones included."""
        ids = [self.columns.ids[slot] for slot in self.identities.find(identity)]
        return [id_ for id_ in ids if id_ != GONE]

    def apply_rows(self, rows: Sequence[Row]) -> None:
        """Apply the rows of commits in order. The first row of a new fragment is complete; later ones carry changes."""
        changes: list[Row] = []
        new: dict[str, Row] = {}
        for row in rows:
            known = row.fragment.id in new or row.fragment.id in self.columns
            if known:
                changes.append(row)
            else:
                new[row.fragment.id] = row
        if new:
            self.extend(RowBlock.from_rows(list(new.values())))
        for row in changes:
            self._apply_row(row)

    def apply_block(self, block: RowBlock) -> None:
        """Apply fragments as they are after an image, by position: those that it lacks, and others of which neither
        words nor attributes were replaced, but place, marks or vector may have changed.
        """
        fragments = block.fragments
        new = [each.id not in self.columns for each in fragments]
        vectors = iter(block.vectors)
        given = [next(vectors) if has else None for has in block.vectored]
        for fragment, is_new, vector in zip(fragments, new, given, strict=True):
            if not is_new:
                self._apply_marks(fragment, vector)
        if any(new):
            self.extend(block.select(np.array(new)), later=True)

    def _apply_marks(self, fragment: Fragment, vector: Vector | None) -> None:
        slot = self.columns.update(fragment)
        self._move(slot, fragment)
        if self.dense is not None:
            self.dense.set(slot, vector)
        if fragment.forget_time_us is None:
            self.lexical.restore(slot)
        else:
            self.lexical.remove(slot)

    def _move(self, slot: int, fragment: Fragment) -> None:
        self._dialogue = None
        self.identities.set(slot, identity_hash(fragment))
        self.lexical.move(slot, int(self.columns.linked_sessions(slot, slot + 1)[0]))

    def _apply_row(self, row: Row) -> None:
        fragment = row.fragment
        was_alive = self.columns.is_alive(fragment.id)
        slot = self.columns.update(fragment, says_else=row.terms is not None)
        self._move(slot, fragment)
        if row.terms is not None:
            self.lexical.replace(slot, row.terms.hashes, row.terms.counts, len(fragment.content))
            self._set_vector(slot, fragment.id, row.vector)
        elif row.vector is not None:
            self._set_vector(slot, fragment.id, row.vector)
        if was_alive and fragment.forget_time_us is not None:
            self.lexical.remove(slot)
        elif not was_alive and fragment.forget_time_us is None:
            self.lexical.restore(slot)

    def _set_vector(self, slot: int, fragment_id: str, packed: bytes | None) -> None:
        vector = None if packed is None else np.frombuffer(packed, dtype="<f4")
        if self.dense is not None:
            self.dense.set(slot, vector)
        elif vector is not None:
            self.fresh[fragment_id] = vector
        else:
            self.fresh.pop(fragment_id, None)

    def list_newest(self, count: int) -> list[str]:
        """Ids of the fragments in the last `count` slots."""
        return [id_ for id_ in self.columns.ids[max(len(self.columns) - count, 0) :] if id_ != GONE]

    def drop_large_dense(self, dense_max: int, unsettled: Iterable[str], newest: int = 0) -> None:
        """Drop the vectors from RAM beyond the bound; the index replaces them, and `fresh` overlays those it may lack,
        and those of the `newest` fragments.

        The bound is that of a load, so that a restart changes nothing. Not while the index may lack a vector that is in
        RAM as an int8 copy only (the index is down).
        """
        if self.dense is None or len(self.dense) <= dense_max:
            return
        unsettled = list(unsettled)
        if not any(self.dense.has_unread(slot) for slot in self.columns.slots(unsettled).tolist()):
            self.fresh = self.get_vectors([*unsettled, *self.list_newest(newest)])
            self.dense = None

    def remove_fragments(self, ids: Iterable[str]) -> None:
        """Remove fragments that left the memory permanently."""
        self._dialogue = None
        for id_ in ids:
            slot = self.columns.slot(id_)
            if slot is not None:
                self.columns.remove(slot)
                self.lexical.remove(slot)
                if self.dense is not None:
                    self.dense.set(slot, None)
                self.fresh.pop(id_, None)
        self._compact_slots()

    def pack(self) -> Parts | None:
        """What an image keeps. None if a load from rows would give other slots, or if not all vectors are in RAM.

        May renumber the slots: only for an owner that does not use them any more.
        """
        if self.dense is None:
            return None
        if len(self.columns) > len(self.columns.live_ids()):
            self._drop_gone_slots()
        if not self.columns.in_order():
            return None
        columns = self.columns.pack()
        groups = {
            "columns": columns,
            "lexical": self.lexical.pack(),
            "identities": self.identities.pack(),
            "dense": self.dense.pack(),
        }
        arrays = {f"{group}.{name}": array for group, parts in groups.items() for name, array in parts.arrays.items()}
        return Parts(arrays, columns.values)

    def unpack(self, parts: Parts) -> None:
        """Become what was packed, from empty, as after a load from rows. Raises KeyError and ValueError.

        The caller then calls `settle_postings`.
        """
        if self.dense is None:
            raise ValueError("an image has all vectors")
        groups: defaultdict[str, dict[str, npt.NDArray[Any]]] = defaultdict(dict)
        for name, array in parts.arrays.items():
            group, _, rest = name.partition(".")
            groups[group][rest] = array
        self.columns.unpack(Parts(groups["columns"], parts.values, parts.mapped))
        sessions, alive = self.columns.linked_sessions(), self.columns.alive
        self.lexical.unpack(Parts(groups["lexical"], {}, parts.mapped), sessions, alive)
        self.identities.unpack(Parts(groups["identities"], {}, parts.mapped))
        self.dense.unpack(Parts(groups["dense"], {}, parts.mapped))

    def _compact_slots(self) -> None:
        dead = len(self.columns) - len(self.columns.live_ids())
        if dead >= _DEAD_MIN and dead * 4 >= len(self.columns):
            self._drop_gone_slots()

    def _drop_gone_slots(self) -> None:
        kept = np.array([slot for slot, id_ in enumerate(self.columns.ids) if id_ != GONE], np.int64)
        self.columns.keep(kept)
        self.lexical.keep(kept)
        self.identities.keep(kept)
        if self.dense is not None:
            self.dense.keep(kept)
