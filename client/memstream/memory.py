"""The handle of one memory: observe, recall, watch, and manage its fragments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal, Unpack

from google.protobuf.field_mask_pb2 import FieldMask

from memstream.answer_codec import answer_from_wire, count_from_wire, unmatched_from_wire
from memstream.answer_values import Answer, FragmentCount
from memstream.argument_types import Count, Items, Moment, Position, Seconds, Several
from memstream.arguments import check_methods, checked_items
from memstream.blocks import Blocks
from memstream.channel import Link, MemoryPath, Response, Unary, memory_path, new_request_id
from memstream.codec import (
    Observable,
    ack_level_to_wire,
    batch_result_from_wire,
    conflict_from_wire,
    decision_to_wire,
    fragment_from_wire,
    observation_to_wire,
    query_to_wire,
    role_to_wire,
    set_as_of,
    structured_to_wire,
    version_from_wire,
)
from memstream.conflict_values import ConflictDecision, ConflictRecord
from memstream.context import Context, ContextOptions, ContextText, context_to_wire
from memstream.filter_codec import filter_to_wire, tiers_to_wire
from memstream.fragment_listing import FragmentListing, list_request, set_key
from memstream.listed_codec import (
    iterate_conflicts,
    iterate_fragment_events,
    iterate_sessions,
    iterate_standing_queries,
)
from memstream.listed_values import FragmentOrder, OpenStandingQuery, SessionSummary
from memstream.observe import ObserveStream
from memstream.policy import PolicyLike
from memstream.policy_codec import policy_paths, policy_to_wire
from memstream.recall import RecallStream
from memstream.receipt_codec import iterate_receipts, replay_from_wire
from memstream.receipt_values import RecallReceipt, Replay
from memstream.resource_codec import memory_from_wire, operation_from_wire, put_from_wire, stats_from_wire
from memstream.resources import Event, FragmentHistory, MemoryInfo, MemoryStats, Operation, Put
from memstream.v1 import fragment_pb2, memory_pb2, stream_service_pb2
from memstream.v1 import memory_service_pb2 as pb
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
from memstream.watch import Start, Watch
from memstream.wiretypes import encoding, invalid_field, metadata_value_to_wire, timestamp_to_wire

_IDS_MAX = 1_000
"""Of one call."""


@check_methods
class Memory:
    """A handle of a memory; creating one sends nothing. Every method raises a MemstreamError (see memstream.errors)."""

    def __init__(self, link: Link, path: MemoryPath) -> None:
        self._link = link
        self._path = path

    def __repr__(self) -> str:
        return f"<Memory {self._path}>"

    @property
    def path(self) -> str:
        """`namespace/name`."""
        return str(self._path)

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self._path.namespace

    @property
    def name(self) -> str:
        """Its name in the namespace."""
        return self._path.name

    @property
    def blocks(self) -> Blocks:
        """Its blocks: small named texts for an agent's context."""
        return Blocks(self._link, self._path)

    # Streams, and unary calls that do the same.

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
        """A stream of observations; open it with `async with`.

        `producer`: the durable name under which observations are numbered; only one process may use it at a time.
        `session`: the session of observations that have none.
        `ack_level`: the level that `flush` waits for.
        `outcomes`: report the outcome of each observation.
        `known_sequence`: for a process that takes over from an earlier one of the producer: the last number whose
        result it knows (0: none). The rejections and outcomes since then are in the stream's `resumption`.
        `related`: name up to this many earlier statements near to the observation in its outcome, at most 10.
        """
        return ObserveStream(self._link, self._path, producer, session, ack_level, outcomes, known_sequence, related)

    def recall(self, *, session: str = "") -> RecallStream:
        """A stream of queries, many in flight; open it with `async with`."""
        return RecallStream(self._link, self._path, session)

    def watch(
        self,
        start: Start = "now",
        *,
        types: Several[EventType] = (),
        include_fragments: bool = False,
        progress_interval: timedelta | None = None,
    ) -> Watch:
        """Watches the events after `start` (a cursor, "now" or "beginning"), optionally only those of `types`."""
        return Watch(self._link, self._path, start, types, include_fragments, progress_interval)

    async def recall_once(
        self, what: str | Structured, *, session: str = "", **options: Unpack[RecallOptions]
    ) -> Answer:
        """Answers one query; see RecallOptions."""
        request = stream_service_pb2.RecallOnceRequest(
            namespace=self.namespace,
            memory=self.name,
            session=session,
            query=query_to_wire("", what, **options),
        )
        answer = await self._link.call(self._link.streams.RecallOnce, request, self._path, options.get("timeout_s"))
        return answer_from_wire([answer.recollections], answer.done)

    async def context(
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
        paths = [name if "#" in name else f"{self.path}#{name}" for name in blocks]
        if (summary := options.get("summary")) and "#" not in summary:
            options["summary"] = f"{self.path}#{summary}"
        request = context_to_wire([self.path], question, conversation, paths, budget, after, False, options)
        answer = await self._link.call(self._link.contexts.Context, request, None, options.get("timeout_s"))
        return Context(self._link, request, answer)

    async def observe_batch(
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
        request = stream_service_pb2.ObserveBatchRequest(
            namespace=self.namespace,
            memory=self.name,
            producer=producer,
            session=session,
            first_sequence=first_sequence,
            observations=[
                observation_to_wire(each) for each in checked_items("observations", observations, Observable)
            ],
            ack_level=ack_level_to_wire(ack_level),
            request_id=request_id or ("" if producer else new_request_id()),
            related=related,
        )
        answer = await self._link.call(self._link.streams.ObserveBatch, request, self._path, timeout_s)
        return batch_result_from_wire(answer.ack)

    # The memory itself.

    async def describe(self) -> MemoryInfo:
        """The memory's kind, complete policy, labels and revision."""
        request = pb.GetMemoryRequest(namespace=self.namespace, memory=self.name)
        answer = await self._link.call(self._link.memories.GetMemory, request, self._path)
        return memory_from_wire(answer.memory)

    async def stats(self) -> MemoryStats:
        """Counts of the memory's fragments."""
        request = pb.GetMemoryStatsRequest(namespace=self.namespace, memory=self.name)
        answer = await self._link.call(self._link.memories.GetMemoryStats, request, self._path)
        return stats_from_wire(answer.stats)

    async def update(
        self, *, policy: PolicyLike | None = None, labels: Mapping[str, str] | None = None, etag: str = ""
    ) -> MemoryInfo:
        """Sets the policy fields passed, and replaces all labels if passed; an etag, if passed, must be current."""
        request = pb.UpdateMemoryRequest(
            memory=memory_pb2.Memory(
                namespace=self.namespace,
                name=self.name,
                policy=policy_to_wire(policy) if policy is not None else None,
                labels=None if labels is None else dict(labels),
                etag=etag,
            ),
            update_mask=FieldMask(
                paths=[
                    *(policy_paths(policy) if policy is not None else ()),
                    *(["labels"] if labels is not None else ()),
                ]
            ),
            request_id=new_request_id(),
        )
        answer = await self._link.call(self._link.memories.UpdateMemory, request, self._path)
        return memory_from_wire(answer.memory)

    async def clone(self, new_path: str) -> Memory:
        """Creates a memory (`namespace/name`) with the same kind and policy, without content."""
        path = memory_path(new_path)
        request = pb.CloneMemoryRequest(
            namespace=self.namespace,
            memory=self.name,
            new_memory=path.name,
            new_namespace=path.namespace if path.namespace != self.namespace else "",
            request_id=new_request_id(),
        )
        await self._link.call(self._link.memories.CloneMemory, request, self._path)
        return Memory(self._link, path)

    async def clear(self, tiers: Several[Tier] = ()) -> int:
        """Permanently empties the tiers (default: all); returns the number of fragments, including forgotten ones."""
        request = pb.ClearMemoryRequest(
            namespace=self.namespace, memory=self.name, tiers=tiers_to_wire(tiers), request_id=new_request_id()
        )
        return (await self._link.call(self._link.memories.ClearMemory, request, self._path)).cleared

    async def delete(self, *, etag: str = "") -> None:
        """Deletes the memory and all of its content permanently; an etag, if passed, must be current."""
        request = pb.DeleteMemoryRequest(
            namespace=self.namespace, memory=self.name, etag=etag, request_id=new_request_id()
        )
        await self._link.call(self._link.memories.DeleteMemory, request, self._path)

    async def reflect(self) -> Operation:
        """Starts a reflection."""
        request = pb.ReflectMemoryRequest(namespace=self.namespace, memory=self.name, request_id=new_request_id())
        answer = await self._link.call(self._link.memories.ReflectMemory, request, self._path)
        return operation_from_wire(answer.operation)

    # Fragments.

    async def get_fragment(self, id: str = "", *, external_id: str = "", as_of: Moment | None = None) -> Fragment:
        """A fragment by its id or its external_id; `as_of` a revision or a time, as it was then."""
        request = pb.GetFragmentRequest(namespace=self.namespace, memory=self.name)
        set_key(request, id, external_id)
        set_as_of(request, as_of)
        answer = await self._link.call(self._link.memories.GetFragment, request, self._path)
        return fragment_from_wire(answer.fragment)

    async def fragment_history(self, id: str = "", *, external_id: str = "") -> FragmentHistory:
        """A fragment and its earlier versions, as far as the policy keeps them."""
        request = pb.GetFragmentHistoryRequest(namespace=self.namespace, memory=self.name)
        set_key(request, id, external_id)
        answer = await self._link.call(self._link.memories.GetFragmentHistory, request, self._path)
        versions = tuple(map(version_from_wire, answer.versions))
        return FragmentHistory(fragment_from_wire(answer.fragment), versions, answer.revision)

    async def restore_version(self, id: str, version: Position, *, etag: str = "") -> Fragment:
        """Gives the fragment the content of an earlier version (`FragmentVersion.version`); an etag, if passed, must be
        current."""
        request = pb.RestoreFragmentVersionRequest(
            namespace=self.namespace,
            memory=self.name,
            id=id,
            version=version,
            etag=etag,
            request_id=new_request_id(),
        )
        answer = await self._link.call(self._link.memories.RestoreFragmentVersion, request, self._path)
        return fragment_from_wire(answer.fragment)

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
        which = filter, forgotten, page_size, truth, as_of, text, order, descending
        return FragmentListing(self._link, self._path, list_request(self._path, *which))

    def fragment_events(self, id: str, *, page_size: Count = 0) -> AsyncIterator[Event]:
        """Iterates over the events that concern a fragment, the earliest first, fetching page by page."""
        return iterate_fragment_events(self._link, self._path, id, page_size)

    async def put_fragment(
        self, what: Observable, *, etag: str = "", absent: bool = False, **said: Unpack[ObservationFields]
    ) -> Put:
        """Creates or replaces the fragment with that `external_id` (required); an etag, if passed, must be current.

        absent: raises EtagMismatch if there is one that is neither forgotten nor expired.
        Fields that are not passed are unset; `update_fragment` changes only some. A forgotten fragment is restored.
        """
        request = pb.PutFragmentRequest(
            namespace=self.namespace,
            memory=self.name,
            observation=observation_to_wire(what, **said),
            request_id=new_request_id(),
            etag=etag,
            absent=absent,
        )
        answer = await self._link.call(self._link.memories.PutFragment, request, self._path)
        return put_from_wire(answer)

    async def update_fragment(
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
        with encoding("fragment"):
            wire = fragment_pb2.Fragment(id=id, etag=etag, importance=importance or 0.0, pinned=bool(pinned))
            wire.speaker, wire.role = speaker or "", role_to_wire(role)
        body = "content"
        if isinstance(content, Structured):
            body = "structured"
            wire.structured.CopyFrom(structured_to_wire(content))
        elif content is not None:
            wire.content = content
        for key, value in (metadata or {}).items():
            wire.metadata[key].CopyFrom(metadata_value_to_wire(f"metadata.{key}", value))
        if isinstance(expire_time, datetime):
            wire.expire_time.CopyFrom(timestamp_to_wire("expire_time", expire_time))
        if isinstance(valid_from, datetime):
            wire.valid_from.CopyFrom(timestamp_to_wire("valid_from", valid_from))
        if isinstance(valid_until, datetime):
            wire.valid_until.CopyFrom(timestamp_to_wire("valid_until", valid_until))
        given = {
            body: content,
            "importance": importance,
            "metadata": metadata,
            "expire_time": expire_time,
            "pinned": pinned,
            "speaker": speaker,
            "role": role,
            "valid_from": valid_from,
            "valid_until": valid_until,
        }
        request = pb.UpdateFragmentRequest(
            namespace=self.namespace,
            memory=self.name,
            fragment=wire,
            update_mask=FieldMask(paths=[name for name, value in given.items() if value is not None]),
            request_id=new_request_id(),
        )
        answer = await self._link.call(self._link.memories.UpdateFragment, request, self._path)
        return fragment_from_wire(answer.fragment)

    async def forget_fragments(self, ids: Several[str] = (), *, filter: Filter | None = None) -> FragmentCount:
        """Forgets fragments by ids or by filter, restorable during the grace period; returns how many.

        More than 1,000 ids are sent in several calls. If one fails, the ids before it are forgotten.
        """
        call, kind = self._link.memories.ForgetFragments, pb.ForgetFragmentsRequest
        return count_from_wire(
            [(one.forgotten, one.unmatched) async for one in self._send_ids(call, kind, ids, filter)]
        )

    async def restore_fragments(self, ids: Several[str] = (), *, filter: Filter | None = None) -> FragmentCount:
        """Restores forgotten fragments by ids or by filter; returns how many. Ids make superseded ones current, too.

        More than 1,000 ids are sent in several calls. If one fails, the ids before it are restored.
        """
        call, kind = self._link.memories.RestoreFragments, pb.RestoreFragmentsRequest
        return count_from_wire([(one.restored, one.unmatched) async for one in self._send_ids(call, kind, ids, filter)])

    async def _send_ids(
        self, call: Unary[Any, Response], kind: Callable[..., Any], ids: Several[str], filter: Filter | None
    ) -> AsyncIterator[Response]:
        """The answers to the parts of the ids; one call without ids has the filter."""
        chosen, every = filter_to_wire(filter) if filter is not None else None, list(ids)
        for start in range(0, max(1, len(every)), _IDS_MAX):
            part, id_ = every[start : start + _IDS_MAX], new_request_id()
            request = kind(namespace=self.namespace, memory=self.name, ids=part, filter=chosen, request_id=id_)
            yield await self._link.call(call, request, self._path)

    async def supersede(
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
        if bool(newer_id) == bool(newer_external_id):
            raise invalid_field("newer_id", "give either a newer_id or a newer_external_id")
        request = pb.SupersedeFragmentsRequest(
            namespace=self.namespace,
            memory=self.name,
            ids=ids,
            external_ids=external_ids,
            request_id=new_request_id(),
        )
        if newer_id:
            request.newer_id = newer_id
        else:
            request.newer_external_id = newer_external_id
        return (await self._link.call(self._link.memories.SupersedeFragments, request, self._path)).superseded

    def list_conflicts(self, *, decided: bool = False, page_size: Count = 0) -> AsyncIterator[ConflictRecord]:
        """Iterates over the open (or the decided) suspicions by age, fetching page by page."""
        return iterate_conflicts(self._link, self._path, decided, page_size)

    async def resolve_conflict(
        self, newer_id: str, older_id: str, decision: ConflictDecision, *, note: str = ""
    ) -> ConflictRecord:
        """Decides a suspicion; `note` says why."""
        request = pb.ResolveConflictRequest(
            namespace=self.namespace,
            memory=self.name,
            newer_id=newer_id,
            older_id=older_id,
            decision=decision_to_wire(decision),
            note=note,
            request_id=new_request_id(),
        )
        answer = await self._link.call(self._link.memories.ResolveConflict, request, self._path)
        return conflict_from_wire(answer.conflict)

    def list_receipts(self, *, page_size: Count = 0) -> AsyncIterator[RecallReceipt]:
        """Iterates over the receipts of recalls, the latest first, fetching page by page."""
        return iterate_receipts(self._link, self._path, page_size)

    def list_sessions(
        self,
        prefix: str = "",
        *,
        observe_time_min: datetime | None = None,
        observe_time_max: datetime | None = None,
        page_size: Count = 0,
    ) -> AsyncIterator[SessionSummary]:
        """Iterates over the sessions, the one with the latest observation first, fetching page by page. `prefix`: of
        their names; the times keep sessions with a last observation from `observe_time_min` on, and a first one before
        `observe_time_max`."""
        return iterate_sessions(self._link, self._path, prefix, observe_time_min, observe_time_max, page_size)

    def list_standing_queries(self, *, page_size: Count = 0) -> AsyncIterator[OpenStandingQuery]:
        """Iterates over the standing queries that clients have open, the oldest first, fetching page by page."""
        return iterate_standing_queries(self._link, self._path, page_size)

    async def replay(self, receipt_id: str) -> Replay:
        """Ranks the memory as of a receipt's revision, by its query and policy, and compares."""
        request = pb.ReplayRecallRequest(namespace=self.namespace, memory=self.name, receipt_id=receipt_id)
        return replay_from_wire(await self._link.call(self._link.memories.ReplayRecall, request, self._path))

    async def erase_fragments(self, ids: Several[str] = (), *, filter: Filter | None = None) -> Operation:
        """Starts to erase fragments by ids or by filter, with everything derived from them."""
        request = pb.EraseFragmentsRequest(
            namespace=self.namespace,
            memory=self.name,
            ids=ids,
            filter=filter_to_wire(filter) if filter is not None else None,
            request_id=new_request_id(),
        )
        answer = await self._link.call(self._link.memories.EraseFragments, request, self._path)
        return replace(operation_from_wire(answer.operation), unmatched=unmatched_from_wire(answer.unmatched))
