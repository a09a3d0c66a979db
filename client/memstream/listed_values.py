"""What lists have: the order of fragments, sessions, open standing queries, conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from memstream.values import RecallOptions, Structured


class FragmentOrder(StrEnum):
    """What a list of fragments is ordered by."""

    RECEIPT = "receipt"
    OBSERVE_TIME = "observe_time"
    IMPORTANCE = "importance"
    ACCESS_TIME = "access_time"
    LENGTH = "length"
    SPEAKER = "speaker"
    SESSION = "session"
    TIER = "tier"


@dataclass(frozen=True, slots=True)
class ConversationSummary:
    """A conversation of a namespace. `last_number`: of the last message it ever had, 0 if it never had one.

    `feed_memory`: the memory that its messages feed, empty for none; `fed_number`: of the last one it was fed with.
    `ttl`, `expire_time`: None if it does not expire. `update_time`: when messages were appended, or labels, time to
    live or state set, for the last time.
    """

    name: str
    last_number: int
    completed: bool
    create_time: datetime
    labels: Mapping[str, str]
    ttl: timedelta | None
    expire_time: datetime | None
    message_count: int
    update_time: datetime
    feed_memory: str
    fed_number: int


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """The fragments of one session that are neither forgotten nor expired.

    `first_observe_time` and `last_observe_time`: when the earliest and the latest of them were perceived. `speakers`:
    those with most fragments first, at most 10 of `speaker_count`.
    """

    session: str
    first_observe_time: datetime
    last_observe_time: datetime
    fragments: int
    speakers: tuple[str, ...]
    speaker_count: int


@dataclass(frozen=True, slots=True)
class OpenStandingQuery:
    """A standing query that a client has open.

    `id`: its id at the server. `what` and `options`: the query as it was given, without its embedding. `query_id` and
    `session`: those of its stream. `change_time`: when its last change was sent; None before the first answer.
    `recollections`: their number in the present answer. `principal`: who opened it; empty without the right `admin`,
    and on a server without authentication.
    """

    id: str
    query_id: str
    what: str | Structured
    options: RecallOptions
    session: str
    open_time: datetime
    change_time: datetime | None
    messages_sent: int
    recollections: int
    principal: str
