"""Which fragments a recall may return, and a list has: filters over a memory's columns, texts, orders."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import sort_distinct
from memstream_server.core.columns import Codes, Columns, Mask, Slots
from memstream_server.core.metadata import Condition, Tested, holds_in
from memstream_server.core.policy import Truth
from memstream_server.core.speakers import fold_name
from memstream_server.core.values import Fragment, FragmentKind, Tier, TruthStatus


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions joined by AND; an empty or unset one always holds. Time ranges are half open, [from, until)."""

    sessions: tuple[str, ...] = ()
    speakers: tuple[str, ...] = ()
    """In any spelling that `fold_name` takes for the same."""
    kinds: tuple[FragmentKind, ...] = ()
    tiers: tuple[Tier, ...] = ()
    observe_from_us: int | None = None
    observe_until_us: int | None = None
    create_from_us: int | None = None
    create_until_us: int | None = None
    importance_min: float | None = None
    importance_max: float | None = None
    """Both bounds of importance are inclusive."""
    external_id_prefixes: tuple[str, ...] = ()
    metadata: tuple[Condition, ...] = ()
    excluded: tuple[str, ...] = ()
    """Ids to leave out."""
    all_of: tuple[Filter, ...] = ()
    """Each of them holds too."""
    any_of: tuple[Filter, ...] = ()
    """At least one of them holds, if there are any."""
    none_of: tuple[Filter, ...] = ()
    """None of them holds."""

    @property
    def named_keys(self) -> tuple[str, ...]:
        """Keys of metadata without which nothing matches, each once."""
        return tuple(dict.fromkeys(each.key for each in self.metadata if each.exists is not False))


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A part of a filter that no fragment of the memory can match: nobody of that name, no such session or key."""

    field: str
    """"speakers", "sessions" or "metadata"."""
    value: str
    """The name, or the key."""


EVERYTHING = Filter()
"""Selects all fragments."""


def visible(columns: Columns, now_us: int, ttl_s: int = 0) -> Mask:
    """Slots that are neither forgotten nor expired at `now_us`, bool[n]. `ttl_s` is the policy's."""
    return columns.alive & columns.is_unexpired(now_us, ttl_s)


TestedConditions = Mapping[int, Tested]
"""By the identity of each condition of metadata in a filter."""


def search_metadata(columns: Columns, chosen: Filter) -> Generator[None, None, TestedConditions]:
    """Test the metadata of all slots: of a large memory it takes many milliseconds. `mask` then tests only what has
    changed. Pauses, in which the columns may change."""
    found: dict[int, Tested] = {}
    for condition in chosen.metadata:
        found[id(condition)] = yield from columns.metadata.test(condition)
    for each in (*chosen.all_of, *chosen.any_of, *chosen.none_of):
        found |= yield from search_metadata(columns, each)
    return found


def mask(columns: Columns, chosen: Filter, now_us: int, ttl_s: int = 0, tested: TestedConditions | None = None) -> Mask:
    """Slots that are visible at `now_us` and match the filter, bool[n]. tested: an earlier result of `search_metadata`
    for this filter."""
    return _narrow(visible(columns, now_us, ttl_s), columns, chosen, tested or {})


def _select_slots(columns: Columns, chosen: Filter, tested: TestedConditions) -> Mask:
    return _narrow(np.ones(len(columns), np.bool_), columns, chosen, tested)


def _narrow(passed: Mask, columns: Columns, chosen: Filter, tested: TestedConditions) -> Mask:
    """Clear the slots that do not match the filter."""
    if chosen.sessions:
        passed &= columns.sessions.match(columns.session, columns.sessions.find_codes(chosen.sessions))
    if chosen.speakers:
        codes = [code for name in chosen.speakers for code in columns.speakers.find_spellings(name)]
        passed &= columns.speakers.match(columns.speaker, codes)
    if chosen.kinds:
        passed &= columns.kind_is(chosen.kinds)
    if chosen.tiers:
        passed &= columns.tier_is(chosen.tiers)
    if chosen.importance_min is not None:
        passed &= columns.importance >= chosen.importance_min
    if chosen.importance_max is not None:
        passed &= columns.importance <= chosen.importance_max
    _drop_outside(passed, columns.observe_us, chosen.observe_from_us, chosen.observe_until_us)
    _drop_outside(passed, columns.create_us, chosen.create_from_us, chosen.create_until_us)
    if chosen.external_id_prefixes:
        passed &= columns.external_id_begins(chosen.external_id_prefixes)
    for condition in chosen.metadata:
        passed &= columns.metadata.select(condition, tested.get(id(condition)))
    if chosen.excluded:
        passed[columns.slots(chosen.excluded)] = False
    _narrow_by_inner(passed, columns, chosen, tested)
    return passed


def _narrow_by_inner(passed: Mask, columns: Columns, chosen: Filter, tested: TestedConditions) -> None:
    for each in chosen.all_of:
        passed &= _select_slots(columns, each, tested)
    if chosen.any_of:
        passed &= np.logical_or.reduce([_select_slots(columns, each, tested) for each in chosen.any_of])
    for each in chosen.none_of:
        passed &= ~_select_slots(columns, each, tested)


