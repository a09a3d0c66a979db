"""What an LLM is asked about a memory: importances, insights, reflections with cited evidence, decisions on suspicions.

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

from memstream_server.adapters.models import reply_parsing
from memstream_server.adapters.models.openai_chat import (
    HARMLESS,
    ChatModel,
    ModelQuestion,
    ModelRole,
    UnclearAnswerError,
    number_texts,
)
from memstream_server.adapters.models.openai_errors import RefusedError
from memstream_server.adapters.models.prompts import Prompts
from memstream_server.adapters.models.replies import Read, Value
from memstream_server.core.rendering import clip_for_index
from memstream_server.ports.models import Account, Judgement, ModelRefused, ModelUnavailable, Statement

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
            ModelRole.INSIGHTS,
            self._prompts.insight.substitute(),
            {"texts": number_texts(shown)},
            reply_parsing.INSIGHTS,
        )
        return await self._ask_model(question, lambda answer: reply_parsing.parse_texts(answer, "insights"), account)

    async def derive_questions(self, texts: Sequence[str], count: int, account: Account | None = None) -> list[str]:
        """At most `count` high-level questions about the latest texts. Raises as promotion_insights does."""
        shown = self._texts_that_fit(reversed(texts))[::-1]  # leaves out the oldest first
        if not shown:
            return []
        guidance = self._prompts.questions.substitute(count=count)
        question = ModelQuestion(ModelRole.INSIGHTS, guidance, {"texts": number_texts(shown)}, reply_parsing.QUESTIONS)
        return (
            await self._ask_model(question, lambda answer: reply_parsing.parse_texts(answer, "questions"), account)
        )[:count]

    async def reflect(
        self, question: str, texts: Sequence[str], count: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        """At most `count` of (insight, indices of its evidence in `texts`). Raises as promotion_insights does."""
        shown = self._texts_that_fit(texts)
        if not shown:
            return []
        guidance = self._prompts.reflection.substitute(count=count)
        asked = ModelQuestion(
            ModelRole.INSIGHTS, guidance, {"question": question, "texts": number_texts(shown)}, reply_parsing.CITED
        )
        return (await self._ask_model(asked, lambda answer: reply_parsing.parse_cited(answer, len(shown)), account))[
            :count
        ]

    async def answer(
        self, question: str, instructions: str, texts: Sequence[str], tokens: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        """(statement, indices of its evidence in `texts`), about so many tokens. Raises as promotion_insights does."""
        shown = self._texts_that_fit(texts)
        if not shown:
            return []
        guidance = self._prompts.answer.substitute(tokens=tokens)
        data = {"question": question, "instructions": instructions, "texts": number_texts(shown)}
        asked = ModelQuestion(ModelRole.INSIGHTS, guidance, data, reply_parsing.STATEMENTS)
        count = len(shown)
        return await self._ask_model(asked, lambda it: reply_parsing.parse_cited(it, count, "statement"), account)

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
        question = ModelQuestion(ModelRole.CONFLICTS, self._guidance, data, reply_parsing.CONFLICT, repeated=False)
        try:
            return await ask_or_refuse(self._chat, question, reply_parsing.parse_judgement, account, len(data))
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
        digests = [_text_digest(text) for text in texts]
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
        self,
        found: dict[int, float],
        texts: Sequence[str],
        batches: Iterable[list[int]],
        account: Account | None,
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
        question = ModelQuestion(
            ModelRole.SCORER, self._guidance, data, reply_parsing.SCORES, harmless=texts == [HARMLESS]
        )
        return await self._chat.ask_model(
            question, lambda answer: reply_parsing.parse_scores(answer, len(texts)), account
        )

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


def _text_digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
