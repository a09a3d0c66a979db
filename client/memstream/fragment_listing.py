"""A listing of fragments that remembers the revision of its first page."""

from __future__ import annotations

from collections.abc import AsyncIterator

from memstream.answer_codec import unmatched_from_wire
from memstream.answer_values import Unmatched
from memstream.channel import Link, MemoryPath
from memstream.codec import fragment_from_wire
from memstream.resources import Cursor
from memstream.v1 import memory_service_pb2 as pb
from memstream.values import Fragment


class FragmentListing(AsyncIterator[Fragment]):
    """Fragments in order of receipt, fetched page by page during iteration.

    The first page sets `cursor`, from which a watch continues where this listing ends, and `unmatched`: the speakers,
    sessions and metadata keys of the filter that the memory does not have (empty with `as_of`).
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
