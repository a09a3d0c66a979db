"""An active memory in RAM: the state of its tiers, the search structures of all fragments, and the latest contents.

Rule 1. Only `apply_commit` changes it, after the commit. A recall reads it between two awaits and so sees one revision.
Rule 2. The tiers are current when `apply_commit` returns. The search structures are updated lazily: the next read
applies the rows of small commits in one batch. Row by row costs several times as much, and clients that wait for
*stored* would wait for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import structlog

from memstream_server.core.arrays import Parts
from memstream_server.core.columns import Columns
from memstream_server.core.dense import DenseMatrix
from memstream_server.core.events import EventType
from memstream_server.core.identity import identity_hash
from memstream_server.core.lexical import Legs, LexicalIndex, WordStatistics
from memstream_server.core.postings import Hashes
from memstream_server.core.supersession import Links
from memstream_server.core.suspicions import KnownPairs
from memstream_server.core.transition import Transition
from memstream_server.core.twins import KnownWords
from memstream_server.core.values import Fragment, FragmentKind, Held, MemoryKind, State, Tier, Vector
from memstream_server.engine.memory.enrich import Embedding, renew_terms
from memstream_server.engine.memory.fragment_cache import FragmentCache
from memstream_server.engine.memory.image_changes import outdates_image, read_changes
from memstream_server.engine.memory.search_structures import SearchStructures
from memstream_server.engine.runtime.turns import pause_if_due
from memstream_server.ports.images import NO_IMAGES, Image, ImageKey, Images
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import Changes, LoadedMemory
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.rows import Row, RowBlock
from memstream_server.ports.journal.writing import Commit
from memstream_server.ports.models import Analyzer

log = structlog.get_logger(__name__)

_RECALLED_MAX = 4_096
"""Recalled contents kept to detect echoes, over all sessions."""
LATEST_MAX = 1_024
"""Fragments that a load leaves in the fragment cache: it decodes them anyway."""
UNSHOWN_MAX = 32
"""Rows that may wait for the next read; so many cost it half a millisecond."""
SHOWN_PER_SLICE = 64
"""Fragments with which the search structures are brought up to date in one step, about a millisecond."""


class WorkingSet:
    """See the module docstring.

    It starts empty. The journal adds the memory's blocks (Gathering) in a thread, as sole owner. `finish_load`
    completes it.
    """

    record: MemoryRecord
    state: State

    def __init__(
        self,
        embedding: Embedding,
        dense_max: int,
        analyzer: Analyzer,
        images: Images = NO_IMAGES,
        *,
        newest_vectors: int = 0,
    ) -> None:
        """`newest_vectors`: how many vectors of its newest fragments it keeps in RAM if it is too large for `dense`."""
        self.embedding = embedding
        """The space of all its vectors."""
        self.vectorless: set[str] = set()
        """Of a memory of the past that is too large for RAM: fragments whose present vector is of another content."""
        self.fragment_cache = FragmentCache()
        self.stale: dict[str, int] = {}
        """Revisions by id: text read from that fragment before the revision may hold erased words: not to be used."""
        self.erase_revision = 0
        """The last revision since the load that erased content: an earlier answer may hold erased words."""
        self.suspicions = KnownPairs()
        self.words: KnownWords = {}
        """Of fragments that recall returned lately; see related.py."""
        self._dense_max = dense_max
        self._newest_vectors = newest_vectors
        self._recalled: OrderedDict[tuple[str, int], tuple[int, str]] = OrderedDict()
        self._analyzer = analyzer
        self._images = images
        self.image_revision = -1
        """Revision of the image that it was restored from and that is still there; -1 if there is none."""
        self._image_count = 0
        """Fragments of that image: they have the first slots."""
        self._log_time_us = 0
        """Time of the commit that made the present revision; 0: unknown."""

    # ---- called by the journal during the load
    def restore(self, record: MemoryRecord, vectors_max: int, changes: Changes) -> list[str] | None:
        """See Gathering: from the memory's image and the rows that were committed after it."""
        self.record = record
        self._log_time_us = changes.time_us
        self.forget_image()
        reading = self._images.read(record.uid, record.epoch, self.embedding.name, self._analyzer.version)
        if reading is None:
            return None
        self.begin(record, all_vectors=True)
        positions, times_us = changes.read_accesses()  # another thread reads the image meanwhile
        image, held = reading.result(), None
        if image is None:
            return None
        try:
            held = self._unpack(image, vectors_max, changes)
            if held is not None:
                self._structures.columns.set_accesses(positions, times_us)
        except (LookupError, TypeError, ValueError) as error:  # written by other software of the same version
            log.error("image_not_usable", memory=record.uid, error=type(error).__name__)
        if held is None:
            self._images.drop(record.uid)
        return held

    def _unpack(self, image: Image, vectors_max: int, changes: Changes) -> list[str] | None:
        parts, language = image.parts, self.record.policy.language
        self.links.unpack(parts.values["links"])
        blocks = read_changes(image, self.links, self.record, changes)
        self._renewed_in = parts.values["renewed_in"]
        if blocks is None or self._renewed_in not in ("", language):
            return None
        self._structures.unpack(parts)
        self._key_of.update(parts.values["external_ids"])
        self._keys.update({key: id_ for id_, key in self._key_of.items()})
        columns, count = self._structures.columns, len(self._structures.columns)
        for block in blocks:
            self._structures.apply_block(self._renew_terms(block))
            for each in block.fragments:
                self._index_keys(each)
                self.links.note(each)
        if (blocks and not columns.in_order()) or self._structures.vector_count > vectors_max:
            return None
        self._structures.settle_postings()
        insights, held = columns.kind_is([FragmentKind.INSIGHT]), ~columns.tier_is([Tier.LONG_TERM])
        self.insights.update([columns.ids[slot] for slot in np.flatnonzero(insights).tolist()])
        self._unsettled.update([columns.ids[slot] for slot in np.flatnonzero(held).tolist()])
        self.image_revision, self._image_count = image.key.revision, count
        return [columns.ids[slot] for slot in np.flatnonzero(held & columns.alive).tolist()]

    def forget_image(self) -> None:
        """The memory's image is removed, or about to be."""
        self.image_revision, self._image_count = -1, 0

    def outdates_image(self, commit: Commit) -> bool:
        """Whether the memory's image must be removed before the commit."""
        return self.image_revision < 0 or outdates_image(commit, self._structures.columns, self._image_count)

    def _image_key(self) -> ImageKey:
        record = self.record
        space, analyzer = self.embedding.name, self._analyzer.version
        return ImageKey(record.uid, record.epoch, record.revision, self._log_time_us, space, analyzer)

    async def write_image(self, ticket: int) -> None:
        """Write the memory's image. Only for a working set that is not used any more: its slots may be renumbered."""
        self.refresh_search()
        await self._images.write(ticket, self._image_key(), self._pack)

    def _pack(self) -> Parts | None:
        if self._renewed_in not in ("", self.record.policy.language):
            return None  # a load would analyze the fragments with outdated terms in the present language
        parts = self._structures.pack()
        if parts is None:
            return None
        more = {"links": self.links.pack(), "external_ids": self._key_of, "renewed_in": self._renewed_in}
        return Parts(parts.arrays, {**parts.values, **more})

    def begin(self, record: MemoryRecord, all_vectors: bool) -> None:
        """See Gathering."""
        self.record = record
        # A memory of another kind answers with all its fragments, and would read all their vectors.
        self._empty(all_vectors, record.kind in (MemoryKind.LONG_TERM, MemoryKind.HYBRID))

    def _empty(self, all_vectors: bool, quantizes: bool = False) -> None:
        self._structures = SearchStructures(self.embedding.model.dimension, all_vectors, quantizes)
        self._measured = (0, -1), 0  # revision and waiting rows at the last measurement, and the bytes
        self._pending: dict[str, list[Row]] = {}
        """Committed rows by fragment that the search structures lack."""
        self.pending_rows = 0
        """Number of these rows."""
        self._pending_identities: dict[int, list[str]] = {}
        """Their long-term fragments by identity hash."""
        self.insights: set[str] = set()
        self._unsettled: set[str] = set()
        """Fragments whose vectors the index may lack; kept up to date even while all vectors are in RAM."""
        self._latest: list[Fragment] = []
        self.links = Links()
        """Which fragments supersede which, forgotten ones included."""
        self._keys: dict[str, str] = {}
        self._key_of: dict[str, str] = {}
        self._renewed_in = ""
        """The language in which outdated terms were renewed; empty if none were."""

    def add(self, block: RowBlock) -> None:
        """See Gathering. Raises ValueError if the terms are outdated and the analyzer lacks the language."""
        self._structures.extend(self._renew_terms(block), later=True)
        for each in block.fragments:
            if each.external_id or each.kind is FragmentKind.INSIGHT:
                self._index_keys(each)
            if each.superseded_by or each.supersedes:
                self.links.note(each)
        self._unsettled.update([each.id for each in block.fragments if each.tier is not Tier.LONG_TERM])
        self._latest = [*self._latest, *block.fragments][-LATEST_MAX:]

    def _renew_terms(self, block: RowBlock) -> RowBlock:
        renewed = renew_terms(block, self._analyzer, self.record)
        if renewed is not block:
            self._renewed_in = self.record.policy.language
        return renewed

    def end(self) -> None:
        """See Gathering."""
        self._structures.settle_postings()
        self.fragment_cache.put(self._latest)  # in the order of the load; a small memory is cached completely
        self._latest = []  # now only the cache refers to them, and it drops erased ones

    def finish_load(self, loaded: LoadedMemory) -> None:
        """Add the record and the tiers' state."""
        self.record = loaded.record
        self.state = State(
            kind=loaded.record.kind,
            seed=loaded.record.seed,
            sensory=_sort_held(loaded.sensory),
            short_term=_sort_held(loaded.short_term),
            reflection_aggregate=loaded.record.reflection_aggregate,
        )
        self.suspicions = KnownPairs(loaded.suspicions)

    def take_over(self, earlier: WorkingSet) -> None:
        """Take over the state of an earlier working set that the journal does not store."""
        self._recalled, self.stale = earlier._recalled, earlier.stale
        known = [id_ for id_ in earlier.columns.live_ids() if id_ in self.columns]
        self.columns.touch(self.columns.slots(known), earlier.columns.access_us[earlier.columns.slots(known)])

    def overlay_vectors(self, vectors: Mapping[str, bytes]) -> None:
        """Add vectors that the index may not show yet."""
        self.fresh.update({id_: np.frombuffer(raw, dtype="<f4") for id_, raw in vectors.items()})

    @property
    def size_bytes(self) -> int:
        """Approximate RAM. Measures the search structures once for each change, and does not bring them up to date."""
        if self._measured[0] != (at := (self.record.revision, self.pending_rows)):
            self._measured = at, self._structures.size_bytes + self.pending_rows * 4_096
        return self._measured[1] + self.fragment_cache.bytes

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def fragment_count(self) -> int:
        """Number of fragments, including forgotten ones; brings nothing up to date."""
        live = self._structures.columns.live_ids()
        return len(live) + sum(waiting not in live for waiting in self._pending)

    async def read_fragments(self, journal: Journal, ids: Sequence[str]) -> list[Fragment]:
        """The existing ones of these fragments, as this working set has them."""
        return await journal.get_fragments(self.record.uid, ids)

    async def read_vectors(self, journal: Journal, ids: Sequence[str]) -> Mapping[str, bytes]:
        """The vectors of these fragments, as this working set has them or newer."""
        return await journal.get_vectors(self.record.uid, self.embedding.name, ids)

    # ---- search structures: read them again after an await
    @property
    def columns(self) -> Columns:
        """The attributes that filters and ranking need, by slot."""
        return (self.refresh_search() if self._pending else self._structures).columns

    def legs(self, terms: Hashes, of_several: WordStatistics | None = None) -> Legs:
        """The lexical legs of a query's terms; by the statistics of several memories if they are given."""
        return self.refresh_search().legs(terms, of_several)

    def count_words(self, terms: Hashes) -> WordStatistics:
        """How often a query's terms occur."""
        return self.refresh_search().count_words(terms)

    @property
    def lexical(self) -> LexicalIndex:
        """The lexical indexes."""
        return self.refresh_search().lexical

    @property
    def dense(self) -> DenseMatrix | None:
        """All vectors; None if the memory is too large to keep them in RAM."""
        return self.refresh_search().dense

    @property
    def fresh(self) -> dict[str, Vector]:
        """Vectors that overlay the index; used if `dense` is None."""
        return self.refresh_search().fresh

    @property
    def has_overlay(self) -> bool:
        """Whether vectors overlay the index, or will by the rows that wait for a read, which it does not apply."""
        return self._structures.dense is None and bool(self._structures.fresh or self._pending)

    def get_vectors(self, ids: Iterable[str]) -> dict[str, Vector]:
        """The vectors of these fragments that are in RAM."""
        return self.refresh_search().get_vectors(ids)

    def refresh_search(self, fragments_max: int | None = None) -> SearchStructures:
        """The search structures, brought up to date with all commits, or with so many of the fragments that wait."""
        if self._pending:
            part = dict(islice(self._pending.items(), fragments_max))
            self._structures.apply_rows([row for rows in part.values() for row in rows])
            # Cleared last: half-applied rows must stay pending.
            self._pending = {id_: rows for id_, rows in self._pending.items() if id_ not in part}
            self.pending_rows = sum(map(len, self._pending.values()))
            if not self._pending:
                self._pending_identities = {}
            self._structures.drop_large_dense(self._dense_max, self._unsettled, self._newest_vectors)
        return self._structures

    async def show_rows(self) -> None:
        """Bring the search structures up to date in slices, so that the next read need not."""
        while self.pending_rows > UNSHOWN_MAX:
            await pause_if_due()
            self.refresh_search(SHOWN_PER_SLICE)

    # ---- queries of decisions
    def tier_of(self, fragment_id: str) -> Tier | None:
        """The fragment's tier; None if it is not in the memory."""
        rows = self._pending.get(fragment_id)
        return self._structures.columns.tier_of(fragment_id) if rows is None else rows[-1].fragment.tier

    def is_present(self, fragment_id: str) -> bool:
        """Whether the fragment is in the memory and not forgotten."""
        rows = self._pending.get(fragment_id)
        if rows is not None:
            return rows[-1].fragment.forget_time_us is None
        return self._structures.columns.is_alive(fragment_id)

    def is_forgotten(self, fragment_id: str) -> bool:
        """Whether the fragment is in the memory but forgotten."""
        return self.tier_of(fragment_id) is not None and not self.is_present(fragment_id)

    def id_of(self, external_id: str) -> str:
        """The id of the fragment with that external id; empty if there is none."""
        return self._keys.get(external_id, "")

    def find_id(self, key: str) -> str:
        """The id of the fragment with that id or else that external id; empty if there is none."""
        return key if self.tier_of(key) is not None else self.id_of(key)

    def held_ids(self) -> set[str]:
        """Ids of the fragments in sensory and short-term."""
        return {held.fragment.id for held in (*self.state.sensory, *self.state.short_term)}

    def find_alike(self, identity: int) -> list[str]:
        """Ids of the long-term fragments with that identity hash that are not forgotten."""
        found = self._structures.find_alike(identity)
        if identity in self._pending_identities:
            found = [*found, *self._pending_identities[identity]]
        return [id_ for id_ in dict.fromkeys(found) if self.tier_of(id_) is Tier.LONG_TERM and self.is_present(id_)]

    # ---- echoes
    def remember_recalled(self, session: str, fragments: Iterable[Fragment], now_us: int) -> None:
        """Remember the fragments that a session has just recalled."""
        for fragment in fragments:
            key = (session, hash(fragment.content))
            self._recalled[key] = (now_us, fragment.id)
            self._recalled.move_to_end(key)
        oldest_us = now_us - self.record.policy.short_term.echo_window_s * 1_000_000
        while len(self._recalled) > _RECALLED_MAX or next(iter(self._recalled.values()), (oldest_us,))[0] < oldest_us:
            self._recalled.popitem(last=False)

    def echo_of(self, fragment: Fragment) -> str:
        """The fragment with the same words that the session recalled within the policy's window; empty if there is
        none.

        The core decides whether it is an echo, see core/identity.py.
        """
        window_s = self.record.policy.short_term.echo_window_s
        if not window_s or not self._recalled:
            return ""
        recalled = self._recalled.get((fragment.session, hash(fragment.content)))
        if recalled is None or fragment.create_time_us - recalled[0] > window_s * 1_000_000:
            return ""
        return recalled[1] if self.is_present(recalled[1]) else ""

    # ---- after a commit
    def apply_commit(self, commit: Commit, transition: Transition | None) -> None:
        """Apply a commit, and the transition that it stored."""
        if transition is not None:
            changed = {row.fragment.id for row in commit.rows}
            self.state = transition.state.at_version(changed, commit.revision + 1)
        self.record = replace(
            self.record,
            revision=commit.revision + 1,
            policy=commit.policy or self.record.policy,
            labels=self.record.labels if commit.labels is None else commit.labels,
            namespace=self.record.namespace if commit.name is None else commit.name[0],
            name=self.record.name if commit.name is None else commit.name[1],
            update_time_us=commit.time_us if commit.policy or commit.labels is not None else self.record.update_time_us,
            reflection_aggregate=self.state.reflection_aggregate,
            fragments=self.record.fragments + commit.added,
            change_time_us=commit.time_us,
        )
        self._log_time_us = commit.time_us
        self._apply_suspicions(commit)
        if commit.policy is not None:  # another language may be set
            self.words.clear()
        if commit.erased_evidence:
            self.erase_revision = commit.revision + 1
        if transition is None:
            return
        for row in commit.rows:
            fragment = row.fragment
            self.words.pop(fragment.id, None)
            if row.vector is not None or row.terms is not None or self.tier_of(fragment.id) is None:
                self._unsettled.add(fragment.id)
            self._pending.setdefault(fragment.id, []).append(row)
            if fragment.tier is Tier.LONG_TERM:
                self._pending_identities.setdefault(identity_hash(fragment), []).append(fragment.id)
            self._index_keys(fragment)
            self.links.note(fragment)
        self.pending_rows += len(commit.rows)
        self.fragment_cache.put([row.fragment for row in commit.rows])
        if commit.erased:
            self._forget_words(commit)
        if self._recalled:
            self._forget_changed({row.fragment.id: row.fragment.content for row in commit.rows if row.replaces})
        if commit.removed:
            self.refresh_search()
            self._remove_fragments(commit.removed)

    def _apply_suspicions(self, commit: Commit) -> None:
        if self.suspicions:
            for event in commit.events:
                if event.type is EventType.CONFLICT_ENDED:
                    self.suspicions.discard(event.fragment, event.other)
        for one in commit.suspicions:
            self.suspicions.add(one)
        for done in commit.resolutions:
            self.suspicions.resolve(done.newer, done.older, done.decision)

    def _forget_words(self, commit: Commit) -> None:
        self.stale |= dict.fromkeys(commit.erased, commit.revision + 1)
        for key in [key for key, (_, id_) in self._recalled.items() if id_ in self.stale]:
            del self._recalled[key]

    def _forget_changed(self, contents: Mapping[str, str]) -> None:
        """Remove changed contents: repeating the old text is new information."""
        if contents:
            hashes = {id_: hash(content) for id_, content in contents.items()}
            for key in [key for key, (_, id_) in self._recalled.items() if hashes.get(id_, key[1]) != key[1]]:
                del self._recalled[key]

    def list_unsettled(self) -> list[str]:
        """Long-term fragments whose vectors the index may lack."""
        return [id_ for id_ in self._unsettled if self.tier_of(id_) is Tier.LONG_TERM]

    def drop_flushed(self, ids: Iterable[str]) -> None:
        """Drop vectors that the index shows to its readers; without an index, those of all but the newest fragments."""
        fresh = self.fresh
        self._unsettled.difference_update(flushed := set(ids))
        if self._newest_vectors:
            flushed = fresh.keys() - self._unsettled - set(self.list_newest())
        for id_ in flushed:
            fresh.pop(id_, None)

    def list_newest(self) -> list[str]:
        """The fragments whose vectors stay in RAM if there is no index to search."""
        return self._structures.list_newest(self._newest_vectors)

    def _remove_fragments(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            if self.tier_of(id_) is not None:
                self.fragment_cache.remove(id_)
            self._unsettled.discard(id_)
            self.words.pop(id_, None)
            self.insights.discard(id_)
            self.links.remove(id_)
            key = self._key_of.pop(id_, "")
            if key and self._keys.get(key) == id_:
                del self._keys[key]
        self._structures.remove_fragments(ids)

    def _index_keys(self, fragment: Fragment) -> None:
        if fragment.kind is FragmentKind.INSIGHT:
            self.insights.add(fragment.id)
        if fragment.external_id:
            self._keys[fragment.external_id] = fragment.id
            self._key_of[fragment.id] = fragment.external_id


def _sort_held(held: Sequence[Held]) -> tuple[Held, ...]:
    """In the order in which a tier keeps them."""
    return tuple(sorted(held, key=lambda one: one.fragment.last_position))
