"""Caches of what is computed of words, one for each namespace.

They change no result, but whether a word is in one can be told from the time that an answer takes (recall reports its
steps in microseconds): one cache for all would tell a tenant which words another one has used.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class _Sized(Protocol):
    def __len__(self) -> int: ...


Cache = TypeVar("Cache", bound=_Sized)


class PerNamespace(Generic[Cache]):
    """Makes a cache when it is first asked for. Together they have at most about `entries_max` entries: beyond that
    those that were asked for least recently are dropped whole. Thread-safe."""

    def __init__(self, make: Callable[[str], Cache], entries_max: int) -> None:
        """`make` gets the key's second part."""
        self._make = make
        self._entries_max = entries_max
        self._caches: OrderedDict[tuple[str, str], Cache] = OrderedDict()
        self._counted: dict[tuple[str, str], int] = {}
        self._entries = 0
        self._last: tuple[str, str] | None = None
        self._lock = threading.Lock()

    def of(self, namespace: str, kind: str = "") -> Cache:
        """The cache of a namespace, of a kind where there are several. Raises what `make` raises."""
        key = (namespace, kind)
        with self._lock:
            if self._last is not None:
                self._count(self._last)  # it may have grown since
            while self._entries > self._entries_max:
                self._drop()
            cache = self._caches.get(key)
            if cache is None:
                cache = self._caches[key] = self._make(kind)
                self._counted[key] = 0
            self._caches.move_to_end(key)
            self._last = key
            return cache

    def _count(self, key: tuple[str, str]) -> None:
        size = len(self._caches[key])
        self._entries += size - self._counted[key]
        self._counted[key] = size

    def _drop(self) -> None:
        key, _ = self._caches.popitem(last=False)
        self._entries -= self._counted.pop(key)
        if key == self._last:
            self._last = None
