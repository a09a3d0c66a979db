"""Insights by an LLM: on promotion, and by reflection with cited evidence.

Generative Agents, arXiv 2304.03442, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memstream_server.adapters.models import reply_parsing
from memstream_server.adapters.models.openai_chat import ChatModel, Question, Role, number_texts
from memstream_server.adapters.models.prompts import Prompts
from memstream_server.adapters.models.refusals import ask_or_refuse
from memstream_server.adapters.models.replies import Read, Value
from memstream_server.core.rendering import clip_for_index
from memstream_server.ports.models import Account


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
        question = Question(
            Role.INSIGHTS, self._prompts.insight.substitute(), {"texts": number_texts(shown)}, reply_parsing.INSIGHTS
        )
        return await self._ask_model(question, lambda answer: reply_parsing.parse_texts(answer, "insights"), account)

    async def derive_questions(self, texts: Sequence[str], count: int, account: Account | None = None) -> list[str]:
        """At most `count` high-level questions about the latest texts. Raises as promotion_insights does."""
        shown = self._texts_that_fit(reversed(texts))[::-1]  # leaves out the oldest first
        if not shown:
            return []
        guidance = self._prompts.questions.substitute(count=count)
        question = Question(Role.INSIGHTS, guidance, {"texts": number_texts(shown)}, reply_parsing.QUESTIONS)
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
        asked = Question(
            Role.INSIGHTS, guidance, {"question": question, "texts": number_texts(shown)}, reply_parsing.CITED
        )
        return (await self._ask_model(asked, lambda answer: reply_parsing.parse_cited(answer, len(shown)), account))[
            :count
        ]

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

    async def _ask_model(self, question: Question, read: Read[Value], account: Account | None) -> Value:
        return await ask_or_refuse(self._chat, question, read, account, len(question.data["texts"]))
