"""Metadata of fragments: equality of values, conditions on them, and an index of values by slot.

Values are what JSON has. They are never changed. Equality is that of JSON: true is not 1, 1 is 1.0.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import finish
from memstream_server.core.values import Metadata, MetadataValue

Mask = npt.NDArray[np.bool_]
ABSENT: Any = object()
"""In place of a value where there is none: null is a value."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_CHARACTERS_MAX = 40
_TESTED_AT_ONCE = 128
"""Values tested between two pauses, a fifth of a millisecond."""
_COMPARES: tuple[tuple[str, Callable[[Any, Any], bool]], ...] = (
    ("at_least", operator.ge),
    ("above", operator.gt),
    ("at_most", operator.le),
    ("below", operator.lt),
)


def freeze_value(value: MetadataValue) -> Hashable:
    """A key that equal values have in common, and no others."""
    if isinstance(value, bool):
        return bool, value
    if isinstance(value, list):
        return list, tuple(map(freeze_value, value))
    if isinstance(value, dict):
        return dict, frozenset((name, freeze_value(held)) for name, held in value.items())
    return value


@dataclass(frozen=True, slots=True)
class Condition:
    """Tests of the value under a key, joined by AND; an empty or unset one always holds."""

    key: str
    values: tuple[MetadataValue, ...] = ()
    """The value equals one of these."""
    path: tuple[str, ...] = ()
    """Names inside of maps under the key; the value is what the last one names."""
    at_least: str | int | float | None = None
    above: str | int | float | None = None
    at_most: str | int | float | None = None
    below: str | int | float | None = None
    """Numbers compare with numbers, texts with texts by code points."""
    time_from_us: int | None = None
    time_until_us: int | None = None
    """The value is a text with a time in [from, until): see `read_time_us`."""
    prefix: str | None = None
    """The value is a text that begins with this."""
    exists: bool | None = None
    any: bool = False
    """The value is a list, and one of its elements passes the tests."""

    def holds(self, value: Any) -> bool:
        """Whether the value under the key, or ABSENT, passes."""
        for name in self.path:
            value = value.get(name, ABSENT) if isinstance(value, dict) else ABSENT
        if value is ABSENT or self.exists is False:
            return value is ABSENT and self.exists is False
        if self.any:
            return isinstance(value, list) and any(map(self._passes, value))
        return self._passes(value)

    def _passes(self, value: MetadataValue) -> bool:
        if self.values and not any(freeze_value(value) == freeze_value(each) for each in self.values):
            return False
        for name, compare in _COMPARES:
            bound = getattr(self, name)
            if bound is not None and not (_comparable(value, bound) and compare(value, bound)):
                return False
        if self.prefix is not None and not (isinstance(value, str) and value.startswith(self.prefix)):
            return False
        return self._has_time(value)

    def _has_time(self, value: MetadataValue) -> bool:
        if self.time_from_us is None and self.time_until_us is None:
            return True
        time_us = read_time_us(value) if isinstance(value, str) else None
        return (
            time_us is not None
            and (self.time_from_us is None or time_us >= self.time_from_us)
            and (self.time_until_us is None or time_us < self.time_until_us)
        )


def _comparable(value: MetadataValue, bound: str | int | float) -> bool:
    if isinstance(bound, str):
        return isinstance(value, str)
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_time_us(text: str) -> int | None:
    """The time that a text is in ISO 8601, in UTC if it has no zone, of a date its midnight; None if it is none."""
    if len(text) > _TIME_CHARACTERS_MAX:
        return None
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    aware = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, eq=False)
class Tested:
    """What a condition selected at one moment."""

    index: MetadataIndex
    mask: Mask
    writes: int
    """How many changes the index had then."""
    renumbered: int


