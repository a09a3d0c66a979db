"""Limits of each principal: concurrent calls and streams, and rates.

They stop one principal from using up the limits of the whole server. Streams and calls beyond their number are refused,
with RetryInfo. A principal may send one second's worth in advance. Beyond that, further messages of its streams are
read later, which slows the sender down by flow control, and calls with one response are refused. What the server has
computed for a principal is known afterwards only: it is charged as it is measured (engine/runtime/turns.py), and the
debt must be paid before the next call, whose message is not even read.
A principal that retries at once gets REFUSALS_PER_S refusals a second without delay; further ones are delayed, because
each costs the server as much as a small response and would slow down the other callers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from memstream_server.core.printable import number_text
from memstream_server.engine.errors import QuotaExceeded

REFUSALS_PER_S = 20
"""Refusals of one principal without delay; the delay grows with each refusal beyond it,"""
REFUSAL_WAIT_MAX_S = 1.0
"""up to this."""
ACCOUNTS_MAX = 4_096
"""Principals whose rates are kept; beyond this, those with a full bucket are dropped."""

NAME_MAX = 120
"""Characters of a client's name that are kept."""
CLIENTS_OF_OWNER_MAX = 20
"""Clients of one principal, or of one address, that are kept;"""
OWNERS_MAX = 200
"""of as many principals or addresses."""

OPEN_STREAMS_OF_PEER_MAX = 16
"""Streams without identification of one connection, such as health watches,"""
OPEN_STREAMS_MAX = 512
"""and of all connections."""


