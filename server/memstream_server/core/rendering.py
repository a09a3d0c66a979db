"""The text of a fragment as it is embedded and indexed, and which part of a long one counts.

A date and a speaker in front of the words let questions of when and who find them; measured on long
conversations, a tool dump of 16 KB every eight turns costs 15 points of recall unless it is clipped and kept
out of its neighbours' windows.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from memstream_server.core.values import Fragment

CLIP_HEAD = 1_000
"""Characters indexed from the start of a long content."""
CLIP_TAIL = 500
"""Characters indexed from its end."""
NEIGHBOUR_CHARACTERS_MAX = 2_000
"""A longer content is nobody's neighbour in the context leg."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Not strftime("%B"): month names must not follow the server's locale.
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


def date_text(time_us: int) -> str:
    """ "8 May 2023" in UTC of microseconds since the epoch; empty outside the years 1 to 9999."""
    try:
        day = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return ""
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def _prefix(fragment: Fragment) -> str:
    date = date_text(fragment.observe_time_us)
    speaker = f"{fragment.speaker}: " if fragment.speaker else ""
    return f"[{date}] {speaker}" if date else speaker


def clip_for_index(content: str) -> str:
    """The first 1,000 and the last 500 characters of a longer content, a line apart."""
    if len(content) <= CLIP_HEAD + CLIP_TAIL:
        return content
    return f"{content[:CLIP_HEAD]}\n{content[-CLIP_TAIL:]}"


def indexed_text(fragment: Fragment) -> str:
    """ "[8 May 2023] Speaker: text", whole: what is embedded (the model's adapter cuts it to its limit)."""
    return _prefix(fragment) + fragment.content


def lexical_text(fragment: Fragment) -> str:
    """The same with a long content clipped: what the analyzer gets."""
    return _prefix(fragment) + clip_for_index(fragment.content)


def may_neighbour(characters: int) -> bool:
    """Whether a content of so many characters counts in the windows of the fragments beside it."""
    return characters <= NEIGHBOUR_CHARACTERS_MAX
