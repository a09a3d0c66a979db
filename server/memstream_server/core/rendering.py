"""Texts around a content: what is embedded and indexed of a fragment, and the marks of what a context injects.

A prefix of date and speaker lets questions about when and who match. Measured on long conversations, a 16 KB tool
dump every eight turns costs 15 points of recall unless it is clipped and excluded from other fragments' windows.

Rule 1. No content can write a mark: `escape_marks` changes what looks like one.
Rule 2. `drop_injected` removes only whole spans, from an opening mark to the next closing one. A lone mark is content.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from memstream_server.core.values import Fragment

CLIP_HEAD = 1_000
"""Characters indexed from the start of a long content."""
CLIP_TAIL = 500
"""Characters indexed from the end of a long content."""
NEIGHBOUR_CHARACTERS_MAX = 2_000
"""A longer content is in no other fragment's window in the context leg."""
_QUESTION_MARKS = "?\uff1f\u061f\u037e\u1367\u2e2e"
"""Latin, fullwidth, Arabic, Greek, Ethiopic, reversed."""
_CLOSING = " \t\r\n\"')]}*_\u201d\u2019\u00bb\u300d"
"""What may follow a question mark at the end of a text."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Not strftime("%B"): month names must not follow the server's locale.
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


def date_text(time_us: int) -> str:
    """ "8 May 2023", in UTC, from microseconds since the epoch; empty outside the years 1 to 9999."""
    try:
        day = _EPOCH + timedelta(microseconds=time_us)
    except OverflowError:
        return ""
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def text_prefix(fragment: Fragment) -> str:
    """ "[8 May 2023] Speaker: ", which precedes the content where it is embedded and indexed."""
    date = date_text(fragment.observe_time_us)
    speaker = f"{fragment.speaker}: " if fragment.speaker else ""
    return f"[{date}] {speaker}" if date else speaker


def clip_for_index(content: str) -> str:
    """A content, shortened to its first 1,000 and last 500 characters, joined by a line break, if it is longer."""
    if len(content) <= CLIP_HEAD + CLIP_TAIL:
        return content
    return f"{content[:CLIP_HEAD]}\n{content[-CLIP_TAIL:]}"


def indexed_text(fragment: Fragment) -> str:
    """ "[8 May 2023] Speaker: text", unclipped: the embedder's input (its adapter truncates to the model's limit)."""
    return text_prefix(fragment) + fragment.content


def lexical_text(fragment: Fragment) -> str:
    """The same with a long content clipped: the reranker's input. The analyzer takes prefix and content apart."""
    return text_prefix(fragment) + clip_for_index(fragment.content)


def may_neighbour(characters: int) -> bool:
    """Whether a content of this length may be in other fragments' windows."""
    return characters <= NEIGHBOUR_CHARACTERS_MAX


def is_question(content: str) -> bool:
    """Whether a content ends in a question mark of any script; closing quotes and brackets may follow it."""
    end = content[-1:]
    if end in _CLOSING:  # most texts end in a letter or a full stop, which needs no copy
        end = content.rstrip(_CLOSING)[-1:]
    return end != "" and end in _QUESTION_MARKS


_MARK = re.compile(r"<(?=/?memstream\b)", re.IGNORECASE)
_OPENING_MARK = re.compile(r"<memstream(?: [^<>\n]{0,600})?>\n")
_CLOSING_MARK = "</memstream>"


def wrap_injected(body: str, what: str) -> str:
    """A text between marks, and an empty line. what: attributes of the opening mark, of characters that need no escape;
    body: escaped lines without a line break at the end."""
    return f"<memstream {what}>\n{body}\n{_CLOSING_MARK}\n\n"


def escape_marks(text: str) -> str:
    """The text with "&lt;" in place of the "<" of what looks like a mark."""
    return _MARK.sub("&lt;", text) if "<" in text else text


def drop_injected(text: str) -> str:
    """The text without the spans between marks and the line breaks after them; the same object if it has none."""
    if _CLOSING_MARK not in text:
        return text
    kept: list[str] = []
    at = 0
    while (opening := _OPENING_MARK.search(text, at)) is not None:
        end = text.find(_CLOSING_MARK, opening.end())
        if end < 0:
            break
        kept.append(text[at : opening.start()])
        at = end + len(_CLOSING_MARK)
        while at < len(text) and text[at] == "\n":
            at += 1
    return "".join([*kept, text[at:]]) if at else text
