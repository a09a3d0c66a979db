"""Identity: when an observation repeats or echoes a fragment, the index that finds repeats, and which fragments fold.

Rule 1. A repeat has the same words and all other client-given fields equal, so dropping it loses nothing.
Rule 2. Hashes find candidates, and `is_repeat` decides.
Rule 3. Fragments that fold share one place in an answer; the best represents the others. They fold if the same speaker
says the same words in the same order, ignoring case, spaces, commas, quotes and final punctuation. A question and its
statement differ. A superseded fragment and a current one differ, and so do fragments of different validity.
Rule 4. Folding compares no vectors: with the hashing embedder "does like" and "doesn't like", or "from Berlin" and "to
Berlin", have a cosine of 1.00, and two long texts that differ in one number 0.99.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.msgpack import Encoder

from memstream_server.core.arrays import Growing, Parts
from memstream_server.core.values import Fragment, FragmentKind, Metadata, MetadataValue, TruthStatus

Hashes = npt.NDArray[np.int64]
_RECENT_MAX = 4_096
"""Entries in the dict before they are merged into the sorted arrays."""
_encode = Encoder().encode


def stable_hash(fields: Any) -> int:
    """A signed 64-bit hash of values that msgpack can hold; True, 1 and 1.0 differ. Takes about a microsecond.

    The same in every process, unlike Python's own: images keep such hashes of a memory's fragments.
    """
    return int.from_bytes(blake2b(_encode(fields), digest_size=8).digest(), "little", signed=True)


def identity_hash(fragment: Fragment) -> int:
    """Equal if one fragment repeats the other."""
    return stable_hash(_identity_fields(fragment))


def is_repeat(new: Fragment, known: Fragment) -> bool:
    """Whether the observation `new` repeats `known`, so that counting it there loses nothing.

    Words of a superseded fragment are new: what they say is true again.
    """
    if known.kind is not FragmentKind.OBSERVATION or _identity_fields(new) != _identity_fields(known):
        return False
    if known.superseded_by or new.has_validity:
        return False
    return not new.own_importance or (known.own_importance and new.importance == known.importance)


def _identity_fields(fragment: Fragment) -> tuple[object, ...]:
    """The client-given fields, without the importance, which a repeat may omit. An observation without a time has the
    time of its receipt, which is ignored."""
    return (
        fragment.content,
        fragment.speaker,
        fragment.role,
        fragment.session,
        fragment.external_id,
        fragment.structured,
        _typed_metadata(fragment.metadata) if fragment.metadata else (),
        fragment.ttl_us,
        fragment.expire_time_us if fragment.ttl_us is None else None,
        None if fragment.observe_time_us == fragment.create_time_us else fragment.observe_time_us,
        fragment.own_vector,
        fragment.token_count,
        fragment.valid_from_us,
        fragment.valid_until_us,
    )


def is_echo(new: Fragment, recalled: Fragment) -> bool:
    """Whether the observation `new`, which has the words of the `recalled` fragment, adds nothing to it.

    The speaker may differ: agents repeat what they recalled. Metadata and expiry may be absent. Words that are no
    longer current are new information.
    """
    return (
        new.content == recalled.content
        and not new.external_id
        and (new.structured is None or new.structured == recalled.structured)
        and set(_typed_metadata(new.metadata)) <= set(_typed_metadata(recalled.metadata))
        and (new.expire_time_us is None or _same_expiry(new, recalled))
        and (not new.own_importance or new.importance == recalled.importance)
        and (given_time_us(new) is None or new.observe_time_us == recalled.observe_time_us)
        and not new.has_validity
        and recalled.status_at(new.create_time_us) is TruthStatus.CURRENT
    )


def _typed_metadata(metadata: Metadata) -> tuple[tuple[str, str, object], ...]:
    # True == 1 == 1.0 in Python, but the contract distinguishes them.
    return tuple((key, type(value).__name__, _hashable(value)) for key, value in metadata)


def _hashable(value: MetadataValue) -> object:
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def _same_expiry(one: Fragment, other: Fragment) -> bool:
    """The same time to live, or the same expiry time if no time to live was given."""
    if one.ttl_us is not None or other.ttl_us is not None:
        return one.ttl_us == other.ttl_us
    return one.expire_time_us == other.expire_time_us


def given_time_us(fragment: Fragment) -> int | None:
    """The observation time that the client gave; None if it gave none, and the server took that of the receipt."""
    return None if fragment.observe_time_us == fragment.create_time_us else fragment.observe_time_us


class IdentityIndex:
    """Slots by identity hash. Mutable, with a single owner.

    Sorted arrays of hashes and slots, and a dict for the latest entries: 24 bytes a fragment, against 100 in a single
    dict. Entries may be stale: the caller checks the current fragment of a slot.
    """

    def __init__(self) -> None:
        self._current = Growing(np.int64)
        self._sorted: Hashes = np.empty(0, np.int64)
        self._slots: Hashes = np.empty(0, np.int64)
        self._recent: dict[int, list[int]] = {}
        self._recent_count = 0
        self._deferred = False
        """Whether slots are in neither yet."""

    @property
    def nbytes(self) -> int:
        """Approximate RAM in bytes."""
        return self._current.nbytes + self._sorted.nbytes + self._slots.nbytes + self._recent_count * 150

    def extend(self, hashes: list[int] | Hashes, later: bool = False) -> None:
        """Add the next slots. `later`: the caller calls `settle` before the next `find`."""
        first = len(self._current)
        self._current.extend(hashes)
        self._deferred |= later
        if not later:
            for slot, value in enumerate(self._current.view[first:].tolist(), first):
                self._add_recent(slot, value)

    def settle(self) -> None:
        """Merge the dict into the sorted arrays."""
        if self._deferred or self._recent:
            self._sort()

    def _sort(self) -> None:
        self._slots = np.argsort(self._current.view, kind="stable")
        self._sorted = self._current.view[self._slots]
        self._recent, self._recent_count, self._deferred = {}, 0, False

    def pack(self) -> Parts:
        """The hashes, and the order of the slots by hash."""
        self._sort()
        return Parts({"hashes": self._current.view, "slots": self._slots}, {})

    def unpack(self, parts: Parts) -> None:
        """Become what was packed, from empty. Raises KeyError and IndexError."""
        self._current.extend(parts.arrays["hashes"])
        self._slots = parts.own_array("slots")
        self._sorted = self._current.view[self._slots]

    def set(self, slot: int, value: int) -> None:
        """Add an entry for the changed fragment of a slot."""
        if self._current.view[slot] != value:
            self._current.view[slot] = value
            self._add_recent(slot, value)

    def find(self, value: int) -> list[int]:
        """Slots with that hash, ascending; may include removed fragments."""
        found = self._recent.get(value, [])
        low = int(self._sorted.searchsorted(value)) if len(self._sorted) else 0
        if low < len(self._sorted) and self._sorted[low] == value:
            high = int(self._sorted.searchsorted(value, "right"))
            found = found + self._slots[low:high].tolist()
        return sorted({slot for slot in found if self._current.view[slot] == value}) if found else []

    @property
    def hashes(self) -> Hashes:
        """The current hash of each slot."""
        return self._current.view

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Keep only these slots, renumbered in that order."""
        self._current.keep(slots)
        self._sort()

    def _add_recent(self, slot: int, value: int) -> None:
        self._recent.setdefault(value, []).append(slot)
        self._recent_count += 1
        if self._recent_count > _RECENT_MAX:
            self._merge_recent()

    def _merge_recent(self) -> None:
        """Merge recent entries into the sorted arrays: one copy, whereas sorting a million entries takes 0.1 s."""
        values = np.fromiter(self._recent, np.int64, len(self._recent))
        hashes = np.repeat(values, [len(slots) for slots in self._recent.values()])
        slots = np.array([slot for slots in self._recent.values() for slot in slots], np.int64)
        order = np.argsort(hashes, kind="stable")
        places = self._sorted.searchsorted(hashes[order])
        self._sorted = np.insert(self._sorted, places, hashes[order])
        self._slots = np.insert(self._slots, places, slots[order])
        self._recent, self._recent_count = {}, 0


