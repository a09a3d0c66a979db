"""Reads of the past: the fragments of a memory as of an earlier revision, and a working set of them that is ranked.

Rule 1. The log is read before the fragments, and read on if a fragment has changed since: a fragment is rebuilt only
from a log that has all its changes.
Rule 2. Versions are read after the log. One that was pruned or erased meanwhile makes the read fail, or its fragment
absent; it never shows another content.
Rule 3. Nothing here changes the memory, and nothing is kept after the call: erased words have no second place to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memstream_server.core.enhancement import merged_text
from memstream_server.core.filters import Filter, Listing, Unmatched, drop_named, fold_names
from memstream_server.core.timeline import Loss, NotKept, Timeline
from memstream_server.core.values import Enhancement, Fragment, Held, Tier
from memstream_server.engine import lifecycle
from memstream_server.engine.errors import CursorCompacted, CursorVoid, FragmentNotFound, JournalUnavailable
from memstream_server.engine.memory.working_set import WorkingSet
from memstream_server.engine.runtime.turns import in_slices, pause_if_due
from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.reading import FragmentQuery, LoadedMemory
from memstream_server.ports.journal.records import FragmentVersion, MemoryRecord, RecallReceipt, Recorded
from memstream_server.ports.journal.rows import Row, RowBlock

if TYPE_CHECKING:
    from memstream_server.engine.memory.enrich import Embedding
    from memstream_server.engine.requests import AsOf
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.journal.port import Journal

PAGE = 500
"""Transitions or fragments read at once."""
EVENTS_PER_SLICE = 64
"""Events of a transition between two pauses, about half a millisecond."""
LOADS_AT_ONCE = 2
"""Working sets of the past that exist at the same time; each takes the RAM of an active memory."""
_ATTEMPTS = 5
"""Loads of a memory that changes meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class PastMemory:
    """What a recall needs of an actor, for the past."""

    working: WorkingSet
    time_us: int
    """The moment: expiry counts at it, and recency."""
    missing: Mapping[str, Loss]
    """Fragments that were there, not forgotten, and why they are absent."""


