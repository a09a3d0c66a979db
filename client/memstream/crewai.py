"""CrewAI on a memstream server: a memory for crews, agents and flows, which is asked by text.

CrewAI's storage is asked by a vector alone, and its embedder chooses the size. So the adapter is a `Memory`: it gives
the server texts and questions as they are, and the server embeds, scores and ranks them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from memstream.arguments import check_constructor
from memstream.errors import FragmentNotFound, MemoryExists, MemoryNotFound
from memstream.frameworks import framework
from memstream.listed_values import FragmentOrder
from memstream.sync import Client
from memstream.values import Condition, Filter, Fragment, MemoryKind, Observation, Tier

with framework("crewai"):
    from crewai.events.event_bus import crewai_event_bus
    from crewai.events.types.memory_events import (
        MemoryQueryCompletedEvent,
        MemoryQueryFailedEvent,
        MemoryQueryStartedEvent,
    )
    from crewai.memory.types import MemoryMatch, MemoryRecord, ScopeInfo
    from crewai.memory.unified_memory import Memory
    from crewai.memory.utils import join_scope_paths, normalize_scope_path

BATCH_MAX = 100
"""Records in one call: below the server's limit of a message with the longest contents."""
POLICY = {
    "score_importance": False,
    "reflection": {"threshold": 0, "insight_on_promotion": False},
    "retention": {"forget_grace": 0},
}
"""Policy of a memory that is created here: no calls of a model, and what is forgotten is erased."""


@check_constructor
class MemstreamStorage:
    """CrewAI's `StorageBackend` on a memory of a server: each record is a fragment. It has no search by vector."""

    def __init__(self, client: Client, memory: str) -> None:
        self._client = client
        self._memory = client.memory(memory)
        self._content_max = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> MemstreamStorage:
        return self  # a copy of a crew has the same memory

    @property
    def content_max_bytes(self) -> int:
        """The longest content that the server takes."""
        self._content_max = self._content_max or self._client.server_info().limits.content_bytes_max
        return self._content_max

    def save(self, records: list[MemoryRecord]) -> None:
        """Stores records; one with the id of another replaces it. Raises what the server refuses."""
        observations = [_to_observation(record) for record in records]
        for start in range(0, len(observations), BATCH_MAX):
            self._observe(observations[start : start + BATCH_MAX])

    def _observe(self, observations: Sequence[Observation]) -> None:
        try:
            done = self._memory.observe_batch(observations)
        except MemoryNotFound:
            with suppress(MemoryExists):  # of another process, or with a policy of its own
                self._client.create_memory(self._memory.path, kind=MemoryKind.LONG_TERM, policy=POLICY)
            done = self._memory.observe_batch(observations)
        for refused in done.rejected:
            raise refused.error

    def find(self, query: str, where: Filter, limit: int, reinforce: bool | None) -> list[tuple[MemoryRecord, float]]:
        """The records that answer a question, best first, with their relevance from 0 to 1."""
        try:
            found = self._memory.recall_once(
                query, limit=limit, filter=where, omit_working_memory=True, reinforce=reinforce
            )
        except MemoryNotFound:
            return []
        return [(_to_record(hit.fragment), hit.relevance) for hit in found]

    def search(self, query_embedding: list[float], *args: Any, **kwargs: Any) -> list[tuple[MemoryRecord, float]]:
        """Raises NotImplementedError: the server has vectors of its own model."""
        raise NotImplementedError("the server is asked by text: use memstream.crewai.MemstreamMemory as the memory")

    def update(self, record: MemoryRecord) -> None:
        """Replaces the record with the same id."""
        self.save([record])

    def get_record(self, record_id: str) -> MemoryRecord | None:
        """The record, or None."""
        found = self._get(record_id)
        return _to_record(found) if found else None

    def _get(self, record_id: str) -> Fragment | None:
        try:
            return self._memory.get_fragment(external_id=record_id)
        except (FragmentNotFound, MemoryNotFound):
            return None

    def delete(
        self,
        scope_prefix: str | None = None,
        categories: list[str] | None = None,
        record_ids: list[str] | None = None,
        older_than: datetime | None = None,
        metadata_filter: dict[str, Any] | None = None,
    ) -> int:
        """Deletes the records that meet all that is given, and returns how many."""
        where = _filter(scope_prefix, categories, metadata_filter, older_than)
        ids = [found.id for found in self._list(where) if record_ids is None or found.external_id in record_ids]
        return int(self._memory.forget_fragments(ids)) if ids else 0

    def list_records(self, scope_prefix: str | None = None, limit: int = 200, offset: int = 0) -> list[MemoryRecord]:
        """Records of a scope, newest first."""
        if limit <= 0 or offset < 0:
            return []
        found: list[MemoryRecord] = []
        for place, fragment in enumerate(self._list(_filter(scope_prefix))):
            if place >= offset + limit:
                break
            if place >= offset:
                found.append(_to_record(fragment))
        return found

    def get_scope_info(self, scope: str) -> ScopeInfo:
        """Counts, categories and times of a scope and those below it."""
        records = list(map(_to_record, self._list(_filter(scope))))
        times = [record.created_at for record in records]
        path = normalize_scope_path(scope)
        return ScopeInfo(
            path=path,
            record_count=len(records),
            categories=sorted({category for record in records for category in record.categories}),
            oldest_record=min(times, default=None),
            newest_record=max(times, default=None),
            child_scopes=_children(path, records),
        )

    def list_scopes(self, parent: str = "/") -> list[str]:
        """The scopes right below a scope."""
        return _children(normalize_scope_path(parent), map(_to_record, self._list(_filter(parent))))

    def list_categories(self, scope_prefix: str | None = None) -> dict[str, int]:
        """How many records have each category."""
        records = map(_to_record, self._list(_filter(scope_prefix)))
        return dict(Counter(category for record in records for category in record.categories))

    def count(self, scope_prefix: str | None = None) -> int:
        """How many records a scope and those below it have."""
        return sum(1 for _ in self._list(_filter(scope_prefix)))

    def reset(self, scope_prefix: str | None = None) -> None:
        """Deletes all records of a scope and those below it."""
        self.delete(scope_prefix)

    def _list(self, where: Filter) -> Iterator[Fragment]:
        try:
            yield from self._memory.list_fragments(
                where, order=FragmentOrder.OBSERVE_TIME, descending=True, page_size=1_000
            )
        except MemoryNotFound:
            return


