"""Suspicions: pairs of statements of one speaker that may not be true together, and what was decided about them.

Rule 1. A suspicion is recorded for the LLM that decides it, and changes no order; twins.py orders an answer.
Rule 2. A pair that was decided to be true together, or of no interest, is kept apart: twins.py does not pair it again.
Rule 3. A suspicion ends undecided when one of the two may be suspected no longer, or says something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from memstream_server.core.values import Fragment, FragmentKind


class ConflictReason(StrEnum):
    """Why two statements are suspected."""

    TWINS = "twins"
    OTHER = "other"  # one of a newer server that owns the memory
    # Of suspicions that earlier versions recorded:
    NUMBER = "number"
    DATE = "date"
    NAME = "name"
    PLACE = "place"
    POLARITY = "polarity"
    CHANGE = "change"


class ConflictDecision(StrEnum):
    """How a suspicion was resolved."""

    NEWER = "newer"
    OLDER = "older"
    BOTH = "both"
    NEITHER = "neither"


APART = frozenset({ConflictDecision.BOTH, ConflictDecision.NEITHER})
"""Decisions after which the pair is kept apart."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Two fragments that may not be true together."""

    newer: str
    older: str
    reason: ConflictReason = ConflictReason.TWINS
    time_us: int = 0
    """When it was found."""
    apart: bool = False
    """Whether it was decided, and the pair is kept apart."""


def may_be_suspected(fragment: Fragment) -> bool:
    """Whether its sender left open whether it is true, and it is in force: not superseded or forgotten, without a
    validity."""
    return (
        fragment.kind is FragmentKind.OBSERVATION
        and fragment.structured is None
        and fragment.forget_time_us is None
        and not fragment.superseded_by
        and not fragment.has_validity
    )


class KnownPairs:
    """A memory's open suspicions by fragment, and the pairs that are kept apart. Mutable, with a single owner."""

    def __init__(self, pairs: Iterable[Suspicion] = ()) -> None:
        self._of: dict[str, dict[tuple[str, str], Suspicion]] = {}
        for one in pairs:
            self.add(one)

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Suspicion]:
        return (one for id_, pairs in self._of.items() for one in pairs.values() if one.newer == id_)

    def of(self, fragment_id: str) -> tuple[Suspicion, ...]:
        """The open suspicions that name the fragment, in order of their ids."""
        return tuple(one for one in self.all_of(fragment_id) if not one.apart) if self._of else ()

    def all_of(self, fragment_id: str) -> tuple[Suspicion, ...]:
        """The pairs with the fragment, in order of their ids."""
        found = self._of.get(fragment_id)
        return () if found is None else tuple(found[key] for key in sorted(found))

    def is_open(self, newer: str, older: str) -> bool:
        """Whether these two are suspected."""
        found = self._of.get(newer, {}).get((newer, older))
        return found is not None and not found.apart

    def are_known(self, one: str, other: str) -> bool:
        """Whether these two, in any order, are suspected or kept apart."""
        pairs = self._of.get(one, {})
        return (one, other) in pairs or (other, one) in pairs

    def are_apart(self, one: str, other: str) -> bool:
        """Whether these two, in any order, are kept apart."""
        pairs = self._of.get(one, {})
        return any(pair in pairs and pairs[pair].apart for pair in ((one, other), (other, one)))

    def add(self, one: Suspicion) -> None:
        """Add a pair; replaces the same one."""
        for id_ in (one.newer, one.older):
            self._of.setdefault(id_, {})[one.newer, one.older] = one

    def discard(self, newer: str, older: str) -> None:
        """Remove a pair. Idempotent."""
        for id_ in (newer, older):
            pairs = self._of.get(id_)
            if pairs is not None:
                pairs.pop((newer, older), None)
                if not pairs:
                    del self._of[id_]

    def resolve(self, newer: str, older: str, decision: ConflictDecision) -> None:
        """End a suspicion; keep the pair apart if the decision says so."""
        self.discard(newer, older)
        if decision in APART:
            self.add(Suspicion(newer, older, apart=True))

    def end_open(self, fragment_id: str) -> None:
        """Remove the open suspicions that name the fragment."""
        for one in self.of(fragment_id):
            self.discard(one.newer, one.older)

    def end_all(self, fragment_id: str) -> None:
        """Remove all pairs with the fragment."""
        for one in self.all_of(fragment_id):
            self.discard(one.newer, one.older)
