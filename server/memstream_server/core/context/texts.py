"""Writes the parts of a context: labels, marks, dates, and what is cut."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from memstream_server.core.context.values import Block, Entry, Inputs, Part, PartKind, Said, Turn
from memstream_server.core.marks import escape_marks, wrap_injected
from memstream_server.core.rendering import date_text
from memstream_server.core.values import Fragment

_CONTAINED_MIN = 16
"""A shorter text is a repeat only of an equal one."""
_TOKEN_CHARACTERS_MAX = 16
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOTHING_KNOWN = "Nothing is known about this."


class Texts:
    """Writes the parts."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self.count = inputs.count

    def write_question(self) -> Part:
        return self._write_message(PartKind.QUESTION, "user", "", self._inputs.question)

    def write_message(self, said: Said) -> Part:
        whole = self._write_message(PartKind.MESSAGE, said.role, said.name, said.text, self._inputs.budget // 4)
        return replace(whole, key=f"message {said.number}", number=said.number)

    def _write_message(self, kind: PartKind, role: str, name: str, text: str, most: int | None = None) -> Part:
        label = escape_marks(f"{role} {name}: " if name else f"{role}: ")
        content = escape_marks(text)
        if most is not None:
            content = self.clip(content, most)
        text = f"{label}{content}\n\n"
        return Part(kind, text, self.count(text), "question", role=role, label_bytes=len(label.encode()))

    def write_block(self, block: Block, room: int) -> tuple[Part | None, bool]:
        """(the part, or None if not even a cut one fits; whether it is whole)."""
        what = f'kind="block" name="{block.memory}#{block.name}"'
        whole = escape_marks(block.text)
        body = self.clip(whole, block.max_tokens) if block.max_tokens else whole
        body = self.clip(body, room - self.count(wrap_injected("", what)))
        text = wrap_injected(body, what)
        tokens = self.count(text)
        if tokens > room or (whole and not body):
            return None, False
        key = f"block {block.memory}#{block.name}"
        return Part(PartKind.BLOCK, text, tokens, key, block.memory, block.name, role="system"), body == whole

    def write_turn(self, turn: Turn, lines: Sequence[str], key: str, memory: str, ids: tuple[str, ...]) -> Part:
        body = [f"As of {turn.day}:" if lines or turn.unknown else f"It is {turn.day}."] if turn.day else []
        body += lines
        if turn.unknown:
            body.append(NOTHING_KNOWN)
        text = wrap_injected("\n".join(body), 'kind="memory"')
        return Part(PartKind.EVIDENCE, text, self.count(text), key, memory, ids=ids, number=turn.anchor, role="user")

    def write_entry(self, entry: Entry, fragment: Fragment) -> str:
        """The line of a memory."""
        if entry.again:
            return (
                f"[{entry.number}] holds instead of [{entry.corrects}]."
                if entry.number
                else (f"[{entry.corrects}] no longer holds.")
            )
        content = self.clip(escape_marks(fragment.content), self._inputs.budget // 8).replace("\n", "\n    ")
        who = escape_marks(fragment.speaker)
        about = ", ".join(filter(None, (self.write_day(fragment.observe_time_us), who)))
        instead = f" (holds instead of [{entry.corrects}])" if entry.corrects else ""
        return f"[{entry.number}] {about}{': ' if about else ''}{content}{instead}"

    def write_day(self, time_us: int) -> str:
        """The date in the time zone; empty outside the years 1 to 9999."""
        if self._inputs.zone is UTC:
            return date_text(time_us)
        try:
            offset = (_EPOCH + timedelta(microseconds=time_us)).astimezone(self._inputs.zone).utcoffset()
        except (OverflowError, ValueError):
            return ""
        return date_text(time_us + (offset or timedelta()) // timedelta(microseconds=1))

    def clip(self, text: str, most: int) -> str:
        """The text, or its beginning with how much is left out, in at most `most` tokens; empty if that is too few."""
        if len(text) <= most or self.count(text) <= most:
            return text
        low, high = 0, min(len(text), max(most, 0) * _TOKEN_CHARACTERS_MAX)
        while low < high:
            middle = (low + high + 1) // 2
            if self.count(_cut(text, middle)) <= most:
                low = middle
            else:
                high = middle - 1
        return _cut(text, low) if low else ""


def _cut(text: str, characters: int) -> str:
    return f"{text[:characters]}\n[{len(text) - characters} more characters]"


def normalize(text: str) -> str:
    return " ".join(text.casefold().split())


def is_said(text: str, said: str) -> bool:
    """Whether one of the texts, which NUL separates, says it. text and said: normalized."""
    if len(text) >= _CONTAINED_MIN:
        return text in said
    return text in said.split("\0")
