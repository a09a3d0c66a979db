"""Reads lists page by page: sessions, standing queries, conflicts and events of a memory, conversations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime

from memstream.channel import Link, MemoryPath, iterate_pages
from memstream.codec import conflict_from_wire, event_from_wire
from memstream.conflict_values import ConflictRecord
from memstream.listed_values import ConversationSummary, OpenStandingQuery, SessionSummary
from memstream.receipt_codec import options_from_wire, what_from_wire
from memstream.resources import Event
from memstream.v1 import conversation_service_pb2
from memstream.v1 import memory_service_pb2 as pb
from memstream.wiretypes import duration_from_wire, optional_timestamp_from_wire, timestamp_from_wire, timestamp_to_wire


def iterate_sessions(
    link: Link,
    path: MemoryPath,
    prefix: str,
    observe_time_min: datetime | None,
    observe_time_max: datetime | None,
    page_size: int,
) -> AsyncIterator[SessionSummary]:
    """The sessions of a memory, the one with the latest observation first."""
    request = pb.ListSessionsRequest(
        namespace=path.namespace, memory=path.name, session_prefix=prefix, page_size=page_size
    )
    if observe_time_min is not None:
        request.observe_time_min.CopyFrom(timestamp_to_wire("observe_time_min", observe_time_min))
    if observe_time_max is not None:
        request.observe_time_max.CopyFrom(timestamp_to_wire("observe_time_max", observe_time_max))

    async def fetch(token: str) -> tuple[Sequence[SessionSummary], str]:
        request.page_token = token
        answer = await link.call(link.memories.ListSessions, request, path)
        return [_session_from_wire(wire) for wire in answer.sessions], answer.next_page_token

    return iterate_pages(fetch)


def iterate_standing_queries(link: Link, path: MemoryPath, page_size: int) -> AsyncIterator[OpenStandingQuery]:
    """The open standing queries of a memory, the oldest first."""

    async def fetch(token: str) -> tuple[Sequence[OpenStandingQuery], str]:
        request = pb.ListStandingQueriesRequest(
            namespace=path.namespace, memory=path.name, page_size=page_size, page_token=token
        )
        answer = await link.call(link.memories.ListStandingQueries, request, path)
        return [_query_from_wire(wire) for wire in answer.queries], answer.next_page_token

    return iterate_pages(fetch)


def iterate_conflicts(link: Link, path: MemoryPath, decided: bool, page_size: int) -> AsyncIterator[ConflictRecord]:
    """The open, or the decided, suspicions of a memory by age."""

    async def fetch(token: str) -> tuple[Sequence[ConflictRecord], str]:
        request = pb.ListConflictsRequest(
            namespace=path.namespace, memory=path.name, decided=decided, page_size=page_size, page_token=token
        )
        answer = await link.call(link.memories.ListConflicts, request, path)
        return [conflict_from_wire(wire) for wire in answer.conflicts], answer.next_page_token

    return iterate_pages(fetch)


def iterate_fragment_events(link: Link, path: MemoryPath, id: str, page_size: int) -> AsyncIterator[Event]:
    """The events that concern a fragment, the earliest first."""

    async def fetch(token: str) -> tuple[Sequence[Event], str]:
        request = pb.ListFragmentEventsRequest(
            namespace=path.namespace, memory=path.name, id=id, page_size=page_size, page_token=token
        )
        answer = await link.call(link.memories.ListFragmentEvents, request, path)
        return [event_from_wire(wire) for wire in answer.events], answer.next_page_token

    return iterate_pages(fetch)


def iterate_conversations(
    link: Link, namespace: str, prefix: str, labels: Mapping[str, str] | None, latest_first: bool, page_size: int
) -> AsyncIterator[ConversationSummary]:
    """The conversations of a namespace by name, or the latest changed first."""

    async def fetch(token: str) -> tuple[Sequence[ConversationSummary], str]:
        request = conversation_service_pb2.ListConversationsRequest(
            namespace=namespace,
            name_prefix=prefix,
            labels=dict(labels or {}),
            latest_first=latest_first,
            page_size=page_size,
            page_token=token,
        )
        answer = await link.call(link.conversations.ListConversations, request)
        return [conversation_from_wire(one) for one in answer.conversations], answer.next_page_token

    return iterate_pages(fetch)


def conversation_from_wire(wire: conversation_service_pb2.Conversation) -> ConversationSummary:
    """Converts a conversation."""
    return ConversationSummary(
        name=wire.name,
        last_number=wire.last_number,
        completed=wire.completed,
        create_time=timestamp_from_wire(wire.create_time),
        labels=dict(wire.labels),
        ttl=duration_from_wire(wire.ttl) if wire.HasField("ttl") else None,
        expire_time=optional_timestamp_from_wire(wire.expire_time, wire.HasField("expire_time")),
        message_count=wire.message_count,
        update_time=timestamp_from_wire(wire.update_time),
        feed_memory=wire.feed_memory,
        fed_number=wire.fed_number,
    )


def _session_from_wire(wire: pb.SessionSummary) -> SessionSummary:
    return SessionSummary(
        session=wire.session,
        first_observe_time=timestamp_from_wire(wire.first_observe_time),
        last_observe_time=timestamp_from_wire(wire.last_observe_time),
        fragments=wire.fragments,
        speakers=tuple(wire.speakers),
        speaker_count=wire.speaker_count,
    )


def _query_from_wire(wire: pb.OpenStandingQuery) -> OpenStandingQuery:
    return OpenStandingQuery(
        id=wire.id,
        query_id=wire.query.query_id,
        what=what_from_wire(wire.query),
        options=options_from_wire(wire.query),
        session=wire.session,
        open_time=timestamp_from_wire(wire.open_time),
        change_time=optional_timestamp_from_wire(wire.change_time, wire.HasField("change_time")),
        messages_sent=wire.messages_sent,
        recollections=wire.recollections,
        principal=wire.principal,
    )
