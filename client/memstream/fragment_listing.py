"""A listing of fragments that remembers the revision of its first page."""

from __future__ import annotations

from collections.abc import AsyncIterator

from memstream.channel import Link, MemoryPath
from memstream.codec import fragment_from_wire
from memstream.resources import Cursor
from memstream.v1 import memory_service_pb2 as pb
from memstream.values import Fragment


class FragmentListing(AsyncIterator[Fragment]):
    """Fragments in order of receipt, fetched page by page during iteration.

    `cursor` is set with the first page: a watch from it continues where this listing ends.
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
