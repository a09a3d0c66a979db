"""Resumption: reads the rejections and outcomes that a producer's client has missed from the kept receipts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from memstream_server.engine.errors import JournalUnavailable
from memstream_server.engine.requests import Missed, Opened
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.port import Journal

PAGE_RECEIPTS = 256
"""Receipts read at once."""
PAGE_ITEMS = 1_000
"""Rejections and outcomes per message; those of one receipt are never split."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """The rejections and outcomes that a new stream sends again."""

    upto: int
    """The last number that it covers."""
    rejected_since: int
    """Rejections from this number on are complete."""
    outcomes_since: int
    """Outcomes from this number on are complete, up to the stored number at open; 0: the client did not request
    outcomes.
    """
    pages: AsyncGenerator[Missed, None]
    """The caller closes it."""


async def begin_resumption(journal: Journal, producer: str, outcomes: bool, opened: Opened, known: int) -> Resumption:
    """See ObserveSession.resume."""
    try:
        oldest = await journal.kept_receipts(opened.memory_uid, producer, known, 1)
        rejected_since = max(known + 1, oldest[0].first_sequence if oldest else opened.received + 1)
        outcomes_since = 0
        if outcomes:
            unknown = await journal.last_without_outcomes(opened.memory_uid, producer, known, opened.stored)
            outcomes_since = max(rejected_since, unknown + 1)
    except JournalError as error:
        raise _read_error(error) from error
    pages = _read_pages(journal, producer, outcomes, opened, known)
    return Resumption(max(known, opened.received), rejected_since, outcomes_since, pages)


async def _read_pages(
    journal: Journal, producer: str, outcomes: bool, opened: Opened, known: int
) -> AsyncGenerator[Missed, None]:
    """At least one page. The last one ends at the number that was received when the stream opened."""
    page, after = Missed(known), known
    while after < opened.received:
        try:
            receipts = await journal.kept_receipts(opened.memory_uid, producer, after, PAGE_RECEIPTS)
        except JournalError as error:
            raise _read_error(error) from error
        for kept in receipts:
            after = kept.last_sequence
            if after > opened.received:
                break
            became = (kept.outcomes or ()) if outcomes and after <= opened.stored else ()
            page = Missed(
                after,
                page.rejected + tuple(one for one in kept.rejections if one.sequence > known),
                page.outcomes + tuple(one for one in became if one.sequence > known),
            )
            if after < opened.received and len(page.rejected) + len(page.outcomes) >= PAGE_ITEMS:
                yield page
                page = Missed(after)
        if len(receipts) < PAGE_RECEIPTS:
            break
    yield Missed(max(known, opened.received), page.rejected, page.outcomes)


def _read_error(error: JournalError) -> JournalUnavailable:
    return JournalUnavailable(f"the journal could not be read: {error}", retry_after_s=0.5)