class MemstreamMemory(Memory):
    """A memory for `Crew(memory=...)`, `Agent(memory=...)` and flows: the memory "namespace/name" of a server.

    client: a blocking client. memory: created by the first record. Other arguments are those of CrewAI's `Memory`; of
    these, `llm` extracts facts from what a crew has done, `root_scope`, `default_importance` and `read_only` hold, and
    weights, thresholds and `embedder` have no effect, because the server ranks and embeds.
    """

    def __init__(self, client: Client, memory: str, **kwargs: Any) -> None:
        super().__init__(storage=MemstreamStorage(client, memory), **kwargs)

    def recall(
        self,
        query: str,
        scope: str | None = None,
        categories: list[str] | None = None,
        limit: int = 10,
        depth: str = "deep",
        source: str | None = None,
        include_private: bool = False,
    ) -> list[MemoryMatch]:
        """The records that answer a question, best first, with their relevance as score. `depth` has no effect."""
        if not query.strip():
            return []
        where = _filter(join_scope_paths(self.root_scope, scope), categories)
        if not include_private:
            own = ~Filter(metadata={"private": True})
            where = where & (own if source is None else own | Filter(metadata={"source": source}))
        about = {"query": query, "limit": limit, "score_threshold": None, "source_type": "unified_memory"}
        crewai_event_bus.emit(self, MemoryQueryStartedEvent(**about))
        begun = time.perf_counter()
        try:
            found = self._storage.find(query, where, limit, False if self.read_only else None)
        except Exception as error:
            crewai_event_bus.emit(self, MemoryQueryFailedEvent(**about, error=str(error)))
            raise
        matches = [MemoryMatch(record=one, score=score, match_reasons=["semantic"]) for one, score in found]
        took_ms = (time.perf_counter() - begun) * 1_000
        crewai_event_bus.emit(self, MemoryQueryCompletedEvent(**about, results=matches, query_time_ms=took_ms))
        return matches

    def update(
        self,
        record_id: str,
        content: str | None = None,
        scope: str | None = None,
        categories: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        importance: float | None = None,
    ) -> MemoryRecord:
        """Changes a record. Raises ValueError if there is none."""
        found = self._storage.get_record(record_id)
        if found is None:
            raise ValueError(f"Record not found: {record_id}")
        if self.read_only:
            return found
        given = {
            "content": content,
            "scope": scope,
            "categories": categories,
            "metadata": metadata,
            "importance": importance,
        }
        changed = found.model_copy(update={name: value for name, value in given.items() if value is not None})
        self._storage.update(changed)
        return changed

    def _submit_save(self, fn: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        """Saves at once: what CrewAI saves in the background is lost if the process ends."""
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        self._on_save_done(done)
        return done

    def _encode_batch(
        self,
        contents: list[str],
        scope: str | None = None,
        categories: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        importance: float | None = None,
        source: str | None = None,
        private: bool = False,
        root_scope: str | None = None,
    ) -> list[MemoryRecord]:
        """Stores texts without a model; one that is longer than the server takes becomes several records."""
        records = [
            MemoryRecord(
                content=part,
                scope=join_scope_paths(root_scope, scope),
                categories=categories or [],
                metadata=metadata or {},
                importance=self.default_importance if importance is None else importance,
                source=source,
                private=private,
            )
            for content in contents
            for part in _split(content, self._storage.content_max_bytes)
        ]
        self._storage.save(records)
        return records


def _split(content: str, bytes_max: int) -> Iterator[str]:
    """Parts of at most so many bytes, cut between words."""
    data = content.encode("utf-8", "replace")
    while data:
        part = data[:bytes_max]
        if len(data) > bytes_max:
            part = part[: part.rfind(b" ") + 1] or part.decode(errors="ignore").encode()
        if text := part.decode().strip():
            yield text
        data = data[len(part) :]


def _to_observation(record: MemoryRecord) -> Observation:
    """The fragment of a record. Raises InvalidArgument, which is a TypeError and a ValueError, for odd metadata."""
    scope = normalize_scope_path(record.scope)
    return Observation(
        record.content,
        external_id=record.id,
        importance=record.importance,
        observe_time=record.created_at.replace(tzinfo=record.created_at.tzinfo or UTC),
        metadata={
            "scope": scope,
            "within": _above(scope),
            "categories": list(record.categories),
            "metadata": record.metadata,
            "private": record.private,
            **({} if record.source is None else {"source": record.source}),
        },
    )


def _to_record(fragment: Fragment) -> MemoryRecord:
    """The record of a fragment; that of another program is in the scope "/"."""
    about: dict[str, Any] = dict(fragment.metadata)
    made = fragment.observe_time or datetime.now(UTC)
    return MemoryRecord(
        id=fragment.external_id or fragment.id,
        content=fragment.content,
        scope=about.get("scope", "/"),
        categories=list(about.get("categories", ())),
        metadata=dict(about["metadata"]) if isinstance(about.get("metadata"), dict) else {},
        importance=fragment.importance,
        created_at=made.astimezone(UTC).replace(tzinfo=None),  # as CrewAI's own, which are in UTC without a zone
        last_accessed=(fragment.access_time or made).astimezone(UTC).replace(tzinfo=None),
        source=about.get("source"),
        private=bool(about.get("private")),
    )


def _filter(
    scope: str | None,
    categories: Sequence[str] | None = None,
    metadata: dict[str, Any] | None = None,
    older_than: datetime | None = None,
) -> Filter:
    """The filter of a scope and those below it, with one of the categories and all of the metadata."""
    path = normalize_scope_path(scope or "/")
    tests: list[Filter] = [Filter(tiers=(Tier.LONG_TERM, Tier.SHORT_TERM, Tier.SENSORY))]
    if path != "/":
        tests.append(Filter(metadata={"within": Condition(any=True, values=(path,))}))
    if categories:
        tests.append(Filter(metadata={"categories": Condition(any=True, values=tuple(categories))}))
    for name, value in (metadata or {}).items():
        tests.append(Filter(metadata={"metadata": Condition(path=(name,), values=(value,))}))
    if older_than is not None:
        tests.append(Filter(observe_time_max=older_than.replace(tzinfo=older_than.tzinfo or UTC)))
    return Filter(all_of=tests)


def _above(scope: str) -> list[str]:
    """A scope and the scopes that it is in, without "/"."""
    parts = scope.strip("/").split("/")
    return ["/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1) if parts[0]]


def _children(parent: str, records: Iterable[MemoryRecord]) -> list[str]:
    """The scopes right below one that records are in."""
    head = parent.rstrip("/") + "/"
    below = (record.scope.removeprefix(head) for record in records if record.scope.startswith(head))
    return sorted({head + rest.split("/")[0] for rest in below if rest})
