"""Writes the parts of a context: labels, marks, dates, what is cut, and excerpts of long memories."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from math import log

from msgspec.structs import replace

from memstream_server.core.budget import estimated_tokens
from memstream_server.core.context.values import (
    ContextBlock,
    ContextPart,
    Entry,
    FoundMemory,
    Inputs,
    PartKind,
    Said,
    Turn,
)
from memstream_server.core.rendering import date_text, escape_marks, wrap_injected
from memstream_server.core.values import Fragment

CONTAINED_MIN = 16
"""A shorter text is a repeat only of an equal one."""
_HEAD = 64
"""Characters of a text that are looked for first."""
_TOKEN_CHARACTERS_MAX = 16
_CHARACTER_TOKENS_MAX = 4
"""A token has at least a byte."""
_MEMORY_TOKENS = 48
_MEMORY_SHARE = 256
"""A longer memory is cut to so many tokens, or to this part of the budget if that is more; see docs/decisions.md."""
_DAY_US = 86_400_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SENTENCES_MAX = 2_000
"""Of a text; the rest is its last sentence."""
_PIECE_MAX = 240
"""Characters of a sentence; a longer one is cut between words."""
# One set of characters begins all ends: the search skips what is none of them.
_END = re.compile(
    r"[.!?\u3002\uff01\uff1f\n](?:(?<=[.!?])[.!?]*[\"')\]]*\s+|(?<=[\u3002\uff01\uff1f])[\u3002\uff01\uff1f]*|(?<=\n)\n*)"
)
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
_CHARACTER = re.compile(f"[{_UNSPACED}]")
_WORD = re.compile(rf"[^\W_{_UNSPACED}]+")
_PIECE_TOKENS_MIN = 4
"""Less room is left empty."""
_COMMON = 1.0
"""A word that occurs more often than that in a piece, on average, does not tell pieces apart."""
_WORDS_MAX = 200
"""Of a question."""
_STEM = 5
"""Characters by which words are compared: inflected forms share them."""
NOTHING_KNOWN = "Nothing is known about this."
Spans = tuple[int, ...]
"""Begin and end of each piece of an excerpt, in characters, ascending."""


class Texts:
    """Writes the parts."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self.count = inputs.count
        self._days: dict[int, str] = {}
        self._excerpts = _Excerpts(inputs.question, inputs.count)
        self._memory_tokens = inputs.memory_tokens or max(_MEMORY_TOKENS, inputs.budget // _MEMORY_SHARE)
        self._whole_tokens = inputs.memory_tokens or 2 * self._memory_tokens
        """A memory of so many is not cut,"""
        self._clip_tokens = inputs.memory_tokens or inputs.budget // 8
        """and none has more."""

    def write_question(self) -> ContextPart:
        return self._write_message(PartKind.QUESTION, "user", "", self._inputs.question)

    def write_message(self, said: Said) -> ContextPart:
        whole = self._write_message(PartKind.MESSAGE, said.role, said.name, said.text, self._inputs.budget // 4)
        return replace(whole, key=f"message {said.number}", number=said.number)

    def _write_message(self, kind: PartKind, role: str, name: str, text: str, most: int | None = None) -> ContextPart:
        label = escape_marks(f"{role} {name}: " if name else f"{role}: ")
        content = escape_marks(text)
        if most is not None:
            content = self.clip(content, most)
        text = f"{label}{content}\n\n"
        return ContextPart(kind, text, self.count(text), "question", role=role, label_bytes=len(label.encode()))

    def write_block(
        self, block: ContextBlock, room: int, kind: PartKind = PartKind.BLOCK
    ) -> tuple[ContextPart | None, bool]:
        """(the part, or None if not even a cut one fits; whether it is whole)."""
        name = kind.name.lower()
        what = f'kind="{name}" name="{block.memory}#{block.name}"'
        whole = escape_marks(block.text)
        body = self.clip(whole, block.max_tokens) if block.max_tokens else whole
        body = self.clip(body, room - self.count(wrap_injected("", what)))
        text = wrap_injected(body, what)
        tokens = self.count(text)
        if tokens > room or (whole and not body):
            return None, False
        key = f"{name} {block.memory}#{block.name}"
        role = "system" if kind is PartKind.BLOCK else "user"
        return ContextPart(kind, text, tokens, key, block.memory, block.name, role=role), body == whole

    def write_turn(self, turn: Turn, lines: Sequence[str], key: str, memory: str, ids: tuple[str, ...]) -> ContextPart:
        body = [f"As of {turn.day}:" if lines or turn.unknown else f"It is {turn.day}."] if turn.day else []
        body += lines
        if turn.unknown:
            body.append(NOTHING_KNOWN)
        text = wrap_injected("\n".join(body), 'kind="memory"')
        return ContextPart(
            PartKind.EVIDENCE, text, self.count(text), key, memory, ids=ids, number=turn.anchor, role="user"
        )

    def write_entry(self, entry: Entry, fragment: Fragment) -> str:
        """The line of a memory."""
        if entry.again:
            return (
                f"[{entry.number}] holds instead of [{entry.corrects}]."
                if entry.number
                else (f"[{entry.corrects}] no longer holds.")
            )
        content = self._write_content(entry.excerpt, fragment).replace("\n", "\n    ")
        instead = f" (holds instead of [{entry.corrects}])" if entry.corrects else ""
        return f"[{entry.number}] {self._write_about(fragment)}{content}{instead}"

    def write_line(self, fragment: Fragment) -> str:
        """A memory on one line, without a number."""
        content = self._write_content(self.find_excerpt(FoundMemory("", fragment)), fragment)
        return " ".join(f"{self._write_about(fragment)}{content}".split("\n"))

    def _write_about(self, fragment: Fragment) -> str:
        """When and by whom."""
        day, who = self.write_day(fragment.observe_time_us), escape_marks(fragment.speaker)
        about = f"{day}, {who}" if day and who else day or who
        return f"{about}: " if about else ""

    def _write_content(self, excerpt: Spans, fragment: Fragment) -> str:
        pieces = _cut_excerpt(fragment.content, excerpt) if excerpt else []
        if not pieces:
            return self.clip(escape_marks(fragment.content), self._clip_tokens)
        left = len(fragment.content) - sum(map(len, pieces))
        return f"{escape_marks(' … '.join(pieces))} [{left} more characters]"

    def find_excerpt(self, found: FoundMemory) -> Spans:
        """What of a long memory is shown."""
        share = 2 if found.is_reply else 1
        most, whole = [min(tokens // share, self._clip_tokens) for tokens in (self._memory_tokens, self._whole_tokens)]
        return self._excerpts.find(found.fragment.content, most, whole)

    def write_day(self, time_us: int) -> str:
        """The date in the time zone; empty outside the years 1 to 9999."""
        if self._inputs.zone is not UTC:
            try:
                offset = (_EPOCH + timedelta(microseconds=time_us)).astimezone(self._inputs.zone).utcoffset()
            except (OverflowError, ValueError):
                return ""
            time_us += (offset or timedelta()) // timedelta(microseconds=1)
        day = time_us // _DAY_US
        if (text := self._days.get(day)) is None:
            text = self._days[day] = date_text(time_us)
        return text

    def clip(self, text: str, most: int) -> str:
        """The text, or its beginning with how much is left out, in at most `most` tokens; empty if that is too few."""
        if len(text) * _CHARACTER_TOKENS_MAX <= most:
            return text
        if len(text) <= most * _TOKEN_CHARACTERS_MAX and self.count(text) <= most:
            return text
        low, high = 0, min(len(text), max(most, 0) * _TOKEN_CHARACTERS_MAX)
        while low < high:
            middle = (low + high + 1) // 2
            if self.count(_cut(text, middle)) <= most:
                low = middle
            else:
                high = middle - 1
        return _cut(text, low) if low else ""


def write_lines(
    question: str, found: Sequence[Fragment], tokens: int, memory_tokens: int = 0
) -> list[tuple[Fragment, str]]:
    """The lines of a standing answer: those of the memories, best first, that fit into so many tokens, in the order of
    time. memory_tokens: most of one of them; 0: as in a context."""
    inputs = Inputs(question=question, now_us=0, budget=tokens, count=estimated_tokens, memory_tokens=memory_tokens)
    texts = Texts(inputs)
    kept: list[tuple[Fragment, str]] = []
    for fragment in found:
        line = texts.write_line(fragment)
        cost = estimated_tokens(f"{line}\n")
        if cost <= tokens:
            kept.append((fragment, line))
            tokens -= cost
    return sorted(kept, key=lambda one: (one[0].observe_time_us, one[0].id))


def _cut(text: str, characters: int) -> str:
    return f"{text[:characters]}\n[{len(text) - characters} more characters]"


def normalize(text: str) -> str:
    return " ".join(text.casefold().split())


def is_said(text: str, said: str) -> bool:
    """Whether one of the texts, which NUL separates, says it. text and said: normalized."""
    if len(text) >= CONTAINED_MIN:
        return text[:CONTAINED_MIN] in said and text in said  # a short text is found at once, if it is not there
    return text in said.split("\0")


def may_be_said(text: str, said: str) -> bool:
    """False only where is_said(normalize(text), said) is: the beginning of a long text is enough to see that."""
    head = normalize(text[:_HEAD])
    return len(head) < CONTAINED_MIN or head in said


class _Excerpts:
    """Finds what long texts say about a question.

    Each piece of a text scores the sum of the weights of the question's words in it; a word weighs more the fewer
    pieces have it. Scripts without spaces count characters instead of words.
    """

    def __init__(self, question: str, count: Callable[[str], int]) -> None:
        self._count = count
        stems = [word[:_STEM] for word in _WORD.findall(question.lower()) if len(word) > 1]
        self._words = sorted({*stems, *_CHARACTER.findall(question)})[:_WORDS_MAX]

    def find(self, text: str, most: int, whole: int) -> Spans:
        """The best pieces that fit into `most` tokens; empty if the text has at most `whole`, or if none fits."""
        if len(text) * _CHARACTER_TOKENS_MAX <= whole:
            return ()
        if len(text) <= whole * _TOKEN_CHARACTERS_MAX and self._count(text) <= whole:
            return ()
        ends = [match.end() for match in islice(_END.finditer(text), _SENTENCES_MAX - 1)]
        pieces = _cut_long(text, [0, *ends, len(text)])
        scores = self._score(text, [end for _, end in pieces])
        chosen: list[int] = []
        for at in sorted(range(len(pieces)), key=scores.__getitem__, reverse=True):  # of equal ones, the first
            begin, end = pieces[at]
            cost = self._count(text[begin:end]) + 1
            if cost <= most:
                most -= cost
                chosen.append(at)
            if most < _PIECE_TOKENS_MIN:
                break
        spans: list[int] = []
        for at in sorted(chosen):
            begin, end = pieces[at]
            if spans and spans[-1] == begin:
                spans[-1] = end
            else:
                spans += [begin, end]
        return tuple(spans)

    def _score(self, text: str, ends: Sequence[int]) -> list[float]:
        """Of each piece, by where it ends."""
        lower = text.lower()
        if len(lower) != len(text):  # a letter whose small form has two
            lower = text
        scores = [0.0] * len(ends)
        for word in self._words:
            if not 0 < lower.count(word) <= len(ends) * _COMMON:
                continue
            said = {bisect_right(ends, at) for at in _find_beginnings(lower, word)}
            for piece in said:
                scores[piece] += log(1 + len(ends) / len(said))
        return scores


def _find_beginnings(text: str, word: str) -> Iterator[int]:
    """Where words begin with it; any place for a character of a script without spaces."""
    at = text.find(word)
    while at >= 0:
        if len(word) == 1 or not at or not text[at - 1].isalnum():
            yield at
        at = text.find(word, at + 1)


def _cut_excerpt(text: str, spans: Spans) -> list[str]:
    """The pieces without blanks around them, as far as the text has them."""
    pairs = zip(spans[::2], spans[1::2], strict=False)
    return [piece for begin, end in pairs if (piece := text[begin:end].strip())]


def _cut_long(text: str, ends: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in pairwise(ends):
        while end - begin > _PIECE_MAX:
            space = text.rfind(" ", begin + _PIECE_MAX // 2, begin + _PIECE_MAX)
            middle = begin + _PIECE_MAX if space < 0 else space + 1
            found.append((begin, middle))
            begin = middle
        if begin < end:
            found.append((begin, end))
    return found