def find_unmatched(columns: Columns, chosen: Filter, now_us: int, ttl_s: int = 0) -> tuple[Unmatched, ...]:
    """The speakers, sessions and metadata keys of a filter that no visible fragment has."""
    if not (chosen.speakers or chosen.sessions or chosen.metadata):
        return ()
    seen = visible(columns, now_us, ttl_s)
    speakers = set(sort_distinct(columns.speaker[seen]).tolist()) if chosen.speakers else set()
    sessions = set(sort_distinct(columns.session[seen]).tolist()) if chosen.sessions else set()
    nobody = (each for each in chosen.speakers if speakers.isdisjoint(columns.speakers.find_spellings(each)))
    unknown = (each for each in chosen.sessions if sessions.isdisjoint(columns.sessions.find_codes([each])))
    absent = (key for key in chosen.named_keys if not columns.metadata.has_key(key, seen))
    return (
        *(Unmatched("speakers", each) for each in nobody),
        *(Unmatched("sessions", each) for each in unknown),
        *(Unmatched("metadata", each) for each in absent),
    )


def fold_names(asked: Iterable[str], field: str) -> dict[str, str]:
    """What a filter asks for in a field of `Unmatched`, by the form in which fragments are compared."""
    return {fold_name(each) if field == "speakers" else each: each for each in asked}


def drop_named(left: dict[str, str], fragments: Iterable[Fragment], field: str) -> None:
    """Remove from `left` (as fold_names makes it) what these fragments have."""
    for one in fragments:
        if field == "speakers":
            left.pop(fold_name(one.speaker), None)
        elif field == "sessions":
            left.pop(one.session, None)
        else:
            for key, _ in one.metadata:
                left.pop(key, None)


def _drop_outside(passed: Mask, times_us: npt.NDArray[np.int64], from_us: int | None, until_us: int | None) -> None:
    """Clear the slots whose time is not in [from_us, until_us); None is no bound."""
    if from_us is not None:
        passed &= times_us >= from_us
    if until_us is not None:
        passed &= times_us < until_us


def make_test(chosen: Filter) -> Callable[[Fragment], bool]:
    """A function that says whether a fragment, also one outside RAM, matches the filter, visible or not."""
    sessions, excluded = frozenset(chosen.sessions), frozenset(chosen.excluded)
    speakers = frozenset(map(fold_name, chosen.speakers))
    all_of, any_of, none_of = (
        [make_test(each) for each in inner] for inner in (chosen.all_of, chosen.any_of, chosen.none_of)
    )

    def has_attributes(fragment: Fragment) -> bool:
        tests = (
            not sessions or fragment.session in sessions,
            not speakers or fold_name(fragment.speaker) in speakers,
            not chosen.kinds or fragment.kind in chosen.kinds,
            not chosen.tiers or fragment.tier in chosen.tiers,
            chosen.importance_min is None or fragment.importance >= chosen.importance_min,
            chosen.importance_max is None or fragment.importance <= chosen.importance_max,
            chosen.observe_from_us is None or fragment.observe_time_us >= chosen.observe_from_us,
            chosen.observe_until_us is None or fragment.observe_time_us < chosen.observe_until_us,
            chosen.create_from_us is None or fragment.create_time_us >= chosen.create_from_us,
            chosen.create_until_us is None or fragment.create_time_us < chosen.create_until_us,
            fragment.id not in excluded,
            not chosen.external_id_prefixes or fragment.external_id.startswith(chosen.external_id_prefixes),
        )
        return all(tests)

    def test(fragment: Fragment) -> bool:
        return (
            has_attributes(fragment)
            and all(holds_in(fragment.metadata, each) for each in chosen.metadata)
            and all(each(fragment) for each in all_of)
            and (not any_of or any(each(fragment) for each in any_of))
            and not any(each(fragment) for each in none_of)
        )

    return test


def passes(fragment: Fragment, chosen: Filter) -> bool:
    """Whether a fragment matches the filter, as `make_test`, which is for many."""
    return make_test(chosen)(fragment)


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
    """See `has_text`."""
    forgotten: bool = False
    order: Order = Order.RECEIPT
    descending: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the list is in ascending order of receipt, as the journal has it."""
        return self.order is Order.RECEIPT and not self.descending

    def make_test(self) -> Callable[[Fragment, int], bool]:
        """A function that says whether the list has a fragment at a time in µs. Does not check whether it is forgotten
        or expired."""
        matches = make_test(self.chosen)

        def test(fragment: Fragment, now_us: int) -> bool:
            current = self.truth is Truth.ALL or fragment.status_at(now_us) is TruthStatus.CURRENT
            return current and self.has_text(fragment) and matches(fragment)

        return test

    def has(self, fragment: Fragment, now_us: int) -> bool:
        """Whether the list has this fragment, as `make_test`, which is for many."""
        return self.make_test()(fragment, now_us)

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