def normalise_words(text: str) -> str:
    """The text as folding compares it."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).replace("\u201c", "").replace("\u201d", "")
    text = text.casefold().replace('"', "").replace(", ", " ").replace("; ", " ")
    if "  " in text or "\n" in text or "\t" in text:  # split and join cost more than the rest of the function
        text = " ".join(text.split())
    return text.strip(" .!\u3002")


def fold_key(fragment: Fragment) -> int:
    """Equal for fragments with the same words, speaker, role and truth."""
    voice = fragment.speaker, fragment.role
    if fragment.superseded_by or fragment.has_validity:  # a current one must not hide behind it
        truth = (bool(fragment.superseded_by), fragment.valid_from_us, fragment.valid_until_us)
        return stable_hash((truth, normalise_words(fragment.content), fragment.structured, *voice))
    if fragment.structured is None:
        return stable_hash((normalise_words(fragment.content), *voice))
    parts = tuple((name, normalise_words(value)) for name, value in fragment.structured.parts().items())
    return stable_hash((parts, *voice))


def fold_places(keys: Sequence[int], preferred: Collection[int] = ()) -> tuple[list[int], dict[int, list[int]]]:
    """Fold equal `keys`, best first: (indices that stay, in order; indices folded into each of them, if any).

    A `preferred` index represents its key; without one, the best index does.
    """
    stays: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        first = stays.setdefault(key, place)
        if first != place:
            groups.setdefault(key, []).append(place)
    folded: dict[int, list[int]] = {}
    for key, others in groups.items():
        members = [stays[key], *others]
        chosen = next((place for place in members if place in preferred), members[0])
        stays[key] = chosen
        folded[chosen] = [place for place in members if place != chosen]
    return sorted(stays.values()), folded


def find_crowded(keys: Iterable[int]) -> list[int]:
    """The keys that occur more than once."""
    return [key for key, count in Counter(keys).items() if count > 1]
