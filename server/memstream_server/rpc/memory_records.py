"""Rpcs of MemoryService for what a memory keeps besides fragments, with a class for each.

Suspicions (list, resolve), receipts of recalls (list, replay), sessions (list), open standing queries (list).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import stream_service_pb2 as stream_pb
from memstream_server.core.session_summaries import SessionQuery, SessionSummary
from memstream_server.core.suspicions import ConflictDecision
from memstream_server.engine.conflicts import Resolved, Verdict
from memstream_server.engine.recall.standing_query import OpenQuery
from memstream_server.engine.requests import Query
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.access.caller import Verb, caller_may
from memstream_server.rpc.errors import PageTokenInvalid
from memstream_server.rpc.idempotency import commit_with_answer, idempotent_call, respond_once
from memstream_server.rpc.limits import RequestLimits, encode_fitting
from memstream_server.rpc.validation import Violations, check_identifier, invalid_field, memory_name
from memstream_server.rpc.wire import queries
from memstream_server.rpc.wire.fragments import DECISIONS, conflict_message
from memstream_server.rpc.wire.queries import encode_replay, write_receipt
from memstream_server.rpc.wire.scalars import time_us, timestamp_message

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.ports.journal.reading import StoredConflict


_Context = grpc.aio.ServicerContext[Any, Any]
NOTE_CHARACTERS_MAX = 1_000
_TOKEN_PARTS = 3


class ConflictMethods:
    """The handlers."""

    _engine: Engine
    _limits: RequestLimits

    async def list_conflicts(self, request: pb.ListConflictsRequest, _context: _Context) -> bytes:
        """A serialised ListConflictsResponse."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()
        after, uid_before = _read_token(request)
        page, more, uid = await self._engine.conflicts.list_page(namespace, name, request.decided, after, size)
        if uid_before and uid_before != uid:
            raise PageTokenInvalid("the page_token is of an earlier memory of that name; start without one")
        shown, count = await encode_fitting(
            page, pb.ListConflictsResponse(), _add_conflict, self._limits.page_bytes_max
        )
        token = ""
        if more or count < len(page):
            last = page[count - 1].suspicion
            token = page_tokens.make_token(request, f"{last.newer}:{last.older}:{uid}")
        return shown + pb.ListConflictsResponse(next_page_token=token).SerializeToString()

    async def resolve_conflict(
        self, request: pb.ResolveConflictRequest, _context: _Context
    ) -> pb.ResolveConflictResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        validation.fragment_id(found, "newer_id", request.newer_id)
        validation.fragment_id(found, "older_id", request.older_id)
        decision = DECISIONS.read_value(found, "decision", request.decision, ConflictDecision.NEITHER)
        if not request.decision:
            found.add("decision", "is required: newer, older, both or neither")
        if len(request.note) > NOTE_CHARACTERS_MAX:
            found.add("note", f"has {len(request.note):,} characters, at most {NOTE_CHARACTERS_MAX:,} are allowed")
        if "\0" in request.note:
            found.add("note", "has a null character, which the journal cannot hold")
        request_id = check_identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        verdict = Verdict(request.newer_id, request.older_id, decision, request.note)
        call = idempotent_call(request, namespace, request_id, pb.ResolveConflictResponse)

        async def resolve() -> pb.ResolveConflictResponse:
            once = commit_with_answer(call, _resolve_response)
            return _resolve_response(await self._engine.conflicts.resolve(namespace, name, verdict, once))

        return await respond_once(call, self._engine, resolve)


def _add_conflict(page: pb.ListConflictsResponse, conflict: StoredConflict) -> None:
    page.conflicts.append(conflict_message(conflict))


def _read_token(request: pb.ListConflictsRequest) -> tuple[tuple[str, str], str]:
    """((newer, older), uid of the memory); empty for the first page. Raises PageTokenInvalid."""
    payload = page_tokens.read_name(request)
    if not payload:
        return ("", ""), ""
    parts = payload.split(":")
    if len(parts) != _TOKEN_PARTS:
        raise PageTokenInvalid("the page_token was not made by this call; start without one")
    return (parts[0], parts[1]), parts[2]


def _resolve_response(result: Resolved) -> pb.ResolveConflictResponse:
    conflict, revision = result
    return pb.ResolveConflictResponse(conflict=conflict_message(conflict), revision=revision)


