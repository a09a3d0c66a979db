"""The caller of the current call, for handlers that filter lists over many namespaces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from memstream_server.ports.journal.records import Labels

T = TypeVar("T")
ROWS_AT_ONCE = 500


class Verb(StrEnum):
    """A right that a grant allows in its namespaces. None includes another."""

    OBSERVE = "observe"
    RECALL = "recall"
    READ = "read"
    WRITE = "write"
    FORGET = "forget"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """`principal` is the identity: key:NAME, jwt:SUBJECT or uri:URI. `may` asks the current policy. `again` is awaited
    before the server acts for a stream without a request."""

    principal: str
    may: Callable[[Verb, str, Labels | None], bool]
    again: Callable[[], Awaitable[None]]


CALLER: ContextVar[Caller | None] = ContextVar("memstream_caller", default=None)
"""Set in the task of the call by the authorization interceptor; None if the server has no authentication."""


def caller_may(verb: Verb, namespace: str, labels: Labels | None = ()) -> bool:
    """Whether the caller has this right for a memory with these labels; without labels for the whole namespace, None:
    for some memory of it. Always true if the server has no authentication."""
    caller = CALLER.get()
    return caller is None or caller.may(verb, namespace, labels)


async def recheck_caller() -> None:
    """Rechecks and charges the caller before the server acts for a stream as if the caller had sent a request. Raises
    Unauthenticated, PermissionDenied."""
    caller = CALLER.get()
    if caller is not None:
        await caller.again()


async def list_readable(
    fetch: Callable[[str, int], Awaitable[list[T]]],
    after: str,
    limit: int,
    key: Callable[[T], str],
    namespace: Callable[[T], str],
) -> list[T]:
    """The first `limit` rows after `after` in namespaces that the caller may read; `fetch(after, limit)` returns rows.

    It filters before the page is made: otherwise a page token could name a row that the caller may not see.
    """
    if CALLER.get() is None:
        return await fetch(after, limit)
    found: list[T] = []
    while len(found) < limit:
        rows = await fetch(after, max(limit, ROWS_AT_ONCE))
        found += [row for row in rows if caller_may(Verb.READ, namespace(row))]
        if len(rows) < max(limit, ROWS_AT_ONCE):
            break
        after = key(rows[-1])
    return found[:limit]
