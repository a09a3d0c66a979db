"""Memories and fragments of the fake engine as resources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from memstream_server.core.columns import Columns
from memstream_server.core.events import Event, EventType
from memstream_server.core.filters import Filter, Listing, passes
from memstream_server.core.session_summaries import SessionQuery, SessionSummary, summarize_sessions
from memstream_server.core.values import Fragment, Tier
from memstream_server.engine.conflicts import Resolved, Verdict
from memstream_server.engine.errors import (
    CursorCompacted,
    EtagMismatch,
    FragmentNotFound,
    MemoryExists,
)
from memstream_server.engine.lifecycle import FragmentChange, apply_change
from memstream_server.engine.recall.recall_receipts import Replay
from memstream_server.engine.recall.standing_query import OpenQuery
from memstream_server.engine.requests import (
    AnswerOf,
    AsOf,
    ChangeCount,
    MemoryChange,
    NewMemory,
    NewObservation,
    Once,
    Put,
    Statistics,
    fragment_etag,
    memory_etag,
)
from memstream_server.engine.runtime.clock import encode_ulid
from memstream_server.ports.journal.reading import StoredConflict
from memstream_server.ports.journal.records import (
    Answer,
    Counts,
    FragmentVersion,
    Labels,
    MemoryRecord,
    NamespaceBytes,
    RecallReceipt,
    Recorded,
)
from tests.support.fake_state import FakeMemory

if TYPE_CHECKING:
    from tests.support.fake_engine import FakeEngine

T = TypeVar("T")


class FakeConflicts:
    """No suspicions: the scripted engine compares nothing."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def list_page(
        self, namespace: str, name: str, decided: bool, after: tuple[str, str], limit: int
    ) -> tuple[list[StoredConflict], bool, str]:
        return [], False, self._engine.find(namespace, name).record.uid

    async def resolve(self, namespace: str, name: str, verdict: Verdict, once: object) -> Resolved:
        self._engine.find(namespace, name)
        raise FragmentNotFound(f"{verdict.newer} and {verdict.older} are not suspected", id=verdict.newer)


class FakeReceipts:
    """No receipts: the scripted engine keeps none."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def list_page(
        self, namespace: str, name: str, before: int | None, limit: int
    ) -> tuple[list[tuple[int, RecallReceipt]], bool, str]:
        return [], False, self._engine.find(namespace, name).record.uid

    async def replay(self, namespace: str, name: str, receipt_id: str, read_query: object) -> Replay:
        self._engine.find(namespace, name)
        raise FragmentNotFound(f"there is no receipt {receipt_id}", id=receipt_id)


class FakeOpenQueries:
    """No standing queries: the scripted engine answers none."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def list_page(self, namespace: str, name: str, after: str, limit: int) -> tuple[list[OpenQuery], bool]:
        self._engine.find(namespace, name)
        return [], False


