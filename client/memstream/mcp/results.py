"""Results of the tools: structured for programs, and as compact text for models.

A fragment is a line `id date speaker: words`; further lines of its words are indented, so that no content can imitate
another line. The id in the text is the end of the whole one; tools take both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from memstream.answer_values import Recollection
from memstream.receipt_values import RecallReceipt
from memstream.values import Fragment, Structured

ID_CHARS = 8
"""Characters of an id in text: the last 40 bits, of which 2 in a million fragments are hardly ever equal."""


def short_id(id: str) -> str:
    """The end of an id."""
    return id[-ID_CHARS:]


class Result(BaseModel):
    """A result. Its structure leaves out what is empty."""

    def text(self) -> str:
        """What a model reads."""
        raise NotImplementedError

    def structure(self) -> dict[str, Any]:
        """The JSON object of structuredContent."""
        return self.model_dump(mode="json", exclude_defaults=True)


class Remembered(BaseModel):
    """A fragment."""

    id: str
    content: str
    speaker: str = ""
    role: str = ""
    session: str = ""
    time: datetime | None = None
    tier: str = ""
    kind: str = ""
    importance: float | None = None
    metadata: dict[str, Any] = {}
    key: str = ""
    superseded_by: str = ""
    valid_from: datetime | None = None
    valid_until: datetime | None = None
    expires: datetime | None = None

    def line(self) -> str:
        """`id date speaker: words`, with what limits its truth and its metadata after it."""
        day = f"{self.time:%Y-%m-%d}" if self.time is not None else ""
        head = " ".join(filter(None, (short_id(self.id), day, _one_line(self.speaker))))
        return f"{head}: {_indent(self.content)}{self._notes()}"

    def _notes(self) -> str:
        notes = []
        if self.superseded_by:
            notes.append(f"corrected by {short_id(self.superseded_by)}")
        if self.valid_from is not None:
            notes.append(f"true from {self.valid_from:%Y-%m-%d %H:%M}")
        if self.valid_until is not None:
            notes.append(f"true until {self.valid_until:%Y-%m-%d %H:%M}")
        if self.metadata:
            notes.append(json.dumps(self.metadata, ensure_ascii=False))
        return f" [{'; '.join(notes)}]" if notes else ""


class Reply(Remembered):
    """An assistant's reply to a recalled message. `score`: the ranking; `relevance`: 0 to 1, absolute."""

    score: float
    relevance: float


class Recalled(Reply):
    """A fragment that answers a query. `later_id`: a later statement of the speaker that may have replaced it."""

    memory: str = ""
    later_id: str = ""
    replies: list[Reply] = []

    def lines(self) -> Iterable[str]:
        """The fragment, and the reply indented under it."""
        later = f" [earlier statement; {short_id(self.later_id)} is later]" if self.later_id else ""
        yield self.line() + (f" [{self.memory}]" if self.memory else "") + later
        for reply in self.replies:
            yield f"  {_indent(reply.line())}"


class Said(BaseModel):
    """An earlier statement of the same speaker."""

    id: str
    content: str
    time: datetime | None = None


class Observed(Result):
    """The outcome of an observation. `related`: what the speaker said earlier in similar words, the nearest first."""

    id: str
    outcome: Literal["remembered", "updated", "repeated", "not_kept", "corrected"]
    related: list[Said]

    def text(self) -> str:
        lines = [f"{self.outcome} {short_id(self.id)}"]
        if self.related:
            lines.append(
                f"said earlier; if one is no longer true, call correct with its id and by={short_id(self.id)}:"
            )
            lines += [Remembered(id=one.id, content=one.content, time=one.time).line() for one in self.related]
        return "\n".join(lines)


class Interpreted(BaseModel):
    """Words of the query that name a time, and the time they were taken for."""

    phrase: str
    since: datetime | None = None
    until: datetime | None = None


class Recollections(Result):
    """The answer to a query, the best first. `working_memory`: other recent fragments."""

    memory: str
    recollections: list[Recalled]
    working_memory: list[Remembered] = []
    weak: bool = False
    interpreted: list[Interpreted] = []
    unmatched: list[str] = []
    incomplete: str = ""

    def text(self) -> str:
        lines = [line for one in self.recollections for line in one.lines()]
        if self.weak:
            lines.insert(0, "weak: probably nothing is known about this")
        if self.working_memory:
            lines += ["recent:", *(one.line() for one in self.working_memory)]
        lines += self.unmatched
        if self.incomplete:
            lines.append(f"incomplete: {self.incomplete}")
        return "\n".join(lines) or "nothing is remembered"


class TurnContext(Result):
    """What to know before answering a question. `after`: for the next call.

    Of a call with `after`, `context` is what is new since, and `withdrawn` has the numbers of memories that are gone.
    `unknown_after`: that was not known, so `context` is the whole one.
    """

    memory: str
    context: str
    tokens: int
    weak: bool = False
    incomplete: str = ""
    withdrawn: list[int] = []
    unknown_after: str = ""
    after: str = ""

    def text(self) -> str:
        lines = (
            [] if self.context else ["nothing is known about this" if self.weak else "nothing new is known about this"]
        )
        if self.withdrawn:
            lines.append(f"withdrawn, do not use: {', '.join(f'[{number}]' for number in self.withdrawn)}")
        if self.incomplete:
            lines.append(f"incomplete: {self.incomplete}")
        if self.unknown_after:
            lines.append(f"after={_one_line(self.unknown_after)} is not known any more: this is the whole context")
        lines.append(f"next: after={self.after}")
        return "".join([self.context, *(f"{line}\n" for line in lines)])

    def structure(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"context"})


