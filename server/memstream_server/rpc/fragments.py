"""Fragment rpcs of MemoryService: get, list, history, put, update, forget, restore, supersede, erase."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import grpc.aio

from memstream.v1 import memory_service_pb2 as pb
from memstream_server.core.filters import Filter, Listing, Order, Unmatched
from memstream_server.core.policy import Truth
from memstream_server.core.values import Fragment
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import ChangeCount, NewObservation, Put
from memstream_server.engine.runtime.turns import in_slices
from memstream_server.ports.operations import Operation
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.errors import PageTokenInvalid
from memstream_server.rpc.idempotency import answer_from, commit_with_answer, idempotent_call, respond_once
from memstream_server.rpc.limits import ENTRIES_PER_SLICE, RequestLimits, encode_fitting
from memstream_server.rpc.operations import operation_message
from memstream_server.rpc.validation import Violations, check_identifier, memory_name, quote_text
from memstream_server.rpc.wire import observations, scalars
from memstream_server.rpc.wire.filters import read_filter
from memstream_server.rpc.wire.fragments import (
    EVENT_TYPES,
    ORDERS,
    event_message,
    fragment_message,
    read_as_of,
    unmatched_message,
    write_fragment,
    write_version,
)
from memstream_server.rpc.wire.queries import read_truth

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine

_Context = grpc.aio.ServicerContext[Any, Any]
_IDS_MAX = 1_000
_TEXT_CHARACTERS_MAX = 1_000
_MASKED = (
    "content",
    "structured",
    "importance",
    "metadata",
    "expire_time",
    "pinned",
    "speaker",
    "role",
    "valid_from",
    "valid_until",
)
_VALIDITY: tuple[Literal["valid_from", "valid_until"], ...] = ("valid_from", "valid_until")


class FragmentMethods:
    """The handlers."""

    def __init__(self, engine: Engine, limits: RequestLimits) -> None:
        self._engine = engine
        self._limits = limits

    async def get_fragment(self, request: pb.GetFragmentRequest, _context: _Context) -> pb.GetFragmentResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        self._check_key(found, request)
        as_of = read_as_of(found, request)
        found.check()
        keys = {"id": request.id, "external_id": request.external_id}
        if as_of is None:
            fragment, merged, revision = await self._engine.fragments.get(namespace, name, **keys)
        else:
            fragment, merged, revision = await self._engine.past.get(namespace, name, as_of, **keys)
        return pb.GetFragmentResponse(fragment=fragment_message(fragment, merged), revision=revision)

    def _check_key(self, found: Violations, request: pb.GetFragmentRequest | pb.GetFragmentHistoryRequest) -> None:
        if request.WhichOneof("key") == "external_id":
            check_identifier(found, "external_id", request.external_id, self._limits, required=True)
        else:
            validation.fragment_id(found, "id", request.id)

    async def get_fragment_history(self, request: pb.GetFragmentHistoryRequest, _context: _Context) -> bytes:
        """A serialised GetFragmentHistoryResponse."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        self._check_key(found, request)
        found.check()
        fragment, versions, revision = await self._engine.fragments.read_history(
            namespace, name, id=request.id, external_id=request.external_id
        )
        shown, _ = await encode_fitting(
            versions,
            pb.GetFragmentHistoryResponse(),
            lambda response, each: write_version(response.versions.add(), each),
            self._limits.page_bytes_max,
        )
        rest = pb.GetFragmentHistoryResponse(fragment=fragment_message(fragment), revision=revision)
        return shown + rest.SerializeToString()

    async def list_fragment_events(
        self, request: pb.ListFragmentEventsRequest, _context: _Context
    ) -> pb.ListFragmentEventsResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        validation.fragment_id(found, "id", request.id)
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()
        after, uid_before = page_tokens.read_position(request)
        happened, following, pruned, uid = await self._engine.fragments.list_events(
            namespace, name, request.id, after or 0, size
        )
        if uid_before and uid_before != uid:
            raise PageTokenInvalid("the page_token is of an earlier memory of that name; start without one")
        response = pb.ListFragmentEventsResponse(pruned_revision=pruned)
        if following is not None:
            response.next_page_token = page_tokens.make_token(request, f"{following}:{uid}")
        events = [(one, event) for one in happened for event in one.events if event.type in EVENT_TYPES]
        async for part in in_slices(events, ENTRIES_PER_SLICE):
            response.events.extend([event_message(event, uid, one.revision, 0, one.time_us) for one, event in part])
        return response

    async def restore_fragment_version(
        self, request: pb.RestoreFragmentVersionRequest, _context: _Context
    ) -> pb.RestoreFragmentVersionResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        validation.fragment_id(found, "id", request.id)
        if request.version < 1:
            found.add("version", "is not positive: take one from GetFragmentHistory")
        request_id = check_identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = idempotent_call(request, namespace, request_id, pb.RestoreFragmentVersionResponse)

        async def restore() -> pb.RestoreFragmentVersionResponse:
            return _restored_response(
                await self._engine.fragments.restore_version(
                    namespace,
                    name,
                    request.id,
                    request.version,
                    request.etag,
                    commit_with_answer(call, _restored_response),
                )
            )

        return await respond_once(call, self._engine, restore)

    async def list_fragments(self, request: pb.ListFragmentsRequest, _context: _Context) -> bytes:
        """A serialised ListFragmentsResponse."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        size = validation.page_size(found, request.page_size, self._limits)
        listing = self._read_listing(found, request)
        as_of = read_as_of(found, request)
        if (as_of is not None or request.forgotten) and not listing.is_plain:
            found.add("order", "is given with as_of or forgotten: such a list is in order of receipt")
        found.check()
        position, uid_before = page_tokens.read_position(request)
        after = -1 if position is None else position
        if as_of is None:
            page = await self._engine.fragments.list_page(namespace, name, listing, after, size)
        else:
            page = await self._engine.past.list_page(namespace, name, as_of, listing, after, size)
        fragments, following, revision, uid = page
        if uid_before and uid_before != uid:
            raise PageTokenInvalid("the page_token is of an earlier memory of that name; start without one")
        unmatched: tuple[Unmatched, ...] = ()
        if position is None and as_of is None:
            find = self._engine.fragments.find_unmatched
            unmatched = await find(uid, listing.chosen, request.forgotten, fragments)
        elif position is None and as_of is not None:
            find_past = self._engine.past.find_unmatched
            unmatched = await find_past(namespace, name, as_of, listing.chosen, request.forgotten)
        shown, count = await encode_fitting(
            fragments,
            pb.ListFragmentsResponse(),
            lambda response, each: write_fragment(response.fragments.add(), each),
            self._limits.page_bytes_max,
        )
        if count < len(fragments):
            following = fragments[count - 1].position if listing.is_plain else after + count
        rest = pb.ListFragmentsResponse(
            next_page_token="" if following is None else page_tokens.make_token(request, f"{following}:{uid}"),
            revision=revision,
            memory_uid=uid,
            unmatched=map(unmatched_message, unmatched),
        )
        return shown + rest.SerializeToString()

    def _read_listing(self, found: Violations, request: pb.ListFragmentsRequest) -> Listing:
        if len(request.text) > _TEXT_CHARACTERS_MAX:
            found.add("text", f"has {len(request.text):,} characters, at most {_TEXT_CHARACTERS_MAX:,} are allowed")
        return Listing(
            read_filter(found, request.filter, self._limits, "filter") if request.HasField("filter") else Filter(),
            read_truth(found, "truth", request.truth) or Truth.ALL,
            request.text,
            request.forgotten,
            ORDERS.read_value(found, "order", request.order, Order.RECEIPT),
            request.descending,
        )

    async def put_fragment(self, request: pb.PutFragmentRequest, _context: _Context) -> pb.PutFragmentResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        new, etag = read_put(found, request, self._limits, self._engine.dimension)
        request_id = check_identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = idempotent_call(request, namespace, request_id, pb.PutFragmentResponse)

        async def put() -> pb.PutFragmentResponse:
            once = commit_with_answer(call, put_response)
            return put_response(await self._engine.fragments.put(namespace, name, new, etag, once))

        return await respond_once(call, self._engine, put)

    async def update_fragment(self, request: pb.UpdateFragmentRequest, _context: _Context) -> pb.UpdateFragmentResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        change = _read_change(found, request, self._limits)
        request_id = check_identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = idempotent_call(request, namespace, request_id, pb.UpdateFragmentResponse)

        async def update() -> pb.UpdateFragmentResponse:
            return _update_response(
                await self._engine.fragments.update(namespace, name, change, commit_with_answer(call, _update_response))
            )

        return await respond_once(call, self._engine, update)

    async def forget_fragments(
        self, request: pb.ForgetFragmentsRequest, _context: _Context
    ) -> pb.ForgetFragmentsResponse:
        namespace, name, which = self._read_selection(request)
        call = idempotent_call(request, namespace, request.request_id, pb.ForgetFragmentsResponse)

        async def forget() -> pb.ForgetFragmentsResponse:
            unmatched = await self._engine.fragments.check_selection(namespace, name, which, forgotten=False)

            def respond(changed: ChangeCount) -> pb.ForgetFragmentsResponse:
                return pb.ForgetFragmentsResponse(
                    forgotten=changed.count, revision=changed.revision, unmatched=map(unmatched_message, unmatched)
                )

            return respond(
                await self._engine.fragments.forget(namespace, name, which, commit_with_answer(call, respond))
            )

        return await respond_once(call, self._engine, forget)

    async def restore_fragments(
        self, request: pb.RestoreFragmentsRequest, _context: _Context
    ) -> pb.RestoreFragmentsResponse:
        namespace, name, which = self._read_selection(request)
        call = idempotent_call(request, namespace, request.request_id, pb.RestoreFragmentsResponse)

        async def restore() -> pb.RestoreFragmentsResponse:
            unmatched = await self._engine.fragments.check_selection(namespace, name, which, forgotten=True)

            def respond(changed: ChangeCount) -> pb.RestoreFragmentsResponse:
                return pb.RestoreFragmentsResponse(
                    restored=changed.count, revision=changed.revision, unmatched=map(unmatched_message, unmatched)
                )

            return respond(
                await self._engine.fragments.restore(namespace, name, which, commit_with_answer(call, respond))
            )

        return await respond_once(call, self._engine, restore)

    async def supersede_fragments(
        self, request: pb.SupersedeFragmentsRequest, _context: _Context
    ) -> pb.SupersedeFragmentsResponse:
        namespace, name, olds, new = self._read_supersession(request)
        call = idempotent_call(request, namespace, request.request_id, pb.SupersedeFragmentsResponse)

        async def supersede() -> pb.SupersedeFragmentsResponse:
            return _supersede_response(
                await self._engine.fragments.supersede(
                    namespace, name, olds, new, commit_with_answer(call, _supersede_response)
                )
            )

        return await respond_once(call, self._engine, supersede)

    def _read_supersession(self, request: pb.SupersedeFragmentsRequest) -> tuple[str, str, list[str], str]:
        """(namespace, memory, keys of the older fragments, key of the newer one). Raises InvalidField."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        check_identifier(found, "request_id", request.request_id, self._limits)
        olds = [*request.ids, *request.external_ids]
        if not olds:
            found.add("ids", "is empty, and so is external_ids: say which fragments are superseded")
        elif len(olds) > _IDS_MAX:
            found.add("ids", f"has {len(olds):,} entries with external_ids, at most {_IDS_MAX:,} are allowed")
        else:
            for number, each in enumerate(request.ids):
                validation.fragment_id(found, f"ids[{number}]", each)
            for number, each in enumerate(request.external_ids):
                check_identifier(found, f"external_ids[{number}]", each, self._limits, required=True)
        if request.WhichOneof("newer") == "newer_external_id":
            new = check_identifier(found, "newer_external_id", request.newer_external_id, self._limits, required=True)
        else:
            new = validation.fragment_id(found, "newer_id", request.newer_id)
        found.check()
        return namespace, name, olds, new

    async def erase_fragments(self, request: pb.EraseFragmentsRequest, _context: _Context) -> pb.EraseFragmentsResponse:
        namespace, name, which = self._read_selection(request)
        call = idempotent_call(request, namespace, request.request_id, pb.EraseFragmentsResponse)

        async def erase() -> pb.EraseFragmentsResponse:
            unmatched = await self._engine.fragments.check_selection(namespace, name, which, forgotten=None)

            def respond(operation: Operation) -> pb.EraseFragmentsResponse:
                shown = map(unmatched_message, unmatched)
                return pb.EraseFragmentsResponse(operation=operation_message(operation), unmatched=shown)

            return respond(await self._engine.erasing.start(namespace, name, which, answer_from(call, respond)))

        return await respond_once(call, self._engine, erase)

    def _read_selection(
        self, request: pb.ForgetFragmentsRequest | pb.RestoreFragmentsRequest | pb.EraseFragmentsRequest
    ) -> tuple[str, str, list[str] | Filter]:
        """(namespace, memory, ids or a filter that is not empty). Raises InvalidField."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        check_identifier(found, "request_id", request.request_id, self._limits)
        chosen = read_filter(found, request.filter, self._limits, "filter")
        if request.ids and request.HasField("filter"):
            found.add("filter", "is given beside ids: give one of them")
        elif not request.ids and not request.HasField("filter"):
            found.add("ids", "is empty, and there is no filter: say which fragments are meant")
        elif not request.ids and chosen == Filter():
            found.add("filter", "is empty, which would mean every fragment: name a condition")
        elif len(request.ids) > _IDS_MAX:
            found.add("ids", f"has {len(request.ids):,} entries, at most {_IDS_MAX:,} are allowed")
        else:
            for number, each in enumerate(request.ids):
                validation.fragment_id(found, f"ids[{number}]", each)
        found.check()
        return namespace, name, list(request.ids) or chosen


def _read_change(found: Violations, request: pb.UpdateFragmentRequest, limits: RequestLimits) -> FragmentChange:
    """The masked fields of the message; a masked time that is not set is removed."""
    message, paths = request.fragment, set(request.update_mask.paths)
    validation.fragment_id(found, "fragment.id", message.id)
    _check_mask(found, request.update_mask.paths)
    expires = "expire_time" in paths and message.HasField("expire_time")
    importance = message.importance if "importance" in paths else None
    if importance is not None:
        validation.check_bounds(found, "fragment.importance", importance, 0, 1)
    times_us = {
        name: scalars.time_us(found, f"fragment.{name}", getattr(message, name))
        for name in _VALIDITY
        if name in paths and message.HasField(name)
    }
    structured, content = None, None
    if paths & {"structured", "content"}:
        structured, content = observations.read_body(found, message, "structured" in paths, limits, "fragment.")
    return FragmentChange(
        id=message.id,
        content=content,
        structured=structured,
        speaker=check_identifier(found, "fragment.speaker", message.speaker, limits) if "speaker" in paths else None,
        role=observations.read_role(found, "fragment.role", message.role) if "role" in paths else None,
        has_role="role" in paths,
        importance=importance,
        metadata=scalars.read_metadata(found, "fragment.metadata", message.metadata, limits)
        if "metadata" in paths
        else None,
        expire_time_us=scalars.time_us(found, "fragment.expire_time", message.expire_time) if expires else None,
        never_expires="expire_time" in paths and not expires,
        pinned=message.pinned if "pinned" in paths else None,
        valid_from_us=times_us.get("valid_from"),
        valid_until_us=times_us.get("valid_until"),
        unbounded=frozenset(f"{name}_us" for name in _VALIDITY if name in paths and name not in times_us),
        etag=message.etag,
    )


def _check_mask(found: Violations, paths: Iterable[str]) -> None:
    given = list(paths)
    if not given:
        found.add("update_mask", "is empty: name the fields to set")
    for path in given:
        if path not in _MASKED:
            found.add("update_mask", f"has {quote_text(path)}: one of {', '.join(_MASKED)} can be set")
    if {"content", "structured"} <= set(given):
        found.add("update_mask", "has content and structured: a fragment says one of them")


def read_put(
    found: Violations, request: pb.PutFragmentRequest, limits: RequestLimits, dimension: int
) -> tuple[NewObservation, str | None]:
    """(observation, etag as of `Fragments.put`)."""
    new = observations.read_observation(found, request.observation, b"", "", limits, dimension, prefix="observation.")
    if not new.external_id:
        found.add("observation.external_id", "is required: it says which fragment is put")
    if request.absent and request.etag:
        found.add("absent", "and etag exclude each other")
    return new, None if request.absent else request.etag


def put_response(put: Put) -> pb.PutFragmentResponse:
    """What is there now."""
    fragment = None if put.fragment is None else fragment_message(put.fragment)
    return pb.PutFragmentResponse(fragment=fragment, created=put.created, revision=put.revision)


def _update_response(result: tuple[Fragment, int]) -> pb.UpdateFragmentResponse:
    fragment, revision = result
    return pb.UpdateFragmentResponse(fragment=fragment_message(fragment), revision=revision)


def _restored_response(result: tuple[Fragment, int]) -> pb.RestoreFragmentVersionResponse:
    fragment, revision = result
    return pb.RestoreFragmentVersionResponse(fragment=fragment_message(fragment), revision=revision)


def _supersede_response(changed: ChangeCount) -> pb.SupersedeFragmentsResponse:
    return pb.SupersedeFragmentsResponse(superseded=changed.count, revision=changed.revision)