class ReceiptMethods:
    """The handlers."""

    _engine: Engine
    _limits: RequestLimits

    async def list_recall_receipts(self, request: pb.ListRecallReceiptsRequest, _context: _Context) -> bytes:
        """A serialised ListRecallReceiptsResponse."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()
        before, uid_before = page_tokens.read_position(request)
        page, more, uid = await self._engine.recall_receipts.list_page(namespace, name, before, size)
        if uid_before and uid_before != uid:
            raise PageTokenInvalid("the page_token is of an earlier memory of that name; start without one")
        receipts, count = await encode_fitting(
            page,
            pb.ListRecallReceiptsResponse(),
            lambda response, each: write_receipt(response.receipts.add(), each[1]),
            self._limits.page_bytes_max,
        )
        more = more or count < len(page)
        token = page_tokens.make_token(request, f"{page[count - 1][0]}:{uid}") if more else ""
        return receipts + pb.ListRecallReceiptsResponse(next_page_token=token).SerializeToString()

    async def replay_recall(self, request: pb.ReplayRecallRequest, _context: _Context) -> bytes:
        """A serialised ReplayRecallResponse."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        validation.fragment_id(found, "receipt_id", request.receipt_id)
        found.check()
        replay = await self._engine.recall_receipts.replay(namespace, name, request.receipt_id, self._read_query)
        response = await encode_replay(replay)
        if len(response) > self._limits.message_bytes_max:
            raise invalid_field(
                "receipt_id",
                f"leads to an answer of {len(response)} bytes, a message has at most "
                f"{self._limits.message_bytes_max}: recall with as_of on the Recall stream",
            )
        return response

    def _read_query(self, given: bytes) -> Query:
        """The query as it was given. A client's embedding of another model is left out."""
        message = stream_pb.RecallQuery.FromString(given)
        if len(message.embedding) != self._engine.dimension:
            message.ClearField("embedding")
        return queries.read_query(message, "", self._limits, self._engine.dimension)


class SessionMethods:
    """The handler."""

    _engine: Engine
    _limits: RequestLimits

    async def list_sessions(self, request: pb.ListSessionsRequest, _context: _Context) -> bytes:
        """A serialised ListSessionsResponse."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        size = validation.page_size(found, request.page_size, self._limits)
        after, uid_before = page_tokens.read_place(request)
        query = SessionQuery(
            check_identifier(found, "session_prefix", request.session_prefix, self._limits),
            time_us(found, "observe_time_min", request.observe_time_min)
            if request.HasField("observe_time_min")
            else None,
            time_us(found, "observe_time_max", request.observe_time_max)
            if request.HasField("observe_time_max")
            else None,
            after,
            size,
        )
        found.check()
        page, more, revision, uid = await self._engine.fragments.list_sessions(namespace, name, query)
        if uid_before and uid_before != uid:
            raise PageTokenInvalid("the page_token is of an earlier memory of that name; start without one")
        shown, count = await encode_fitting(page, pb.ListSessionsResponse(), _add_session, self._limits.page_bytes_max)
        token = ""
        if more or count < len(page):
            last = page[count - 1]
            token = page_tokens.make_token(request, f"{last.last_us}:{last.position}:{uid}")
        return shown + pb.ListSessionsResponse(next_page_token=token, revision=revision).SerializeToString()


def _add_session(page: pb.ListSessionsResponse, summary: SessionSummary) -> None:
    page.sessions.add(
        session=summary.session,
        first_observe_time=timestamp_message(summary.first_us),
        last_observe_time=timestamp_message(summary.last_us),
        fragments=summary.fragments,
        speakers=summary.speakers,
        speaker_count=summary.speaker_count,
    )


class StandingQueryMethods:
    """The handler."""

    _engine: Engine
    _limits: RequestLimits

    async def list_standing_queries(self, request: pb.ListStandingQueriesRequest, _context: _Context) -> bytes:
        """A serialised ListStandingQueriesResponse."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()
        page, more = await self._engine.open_queries.list_page(namespace, name, page_tokens.read_name(request), size)
        named = caller_may(Verb.ADMIN, namespace)
        shown, count = await encode_fitting(
            page,
            pb.ListStandingQueriesResponse(),
            lambda response, each: _add_query(response, each, named),
            self._limits.page_bytes_max,
        )
        token = page_tokens.make_token(request, page[count - 1].id) if more or count < len(page) else ""
        return shown + pb.ListStandingQueriesResponse(next_page_token=token).SerializeToString()


def listed_query(message: stream_pb.RecallQuery, session: str) -> OpenQuery:
    """What a list shows of a query that a client opens."""
    shown = stream_pb.RecallQuery()
    shown.CopyFrom(message)
    shown.ClearField("embedding")
    return OpenQuery(shown.SerializeToString(deterministic=True), session)


def _add_query(page: pb.ListStandingQueriesResponse, query: OpenQuery, named: bool) -> None:
    """`named`: whether the caller may see who opened it."""
    message = page.queries.add(
        id=query.id,
        session=query.session,
        open_time=timestamp_message(query.open_us),
        messages_sent=query.messages_sent,
        recollections=query.recollections,
        principal=query.principal if named else "",
    )
    message.query.MergeFromString(query.query)
    if query.change_us is not None:
        message.change_time.CopyFrom(timestamp_message(query.change_us))
