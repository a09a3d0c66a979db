"""The fragments of an active memory that recall is likely to return, so that it need not ask the journal.

The latest are known from when the memory was read, the others once they were written or recalled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from memstream_server.core.values import Fragment

FRAGMENTS_MAX = 1_024
"""Fragments kept of one memory."""
BYTES_MAX = 1 << 20
"""Bytes kept of one memory, about; a fragment counts its texts and what it weighs without them."""
_FRAGMENT_BYTES = 600


class Contents:
    """The least recently written or recalled leave first. Single owner.

    Access counts in it are those of the journal when it was read plus what was counted since, so they may be behind by
    what the journal had not been told at that time.
    """

    def __init__(self) -> None:
        self.left = 0
        """How often fragments left: while it stands still, what is not here was neither changed nor removed."""
        self.bytes = 0
        self._fragments: OrderedDict[str, Fragment] = OrderedDict()

    def found(self, ids: Iterable[str]) -> dict[str, Fragment]:
        """Those of the ids that are here."""
        out: dict[str, Fragment] = {}
        for id_ in ids:
            fragment = self._fragments.get(id_)
            if fragment is not None:
                self._fragments.move_to_end(id_)
                out[id_] = fragment
        return out

    def put(self, fragments: Iterable[Fragment]) -> None:
        """What was committed just now."""
        kept = self._fragments
        for fragment in fragments:
            if fragment.id in kept:
                self._drop(fragment.id)
            kept[fragment.id] = fragment
            self.bytes += _size(fragment)
        while len(self._fragments) > FRAGMENTS_MAX or self.bytes > BYTES_MAX:
            self.bytes -= _size(self._fragments.popitem(last=False)[1])
            self.left += 1

    def read(self, fragments: Sequence[Fragment], left: int) -> None:
        """What the journal gave, asked when `left` was as told: nothing that was changed meanwhile is kept."""
        if left == self.left:
            self.put([one for one in fragments if one.id not in self._fragments])

    def accessed(self, ids: Iterable[str], time_us: int) -> None:
        """The fragments were recalled."""
        for id_ in ids:
            fragment = self._fragments.get(id_)
            if fragment is not None:
                self._fragments[id_] = fragment.but(
                    access_count=fragment.access_count + 1, access_time_us=max(fragment.access_time_us, time_us)
                )

    def remove(self, fragment_id: str) -> None:
        """The fragment is gone from the memory."""
        self._drop(fragment_id)
        self.left += 1

    def _drop(self, fragment_id: str) -> None:
        fragment = self._fragments.pop(fragment_id, None)
        if fragment is not None:
            self.bytes -= _size(fragment)


def _size(fragment: Fragment) -> int:
    """Of the texts of any length. Two bytes a character: one where all is ASCII, four where an emoji is among them."""
    if fragment.structured is None and not fragment.metadata and not fragment.sources:  # as most are
        return _FRAGMENT_BYTES + 2 * len(fragment.content)
    structured = 2 * len(fragment.content) if fragment.structured is not None else 0
    metadata = sum(100 + (2 * len(value) if isinstance(value, str) else 0) for _, value in fragment.metadata)
    return _FRAGMENT_BYTES + 2 * len(fragment.content) + structured + metadata + 30 * len(fragment.sources)