class _Moment:
    """A memory at one moment: its timeline, and the versions that were read."""

    def __init__(self, journal: Journal, record: MemoryRecord, timeline: Timeline, time_us: int | None) -> None:
        self.record = record
        self.timeline = timeline
        self._journal = journal
        self._time_us = time_us
        self._versions: dict[str, FragmentVersion] = {}

    @property
    def time_us(self) -> int:
        return self.timeline.time_us if self._time_us is None else self._time_us

    async def read_log(self) -> None:
        """Add the transitions that were committed since the last read, then read which versions are kept."""
        while page := await self._journal.list_events(self.record.uid, self.timeline.head, PAGE):
            for one in page:
                await self._add(one)
        self.timeline.set_versions(await self._journal.version_keys(self.record.uid))
        self._versions = {}

    async def _add(self, one: Recorded) -> None:
        """Add a transition, in slices up to the moment: what must be undone follows from a whole one."""
        if one.revision > self.timeline.revision or len(one.events) <= EVENTS_PER_SLICE:
            self.timeline.add(one.revision, one.time_us, one.events)
            await pause_if_due()
            return
        async for part in in_slices(one.events, EVENTS_PER_SLICE):
            self.timeline.add(one.revision, one.time_us, part)

    async def read_time(self) -> None:
        """Read when the revision was committed, without the log around it. Raises CursorCompacted."""
        found = await self._journal.list_events(self.record.uid, self.timeline.revision - 1, 1)
        if not found or found[0].revision != self.timeline.revision:
            raise _not_kept(found[0].revision if found else self.record.revision)
        self.timeline.time_us = found[0].time_us

    async def read_versions(self, ids: Iterable[str]) -> Mapping[str, FragmentVersion]:
        """The versions that hold these fragments' content. Raises CursorCompacted."""
        wanted = {id_: base for id_ in ids if (base := self._find_base(id_))}
        missing = {id_: base for id_, base in wanted.items() if id_ not in self._versions}
        if missing:
            self._versions |= await self._journal.get_versions(self.record.uid, missing)
        return self._versions

    def _find_base(self, id_: str) -> int | None:
        try:
            return self.timeline.find_base(id_)
        except NotKept:
            raise _not_kept(self.timeline.find_oldest(id_)) from None

    async def rebuild_all(self, present: Sequence[Fragment]) -> list[Fragment]:
        """The fragments as they were; those that were not there are left out. Raises CursorCompacted."""
        if all(one.version <= self.timeline.revision for one in present):  # no change since: the log is not needed
            return [one.but(version=0) for one in present]
        while any(one.version > self.timeline.head for one in present):
            await self.read_log()
        versions = await self.read_versions([one.id for one in present])
        return [built for one in present if (built := self._rebuild(one, versions)) is not None]

    async def rebuild_vectors(self, present: Sequence[Fragment]) -> dict[str, bytes]:
        """The vectors of those fragments that had another content. Raises CursorCompacted."""
        while any(one.version > self.timeline.head for one in present):
            await self.read_log()
        changed = [one.id for one in present if self._find_base(one.id)]
        versions = await self.read_versions(changed)
        return {id_: vector for id_ in changed if (vector := _get_version(versions, id_).vector)}

    def _rebuild(self, present: Fragment, versions: Mapping[str, FragmentVersion]) -> Fragment | None:
        base = self._find_base(present.id)
        if base is None:
            return None
        return self.timeline.rebuild(present, _get_version(versions, present.id).fragment if base else None)

    def rebuild_row(self, row: Row, space: str) -> Row | None:
        """A row of a block as it was, with the terms and the vector of that content."""
        built = self._rebuild(row.fragment, self._versions)
        if built is None:
            return None
        if not self.timeline.find_base(built.id):
            return replace(row, fragment=built, vector=row.vector if built.model else None)
        version = self._versions[built.id]
        vector = version.vector if version.model == space and built.model else None
        return Row(built.but(model=space if vector else ""), version.terms, vector)


def _get_version(versions: Mapping[str, FragmentVersion], id_: str) -> FragmentVersion:
    if id_ not in versions:  # pruned or erased since the keys were read
        raise JournalUnavailable("the history changes now: try again", retry_after_s=0.1)
    return versions[id_]


class _PastWorkingSet(WorkingSet):
    """A working set whose blocks are rebuilt while it is loaded."""

    moment: _Moment
    receipt: RecallReceipt | None = None
    """Of a replay: its policy and its suspicions take the place of the present ones and of those of the log."""
    behind = False
    """Whether a fragment has changed since the log was read: the load is worthless."""

    def add(self, block: RowBlock) -> None:
        if self.behind or any(one.version > self.moment.timeline.head for one in block.fragments):
            self.behind = True
            return
        rows = (self.moment.rebuild_row(row, self.embedding.name) for row in block.iterate_rows())
        kept = [row for row in rows if row is not None]
        self.vectorless.update(row.fragment.id for row in kept if not row.fragment.model)
        self.held += [
            row.fragment
            for row in kept
            if row.fragment.tier is not Tier.LONG_TERM and row.fragment.forget_time_us is None
        ]
        super().add(RowBlock.from_rows(kept))

    def begin(self, record: MemoryRecord, all_vectors: bool) -> None:
        super().begin(self._with_policy(record), all_vectors)
        self.behind, self.vectorless = False, set()
        self.held: list[Fragment] = []

    def _with_policy(self, record: MemoryRecord) -> MemoryRecord:
        return record if self.receipt is None else replace(record, policy=self.receipt.policy)

    def finish_load(self, loaded: LoadedMemory) -> None:
        held = [Held(one) for one in self.held]
        timeline = self.moment.timeline
        super().finish_load(
            replace(
                loaded,
                suspicions=tuple(timeline.suspicions) if self.receipt is None else self.receipt.suspicions,
                record=replace(self._with_policy(loaded.record), revision=timeline.revision),
                sensory=tuple(one for one in held if one.fragment.tier is Tier.SENSORY),
                short_term=tuple(one for one in held if one.fragment.tier is Tier.SHORT_TERM),
            )
        )

    async def read_fragments(self, journal: Journal, ids: Sequence[str]) -> list[Fragment]:
        return await self.moment.rebuild_all(await journal.get_fragments(self.record.uid, ids))

    async def read_vectors(self, journal: Journal, ids: Sequence[str]) -> Mapping[str, bytes]:
        vectors = await super().read_vectors(journal, ids)
        # Read afterwards: a fragment that changed before its vector was read has a version beyond the log.
        present = await journal.get_fragments(self.record.uid, ids)
        return {**vectors, **await self.moment.rebuild_vectors(present)}


