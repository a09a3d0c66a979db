"""The marks around text that a context injects into a prompt, and what removes that text from an observation.

Rule 1. No content can write a mark: `escape_marks` changes what looks like one.
Rule 2. `drop_injected` removes only whole spans, from an opening mark to the next closing one. A lone mark is content.
"""

from __future__ import annotations

import re

_MARK = re.compile(r"<(?=/?memstream\b)", re.IGNORECASE)
_OPENING = re.compile(r"<memstream(?: [^<>\n]{0,600})?>\n")
_CLOSING = "</memstream>"


def wrap_injected(body: str, what: str) -> str:
    """A text between marks, and an empty line. what: attributes of the opening mark, of characters that need no escape;
    body: escaped lines without a line break at the end."""
    return f"<memstream {what}>\n{body}\n{_CLOSING}\n\n"


def escape_marks(text: str) -> str:
    """The text with "&lt;" in place of the "<" of what looks like a mark."""
    return _MARK.sub("&lt;", text) if "<" in text else text


def drop_injected(text: str) -> str:
    """The text without the spans between marks and the line breaks after them; the same object if it has none."""
    if _CLOSING not in text:
        return text
    kept: list[str] = []
    at = 0
    while (opening := _OPENING.search(text, at)) is not None:
        end = text.find(_CLOSING, opening.end())
        if end < 0:
            break
        kept.append(text[at : opening.start()])
        at = end + len(_CLOSING)
        while at < len(text) and text[at] == "\n":
            at += 1
    return "".join([*kept, text[at:]]) if at else text
