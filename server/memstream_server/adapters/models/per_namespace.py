"""Caches of word computations, one per namespace.

A shared cache would leak which words other tenants use, through timing: a cached word is faster, and recall reports
its steps in microseconds.
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
    """Creates a cache on first use. All caches together hold about `entries_max` entries at most; beyond that, the
    least recently used caches are dropped. Thread-safe."""

    def __init__(self, make: Callable[[str], Cache], entries_max: int) -> None:
        """`make` is called with the `kind`."""
        self._make = make
        self._entries_max = entries_max
        self._caches: OrderedDict[tuple[str, str], Cache] = OrderedDict()
        self._counted: dict[tuple[str, str], int] = {}
        self._entries = 0
        self._last: tuple[str, str] | None = None
        self._lock = threading.Lock()

    def of(self, namespace: str, kind: str = "") -> Cache:
        """The cache of a namespace and kind. Raises what `make` raises."""
        key = (namespace, kind)
        with self._lock:
            if self._last is not None:  # it may have grown since its last count
                size = len(self._caches[self._last])
                self._entries += size - self._counted[self._last]
                self._counted[self._last] = size
            while self._entries > self._entries_max:
                self._drop_oldest()
            cache = self._caches.get(key)
            if cache is None:
                cache = self._caches[key] = self._make(kind)
                self._counted[key] = 0
            self._caches.move_to_end(key)
            self._last = key
            return cache

    def _drop_oldest(self) -> None:
        key, _ = self._caches.popitem(last=False)
        self._entries -= self._counted.pop(key)
        if key == self._last:
            self._last = None
