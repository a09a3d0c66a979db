"""Claims of fragments that newcomers were compared with, so that a text is read once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from memstream_server.core.suspicions import Claim
from memstream_server.core.values import Fragment

FRAGMENTS_MAX = 512
"""Fragments per memory, about a kilobyte each."""


class ClaimCache:
    """An LRU cache with one owner. An entry counts for one content only."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[str, tuple[Claim, ...]]] = OrderedDict()

    def read(self, fragment: Fragment, make: Callable[[], tuple[Claim, ...]]) -> tuple[Claim, ...]:
        """The claims of a fragment; `make` reads them the first time."""
        known = self._held.get(fragment.id)
        if known is None or known[0] != fragment.content:
            known = self._held[fragment.id] = fragment.content, make()
        self._held.move_to_end(fragment.id)
        if len(self._held) > FRAGMENTS_MAX:
            self._held.popitem(last=False)
        return known[1]

    def remove(self, fragment_id: str) -> None:
        """Remove a fragment that left the memory."""
        self._held.pop(fragment_id, None)