class FakeMemories:
    """Memories as resources."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def create(self, new: NewMemory, answer: AnswerOf | None = None) -> tuple[MemoryRecord, bool]:
        if (new.namespace, new.name) in self._engine.held:
            if new.exist_ok:
                return self._engine.find(new.namespace, new.name).record, False
            raise MemoryExists(f"memory {new.namespace}/{new.name} exists", namespace=new.namespace, memory=new.name)
        self._engine.made += 1
        record = MemoryRecord(
            encode_ulid(self._engine.made), new.namespace, new.name, new.kind, new.policy, b"seed", new.labels
        )
        memory = FakeMemory(record)
        memory.commit(Event(EventType.MEMORY_CREATED, ""))
        self._engine.keep_first(None if answer is None else answer(memory.record))
        self._engine.held[new.namespace, new.name] = memory
        return memory.record, True

    async def clone(
        self, namespace: str, name: str, new_namespace: str, new_name: str, answer: AnswerOf | None = None
    ) -> MemoryRecord:
        source = self._engine.find(namespace, name).record
        new = NewMemory(new_namespace, new_name, source.kind, source.policy, source.labels)
        return (await self.create(new, answer))[0]

    async def get(self, namespace: str, name: str) -> MemoryRecord:
        return self._engine.find(namespace, name).record

    async def list_page(
        self, namespace: str, after: str, limit: int, prefix: str = "", labels: Labels = ()
    ) -> list[MemoryRecord]:
        here = [name for space, name in self._engine.held if space == namespace and name.startswith(prefix)]
        records = [self._engine.held[namespace, name].record for name in sorted(here) if name > after]
        return [record for record in records if set(labels) <= set(record.labels)][:limit]

    async def list_namespaces(self, after: str, limit: int) -> list[tuple[str, int]]:
        spaces = [space for space, _ in self._engine.held]
        return [(space, spaces.count(space)) for space in sorted(set(spaces)) if space > after][:limit]

    byte_quotas = 1_000, 100

    async def read_bytes(self, namespaces: Sequence[str]) -> dict[str, NamespaceBytes]:
        """A namespace stores ten bytes of each kind for every memory."""
        spaces = [space for space, _ in self._engine.held]
        return {space: NamespaceBytes(*[10 * spaces.count(space)] * 5) for space in namespaces}

    async def update(
        self, namespace: str, name: str, change: MemoryChange, answer: AnswerOf | None = None
    ) -> MemoryRecord:
        memory = self._engine.find(namespace, name)
        if change.etag and change.etag != memory_etag(memory.record):
            raise EtagMismatch("it has changed since")
        memory.record = replace(
            memory.record,
            policy=change.policy or memory.record.policy,
            labels=memory.record.labels if change.labels is None else change.labels,
            update_time_us=memory.record.update_time_us + 1,
        )
        memory.commit(Event(EventType.MEMORY_UPDATED, ""))
        self._engine.keep(None if answer is None else answer(memory.record))
        return memory.record

    async def delete(self, namespace: str, name: str, etag: str = "", answer: Answer | None = None) -> None:
        memory = self._engine.find(namespace, name)
        if etag and etag != memory_etag(memory.record):
            raise EtagMismatch("it has changed since")
        del self._engine.held[namespace, name]
        self._engine.keep(answer)

    async def get_statistics(self, namespace: str, name: str) -> Statistics:
        memory = self._engine.find(namespace, name)
        return Statistics(memory.record.revision, Counts(long_term=len(memory.fragments)), True, 1)


class FakeFragments:
    """Fragments as resources."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def get(self, namespace: str, name: str, id: str = "", external_id: str = "") -> tuple[Fragment, str, int]:
        memory = self._engine.find(namespace, name)
        for fragment in memory.fragments:
            if fragment.id == id or (external_id and fragment.external_id == external_id):
                return fragment, "", memory.record.revision
        raise FragmentNotFound(f"there is no fragment {id or external_id}", id=id or external_id)

    async def read_many(self, namespace: str, name: str, ids: Sequence[str]) -> list[Fragment]:
        return [fragment for fragment in self._engine.find(namespace, name).fragments if fragment.id in ids]

    async def list_page(
        self,
        namespace: str,
        name: str,
        listing: Listing,
        after: int,
        limit: int,
    ) -> tuple[list[Fragment], int | None, int, str]:
        memory = self._engine.find(namespace, name)
        found = [each for each in memory.fragments if each.position > after and listing.has(each, each.create_time_us)]
        following = found[limit - 1].position if len(found) > limit else None
        return found[:limit], following, memory.record.revision, memory.record.uid

    async def list_events(
        self, namespace: str, name: str, id: str, after: int, limit: int
    ) -> tuple[list[Recorded], int | None, int, str]:
        return [], None, 0, self._engine.find(namespace, name).record.uid

    async def check_selection(self, *_: object, **__: object) -> tuple[()]:
        return ()

    async def find_unmatched(self, *_: object) -> tuple[()]:
        return ()

    async def put(
        self, namespace: str, name: str, new: NewObservation, etag: str | None = "", once: Once[Put] | None = None
    ) -> Put:
        memory = self._engine.find(namespace, name)
        known = [each for each in memory.fragments if each.external_id == new.external_id]
        if (etag is None and known) or (etag and etag not in map(fragment_etag, known)):
            raise EtagMismatch("it has changed since")
        if known:
            changed = self._change(memory, known[0].but(content=new.content, structured=new.structured))
            return self._once(once, Put(changed, False, memory.record.revision))
        self._engine.store(memory, 1, new)
        return self._once(once, Put(memory.fragments[-1], True, memory.record.revision))

    async def update(
        self, namespace: str, name: str, change: FragmentChange, once: Once[tuple[Fragment, int]] | None = None
    ) -> tuple[Fragment, int]:
        fragment, _, _ = await self.get(namespace, name, id=change.id)
        if change.etag and change.etag != fragment_etag(fragment):
            raise EtagMismatch("it has changed since")
        memory = self._engine.find(namespace, name)
        changed = self._change(memory, apply_change(fragment, change))
        return self._once(once, (changed, memory.record.revision))

    async def read_history(
        self, namespace: str, name: str, id: str = "", external_id: str = ""
    ) -> tuple[Fragment, list[FragmentVersion], int]:
        """Keeps no versions."""
        fragment, _, revision = await self.get(namespace, name, id, external_id)
        return fragment, [], revision

    async def restore_version(
        self,
        namespace: str,
        name: str,
        id: str,
        version: int,
        etag: str = "",
        once: Once[tuple[Fragment, int]] | None = None,
    ) -> tuple[Fragment, int]:
        await self.get(namespace, name, id)
        raise FragmentNotFound(f"fragment {id!r} has no version {version}", id=id)

    async def list_sessions(
        self, namespace: str, name: str, query: SessionQuery
    ) -> tuple[list[SessionSummary], bool, int, str]:
        memory, columns = self._engine.find(namespace, name), Columns()
        for each in memory.fragments:
            columns.append(each)
        found = summarize_sessions(columns, columns.alive, replace(query, limit=query.limit + 1))
        return found[: query.limit], len(found) > query.limit, memory.record.revision, memory.record.uid

    async def forget(
        self, namespace: str, name: str, which: Sequence[str] | Filter, once: Once[ChangeCount] | None = None
    ) -> ChangeCount:
        return self._turn(self._engine.find(namespace, name), which, once, None, 1)

    async def restore(
        self, namespace: str, name: str, which: Sequence[str] | Filter, once: Once[ChangeCount] | None = None
    ) -> ChangeCount:
        return self._turn(self._engine.find(namespace, name), which, once, 1, None)

    async def supersede(
        self, namespace: str, name: str, olds: Sequence[str], new: str, once: Once[ChangeCount] | None = None
    ) -> ChangeCount:
        memory = self._engine.find(namespace, name)
        known = {key: each for each in memory.fragments for key in (each.id, each.external_id)}
        for key in (*olds, new):
            if key not in known:
                raise FragmentNotFound(f"there is no fragment {key}", id=key)
        for key in olds:
            self._change(memory, known[key].but(superseded_by=known[new].id, supersede_time_us=1))
        return self._once(once, ChangeCount(len(olds), memory.record.revision))

    def _turn(
        self,
        memory: FakeMemory,
        which: Sequence[str] | Filter,
        once: Once[ChangeCount] | None,
        before_us: int | None,
        after_us: int | None,
    ) -> ChangeCount:
        meant = [
            each
            for each in memory.fragments
            if each.forget_time_us == before_us
            and (passes(each, which) if isinstance(which, Filter) else each.id in which)
        ]
        for each in meant:
            self._change(memory, each.but(forget_time_us=after_us))
        return self._once(once, ChangeCount(len(meant), memory.record.revision))

    async def clear(
        self, namespace: str, name: str, tiers: Sequence[Tier], once: Once[ChangeCount] | None = None
    ) -> ChangeCount:
        memory = self._engine.find(namespace, name)
        kept = [each for each in memory.fragments if tiers and each.tier not in tiers]
        count = len(memory.fragments) - len(kept)
        memory.fragments[:] = kept
        return self._once(once, ChangeCount(count, memory.commit()))

    def _change(self, memory: FakeMemory, changed: Fragment) -> Fragment:
        changed = changed.but(version=memory.commit(Event(EventType.UPDATED, changed.id)))
        memory.fragments[:] = [changed if each.id == changed.id else each for each in memory.fragments]
        return changed

    def _once(self, once: Once[T] | None, result: T) -> T:
        self._engine.keep(None if once is None else once.answer(result))
        return result


class FakePast:
    """The past of memories, of which this engine keeps nothing."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def get(
        self, namespace: str, name: str, as_of: AsOf, id: str = "", external_id: str = ""
    ) -> tuple[Fragment, str, int]:
        raise self._refusal(namespace, name)

    async def list_page(
        self, namespace: str, name: str, as_of: AsOf, *which: object
    ) -> tuple[list[Fragment], int | None, int, str]:
        raise self._refusal(namespace, name)

    def _refusal(self, namespace: str, name: str) -> CursorCompacted:
        revision = self._engine.find(namespace, name).record.revision
        return CursorCompacted("nothing is kept", oldest_revision=revision)
