"""Conflict rpcs of MemoryService: list, resolve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import memory_service_pb2 as pb
from memstream_server.core.suspicions import ConflictDecision
from memstream_server.engine.conflicts import Resolved, Verdict
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.errors import PageTokenInvalid
from memstream_server.rpc.idempotency import commit_with_answer, idempotent_call, respond_once
from memstream_server.rpc.limits import Limits, encode_fitting
from memstream_server.rpc.validation import Violations, check_identifier, memory_name
from memstream_server.rpc.wire.conflicts import DECISIONS, conflict_message

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.ports.journal.reading import StoredConflict

_Context = grpc.aio.ServicerContext[Any, Any]
NOTE_CHARACTERS_MAX = 1_000
_TOKEN_PARTS = 3


class ConflictMethods:
    """The handlers."""

    _engine: Engine
    _limits: Limits

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
