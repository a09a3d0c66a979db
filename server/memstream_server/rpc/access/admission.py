"""How much one caller may have under way: streams, and calls of one answer. More is refused, with RetryInfo.

Counted for each principal, so that one cannot take what the limits of the server leave for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from memstream_server.rpc.errors import QuotaExceeded


class Admission:
    """Counts by principal. A limit of 0 is none."""

    def __init__(self, streams_max: int = 0, calls_max: int = 0) -> None:
        self._limits = {"streams": streams_max, "calls": calls_max}
        self._under_way: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def admitted(self, principal: str, what: str) -> Iterator[None]:
        """One more of `what`, "streams" or "calls", until the end of the block. Raises QuotaExceeded."""
        limit, key = self._limits[what], (principal, what)
        if limit and self._under_way[key] >= limit:
            raise QuotaExceeded(f"you have {limit} {what} under way, more at once are not allowed: try again soon")
        self._under_way[key] += 1
        try:
            yield
        finally:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]
