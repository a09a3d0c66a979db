"""Edits of a block's text: append, replace, insert at a line. Pure; a text that an edit does not fit is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from memstream_server.core.budget import estimated_tokens

LINE_END = "\n"
COUNTED_MAX = 100
"""Occurrences that are counted for an error."""


class EditRefused(ValueError):
    """The edit does not fit the present text. `field`: of the edit."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field} {description}")
        self.field = field
        self.description = description


@dataclass(frozen=True, slots=True)
class Append:
    """Add lines at the end."""

    text: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Replace the only occurrence of `old`."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Insert:
    """Add lines after line number `line`; 0: before the first."""

    line: int
    text: str


Edit: TypeAlias = Append | Replace | Insert


def apply_edit(text: str, edit: Edit) -> str:
    """The text after the edit. Raises EditRefused."""
    match edit:
        case Append():
            return f"{text}{'' if not text or text.endswith(LINE_END) else LINE_END}{edit.text}"
        case Replace():
            # Overlapping occurrences count, too: which one is meant is as unclear.
            count = _count_places(text, edit.old)
            if count != 1:
                found = "does not occur in the text" if not count else f"occurs {count} times: add what surrounds it"
                raise EditRefused("replace.old", found)
            return text.replace(edit.old, edit.new, 1)
        case Insert():
            lines = text.split(LINE_END)
            if not text or text.endswith(LINE_END):
                lines.pop()  # what follows the last line end is no line
            if edit.line > len(lines):
                raise EditRefused("insert.line", f"is {edit.line}, the text has {len(lines)} lines")
            before, after = lines[: edit.line], lines[edit.line :]
            end = LINE_END if text.endswith(LINE_END) else ""
            return LINE_END.join([*before, edit.text.removesuffix(LINE_END), *after]) + end


def _count_places(text: str, part: str) -> int:
    """At how many places `part` begins, up to COUNTED_MAX."""
    count, at = 0, text.find(part)
    while at >= 0 and count < COUNTED_MAX:
        count, at = count + 1, text.find(part, at + 1)
    return count


def check_size(text: str, max_tokens: int) -> str:
    """The text, if it has at most so many tokens; 0: no bound. Raises EditRefused."""
    if max_tokens and (size := estimated_tokens(text)) > max_tokens:
        raise EditRefused("text", f"would have {size} tokens (bytes / 4), at most {max_tokens} are allowed")
    return text
