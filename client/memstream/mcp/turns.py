"""What a host has of a conversation's context, so that the next call returns only what is new.

Each answer has its own handle, which always names the same text: a repeated call, a second agent or a conversation that
is resumed from an earlier message continues from that text.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from hashlib import sha256

from memstream.context import ContextPart, ContextReason, ContextText, PartKind

KEPT_BYTES_MAX = 16 << 20
"""Of all handles of a process, the latest used ones."""
_ENTRY_BYTES = 200
"""Of a part's digest or a memory's number, with what holds it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A text that a host has: its position, digests of its parts, and the numbers of its memories by fragment id."""

    position: bytes
    parts: Counter[bytes]
    numbers: dict[str, int]

    @classmethod
    def of_context(cls, made: ContextText) -> Turn:
        """The text that was made."""
        numbers = {one.fragment_id: one.number for one in made.citations}
        return cls(made.position, Counter(map(_digest, made.parts)), numbers)

    @property
    def handle(self) -> str:
        """8 characters."""
        return sha256(self.position).hexdigest()[:8]

    @property
    def size(self) -> int:
        """Bytes, about."""
        return len(self.position) + _ENTRY_BYTES * (len(self.parts) + len(self.numbers))

    def find_new(self, made: ContextText) -> list[ContextPart]:
        """The parts of a later text that this one lacks, without the question, which the host has asked itself."""
        left = self.parts.copy()
        new: list[ContextPart] = []
        for part in made.parts:
            digest = _digest(part)
            if left[digest]:
                left[digest] -= 1
            elif part.kind is not PartKind.QUESTION:
                new.append(part)
        return new

    def find_withdrawn(self, made: ContextText) -> list[int]:
        """The numbers of memories in this text that are gone: forgotten, erased, expired, no longer valid."""
        if made.degraded:  # what could not be read is not there either
            return []
        gone = (one for one in made.broken_by if one.reason is ContextReason.UNAVAILABLE)
        return sorted({self.numbers[id] for one in gone for id in one.fragment_ids if id in self.numbers})


class Turns:
    """The turns of one process, each by (caller, memory, conversation, handle)."""

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[str, ...], Turn] = OrderedDict()
        self._bytes = 0

    def find(self, *key: str) -> Turn | None:
        """The turn, if it is still kept."""
        if key in self._turns:
            self._turns.move_to_end(key)
        return self._turns.get(key)

    def keep(self, turn: Turn, *key: str) -> None:
        """Keeps the turn, and drops those that were not used for longest."""
        if (known := self._turns.pop(key, None)) is not None:
            self._bytes -= known.size
        self._turns[key] = turn
        self._bytes += turn.size
        while self._bytes > KEPT_BYTES_MAX:
            self._bytes -= self._turns.popitem(last=False)[1].size


def _digest(part: ContextPart) -> bytes:
    return sha256(part.text.encode()).digest()