class Past:
    """Reads the past of all memories."""

    def __init__(self, storage: Storage, models: EngineModels, runtime: Runtime, registry: Registry) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._registry = registry
        self._loads = asyncio.Semaphore(LOADS_AT_ONCE)

    async def get(
        self, namespace: str, name: str, as_of: AsOf, id: str = "", external_id: str = ""
    ) -> tuple[Fragment, str, int]:
        """(fragment as it was, merged text, revision). Raises FragmentNotFound, CursorCompacted, CursorVoid."""
        moment = await self._open(namespace, name, as_of)
        await moment.read_time()
        key = external_id or id
        if external_id:
            async with self._registry.use(namespace, name) as actor:
                id = actor.working.id_of(external_id)
        found = await self._read(moment, [id]) if id else []
        if not found:
            revision = moment.timeline.revision
            raise FragmentNotFound(
                f"there was no fragment {key!r} in {namespace}/{name} at revision {revision}", id=key
            )
        return found[0], await self._merged_text(moment, found[0]), moment.timeline.revision

    async def _merged_text(self, moment: _Moment, fragment: Fragment) -> str:
        """As Fragments derives it, from the sources as they were."""
        if moment.record.policy.short_term.merge_content or not fragment.sources:
            return ""
        sources = await self._read(moment, fragment.sources)
        told = tuple(Enhancement(one.id, one.content, recollection=one.position < fragment.position) for one in sources)
        return merged_text(fragment, told, recollections=False)

    async def _read(self, moment: _Moment, ids: Sequence[str]) -> list[Fragment]:
        found = await moment.rebuild_all(await self._storage.journal.get_fragments(moment.record.uid, ids))
        return lifecycle.drop_expired(found, moment.record, moment.time_us)

    async def list_page(
        self,
        namespace: str,
        name: str,
        as_of: AsOf,
        listing: Listing,
        after: int,
        limit: int,
    ) -> tuple[list[Fragment], int | None, int, str]:
        """As Fragments.list_page, of the past. Raises CursorCompacted, CursorVoid."""
        moment = await self._open_log(namespace, name, as_of)
        record, revision = moment.record, moment.timeline.revision
        found, has = list[Fragment](), listing.make_test()
        async for page in self._iterate_pages(moment, listing.forgotten, after):
            for fragment in page:
                await pause_if_due()
                if has(fragment, moment.time_us):
                    found.append(fragment)
                    if len(found) > limit:
                        return found[:limit], found[limit - 1].position, revision, record.uid
        return found, None, revision, record.uid

    async def find_unmatched(
        self, namespace: str, name: str, as_of: AsOf, chosen: Filter, forgotten: bool
    ) -> tuple[Unmatched, ...]:
        """As Fragments.find_unmatched, of the past. Raises CursorCompacted, CursorVoid."""
        asked = {"speakers": chosen.speakers, "sessions": chosen.sessions, "metadata": chosen.named_keys}
        left = {field: fold_names(names, field) for field, names in asked.items()}
        if any(left.values()):
            async for page in self._iterate_pages(await self._open_log(namespace, name, as_of), forgotten):
                for field, names in left.items():
                    drop_named(names, page, field)
                if not any(left.values()):
                    break
        return tuple(Unmatched(field, each) for field, names in left.items() for each in names.values())

    async def _open_log(self, namespace: str, name: str, as_of: AsOf) -> _Moment:
        moment = await self._open(namespace, name, as_of)
        await moment.read_log()
        _check_kept(moment.timeline)
        return moment

    async def _iterate_pages(self, moment: _Moment, forgotten: bool, after: int = -1) -> AsyncIterator[list[Fragment]]:
        """The fragments as they were, in order of receipt, without expired ones."""
        while True:
            query = FragmentQuery(forgotten=None, after=after, limit=PAGE)
            page = await self._storage.journal.list_fragments(moment.record.uid, query)
            built = [one for one in await moment.rebuild_all(page) if (one.forget_time_us is not None) == forgotten]
            yield built if forgotten else lifecycle.drop_expired(built, moment.record, moment.time_us)
            if len(page) < PAGE:
                return
            after = page[-1].position

    def limit_loads(self) -> asyncio.Semaphore:
        """Held while a working set of the past is in use."""
        return self._loads

    async def load(self, namespace: str, name: str, as_of: AsOf, receipt: RecallReceipt | None = None) -> PastMemory:
        """The memory as it was, to rank it. Raises CursorCompacted, CursorVoid.

        With a receipt: by its policy and access times; a fragment whose version is not kept is absent.
        """
        moment = await self._open(namespace, name, as_of)
        moment.timeline.skips_lost = receipt is not None
        await moment.read_log()
        embedding = self._models.embeddings.in_force
        for _ in range(_ATTEMPTS):
            await pause_if_due()
            _check_kept(moment.timeline)
            await pause_if_due()
            await moment.read_versions(moment.timeline.changed_ids())
            working = await self._load_working(moment, embedding, receipt)
            if not working.behind:
                return PastMemory(working, moment.time_us, moment.timeline.list_missing())
            await moment.read_log()
        raise JournalUnavailable("the memory changes faster than it is read: try again", retry_after_s=0.5)

    async def _load_working(
        self, moment: _Moment, embedding: Embedding, receipt: RecallReceipt | None
    ) -> _PastWorkingSet:
        vectors_max = self._runtime.limits.dense_max(embedding.model.dimension)
        working = _PastWorkingSet(embedding, vectors_max, self._models.analyzer)
        working.moment = moment
        working.receipt = receipt
        await self._models.prepare_language(moment.record.policy if receipt is None else receipt.policy)
        try:
            loaded = await self._storage.journal.load_memory(moment.record.uid, embedding.name, vectors_max, working)
        except StaleWrite as error:
            raise JournalUnavailable("the memory was deleted", retry_after_s=0.1) from error
        working.finish_load(loaded)
        if receipt is not None:
            working.columns.set_access_times(dict(receipt.accesses))
        return working

    async def _open(self, namespace: str, name: str, as_of: AsOf) -> _Moment:
        """The moment, before its log is read."""
        record = await self._registry.read_record(namespace, name)
        revision = await self._find_revision(record, as_of)
        merges = record.policy.short_term.merge_content
        return _Moment(self._storage.journal, record, Timeline(revision, merges=merges), as_of.time_us)

    async def _find_revision(self, record: MemoryRecord, as_of: AsOf) -> int:
        name = f"{record.namespace}/{record.name}"
        if as_of.time_us is None:
            revision = as_of.revision or 0
            if revision > record.revision:
                raise CursorVoid(f"{name} is at revision {record.revision}: {revision} is in the future")
        else:
            if as_of.time_us > self._runtime.clock.now_us():
                raise CursorVoid("as_of_time is in the future")
            revision = await self._storage.journal.find_revision(record.uid, as_of.time_us) or 0
        if revision < 1:
            oldest = await self._storage.journal.list_events(record.uid, 0, 1)
            raise _not_kept(oldest[0].revision if oldest else record.revision)
        return revision


def _check_kept(timeline: Timeline) -> None:
    if oldest := timeline.find_oldest():
        raise _not_kept(oldest)


def _not_kept(oldest: int) -> CursorCompacted:
    return CursorCompacted(
        f"what fragments said is kept from revision {oldest} on: read a later as_of", oldest_revision=oldest
    )
