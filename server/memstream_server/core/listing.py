"""Lists of fragments for readers: by a text that they contain, and in the order of an attribute."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from memstream_server.core.columns import Codes, Columns, Mask, Slots
from memstream_server.core.filters import EVERYTHING, Filter, passes
from memstream_server.core.policy import Truth
from memstream_server.core.values import Fragment, Tier, TruthStatus

ID_END_MIN = 6
"""Fewer last characters of an id name no fragment."""


class Order(StrEnum):
    """What a list is ordered by."""

    RECEIPT = "receipt"
    OBSERVE_TIME = "observe_time"
    IMPORTANCE = "importance"
    ACCESS_TIME = "access_time"
    LENGTH = "length"
    SPEAKER = "speaker"
    SESSION = "session"
    TIER = "tier"


@dataclass(frozen=True, slots=True)
class Listing:
    """Which fragments a list has, and in which order."""

    chosen: Filter = EVERYTHING
    truth: Truth = Truth.ALL
    text: str = ""
    """See `Listing.has`."""
    forgotten: bool = False
    order: Order = Order.RECEIPT
    descending: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the list is in ascending order of receipt, as the journal has it."""
        return self.order is Order.RECEIPT and not self.descending

    def has(self, fragment: Fragment, now_us: int) -> bool:
        """Whether the list has this fragment. Does not check whether it is forgotten or expired."""
        current = self.truth is Truth.ALL or fragment.status_at(now_us) is TruthStatus.CURRENT
        return current and self.has_text(fragment) and passes(fragment, self.chosen)

    def has_text(self, fragment: Fragment) -> bool:
        """Whether its content contains the text without regard to case, or it is its external_id or the end of its
        id."""
        if not self.text or self.text.casefold() in fragment.content.casefold() or self.text == fragment.external_id:
            return True
        return len(self.text) >= ID_END_MIN and fragment.id.endswith(self.text.upper())


def order_slots(columns: Columns, seen: Mask, order: Order, descending: bool) -> Slots:
    """The slots in `seen`, bool[n], in that order; slots of equal rank in ascending order of receipt."""
    slots = np.flatnonzero(seen)
    key = _read_key(columns, order)[slots]
    position = columns.position[slots]
    if order is Order.RECEIPT:
        return slots[np.argsort(-position if descending else position, kind="stable")]
    return slots[np.lexsort((position, -key if descending else key))]


def _read_key(columns: Columns, order: Order) -> npt.NDArray[np.float64] | npt.NDArray[np.int64]:
    if order is Order.IMPORTANCE:
        return columns.importance
    if order is Order.TIER:
        return sum((columns.tier_is((tier,)) * at for at, tier in enumerate(Tier)), np.zeros(len(columns), np.int64))
    if order is Order.SPEAKER:
        return _rank_names(columns.speakers)[columns.speaker]
    if order is Order.SESSION:
        return _rank_names(columns.sessions)[columns.session]
    if order is Order.OBSERVE_TIME:
        return columns.observe_us
    if order is Order.ACCESS_TIME:
        return columns.access_us
    return columns.characters.astype(np.int64) if order is Order.LENGTH else columns.position


def _rank_names(codes: Codes) -> npt.NDArray[np.int64]:
    """The place of each name in their order, by code."""
    places = np.empty(len(codes.names), np.int64)
    places[sorted(range(len(codes.names)), key=codes.names.__getitem__)] = np.arange(len(codes.names))
    return places
