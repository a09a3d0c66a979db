"""One memory, seen from an agent: observing, recalling, watching, and its fragments as resources."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Literal, Unpack

from google.protobuf.field_mask_pb2 import FieldMask

from memstream.channel import Link, MemoryPath, memory_path, new_request_id
from memstream.codec import (
    Observable,
    ack_level_to_wire,
    answer_from_wire,
    batch_result_from_wire,
    filter_to_wire,
    fragment_from_wire,
    observation_to_wire,
    query_to_wire,
    structured_to_wire,
    tiers_to_wire,
)
from memstream.observe import ObserveStream
from memstream.policy import PolicyLike
from memstream.policy_codec import policy_paths, policy_to_wire
from memstream.recall import RecallStream
from memstream.resource_codec import memory_from_wire, operation_from_wire, stats_from_wire
from memstream.resources import Cursor, MemoryInfo, MemoryStats, Operation, Put
from memstream.v1 import fragment_pb2, memory_pb2, stream_service_pb2
from memstream.v1 import memory_service_pb2 as pb
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
from memstream.watch import Start, Watch
from memstream.wiretypes import invalid, metadata_value, timestamp


class Memory:
    """A memory by name; making one calls nobody. Every method raises a MemstreamError (see memstream.errors)."""

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

    # Streams and their unary twins.

    def observe(
        self,
        producer: str,
        *,
        session: str = "",
        ack_level: AckLevel = AckLevel.STORED,
        outcomes: bool = False,
        known_sequence: int | None = None,
    ) -> ObserveStream:
        """A stream of observations; open it with `async with`.

        `producer` names who numbers them: lasting, one process's at a time. `session` is of observations that give
        none; `ack_level` what `flush` waits for; `outcomes` asks what became of each. A process that comes back after
        an earlier one of the producer gives as `known_sequence` the last number whose end it knows (0: none): what
        was refused since, and what became of the others, is then in the stream's `resumption`.
        """
        return ObserveStream(self._link, self._path, producer, session, ack_level, outcomes, known_sequence)

    def recall(self, *, session: str = "") -> RecallStream:
        """A stream of queries, many in flight; open it with `async with`."""
        return RecallStream(self._link, self._path, session)

    def watch(
        self,
        start: Start = "now",
        *,
        types: Collection[EventType] = (),
        include_fragments: bool = False,
        progress_interval: timedelta | None = None,
    ) -> Watch:
        """Every event after `start`: a cursor, "now" or "beginning"; only of `types`, if any are given."""
        return Watch(self._link, self._path, start, types, include_fragments, progress_interval)

    async def recall_once(
        self, what: str | Structured, *, session: str = "", **options: Unpack[RecallOptions]
    ) -> Answer:
        """Asks one query; see RecallOptions."""
        request = stream_service_pb2.RecallOnceRequest(
            namespace=self.namespace,
            memory=self.name,
            session=session,
            query=query_to_wire("", what, **options),
        )
        answer = await self._link.call(self._link.streams.RecallOnce, request, self._path, options.get("timeout_s"))
        return answer_from_wire([answer.recollections], answer.done)

    async def observe_batch(
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
        """Observes one batch and waits until it has come to `ack_level`.

        Without a producer, numbers count from 1 within the batch. Repeated by itself when the server was not reached:
        a number or a request id makes it count once. A `request_id` of your own gets the same result again within 24
        hours, also from another process; with any other arguments it raises RequestIdConflict.
        """
        request = stream_service_pb2.ObserveBatchRequest(
            namespace=self.namespace,
            memory=self.name,
            producer=producer,
            session=session,
            first_sequence=first_sequence,
            observations=[observation_to_wire(each) for each in observations],
            ack_level=ack_level_to_wire(ack_level),
            request_id=request_id or ("" if producer else new_request_id()),
        )
        answer = await self._link.call(self._link.streams.ObserveBatch, request, self._path, timeout_s)
        return batch_result_from_wire(answer.ack)

    # The memory as a resource.

    async def describe(self) -> MemoryInfo:
        """The memory as the server has it: kind, complete policy, labels, revision."""
        request = pb.GetMemoryRequest(namespace=self.namespace, memory=self.name)
        answer = await self._link.call(self._link.memories.GetMemory, request, self._path)
        return memory_from_wire(answer.memory)

    async def stats(self) -> MemoryStats:
        """How much it holds."""
        request = pb.GetMemoryStatsRequest(namespace=self.namespace, memory=self.name)
        answer = await self._link.call(self._link.memories.GetMemoryStats, request, self._path)
        return stats_from_wire(answer.stats)

    async def update(
        self, *, policy: PolicyLike | None = None, labels: Mapping[str, str] | None = None, etag: str = ""
    ) -> MemoryInfo:
        """Sets the policy fields given, and all labels if given; with an etag only if it is current."""
        request = pb.UpdateMemoryRequest(
            memory=memory_pb2.Memory(
                namespace=self.namespace,
                name=self.name,
                policy=policy_to_wire(policy) if policy is not None else None,
                labels=labels,
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
        """A new memory (`namespace/name`) of the same structure and policy, without content."""
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

    async def clear(self, tiers: Collection[Tier] = ()) -> int:
        """Empties the tiers named (none: all) for good; how many fragments that were, forgotten ones included."""
        request = pb.ClearMemoryRequest(
            namespace=self.namespace, memory=self.name, tiers=tiers_to_wire(tiers), request_id=new_request_id()
        )
        return (await self._link.call(self._link.memories.ClearMemory, request, self._path)).cleared

    async def delete(self, *, etag: str = "") -> None:
        """Deletes the memory and all of its content for good; with an etag only if it is current."""
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

    async def get_fragment(self, id: str = "", *, external_id: str = "") -> Fragment:
        """A fragment by its id or by the client's own key."""
        if bool(id) == bool(external_id):
            raise invalid("id", "give either an id or an external_id")
        request = pb.GetFragmentRequest(namespace=self.namespace, memory=self.name)
        if id:
            request.id = id
        else:
            request.external_id = external_id
        answer = await self._link.call(self._link.memories.GetFragment, request, self._path)
        return fragment_from_wire(answer.fragment)

    def list_fragments(
        self, filter: Filter | None = None, *, forgotten: bool = False, page_size: int = 0
    ) -> FragmentListing:
        """Fragments in order of receipt, page by page; iterate over it."""
        request = pb.ListFragmentsRequest(
            namespace=self.namespace,
            memory=self.name,
            filter=filter_to_wire(filter) if filter is not None else None,
            forgotten=forgotten,
            page_size=page_size,
        )
        return FragmentListing(self._link, self._path, request)

    async def put_fragment(self, what: Observable, *, etag: str = "", **said: Unpack[ObservationFields]) -> Put:
        """Observes, or updates the fragment of that `external_id` (required); with an etag only if it is current.

        One that was forgotten is remembered again.
        """
        request = pb.PutFragmentRequest(
            namespace=self.namespace,
            memory=self.name,
            observation=observation_to_wire(what, **said),
            request_id=new_request_id(),
            etag=etag,
        )
        answer = await self._link.call(self._link.memories.PutFragment, request, self._path)
        fragment = fragment_from_wire(answer.fragment) if answer.HasField("fragment") else None
        return Put(fragment, answer.created, answer.revision)

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
        etag: str = "",
    ) -> Fragment:
        """Sets what is given; `metadata` replaces all of it, `expire_time="never"` takes its own expiry away.

        With an etag only if it is current.
        """
        wire = fragment_pb2.Fragment(
            id=id, etag=etag, importance=importance or 0.0, pinned=bool(pinned), speaker=speaker or ""
        )
        body = "content"
        if isinstance(content, Structured):
            body = "structured"
            wire.structured.CopyFrom(structured_to_wire(content))
        elif content is not None:
            wire.content = content
        for key, value in (metadata or {}).items():
            wire.metadata[key].CopyFrom(metadata_value(f"metadata.{key}", value))
        if isinstance(expire_time, datetime):
            wire.expire_time.CopyFrom(timestamp("expire_time", expire_time))
        given = {
            body: content,
            "importance": importance,
            "metadata": metadata,
            "expire_time": expire_time,
            "pinned": pinned,
            "speaker": speaker,
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

    async def forget_fragments(self, ids: Collection[str] = (), *, filter: Filter | None = None) -> int:
        """Takes fragments out of recall, restorable within the grace; how many that were. By ids, or by filter."""
        request = pb.ForgetFragmentsRequest(
            namespace=self.namespace,
            memory=self.name,
            ids=ids,
            filter=filter_to_wire(filter) if filter is not None else None,
            request_id=new_request_id(),
        )
        return (await self._link.call(self._link.memories.ForgetFragments, request, self._path)).forgotten

    async def restore_fragments(self, ids: Collection[str] = (), *, filter: Filter | None = None) -> int:
        """Brings forgotten fragments back; how many that were. By ids, or by filter."""
        request = pb.RestoreFragmentsRequest(
            namespace=self.namespace,
            memory=self.name,
            ids=ids,
            filter=filter_to_wire(filter) if filter is not None else None,
            request_id=new_request_id(),
        )
        return (await self._link.call(self._link.memories.RestoreFragments, request, self._path)).restored

    async def erase_fragments(self, ids: Collection[str] = (), *, filter: Filter | None = None) -> Operation:
        """Starts to remove content and vectors for good, with what was derived from them. By ids, or by filter."""
        request = pb.EraseFragmentsRequest(
            namespace=self.namespace,
            memory=self.name,
            ids=ids,
            filter=filter_to_wire(filter) if filter is not None else None,
            request_id=new_request_id(),
        )
        answer = await self._link.call(self._link.memories.EraseFragments, request, self._path)
        return operation_from_wire(answer.operation)


class FragmentListing(AsyncIterator[Fragment]):
    """Fragments in order of receipt, fetched a page at a time while being iterated over.

    `cursor`, set once the first page is there, is where a watch goes on from this listing.
    """

    def __init__(self, link: Link, path: MemoryPath, request: pb.ListFragmentsRequest) -> None:
        self.cursor: Cursor | None = None
        self._link = link
        self._path = path
        self._request = request
        self._page: list[Fragment] = []
        self._last_page = False

    async def __anext__(self) -> Fragment:
        while not self._page:
            if self._last_page:
                raise StopAsyncIteration
            await self._fetch()
        return self._page.pop()

    async def _fetch(self) -> None:
        answer = await self._link.call(self._link.memories.ListFragments, self._request, self._path)
        if self.cursor is None:
            self.cursor = Cursor(answer.memory_uid, answer.revision)
        self._page = [fragment_from_wire(wire) for wire in reversed(answer.fragments)]
        self._request.page_token = answer.next_page_token
        self._last_page = not answer.next_page_token
