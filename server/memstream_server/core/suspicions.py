"""Suspicions: two statements of one speaker that may not be true together, found by rules and without a model.

Rule 1. Only claims are compared: sentences about a lasting state, or about a change of one. A question is no claim, and
neither is a sentence about the listener.
Rule 2. Both claims are about the same people, by the same speaker, and near: they have one subject and share half of
the words of the smaller one, apart from the values, or they share a topic of which a speaker has one value at a time.
Rule 3. They differ in a number, date, name or place, or one denies what the other says, or the newer one announces a
change.
Rule 4. A suspicion decides nothing: it is recorded, shown, and lets the newer fragment take the place of the older one
in an answer. Of two fragments the one with the later observation time is the newer, then the one received later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from memstream_server.core.values import Fragment


class Nearness(NamedTuple):
    """How much two near claims have in common, without their values."""

    of_smaller: float
    """Share of the words of the smaller claim."""
    of_all: float
    """Share of the words of both."""


NEAR = Nearness(0.5, 0.25)
NEAR_AT_WORK = Nearness(0.5, 0.25)
"""For two claims about work, of which the newer one announces a change; the topic counts as a shared word."""
NEAR_OF_CHANGE = Nearness(0.6, 0.4)
"""If a word of change is the only sign."""
SHARED_MIN = 2
"""Words that two claims share if their polarity or a word of change is the only sign: with one, talk about the same
subject was suspected in real conversations, and nothing else."""
UNSPACED_SLACK = 0.8
"""Factor of these shares in scripts without spaces, which are compared by characters."""
COMMON_SHARE, COMMON_MIN = 0.02, 5
"""A word is common in a memory if more than this share of its fragments have it, and at least so many."""
OCCASION_US = 10_000_000
"""Statements that were observed within this time are one list ("order 1 is paid", "order 2 is paid"), and suspected
only if the newer one announces a change."""
CANDIDATES_MAX = 8
"""Fragments that a newcomer is compared with, of those that share most words with it."""


class ConflictReason(StrEnum):
    """What differs between two suspected statements."""

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


class Claim(NamedTuple):
    """One sentence as the rules read it. Words, names and values are hashes of their stems."""

    words: frozenset[int]
    """Words with content, names included; without values, topics, people and fillers."""
    names: frozenset[int] = frozenset()
    """Those of `words` that are written as names."""
    numbers: frozenset[int] = frozenset()
    dates: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    """People whom it is about, other than the speaker."""
    topics: frozenset[str] = frozenset()
    negated: bool = False
    changed: bool = False
    """It has a word that announces a change."""
    ended: bool = False
    """It has a verb of change, not only a word like "now"."""
    state: bool = False
    """It has a verb of a lasting state."""
    unspaced: bool = False
    """Its script has no capitals that would show names."""
    own: bool = False
    """It is about the speaker or what is the speaker's."""
    added: bool = False
    """It has a word that says that something is true besides."""
    label: frozenset[int] = frozenset()
    """The words before a colon with which its text begins ("Project Atlas: ..."): what the text is about."""
    subject: frozenset[int] = frozenset()
    """The words and numbers before its verb."""
    terms: frozenset[int] = frozenset()
    """Hashes by which the lexical index finds fragments that are near it."""

    @property
    def is_pointed(self) -> bool:
        """Whether it has a value, a topic, a negation or a word of change: without one it contradicts no earlier claim.

        A claim that lifts an earlier negation without a word of change is not found.
        """
        return bool(
            self.changed
            or self.negated
            or self.numbers
            or self.dates
            or self.names
            or self.topics
            or (self.unspaced and self.words)
        )


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Two fragments that may not be true together."""

    newer: str
    older: str
    reason: ConflictReason
    time_us: int = 0
    """When it was found."""


RESIDENCE, WORK, NAMED, FAVOURITE = "residence", "work", "named", "favourite"
"""Topics of which a speaker has one value at a time."""
_OF_A_THING = frozenset({NAMED, FAVOURITE})


def is_newer(one: Fragment, other: Fragment) -> bool:
    """Whether `one` is the newer of two fragments (Rule 4)."""
    return one.last_observed > other.last_observed


def is_one_occasion(newer: Fragment, older: Fragment) -> bool:
    """Whether both were observed within OCCASION_US."""
    return abs(newer.last_observed[0] - older.last_observed[0]) < OCCASION_US


def find_reason(
    newer: Sequence[Claim], older: Sequence[Claim], common: frozenset[int] = frozenset()
) -> ConflictReason | None:
    """The first reason to suspect two statements, in the order of their claims; None if there is none.

    `common`: words that many fragments of the memory have; they show no nearness.
    """
    for new in newer:
        for old in older:
            reason = compare_claims(new, old, common)
            if reason is not None:
                return reason
    return None


def compare_claims(newer: Claim, older: Claim, common: frozenset[int] = frozenset()) -> ConflictReason | None:
    """Why two claims of one speaker may not be true together; None if nothing suggests it."""
    shared = (newer.words & older.words) - common
    topics = newer.topics & older.topics if _is_own(newer) and _is_own(older) else frozenset()
    if not (shared or topics) or not _may_exclude(newer, older):
        return None
    if RESIDENCE in topics and _has_other_value(newer, older):
        return ConflictReason.PLACE
    if WORK in topics and newer.changed and _is_near(newer, older, shared, NEAR_AT_WORK, len(topics)):
        return ConflictReason.CHANGE
    return _compare_near(newer, older, shared, topics) if _have_one_subject(newer, older, shared) else None


def _may_exclude(newer: Claim, older: Claim) -> bool:
    """Whether both are about the same people and things, and the newer one does not add to the older one."""
    if newer.added or newer.others != older.others or not (newer.state or newer.changed):
        return False
    if not (older.state or older.changed) or (newer.label and older.label and newer.label != older.label):
        return False
    return not _differ(_find_marks(newer, older), _find_marks(older, newer))


def _is_own(claim: Claim) -> bool:
    """Whether it may be about the speaker: it says so, or leaves its subject out."""
    return claim.own or not claim.subject


def _find_marks(one: Claim, other: Claim) -> frozenset[int]:
    """Numbers of its subject, and names of its subject that the other claim lacks."""
    return one.subject & ((one.names - other.words) if one.unspaced else one.numbers | (one.names - other.words))


def _have_one_subject(newer: Claim, older: Claim, shared: frozenset[int]) -> bool:
    """Whether a shared word is in the subject of one of them, or the speaker is the subject of both ("I live").

    If the speaker is the subject of one only, the newer one must announce a change ("I sold my car" after "My car is
    red"). Without spaces the subject is not known, and every shared word counts.
    """
    if newer.unspaced or not (newer.subject or older.subject):
        return True
    if not newer.changed and not (newer.subject and older.subject):
        return False
    return bool((newer.subject | older.subject) & shared)


def _compare_near(newer: Claim, older: Claim, shared: frozenset[int], topics: frozenset[str]) -> ConflictReason | None:
    """Why two claims about one subject may not be true together."""
    if _is_near(newer, older, shared):
        # "is no longer a waiter": the whole newer claim is in the older one
        ends = newer.negated and newer.changed and newer.state and newer.words <= older.words
        if (
            newer.negated != older.negated
            and not _differ(newer.words, older.words)
            and (len(shared) >= SHARED_MIN or topics or ends)
        ):
            return ConflictReason.POLARITY
        by_value = _differing_value(newer, older)
        if by_value is not None:
            return by_value
        named = (newer.own == older.own or newer.changed) and _differ(
            newer.names - older.words, older.names - newer.words
        )
        if named or (newer.unspaced and _differ(newer.words, older.words)):
            return ConflictReason.NAME
    if topics & _OF_A_THING and (shared or newer.others) and _differ(newer.words, older.words):
        return ConflictReason.NAME
    return ConflictReason.CHANGE if newer.changed and _is_replaced(newer, older, shared) else None


def _is_replaced(newer: Claim, older: Claim, shared: frozenset[int]) -> bool:
    """Whether a change is about what the older claim states: it names nothing else ("I sold my car" after "I have a
    red car"), or it is near: by two words or dates ("I drink tea in the morning instead of coffee"), or by one word if
    the speaker is the subject ("I left the school" after "I am a teacher at a school").
    """
    by_speaker = newer.ended and newer.own and older.own
    if newer.words <= older.words and newer.numbers <= older.numbers:
        return bool(newer.words) and by_speaker and newer.negated == older.negated
    if by_speaker and not (newer.subject or older.subject) and _is_near(newer, older, shared):
        return True
    agreeing = shared | (newer.dates & older.dates)
    return bool(shared) and len(agreeing) >= SHARED_MIN and _is_near(newer, older, agreeing, NEAR_OF_CHANGE)


def _is_near(newer: Claim, older: Claim, shared: frozenset[int], nearness: Nearness = NEAR, topics: int = 0) -> bool:
    """Whether they share enough words; names that only one of them has do not count."""
    lacking = sorted(len(one.words - shared - one.names) for one in (newer, older))
    have = len(shared) + topics
    slack = UNSPACED_SLACK if newer.unspaced else 1.0
    return (
        have > 0
        and have >= slack * nearness.of_smaller * (have + lacking[0])
        and have >= slack * nearness.of_all * (have + sum(lacking))
    )


def _has_other_value(newer: Claim, older: Claim) -> bool:
    """Whether they name other places or employers; without capitals only a word of change shows it."""
    if newer.unspaced:
        return newer.changed and _differ(newer.words, older.words)
    return _differ(newer.names, older.names)


def _differing_value(newer: Claim, older: Claim) -> ConflictReason | None:
    """A number in a subject says which thing it is ("order 1"), and is no value."""
    if _differ(*(one.numbers if one.unspaced else one.numbers - one.subject for one in (newer, older))):
        return ConflictReason.DATE if newer.dates and older.dates else ConflictReason.NUMBER
    return ConflictReason.DATE if _differ(newer.dates, older.dates) else None


def _differ(one: frozenset[int], other: frozenset[int]) -> bool:
    """Whether each has a value that the other lacks."""
    return bool(one - other) and bool(other - one)


class OpenSuspicions:
    """The open suspicions of a memory by fragment. Mutable, with a single owner."""

    def __init__(self, suspicions: Iterable[Suspicion] = ()) -> None:
        self._of: dict[str, dict[tuple[str, str], Suspicion]] = {}
        for one in suspicions:
            self.add(one)

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Suspicion]:
        return (one for id_, pairs in self._of.items() for one in pairs.values() if one.newer == id_)

    def of(self, fragment_id: str) -> tuple[Suspicion, ...]:
        """Those that name the fragment, in order of their ids."""
        found = self._of.get(fragment_id)
        return () if found is None else tuple(found[key] for key in sorted(found))

    def has(self, newer: str, older: str) -> bool:
        """Whether these two are suspected."""
        return (newer, older) in self._of.get(newer, ())

    def newer_of(self, fragment_id: str) -> list[str]:
        """The newer fragments of suspicions in which this one is the older."""
        return [newer for newer, older in self._of.get(fragment_id, ()) if older == fragment_id]

    def older_ids(self) -> list[str]:
        """Fragments that are the older one of a suspicion."""
        return [id_ for id_, pairs in self._of.items() if any(older == id_ for _, older in pairs)]

    def add(self, one: Suspicion) -> None:
        """Add a suspicion; replaces one of the same pair."""
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

    def discard_all_of(self, fragment_id: str) -> None:
        """Remove the suspicions that name the fragment."""
        for newer, older in list(self._of.get(fragment_id, ())):
            self.discard(newer, older)


@dataclass(frozen=True, slots=True)
class Arranged:
    """An order after suspicions: indices that stay, and those that were folded under each of them."""

    order: tuple[int, ...]
    under: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def arrange(
    ids: Sequence[str], scores: Sequence[float], newer_of: Mapping[str, Sequence[str]], margin: float, fold: bool
) -> Arranged:
    """Put the newer of two suspected results before the older one.

    ids: results, best first; scores: theirs. newer_of: ids of the newer fragments, by the id of an older one. A newer
    one takes the place of the older one if it is at most `margin` behind; with `fold` the older one takes no place of
    its own then. Of several newer ones the best of the list is taken.
    """
    place = {id_: index for index, id_ in enumerate(ids)}
    order = list(range(len(ids)))
    under: dict[int, list[int]] = {}
    hidden: set[int] = set()
    for index in range(len(ids)):
        found = [place[id_] for id_ in newer_of.get(ids[index], ()) if id_ in place]
        close = [other for other in found if scores[index] - scores[other] <= margin]
        if not close:
            continue
        first = min(close)
        at, other_at = order.index(index), order.index(first)
        if other_at > at:
            order.remove(first)
            order.insert(at, first)
        if fold:
            hidden.add(index)
            under.setdefault(first, []).append(index)
    kept = tuple(index for index in order if index not in hidden)
    return Arranged(kept, _resolve_chains(under, hidden))


def _resolve_chains(under: Mapping[int, Sequence[int]], hidden: set[int]) -> dict[int, tuple[int, ...]]:
    """What is folded under a result that is folded itself goes under the one that stays."""

    def collect(index: int, seen: set[int]) -> list[int]:
        found: list[int] = []
        for other in under.get(index, ()):
            if other not in seen:
                seen.add(other)
                found += [other, *collect(other, seen)]
        return found

    return {index: tuple(collect(index, {index})) for index in under if index not in hidden}
