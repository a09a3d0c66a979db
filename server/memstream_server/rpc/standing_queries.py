"""The rpc of MemoryService for the standing queries that are open on a memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import stream_service_pb2 as stream_pb
from memstream_server.engine.recall.open_queries import OpenQuery
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.access.caller import Verb, caller_may
from memstream_server.rpc.limits import Limits, encode_fitting
from memstream_server.rpc.validation import Violations, memory_name
from memstream_server.rpc.wire.scalars import timestamp_message

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine

_Context = grpc.aio.ServicerContext[Any, Any]


class StandingQueryMethods:
    """The handler."""

    _engine: Engine
    _limits: Limits

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