class Rate:
    """A token bucket of one second for each principal; it may go into debt by one message."""

    def __init__(self, quota: str, per_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        """`quota` is the name of its setting."""
        self.quota = quota
        self.per_s = per_s
        self._now_s = now_s
        self._paid_until: dict[str, float] = {}
        """Time at which the debt of a principal is paid; one second ago or earlier means a full bucket."""

    def wait_s(self, principal: str) -> float:
        """Seconds until the debt is paid."""
        return max(0.0, self._paid_until.get(principal, 0.0) - self._now_s()) if self.per_s else 0.0

    def charge_amount(self, principal: str, amount: float) -> None:
        """Counts an amount."""
        if not self.per_s or not amount:
            return
        full = self._now_s() - 1.0
        if len(self._paid_until) >= ACCOUNTS_MAX:
            self._paid_until = {one: until for one, until in self._paid_until.items() if until > full}
        self._paid_until[principal] = max(self._paid_until.get(principal, full), full) + amount / self.per_s


@dataclass(slots=True)
class Client:
    """A program that calls the server: by what it says it is, who it is, and where it is."""

    name: str
    """Its user agent, which nobody has checked: at most NAME_MAX characters, those that are not printable escaped."""
    principal: str
    address: str
    """Of its machine, or of the proxy before it, without the port."""
    first_us: int
    last_us: int
    calls: int = 0
    """Calls and streams since the first one that is counted."""
    streams: int = 0
    """Open now."""


class Clients:
    """The latest clients. Those of one principal (without one: of one address) replace each other, so that a caller
    with many names pushes nobody else out."""

    def __init__(self, clock_us: Callable[[], int] = lambda: time.time_ns() // 1_000) -> None:
        self._clock_us = clock_us
        self._found: dict[tuple[str, str], dict[str, Client]] = {}
        """By (principal, address if there is none): by name and address, the latest last."""

    @contextmanager
    def count_call(self, principal: str, context: Any, what: str) -> Iterator[None]:
        """Counts a call or stream until the end of the block."""
        client = self._enter(principal, context)
        client.calls += 1
        client.streams += what == "streams"
        try:
            yield
        finally:
            client.streams -= what == "streams"

    def list_latest(self) -> list[Client]:
        """The latest call first."""
        found = [client for some in self._found.values() for client in some.values()]
        return sorted(found, key=lambda client: -client.last_us)

    def _enter(self, principal: str, context: Any) -> Client:
        said = next((value for key, value in context.invocation_metadata() or () if key == "user-agent"), "")[:NAME_MAX]
        address = str(context.peer()).rpartition(":")[0] or str(context.peer())
        owner = (principal, "" if principal else address)
        known = self._found.pop(owner, {})
        self._found[owner] = known  # the latest last
        key = f"{address} {said}"
        now_us = self._clock_us()
        client = known.pop(key, None) or Client(_printable_name(said), principal, address, now_us, now_us)
        known[key], client.last_us = client, now_us
        if len(known) > CLIENTS_OF_OWNER_MAX:
            del known[next(iter(known))]
        if len(self._found) > OWNERS_MAX:
            del self._found[next(iter(self._found))]
        return client


def _printable_name(said: str | bytes) -> str:
    text = said if isinstance(said, str) else said.decode("latin-1")
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)[:NAME_MAX]


class Admission:
    """Counts by principal. A limit of 0 is none."""

    def __init__(
        self,
        streams_max: int = 0,
        calls_max: int = 0,
        requests_per_s: float = 0,
        observations_per_s: float = 0,
        bytes_per_s: float = 0,
        cpu_s_per_s: float = 0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = {"streams": streams_max, "calls": calls_max}
        self._under_way: Counter[tuple[str, str]] = Counter()
        per_s = {"requests": requests_per_s, "observations": observations_per_s, "bytes": bytes_per_s}
        rates = [Rate(f"caller_{what}_per_s", limit, now_s) for what, limit in per_s.items()]
        self._rates = rates if any(per_s.values()) else []
        self._cpu = Rate("caller_cpu_s_per_s", cpu_s_per_s, now_s)
        self._refusals = Rate("", REFUSALS_PER_S, now_s)
        self.clients = Clients()

    @property
    def limits_cost(self) -> bool:
        """Whether `charge_cost` has an effect."""
        return bool(self._cpu.per_s)

    def charge_cost(self, principal: str, seconds: float) -> None:
        """Counts the time that the server has computed for a principal."""
        self._cpu.charge_amount(principal, seconds)

    @contextmanager
    def count_open(self, principal: str, what: str) -> Iterator[None]:
        """Counts one more of `what`, "streams" or "calls", until the end of the block. Raises QuotaExceeded."""
        limit, key = self._limits[what], (principal, what)
        self._check_cost(principal, what)
        if limit and self._under_way[key] >= limit:
            raise self._quota_error(
                principal,
                f"you have {limit} {what} under way, more at once are not allowed: try again soon",
                quota=f"caller_{what}_max",
                limit=limit,
            )
        self._under_way[key] += 1
        try:
            yield
        finally:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                del self._under_way[key]

    @contextmanager
    def open_stream(self, peer: str) -> Iterator[None]:
        """Counts one more stream of an unidentified connection until the end of the block. Raises QuotaExceeded."""
        for key, limit in ((peer, OPEN_STREAMS_OF_PEER_MAX), ("", OPEN_STREAMS_MAX)):
            if self._under_way[key, "open streams"] >= limit:
                raise self._quota_error(
                    peer, f"{limit} such streams are open, more are not allowed", quota="", limit=limit
                )
        keys = ((peer, "open streams"), ("", "open streams"))
        self._under_way.update(keys)
        try:
            yield
        finally:
            for counted in keys:
                self._under_way[counted] -= 1
                if not self._under_way[counted]:
                    del self._under_way[counted]

    def charge_message(self, principal: str, message: Message, *, first: bool = False) -> float:
        """Counts a message of a stream (`first`: its first one); returns the seconds until its rates allow it."""
        costs = self._costs_of(message, first)
        for rate, amount in costs:
            rate.charge_amount(principal, amount)
        return max([rate.wait_s(principal) for rate, _ in costs] + [self._cpu.wait_s(principal)])

    def charge_call(self, principal: str, message: Message) -> None:
        """Counts the one request of a call, or refuses it. Raises QuotaExceeded."""
        self._check_cost(principal, "calls")  # of a stream with one request, which is not read any further
        costs = self._costs_of(message, True)
        for rate, _ in costs:
            owed_s = rate.wait_s(principal)
            if owed_s:
                raise self._quota_error(
                    principal,
                    "you send more requests, observations or bytes a second than you are allowed to: "
                    f"try again in {owed_s:.1f} s, or use the streams, which wait",
                    owed_s,
                    quota=rate.quota,
                    limit=number_text(rate.per_s),
                )
        for rate, amount in costs:
            rate.charge_amount(principal, amount)

    def _check_cost(self, principal: str, what: str) -> None:
        """Refuses a call of a principal in debt. Raises QuotaExceeded."""
        owed_s = self._cpu.wait_s(principal) if what == "calls" else 0.0
        if owed_s:
            raise self._quota_error(
                principal,
                "the server has computed longer for your calls than you are allowed: "
                f"try again in {owed_s:.1f} s, or use the streams, which wait",
                owed_s,
                quota=self._cpu.quota,
                limit=number_text(self._cpu.per_s),
            )

    def _quota_error(
        self, principal: str, message: str, retry_after_s: float | None = None, *, quota: str, limit: str | int
    ) -> QuotaExceeded:
        error = QuotaExceeded(message, retry_after_s=retry_after_s, quota=quota, limit=limit)
        error.refusal_delay_s = min(REFUSAL_WAIT_MAX_S, self._refusals.wait_s(principal))
        if error.refusal_delay_s < REFUSAL_WAIT_MAX_S:
            self._refusals.charge_amount(principal, 1)
        return error

    def _costs_of(self, message: Message, first: bool) -> list[tuple[Rate, float]]:
        """The rates that a message counts in: its bytes, its observations, and one request if it asks for something."""
        if not self._rates:
            return []
        batch = getattr(message, "batch", message)
        asks = first or ("query" in message.DESCRIPTOR.fields_by_name and message.HasField("query"))
        amounts = (asks, len(getattr(batch, "observations", ())), message.ByteSize())
        return [(rate, amount) for rate, amount in zip(self._rates, amounts, strict=True) if rate.per_s and amount]