class MetadataIndex:
    """The metadata of all slots, and the slots of each value. Mutable, with a single owner."""

    def __init__(self) -> None:
        self._metadata: list[Metadata] = []
        self._slots: dict[str, dict[Hashable, tuple[MetadataValue, array[int]]]] = {}
        """By key and frozen value: (the value, slots that had it when they were written last or before)."""
        self._rewritten: dict[int, int] = {}
        """Slots whose entries may be outdated: how many changes there were after their last one, ascending."""
        self._writes = 0
        self._renumbered = 0

    def __len__(self) -> int:
        return len(self._metadata)

    def extend(self, metadata: Sequence[Metadata]) -> None:
        """Append the next slots."""
        first = len(self._metadata)
        self._metadata += metadata
        for slot, each in enumerate(metadata, first):
            self._note(slot, each)

    def write(self, slot: int, metadata: Metadata) -> None:
        """Replace the metadata of a slot."""
        known = self._metadata[slot]
        if metadata is not known and _type_pairs(metadata) != _type_pairs(known):
            self._metadata[slot] = metadata
            self._writes += 1
            self._rewritten.pop(slot, None)
            self._rewritten[slot] = self._writes

    def remove(self, slot: int) -> None:
        """Drop the metadata of a slot, which stays allocated."""
        self.write(slot, ())

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Keep only these slots, renumbered in that order."""
        kept, self._metadata = [self._metadata[slot] for slot in slots], []
        self._slots.clear()
        self._rewritten.clear()
        self._renumbered += 1
        self.extend(kept)

    def test(self, condition: Condition) -> Generator[None, None, Tested]:
        """What `select` needs to select at any later time without testing everything. Pauses between its steps, in
        which the index may change."""
        count, writes, renumbered = len(self._metadata), self._writes, self._renumbered
        without = condition.holds(ABSENT)
        mask = np.full(count, without, np.bool_)
        values = self._find_values(condition)
        for start in range(0, len(values), _TESTED_AT_ONCE):
            found = array("q")
            for value, slots in values[start : start + _TESTED_AT_ONCE]:
                if condition.holds(value) is not without:
                    found += slots
            passed = np.frombuffer(found, np.int64)
            mask[passed[passed < count]] = not without
            yield
        for place, slot in enumerate(list(self._rewritten)):
            if slot < count and self._renumbered == renumbered:
                mask[slot] = holds_in(self._metadata[slot], condition)
            if place % _TESTED_AT_ONCE == 0:
                yield
        return Tested(self, mask, writes, renumbered)

    def select(self, condition: Condition, tested: Tested | None = None) -> Mask:
        """Slots whose metadata pass, bool[n]. tested: an earlier result, of which only what has changed is tested."""
        if tested is None or tested.index is not self or tested.renumbered != self._renumbered:
            tested = finish(self.test(condition))
        count = len(tested.mask)
        mask = np.concatenate([tested.mask, np.zeros(len(self._metadata) - count, np.bool_)])
        for slot in range(count, len(self._metadata)):
            mask[slot] = holds_in(self._metadata[slot], condition)
        for slot, number in reversed(self._rewritten.items()):
            if number <= tested.writes:
                break
            mask[slot] = holds_in(self._metadata[slot], condition)
        return mask

    def has_key(self, key: str, among: Mask) -> bool:
        """Whether one of the slots in `among`, bool[n], has a value under the key."""
        for _, slots in self._slots.get(key, {}).values():
            for slot in slots:
                if among[slot] and any(each == key for each, _ in self._metadata[slot]):
                    return True
        return any(among[slot] and any(each == key for each, _ in self._metadata[slot]) for slot in self._rewritten)

    def _find_values(self, condition: Condition) -> list[tuple[MetadataValue, array[int]]]:
        """The values under the key that may pass, or may fail where a missing one passes."""
        held = self._slots.get(condition.key, {})
        if condition.values and not condition.path and not condition.any:
            return [held[each] for each in set(map(freeze_value, condition.values)) if each in held]
        return list(held.values())

    def pack(self) -> tuple[npt.NDArray[np.int32], list[Metadata]]:
        """(a code for each slot, the metadata by code)."""
        found: dict[Hashable, int] = {}
        codes = [found.setdefault(_type_pairs(metadata), len(found)) for metadata in self._metadata]
        kinds: dict[int, Metadata] = dict(zip(codes, self._metadata, strict=True))
        return np.array(codes, np.int32), list(kinds.values())

    def unpack(self, codes: npt.NDArray[np.int32], kinds: Sequence[Metadata]) -> None:
        """Become what was packed, from empty."""
        self._metadata = [kinds[code] for code in codes.tolist()]
        slots = np.argsort(codes, kind="stable")
        ends = np.cumsum(np.bincount(codes, minlength=len(kinds))).tolist()
        for start, end, metadata in zip([0, *ends], ends, kinds, strict=False):
            for key, value in metadata:
                self._find_slots(key, value).frombytes(slots[start:end].tobytes())

    def _note(self, slot: int, metadata: Metadata) -> None:
        for key, value in metadata:
            self._find_slots(key, value).append(slot)

    def _find_slots(self, key: str, value: MetadataValue) -> array[int]:
        held = self._slots.setdefault(key, {})
        frozen = freeze_value(value)
        if frozen not in held:
            held[frozen] = value, array("q")
        return held[frozen][1]


def _type_pairs(metadata: Metadata) -> Hashable:
    return tuple([(key, freeze_value(value)) for key, value in metadata])


def holds_in(metadata: Metadata, condition: Condition) -> bool:
    """Whether metadata pass."""
    return condition.holds(next((value for key, value in metadata if key == condition.key), ABSENT))
