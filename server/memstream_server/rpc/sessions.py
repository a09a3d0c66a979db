"""The rpc of MemoryService for the sessions of a memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import memory_service_pb2 as pb
from memstream_server.core.session_summaries import SessionQuery, SessionSummary
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.errors import PageTokenInvalid
from memstream_server.rpc.limits import Limits, encode_fitting
from memstream_server.rpc.validation import Violations, check_identifier, memory_name
from memstream_server.rpc.wire.scalars import time_us, timestamp_message

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine

_Context = grpc.aio.ServicerContext[Any, Any]


class SessionMethods:
    """The handler."""

    _engine: Engine
    _limits: Limits

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
