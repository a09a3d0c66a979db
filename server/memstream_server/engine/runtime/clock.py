"""Time and time-ordered ids: the engine reads clocks and random bytes only here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]


@dataclass(slots=True)
class Clock:
    """Wall time in microseconds and monotonic time in seconds; tests pass their own."""

    now_us: Callable[[], int] = field(default=lambda: time.time_ns() // 1000)
    monotonic_s: Callable[[], float] = field(default=time.monotonic)


class Ids:
    """ULIDs that only increase, even if the clock goes back: 48 bits of milliseconds and 80 random bits, counted up."""

    def __init__(self, clock: Clock, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._clock = clock
        self._entropy = entropy
        self._last = 0

    def next_id(self) -> str:
        """26 characters of Crockford base 32, greater than every earlier id of this process."""
        fresh = (self._clock.now_us() // 1000) << 80
        if fresh > self._last:
            # leaves space to count up within the millisecond
            self._last = fresh | int.from_bytes(self._entropy(10)) >> 1
        else:
            self._last += 1
        return encode_ulid(self._last)


def encode_ulid(value: int) -> str:
    """A 128-bit number as 26 characters of Crockford base 32, most significant first."""
    return "".join([_PAIRS[value >> shift & 1023] for shift in range(120, -1, -10)])
