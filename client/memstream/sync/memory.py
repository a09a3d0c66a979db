"""One memory for scripts: the methods of memstream.Memory, each waiting for its answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Literal, Unpack

import memstream.memory as memory
from memstream.codec import Observable
from memstream.policy import PolicyLike
from memstream.resources import Cursor, MemoryInfo, MemoryStats, Operation, Put
from memstream.sync.loop import LOOP
from memstream.sync.streams import ObserveStream, RecallStream, Watch
from memstream.values import (
    AckLevel,
    Answer,
    BatchResult,
    EventType,
    Filter,
    Fragment,
    MetadataValue,
    ObservationFields,
    RecallOptions,
    Structured,
    Tier,
)
from memstream.watch import Start


class Memory:
    """A memory by name; making one calls nobody. Every method raises a MemstreamError (see memstream.errors)."""

    def __init__(self, inner: memory.Memory) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"<sync.Memory {self._inner.path}>"

    @property
    def path(self) -> str:
        """`namespace/name`."""
        return self._inner.path

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self._inner.namespace

    @property
    def name(self) -> str:
        """Its name in the namespace."""
        return self._inner.name

    def observe(
        self,
        producer: str,
        *,
        session: str = "",
        ack_level: AckLevel = AckLevel.STORED,
        outcomes: bool = False,
        known_sequence: int | None = None,
    ) -> ObserveStream:
        """A stream of observations; open it with `with`."""
        return ObserveStream(
            self._inner.observe(
                producer, session=session, ack_level=ack_level, outcomes=outcomes, known_sequence=known_sequence
            )
        )

    def recall(self, *, session: str = "") -> RecallStream:
        """A stream of queries; open it with `with`."""
        return RecallStream(self._inner.recall(session=session))

    def watch(
        self,
        start: Start = "now",
        *,
        types: Collection[EventType] = (),
        include_fragments: bool = False,
        progress_interval: timedelta | None = None,
    ) -> Watch:
        """Every event after `start`: a cursor, "now" or "beginning"; only of `types`, if any are given."""
        return Watch(
            self._inner.watch(
                start, types=types, include_fragments=include_fragments, progress_interval=progress_interval
            )
        )

    def recall_once(self, what: str | Structured, *, session: str = "", **options: Unpack[RecallOptions]) -> Answer:
        """Asks one query; see RecallOptions."""
        return LOOP.run(self._inner.recall_once(what, session=session, **options))

    def observe_batch(
        self,
        observations: Iterable[Observable],
        *,
        producer: str = "",
        first_sequence: int = 0,
        session: str = "",
        ack_level: AckLevel = AckLevel.STORED,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> BatchResult:
        """Observes one batch and waits until it has come to `ack_level`."""
        return LOOP.run(
            self._inner.observe_batch(
                observations,
                producer=producer,
                first_sequence=first_sequence,
                session=session,
                ack_level=ack_level,
                request_id=request_id,
                timeout_s=timeout_s,
            )
        )

    def describe(self) -> MemoryInfo:
        """The memory as the server has it: kind, complete policy, labels, revision."""
        return LOOP.run(self._inner.describe())

    def stats(self) -> MemoryStats:
        """How much it holds."""
        return LOOP.run(self._inner.stats())

    def update(
        self, *, policy: PolicyLike | None = None, labels: Mapping[str, str] | None = None, etag: str = ""
    ) -> MemoryInfo:
        """Sets the policy fields given, and all labels if given; with an etag only if it is current."""
        return LOOP.run(self._inner.update(policy=policy, labels=labels, etag=etag))

    def clone(self, new_path: str) -> Memory:
        """A new memory (`namespace/name`) of the same structure and policy, without content."""
        return Memory(LOOP.run(self._inner.clone(new_path)))

    def clear(self, tiers: Collection[Tier] = ()) -> int:
        """Empties the tiers named (none: all) for good; how many fragments that were, forgotten ones included."""
        return LOOP.run(self._inner.clear(tiers))

    def delete(self, *, etag: str = "") -> None:
        """Deletes the memory and all of its content for good; with an etag only if it is current."""
        LOOP.run(self._inner.delete(etag=etag))

    def reflect(self) -> Operation:
        """Starts a reflection."""
        return LOOP.run(self._inner.reflect())

    def get_fragment(self, id: str = "", *, external_id: str = "") -> Fragment:
        """A fragment by its id or by the client's own key."""
        return LOOP.run(self._inner.get_fragment(id, external_id=external_id))

    def list_fragments(
        self, filter: Filter | None = None, *, forgotten: bool = False, page_size: int = 0
    ) -> FragmentListing:
        """Fragments in order of receipt, page by page; iterate over it."""
        return FragmentListing(self._inner.list_fragments(filter, forgotten=forgotten, page_size=page_size))

    def put_fragment(self, what: Observable, *, etag: str = "", **said: Unpack[ObservationFields]) -> Put:
        """Observes, or updates the fragment of that `external_id` (required); with an etag only if it is current."""
        return LOOP.run(self._inner.put_fragment(what, etag=etag, **said))

    def update_fragment(
        self,
        id: str,
        *,
        content: str | Structured | None = None,
        importance: float | None = None,
        metadata: Mapping[str, MetadataValue] | None = None,
        expire_time: datetime | Literal["never"] | None = None,
        pinned: bool | None = None,
        speaker: str | None = None,
        etag: str = "",
    ) -> Fragment:
        """Sets what is given; `metadata` replaces all of it, `expire_time="never"` takes its own expiry away."""
        return LOOP.run(
            self._inner.update_fragment(
                id,
                content=content,
                importance=importance,
                metadata=metadata,
                expire_time=expire_time,
                pinned=pinned,
                speaker=speaker,
                etag=etag,
            )
        )

    def forget_fragments(self, ids: Collection[str] = (), *, filter: Filter | None = None) -> int:
        """Takes fragments out of recall, restorable within the grace; how many that were. By ids, or by filter."""
        return LOOP.run(self._inner.forget_fragments(ids, filter=filter))

    def restore_fragments(self, ids: Collection[str] = (), *, filter: Filter | None = None) -> int:
        """Brings forgotten fragments back; how many that were. By ids, or by filter."""
        return LOOP.run(self._inner.restore_fragments(ids, filter=filter))

    def erase_fragments(self, ids: Collection[str] = (), *, filter: Filter | None = None) -> Operation:
        """Starts to remove content and vectors for good, with what was derived from them. By ids, or by filter."""
        return LOOP.run(self._inner.erase_fragments(ids, filter=filter))


class FragmentListing(Iterator[Fragment]):
    """See memstream.FragmentListing."""

    def __init__(self, inner: memory.FragmentListing) -> None:
        self._inner = inner
        self._items = LOOP.iterate(inner)

    def __next__(self) -> Fragment:
        return next(self._items)

    @property
    def cursor(self) -> Cursor | None:
        """Where a watch goes on from this listing; None before the first page was fetched."""
        return self._inner.cursor
