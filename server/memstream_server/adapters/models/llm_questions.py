"""What an LLM is asked about a memory: importances, insights, reflections with cited evidence, decisions on suspicions;
the schemas of its answers, and their readers.

Rule 1. Insights follow from promoted texts, or from questions about the latest ones (Generative Agents, arXiv
2304.03442, section 4.2).
Rule 2. A suspicion is one question, with the two statements as data. An answer that is not of the form is unclear, and
is not repeated: a statement may contain an instruction that spoils every answer about it.
Rule 3. If the endpoint refuses a question, the client sends a harmless one. If the endpoint refuses that too, it counts
as unavailable, so that a misconfigured endpoint does not fail jobs permanently.

Importance (`ChatScorer`) is asked for several texts per question, each rated 1 to 10 (the same article, 4.1).
Rule 4. A refused batch is split in halves until the refused texts are isolated. If all texts of a call are refused,
the scorer sends a harmless text before it refuses them.
Rule 5. The scores of a partly failed call are cached until a retry succeeds, so that a memory that waits for its scorer
makes progress even if the budget is less than one call needs.
Rule 6. The cache is per memory, and holds no scores of a successful call: neither the score of a text nor the fact
that the model was called depends on the texts of others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from string import Template
from typing import Any

import structlog

from memstream_server.adapters.models.openai_chat import (
    HARMLESS,
    ChatModel,
    Form,
    ModelQuestion,
    ModelRole,
    UnclearAnswerError,
    number_texts,
)
from memstream_server.adapters.models.prompts import Prompts
from memstream_server.adapters.models.replies import Read, Value
from memstream_server.adapters.models.resilience import MalformedError, RefusedError
from memstream_server.core.printable import escape_unprintable
from memstream_server.core.rendering import clip_for_index
from memstream_server.core.suspicions import ConflictDecision
from memstream_server.ports.models import Account, Judgement, ModelRefused, ModelUnavailable, Statement

TEXT_CHARACTERS_MAX = 4_000
"""Limit of an insight or a question, which are single sentences."""
REASON_CHARACTERS_MAX = 300
"""Length at which the reason of a decision is cut."""
_UNCLEAR = "unclear"


def _object_schema(name: str, item: dict[str, Any]) -> dict[str, Any]:
    return _record_schema(**{name: {"type": "array", "items": item}})


def _record_schema(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}
SCORES = Form(
    "scores",
    _object_schema("scores", _record_schema(number=_NUMBER, score=_NUMBER)),
    '{"scores": [{"number": <a text\'s number>, "score": <1 to 10>}, ...]} with every text once',
)
INSIGHTS = Form(
    "insights",
    _object_schema("insights", _TEXT),
    '{"insights": ["<an insight>", ...]}; {"insights": []} if there is none',
)
QUESTIONS = Form("questions", _object_schema("questions", _TEXT), '{"questions": ["<a question>", ...]}')
CITED = Form(
    "cited_insights",
    _object_schema("insights", _record_schema(insight=_TEXT, evidence={"type": "array", "items": _NUMBER})),
    '{"insights": [{"insight": "<an insight>", "evidence": [<numbers of texts>]}, ...]}; '
    '{"insights": []} if there is none',
)
STATEMENTS = Form(
    "cited_statements",
    _object_schema("statements", _record_schema(statement=_TEXT, evidence={"type": "array", "items": _NUMBER})),
    '{"statements": [{"statement": "<a statement>", "evidence": [<numbers of texts>]}, ...]}; '
    '{"statements": []} if the texts answer nothing',
)
CONFLICT = Form(
    "conflict",
    _record_schema(reason=_TEXT, decision={"type": "string", "enum": [*ConflictDecision, _UNCLEAR]}),
    '{"reason": "<one short sentence>", "decision": "<newer, older, both, neither or unclear>"}',
)


def parse_scores(answer: Any, count: int) -> list[float]:
    """Importances of texts 1 to `count`, n/10 for a score of n (1 to 10). Raises MalformedError."""
    found: dict[int, float] = {}
    for item in _read_items(answer, "scores"):
        number, score = _read_whole(item, "number", count), _read_whole(item, "score", 10)
        if number in found:
            raise MalformedError(f"two scores for text {number}")
        found[number] = score / 10
    if len(found) != count:
        raise MalformedError(f"{len(found)} scores for {count} texts")
    return [found[number] for number in range(1, count + 1)]


def parse_texts(answer: Any, name: str) -> list[str]:
    """The list of sentences in the field `name`; may be empty. Raises MalformedError."""
    return [_read_text(item) for item in _read_items(answer, name)]


def parse_cited(answer: Any, count: int, name: str = "insight") -> list[tuple[str, tuple[int, ...]]]:
    """Insights, or statements, with the 0-based indices (at least one) of their evidence among `count` texts. Raises
    MalformedError."""
    return [
        (_read_text(_read_field(item, name)), _read_evidence(item, count)) for item in _read_items(answer, f"{name}s")
    ]


def parse_judgement(answer: Any) -> Judgement | None:
    """A decision with its reason on one line; None if the model finds it unclear. Raises MalformedError."""
    said = _read_field(answer, "decision")
    if said == _UNCLEAR:
        return None
    if said not in list(ConflictDecision):
        raise MalformedError("'decision' is none of the decisions")  # without its words, which may quote a memory
    reason = answer.get("reason")
    words = " ".join(reason.split()) if isinstance(reason, str) else ""
    return Judgement(ConflictDecision(said), escape_unprintable(words[:REASON_CHARACTERS_MAX])[:REASON_CHARACTERS_MAX])


def _read_evidence(item: Any, count: int) -> tuple[int, ...]:
    numbers = _read_field(item, "evidence")
    if not isinstance(numbers, list) or not numbers:
        raise MalformedError("an insight cites no evidence")
    return tuple(dict.fromkeys(_check_bounds(number, "evidence", count) - 1 for number in numbers))


def _read_items(answer: Any, name: str) -> list[Any]:
    items = _read_field(answer, name)
    if not isinstance(items, list):
        raise MalformedError(f"{name!r} is no list")
    return items


def _read_field(item: Any, name: str) -> Any:
    if not isinstance(item, dict) or name not in item:
        raise MalformedError(f"no {name!r} where there must be one")
    return item[name]


def _read_whole(item: Any, name: str, most: int) -> int:
    return _check_bounds(_read_field(item, name), name, most)


def _check_bounds(value: Any, name: str, most: int) -> int:
    # A bool is an int to Python; 7.0 is a whole number to JSON.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= most or value != int(value):
        # Show numbers only: other values may contain a memory's words, which must not reach a log.
        told = value if isinstance(value, int | float) else type(value).__name__
        raise MalformedError(f"{name!r} must be a whole number of 1 to {most}, is {told!s:.50}")
    return int(value)


def _read_text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > TEXT_CHARACTERS_MAX:
        raise MalformedError(f"a text must be a string of 1 to {TEXT_CHARACTERS_MAX} characters")
    return value.strip()


log = structlog.get_logger(__name__)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ChatInsights:
    """ports.models.Insights. Long texts are clipped as for the lexical index; texts beyond the limit are left out."""

    def __init__(self, chat: ChatModel, prompts: Prompts, characters: int = 60_000) -> None:
        """`characters`: limit on all texts of one question together."""
        self._chat = chat
        self._prompts = prompts
        self._characters = characters

    async def promotion_insights(self, texts: Sequence[str], account: Account | None = None) -> list[str]:
        """Insights that follow from the texts together, possibly none. Raises ModelUnavailable or ModelRefused."""
        shown = self._texts_that_fit(texts)
        if not shown:
            return []
        question = ModelQuestion(
            ModelRole.INSIGHTS, self._prompts.insight.substitute(), {"texts": number_texts(shown)}, INSIGHTS
        )
        return await self._ask_model(question, lambda answer: parse_texts(answer, "insights"), account)

    async def derive_questions(self, texts: Sequence[str], count: int, account: Account | None = None) -> list[str]:
        """At most `count` high-level questions about the latest texts. Raises as promotion_insights does."""
        shown = self._texts_that_fit(reversed(texts))[::-1]  # leaves out the oldest first
        if not shown:
            return []
        guidance = self._prompts.questions.substitute(count=count)
        question = ModelQuestion(ModelRole.INSIGHTS, guidance, {"texts": number_texts(shown)}, QUESTIONS)
        return (await self._ask_model(question, lambda answer: parse_texts(answer, "questions"), account))[:count]

    async def reflect(
        self, question: str, texts: Sequence[str], count: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        """At most `count` of (insight, indices of its evidence in `texts`). Raises as promotion_insights does."""
        shown = self._texts_that_fit(texts)
        if not shown:
            return []
        guidance = self._prompts.reflection.substitute(count=count)
        asked = ModelQuestion(ModelRole.INSIGHTS, guidance, {"question": question, "texts": number_texts(shown)}, CITED)
        return (await self._ask_model(asked, lambda answer: parse_cited(answer, len(shown)), account))[:count]

    async def answer(
        self, question: str, instructions: str, texts: Sequence[str], tokens: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        """(statement, indices of its evidence in `texts`), about so many tokens. Raises as promotion_insights does."""
        shown = self._texts_that_fit(texts)
        if not shown:
            return []
        guidance = self._prompts.answer.substitute(tokens=tokens)
        data = {"question": question, "instructions": instructions, "texts": number_texts(shown)}
        asked = ModelQuestion(ModelRole.INSIGHTS, guidance, data, STATEMENTS)
        count = len(shown)
        return await self._ask_model(asked, lambda it: parse_cited(it, count, "statement"), account)

    def _texts_that_fit(self, texts: Iterable[str]) -> list[str]:
        """The longest prefix of texts within the limit, so that indices are unchanged; at least one text."""
        shown: list[str] = []
        room = self._characters
        for text in map(clip_for_index, texts):
            room -= len(text)
            if shown and room < 0:
                break
            shown.append(text)
        return shown

    async def _ask_model(self, question: ModelQuestion, read: Read[Value], account: Account | None) -> Value:
        return await ask_or_refuse(self._chat, question, read, account, len(question.data["texts"]))


async def ask_or_refuse(
    chat: ChatModel, question: ModelQuestion, read: Read[Value], account: Account | None, texts: int
) -> Value:
    """As ChatModel.ask_model; raises ModelRefused for all `texts` texts of the question if only these are refused."""
    try:
        return await chat.ask_model(question, read, account)
    except RefusedError as error:
        await _ask_harmless(chat, question, account)
        raise ModelRefused(f"the model will not take these {texts} texts: {error}", range(texts)) from error


async def _ask_harmless(chat: ChatModel, question: ModelQuestion, account: Account | None) -> None:
    data = {name: number_texts([HARMLESS]) if name == "texts" else HARMLESS for name in question.data}
    try:
        await chat.ask_model(replace(question, data=data, harmless=True), lambda answer: answer, account)
    except RefusedError as error:
        chat.renegotiate_later()
        raise ModelUnavailable(f"the endpoint refuses any question: {error}", summary=error.summary) from error


class ChatConflictJudge:
    """ports.models.ConflictJudge. Long texts are clipped as for the lexical index."""

    def __init__(self, chat: ChatModel, guidance: Template) -> None:
        self._chat = chat
        self._guidance = guidance.substitute()

    async def judge(self, newer: Statement, older: Statement, account: Account | None = None) -> Judgement | None:
        """The decision; None if the answer is unclear. Raises ModelUnavailable or ModelRefused."""
        data = {"older": _as_data(older), "newer": _as_data(newer)}
        question = ModelQuestion(ModelRole.CONFLICTS, self._guidance, data, CONFLICT, repeated=False)
        try:
            return await ask_or_refuse(self._chat, question, parse_judgement, account, len(data))
        except UnclearAnswerError as error:
            log.info("conflict_answer_unclear", error=error)
            return None


def _as_data(statement: Statement) -> dict[str, Any]:
    observed = _EPOCH + timedelta(microseconds=statement.observe_time_us)
    return {
        "time": observed.isoformat(timespec="seconds"),
        "speaker": statement.speaker,
        "text": clip_for_index(statement.text),
    }


KEPT_MAX = 1_024
"""Cached scores per memory."""
MEMORIES_MAX = 128
"""Memories with cached scores."""


class ChatScorer:
    """ports.models.Scorer. Long texts are clipped as for the lexical index."""

    def __init__(
        self, chat: ChatModel, guidance: Template, batch_texts: int = 20, batch_characters: int = 12_000
    ) -> None:
        self._chat = chat
        self._guidance = guidance.substitute()
        self._batch_texts = batch_texts
        self._batch_characters = batch_characters
        self._kept: OrderedDict[str, dict[bytes, float]] = OrderedDict()
        """By memory and text digest."""

    async def score(self, texts: Sequence[str], account: Account | None = None) -> list[float]:
        """n/10 for each text. Raises ModelUnavailable, or ModelRefused with the indices of the refused texts."""
        digests = [blake2b(text.encode(), digest_size=16).digest() for text in texts]
        known = self._kept.get(account.memory, {}) if account is not None else {}
        found = {place: known[digest] for place, digest in enumerate(digests) if digest in known}
        clipped = [clip_for_index(text) for text in texts]
        batches = self._split_batches(clipped, [place for place in range(len(texts)) if place not in found])
        try:
            await self._fill_all(found, clipped, batches, account)
            refused = [place for place in range(len(texts)) if place not in found]
            if refused and not found:
                await self._ask_harmless(account)
            if refused:
                raise ModelRefused(f"{len(refused)} of {len(texts)} texts are refused", refused)
        except BaseException:
            self._keep_scores(account, {digests[place]: score for place, score in found.items()})
            raise
        self._drop_scores(account, digests)
        return [found[place] for place in range(len(texts))]

    def _split_batches(self, texts: Sequence[str], places: Sequence[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        room = self._batch_characters
        for place in places:
            if batch and (len(batch) == self._batch_texts or len(texts[place]) > room):
                yield batch
                batch, room = [], self._batch_characters
            batch.append(place)
            room -= len(texts[place])
        if batch:
            yield batch

    async def _fill_all(
        self, found: dict[int, float], texts: Sequence[str], batches: Iterable[list[int]], account: Account | None
    ) -> None:
        """Set the scores of all texts that are not refused; after a failure, those of the batches that succeeded."""
        done = await asyncio.gather(
            *(self._fill_batch(found, texts, places, account) for places in batches), return_exceptions=True
        )
        for failure in done:
            if isinstance(failure, BaseException):
                raise failure

    async def _fill_batch(
        self, found: dict[int, float], texts: Sequence[str], places: list[int], account: Account | None
    ) -> None:
        """Set the scores of those `places` that are not refused."""
        try:
            scores = await self._ask_scores([texts[place] for place in places], account)
        except RefusedError:
            middle = len(places) // 2
            for half in (places[:middle], places[middle:]) if middle else ():
                await self._fill_batch(found, texts, half, account)
            return
        found.update(zip(places, scores, strict=True))

    async def _ask_scores(self, texts: list[str], account: Account | None) -> list[float]:
        data = {"texts": number_texts(texts)}
        question = ModelQuestion(ModelRole.SCORER, self._guidance, data, SCORES, harmless=texts == [HARMLESS])
        return await self._chat.ask_model(question, lambda answer: parse_scores(answer, len(texts)), account)

    async def _ask_harmless(self, account: Account | None) -> None:
        try:
            await self._ask_scores([HARMLESS], account)
        except RefusedError as error:
            self._chat.renegotiate_later()
            raise ModelUnavailable(f"the endpoint refuses any text: {error}", summary=error.summary) from error

    def _keep_scores(self, account: Account | None, scores: dict[bytes, float]) -> None:
        if account is None or not account.memory or not scores:
            return
        kept = self._kept.setdefault(account.memory, {})
        kept.update(scores)
        for digest in list(kept)[: max(0, len(kept) - KEPT_MAX)]:
            del kept[digest]
        if len(self._kept) > MEMORIES_MAX:
            self._kept.popitem(last=False)

    def _drop_scores(self, account: Account | None, digests: Iterable[bytes]) -> None:
        kept = self._kept.get(account.memory) if account is not None else None
        if account is None or kept is None:
            return
        for digest in digests:
            kept.pop(digest, None)
        if not kept:
            del self._kept[account.memory]
