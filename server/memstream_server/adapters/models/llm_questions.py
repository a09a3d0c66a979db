"""What an LLM is asked about a memory: insights, reflections with cited evidence, and decisions about suspicions.

Rule 1. Insights follow from promoted texts, or from questions about the latest ones (Generative Agents, arXiv
2304.03442, section 4.2).
Rule 2. A suspicion is one question, with the two statements as data. An answer that is not of the form is unclear, and
is not repeated: a statement may contain an instruction that spoils every answer about it.
Rule 3. If the endpoint refuses a question, the client sends a harmless one. If the endpoint refuses that too, it counts
as unavailable, so that a misconfigured endpoint does not fail jobs permanently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
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
