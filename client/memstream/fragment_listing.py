"""Requests for fragments, and a listing that remembers the revision of its first page."""

from __future__ import annotations

from collections.abc import AsyncIterator

from memstream.answer_codec import unmatched_from_wire
from memstream.answer_values import Unmatched
from memstream.argument_types import Moment
from memstream.channel import Link, MemoryPath
from memstream.codec import fragment_from_wire, set_as_of, truth_to_wire
from memstream.filter_codec import filter_to_wire
from memstream.listed_values import FragmentOrder
from memstream.resources import Cursor
from memstream.v1 import fragment_pb2
from memstream.v1 import memory_service_pb2 as pb
from memstream.values import Filter, Fragment, Truth
from memstream.wiretypes import invalid_field


class FragmentListing(AsyncIterator[Fragment]):
    """Fragments in the order asked for, fetched page by page during iteration.

    The first page sets `cursor`, from which a watch continues where this listing ends, and `unmatched`: the speakers,
    sessions and metadata keys of the filter that the memory does not have.
    """

    def __init__(self, link: Link, path: MemoryPath, request: pb.ListFragmentsRequest) -> None:
        self.cursor: Cursor | None = None
        self.unmatched: tuple[Unmatched, ...] = ()
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
            self.unmatched = unmatched_from_wire(answer.unmatched)
        self._page = [fragment_from_wire(wire) for wire in reversed(answer.fragments)]
        self._request.page_token = answer.next_page_token
        self._last_page = not answer.next_page_token


def list_request(
    path: MemoryPath,
    filter: Filter | None,
    forgotten: bool,
    page_size: int,
    truth: Truth | None,
    as_of: Moment | None,
    text: str,
    order: FragmentOrder | None,
    descending: bool,
) -> pb.ListFragmentsRequest:
    """The request of a listing."""
    request = pb.ListFragmentsRequest(
        namespace=path.namespace,
        memory=path.name,
        filter=filter_to_wire(filter) if filter is not None else None,
        forgotten=forgotten,
        page_size=page_size,
        truth=truth_to_wire(truth),
        text=text,
        order=fragment_pb2.FragmentOrder.Value(
            f"FRAGMENT_ORDER_{'UNSPECIFIED' if order is None else FragmentOrder(order).name}"
        ),
        descending=descending,
    )
    set_as_of(request, as_of)
    return request


def set_key(request: pb.GetFragmentRequest | pb.GetFragmentHistoryRequest, id: str, external_id: str) -> None:
    """Sets the one of the two that names the fragment. Raises InvalidArgument unless exactly one is given."""
    if bool(id) == bool(external_id):
        raise invalid_field("id", "give either an id or an external_id")
    if id:
        request.id = id
    else:
        request.external_id = external_id
