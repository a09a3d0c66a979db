"""Who makes the call that is being served, for handlers whose answers are lists over many namespaces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")
ROWS_AT_ONCE = 500


class Verb(StrEnum):
    """What a grant allows in its namespaces. None includes another."""

    OBSERVE = "observe"
    RECALL = "recall"
    READ = "read"
    WRITE = "write"
    FORGET = "forget"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """`principal` is the identity: key:NAME, jwt:SUBJECT or uri:URI. `may` asks the policy as it is now, `again`
    is awaited before what is done for a stream unasked."""

    principal: str
    may: Callable[[Verb, str], bool]
    again: Callable[[], Awaitable[None]]


CALLER: ContextVar[Caller | None] = ContextVar("memstream_caller", default=None)
"""Set by the gate in the task of the call; None where the server asks nobody who they are."""


def may(verb: Verb, namespace: str) -> bool:
    """Whether whoever makes this call may do that there; always where the server asks nobody who they are."""
    caller = CALLER.get()
    return caller is None or caller.may(verb, namespace)


async def again() -> None:
    """Before what is done for a stream as if it had been asked for just now: whether that may be is looked at, and it
    is paid for, as with a request. Raises Unauthenticated, PermissionDenied."""
    caller = CALLER.get()
    if caller is not None:
        await caller.again()


async def readable(
    fetch: Callable[[str, int], Awaitable[list[T]]],
    after: str,
    limit: int,
    key: Callable[[T], str],
    namespace: Callable[[T], str],
) -> list[T]:
    """The first `limit` rows after `after` of namespaces that the caller may read; `fetch(after, limit)` gives rows.

    Left out here and not from a page that was made: its token would name a row that must not be seen.
    """
    if CALLER.get() is None:
        return await fetch(after, limit)
    found: list[T] = []
    while len(found) < limit:
        rows = await fetch(after, max(limit, ROWS_AT_ONCE))
        found += [row for row in rows if may(Verb.READ, namespace(row))]
        if len(rows) < max(limit, ROWS_AT_ONCE):
            break
        after = key(rows[-1])
    return found[:limit]