class Listing(Result):
    """A page of fragments in order of receipt."""

    memory: str
    fragments: list[Remembered]
    more: bool = False
    unmatched: list[str] = []

    def text(self) -> str:
        lines = [one.line() for one in self.fragments] + self.unmatched
        if self.more:
            lines.append(f"more: after={short_id(self.fragments[-1].id)}")
        return "\n".join(lines) or "nothing is remembered"


class Forgotten(Result):
    """How many fragments were forgotten, and what a query found."""

    forgotten: int
    found: list[Remembered] = []
    confirm: bool = False
    """Whether nothing was forgotten yet."""

    def text(self) -> str:
        lines = [one.line() for one in self.found]
        if self.confirm:
            lines.append("nothing is forgotten yet: call forget with ids, or again with confirm")
        else:
            lines.append(f"forgot {self.forgotten}")
        return "\n".join(lines)


class Earlier(BaseModel):
    """What a fragment said before a change."""

    version: int
    content: str
    speaker: str = ""
    time: datetime | None = None
    replaced: datetime | None = None
    by: str = ""


class History(Result):
    """A fragment and its earlier versions, the latest first."""

    current: Remembered
    versions: list[Earlier]

    def text(self) -> str:
        earlier = [
            f"version {one.version}, until {one.replaced:%Y-%m-%d %H:%M}: {_indent(one.content)}"
            if one.replaced is not None
            else f"version {one.version}: {_indent(one.content)}"
            for one in self.versions
        ]
        return "\n".join([self.current.line(), *earlier])


class Receipt(BaseModel):
    """A recall of which a receipt is kept. `ids`: the fragments of its answer, the best first."""

    id: str
    time: datetime | None = None
    query: str = ""
    query_erased: bool = False
    by: str = ""
    ids: list[str]

    def line(self) -> str:
        """One line."""
        when = f"{self.time:%Y-%m-%d %H:%M} " if self.time is not None else ""
        return f"{self.id} {when}{len(self.ids)} found: {_indent('(erased)' if self.query_erased else self.query)}"


class Receipts(Result):
    """Receipts of recalls, the latest first."""

    memory: str
    receipts: list[Receipt]
    more: bool = False

    def text(self) -> str:
        lines = [one.line() for one in self.receipts] + (["there are older ones"] if self.more else [])
        return "\n".join(lines) or "no receipts"


class Replayed(Result):
    """A receipt, and the answer to its query as the memory was then."""

    receipt: Receipt
    same: bool
    recollections: list[Recalled]
    differences: list[str]

    def text(self) -> str:
        head = "the ranking is the same" if self.same else "the ranking differs"
        return "\n".join([head, *(line for one in self.recollections for line in one.lines()), *self.differences])


class Restored(Result):
    """How many fragments were restored."""

    restored: int

    def text(self) -> str:
        return f"restored {self.restored}"


class BlockWritten(Result):
    """A block after an edit."""

    name: str
    etag: str
    version: int
    tokens: int

    def text(self) -> str:
        return f"{self.name} is at version {self.version}, {self.tokens} tokens, etag {self.etag}"


def receipt_fields(receipt: RecallReceipt) -> dict[str, Any]:
    """The fields of Receipt."""
    what = receipt.what
    return {
        "id": receipt.id,
        "time": receipt.create_time,
        "query": structured_text(what) if isinstance(what, Structured) else what or "",
        "query_erased": receipt.query_erased,
        "by": receipt.principal,
        "ids": [one.fragment_id for one in receipt.ranking],
    }


def structured_text(what: Structured) -> str:
    """The set parts of a structured query."""
    return "\n".join(filter(None, (what.question, what.thought, what.action, what.observation)))


def remembered_fields(fragment: Fragment) -> dict[str, Any]:
    """The fields of Remembered."""
    return {
        "id": fragment.id,
        "content": fragment.content or _structured_text(fragment.structured),
        "speaker": fragment.speaker,
        "role": fragment.role.value if fragment.role is not None else "",
        "session": fragment.session,
        "time": fragment.observe_time,
        "tier": fragment.tier.value if fragment.tier is not None else "",
        "kind": fragment.kind.value,
        "importance": round(fragment.importance, 4),
        "metadata": dict(fragment.metadata),
        "key": fragment.external_id,
        "superseded_by": fragment.superseded_by,
        "valid_from": fragment.valid_from,
        "valid_until": fragment.valid_until,
        "expires": fragment.expire_time,
    }


def recalled_fields(hit: Recollection) -> dict[str, Any]:
    """The fields of Recalled."""
    replies = [] if hit.companion is None else [Reply(**_scored_fields(hit.companion))]
    return {**_scored_fields(hit), "memory": hit.memory, "later_id": hit.later_id, "replies": replies}


def _scored_fields(hit: Recollection) -> dict[str, Any]:
    return {**remembered_fields(hit.fragment), "score": round(hit.score, 4), "relevance": round(hit.relevance, 4)}


def earlier_fields(fragment: Fragment) -> dict[str, Any]:
    """The fields of Earlier that the fragment has."""
    fields = remembered_fields(fragment)
    return {name: fields[name] for name in ("content", "speaker", "time")}


def _structured_text(step: Structured | None) -> str:
    if step is None:
        return ""
    parts = ((name, getattr(step, name)) for name in step.__dataclass_fields__)
    return "\n".join(f"{name}: {text}" for name, text in parts if text)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _indent(text: str) -> str:
    return "\n  ".join(text.splitlines()) or text
