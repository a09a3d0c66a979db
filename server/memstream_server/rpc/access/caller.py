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
    """`principal` is the identity: key:NAME, jwt:SUBJECT or uri:URI. `may` asks the policy as it is now, `still`
    whether the call may go on, by raising where it may not."""

    principal: str
    may: Callable[[Verb, str], bool]
    still: Callable[[], Awaitable[None]]


CALLER: ContextVar[Caller | None] = ContextVar("memstream_caller", default=None)
"""Set by the gate in the task of the call; None where the server asks nobody who they are."""


def may(verb: Verb, namespace: str) -> bool:
    """Whether whoever makes this call may do that there; always where the server asks nobody who they are."""
    caller = CALLER.get()
    return caller is None or caller.may(verb, namespace)


async def still() -> None:
    """Before a message that was not asked for just now, and does not pass the gate. Raises Unauthenticated,
    PermissionDenied."""
    caller = CALLER.get()
    if caller is not None:
        await caller.still()


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
