"""The blocking Memory, FragmentListing.

Written by scripts/sync_sdk.py: change the asynchronous class, then run `make generate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Literal, Unpack

import memstream.fragment_listing
import memstream.memory
from memstream.answer_values import Answer, FragmentCount, Unmatched
from memstream.argument_types import Count, Items, Moment, Position, Seconds, Several
from memstream.arguments import check_methods
from memstream.codec import Observable
from memstream.conflict_values import ConflictDecision, ConflictRecord
from memstream.context import ContextOptions, ContextText
from memstream.listed_values import FragmentOrder, OpenStandingQuery, SessionSummary
from memstream.policy import PolicyLike
from memstream.receipt_values import RecallReceipt, Replay
from memstream.resources import Cursor, Event, FragmentHistory, MemoryInfo, MemoryStats, Operation, Put
from memstream.sync.bases import Context, Handle, Listed
from memstream.sync.blocks import Blocks
from memstream.sync.loop import LOOP
from memstream.sync.streams import ObserveStream, RecallStream, Watch
from memstream.values import (
    AckLevel,
    BatchResult,
    EventType,
    Filter,
    Fragment,
    MetadataValue,
    ObservationFields,
    RecallOptions,
    Role,
    Structured,
    Tier,
    Truth,
)
from memstream.watch import Start


@check_methods
class Memory(Handle):
    """See memstream.Memory."""

    def __init__(self, inner: memstream.memory.Memory) -> None:
        super().__init__(inner)
        self._inner = inner

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

    @property
    def blocks(self) -> Blocks:
        """Its blocks: small named texts for an agent's context."""
        return Blocks(self._inner.blocks)

    def observe(
        self,
        producer: str,
        *,
        session: str = "",
        ack_level: AckLevel = AckLevel.STORED,
        outcomes: bool = False,
        known_sequence: int | None = None,
        related: int = 0,
    ) -> ObserveStream:
        """A stream of observations; open it with `with`.

        `producer`: the durable name under which observations are numbered; only one process may use it at a time.
        `session`: the session of observations that have none.
        `ack_level`: the level that `flush` waits for.
        `outcomes`: report the outcome of each observation.
        `known_sequence`: for a process that takes over from an earlier one of the producer: the last number whose
        result it knows (0: none). The rejections and outcomes since then are in the stream's `resumption`.
        `related`: name up to this many earlier statements near to the observation in its outcome, at most 10.
        """
        return ObserveStream(
            LOOP.make(
                lambda: self._inner.observe(
                    producer,
                    session=session,
                    ack_level=ack_level,
                    outcomes=outcomes,
                    known_sequence=known_sequence,
                    related=related,
                )
            )
        )

    def recall(self, *, session: str = "") -> RecallStream:
        """A stream of queries, many in flight; open it with `with`."""
        return RecallStream(LOOP.make(lambda: self._inner.recall(session=session)))

    def watch(
        self,
        start: Start = "now",
        *,
        types: Several[EventType] = (),
        include_fragments: bool = False,
        progress_interval: timedelta | None = None,
    ) -> Watch:
        """Watches the events after `start` (a cursor, "now" or "beginning"), optionally only those of `types`."""
        return Watch(
            LOOP.make(
                lambda: self._inner.watch(
                    start, types=types, include_fragments=include_fragments, progress_interval=progress_interval
                )
            )
        )

    def recall_once(self, what: str | Structured, *, session: str = "", **options: Unpack[RecallOptions]) -> Answer:
        """Answers one query; see RecallOptions."""
        return LOOP.run(self._inner.recall_once(what, session=session, **options))

    def context(
        self,
        question: str,
        *,
        conversation: str = "",
        blocks: Several[str] = (),
        budget: Count = 0,
        after: ContextText | bytes | None = None,
        **options: Unpack[ContextOptions],
    ) -> Context:
        """As `Client.context`, with this memory alone; `blocks`, `summary`: names of its blocks, or paths of others."""
        return Context(
            LOOP.run(
                self._inner.context(
                    question, conversation=conversation, blocks=blocks, budget=budget, after=after, **options
                )
            )
        )

    def observe_batch(
        self,
        observations: Items[Observable],
        *,
        producer: str = "",
        first_sequence: Position = 0,
        session: str = "",
        ack_level: AckLevel = AckLevel.STORED,
        request_id: str = "",
        related: int = 0,
        timeout_s: Seconds | None = None,
    ) -> BatchResult:
        """Observes one batch and waits until it has reached `ack_level`. `related`: as in `observe`.

        Without a producer, numbers count from 1 within the batch. The call is retried while the server is unavailable;
        numbers or a request id make it count once. A repeat with your own `request_id` within 24 hours, also from
        another process, returns the same result; with other arguments it raises RequestIdConflict.
        """
        return LOOP.run(
            self._inner.observe_batch(
                observations,
                producer=producer,
                first_sequence=first_sequence,
                session=session,
                ack_level=ack_level,
                request_id=request_id,
                related=related,
                timeout_s=timeout_s,
            )
        )

    def describe(self) -> MemoryInfo:
        """The memory's kind, complete policy, labels and revision."""
        return LOOP.run(self._inner.describe())

    def stats(self) -> MemoryStats:
        """Counts of the memory's fragments."""
        return LOOP.run(self._inner.stats())

    def update(
        self, *, policy: PolicyLike | None = None, labels: Mapping[str, str] | None = None, etag: str = ""
    ) -> MemoryInfo:
        """Sets the policy fields passed, and replaces all labels if passed; an etag, if passed, must be current."""
        return LOOP.run(self._inner.update(policy=policy, labels=labels, etag=etag))

    def clone(self, new_path: str) -> Memory:
        """Creates a memory (`namespace/name`) with the same kind and policy, without content."""
        return Memory(LOOP.run(self._inner.clone(new_path)))

    def clear(self, tiers: Several[Tier] = ()) -> int:
        """Permanently empties the tiers (default: all); returns the number of fragments, including forgotten ones."""
        return LOOP.run(self._inner.clear(tiers))

    def delete(self, *, etag: str = "") -> None:
        """Deletes the memory and all of its content permanently; an etag, if passed, must be current."""
        LOOP.run(self._inner.delete(etag=etag))

    def reflect(self) -> Operation:
        """Starts a reflection."""
        return LOOP.run(self._inner.reflect())

    def get_fragment(self, id: str = "", *, external_id: str = "", as_of: Moment | None = None) -> Fragment:
        """A fragment by its id or its external_id; `as_of` a revision or a time, as it was then."""
        return LOOP.run(self._inner.get_fragment(id, external_id=external_id, as_of=as_of))

    def fragment_history(self, id: str = "", *, external_id: str = "") -> FragmentHistory:
        """A fragment and its earlier versions, as far as the policy keeps them."""
        return LOOP.run(self._inner.fragment_history(id, external_id=external_id))

    def restore_version(self, id: str, version: Position, *, etag: str = "") -> Fragment:
        """Gives the fragment the content of an earlier version (`FragmentVersion.version`); an etag, if passed, must be
        current."""
        return LOOP.run(self._inner.restore_version(id, version, etag=etag))

    def list_fragments(
        self,
        filter: Filter | None = None,
        *,
        forgotten: bool = False,
        page_size: Count = 0,
        truth: Truth | None = None,
        as_of: Moment | None = None,
        text: str = "",
        order: FragmentOrder | None = None,
        descending: bool = False,
    ) -> FragmentListing:
        """Iterates over fragments, in order of receipt unless `order` is given, fetching page by page. `truth`: None
        lists all. `as_of`, a revision or a time, lists them as they were then. `text`: only those whose content
        contains it, without regard to case, whose external_id it is, or whose id ends with it."""
        return FragmentListing(
            LOOP.make(
                lambda: self._inner.list_fragments(
                    filter,
                    forgotten=forgotten,
                    page_size=page_size,
                    truth=truth,
                    as_of=as_of,
                    text=text,
                    order=order,
                    descending=descending,
                )
            )
        )

    def fragment_events(self, id: str, *, page_size: Count = 0) -> Iterator[Event]:
        """Iterates over the events that concern a fragment, the earliest first, fetching page by page."""
        return LOOP.iterate_from(lambda: self._inner.fragment_events(id, page_size=page_size))

    def put_fragment(
        self, what: Observable, *, etag: str = "", absent: bool = False, **said: Unpack[ObservationFields]
    ) -> Put:
        """Creates or replaces the fragment with that `external_id` (required); an etag, if passed, must be current.

        absent: raises EtagMismatch if there is one that is neither forgotten nor expired.
        Fields that are not passed are unset; `update_fragment` changes only some. A forgotten fragment is restored.
        """
        return LOOP.run(self._inner.put_fragment(what, etag=etag, absent=absent, **said))

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
        role: Role | None = None,
        valid_from: datetime | Literal["unbounded"] | None = None,
        valid_until: datetime | Literal["unbounded"] | None = None,
        etag: str = "",
    ) -> Fragment:
        """Sets the fields passed; `metadata` replaces all metadata, `expire_time="never"` removes the fragment's
        expiry, and "unbounded" a bound of its validity.

        An etag, if passed, must be current.
        """
        return LOOP.run(
            self._inner.update_fragment(
                id,
                content=content,
                importance=importance,
                metadata=metadata,
                expire_time=expire_time,
                pinned=pinned,
                speaker=speaker,
                role=role,
                valid_from=valid_from,
                valid_until=valid_until,
                etag=etag,
            )
        )

    def forget_fragments(self, ids: Several[str] = (), *, filter: Filter | None = None) -> FragmentCount:
        """Forgets fragments by ids or by filter, restorable during the grace period; returns how many.

        More than 1,000 ids are sent in several calls. If one fails, the ids before it are forgotten.
        """
        return LOOP.run(self._inner.forget_fragments(ids, filter=filter))

    def restore_fragments(self, ids: Several[str] = (), *, filter: Filter | None = None) -> FragmentCount:
        """Restores forgotten fragments by ids or by filter; returns how many. Ids make superseded ones current, too.

        More than 1,000 ids are sent in several calls. If one fails, the ids before it are restored.
        """
        return LOOP.run(self._inner.restore_fragments(ids, filter=filter))

    def supersede(
        self,
        ids: Several[str] = (),
        *,
        external_ids: Several[str] = (),
        newer_id: str = "",
        newer_external_id: str = "",
    ) -> int:
        """Marks fragments as superseded by a newer one, given by its id or its external_id; returns how many were not
        before.

        Of a fragment that is superseded already, the current end of its chain is superseded. `restore_fragments` undoes
        it.
        """
        return LOOP.run(
            self._inner.supersede(
                ids, external_ids=external_ids, newer_id=newer_id, newer_external_id=newer_external_id
            )
        )

    def list_conflicts(self, *, decided: bool = False, page_size: Count = 0) -> Iterator[ConflictRecord]:
        """Iterates over the open (or the decided) suspicions by age, fetching page by page."""
        return LOOP.iterate_from(lambda: self._inner.list_conflicts(decided=decided, page_size=page_size))

    def resolve_conflict(
        self, newer_id: str, older_id: str, decision: ConflictDecision, *, note: str = ""
    ) -> ConflictRecord:
        """Decides a suspicion; `note` says why."""
        return LOOP.run(self._inner.resolve_conflict(newer_id, older_id, decision, note=note))

    def list_receipts(self, *, page_size: Count = 0) -> Iterator[RecallReceipt]:
        """Iterates over the receipts of recalls, the latest first, fetching page by page."""
        return LOOP.iterate_from(lambda: self._inner.list_receipts(page_size=page_size))

    def list_sessions(
        self,
        prefix: str = "",
        *,
        observe_time_min: datetime | None = None,
        observe_time_max: datetime | None = None,
        page_size: Count = 0,
    ) -> Iterator[SessionSummary]:
        """Iterates over the sessions, the one with the latest observation first, fetching page by page. `prefix`: of
        their names; the times keep sessions with a last observation from `observe_time_min` on, and a first one before
        `observe_time_max`."""
        return LOOP.iterate_from(
            lambda: self._inner.list_sessions(
                prefix, observe_time_min=observe_time_min, observe_time_max=observe_time_max, page_size=page_size
            )
        )

    def list_standing_queries(self, *, page_size: Count = 0) -> Iterator[OpenStandingQuery]:
        """Iterates over the standing queries that clients have open, the oldest first, fetching page by page."""
        return LOOP.iterate_from(lambda: self._inner.list_standing_queries(page_size=page_size))

    def replay(self, receipt_id: str) -> Replay:
        """Ranks the memory as of a receipt's revision, by its query and policy, and compares."""
        return LOOP.run(self._inner.replay(receipt_id))

    def erase_fragments(self, ids: Several[str] = (), *, filter: Filter | None = None) -> Operation:
        """Starts to erase fragments by ids or by filter, with everything derived from them."""
        return LOOP.run(self._inner.erase_fragments(ids, filter=filter))


class FragmentListing(Listed[Fragment]):
    """See memstream.FragmentListing."""

    def __init__(self, inner: memstream.fragment_listing.FragmentListing) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def cursor(self) -> Cursor | None:
        """The position from which a later watch continues; None before the first page."""
        return self._inner.cursor

    @property
    def unmatched(self) -> tuple[Unmatched, ...]:
        """What the memory lacks of the filter; empty before the first page."""
        return self._inner.unmatched
