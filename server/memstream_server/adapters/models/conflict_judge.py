"""Decisions about suspicions by an LLM: one question for each, with the two statements as data.

An answer that is not of the form is unclear, and is not repeated: a statement may contain an instruction that spoils
every answer about it.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from string import Template
from typing import Any

import structlog

from memstream_server.adapters.models import reply_parsing
from memstream_server.adapters.models.openai_chat import ChatModel, Question, Role, UnclearAnswerError
from memstream_server.adapters.models.refusals import ask_or_refuse
from memstream_server.core.rendering import clip_for_index
from memstream_server.ports.models import Account, Judgement, Statement

log = structlog.get_logger(__name__)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ChatConflictJudge:
    """ports.models.ConflictJudge. Long texts are clipped as for the lexical index."""

    def __init__(self, chat: ChatModel, guidance: Template) -> None:
        self._chat = chat
        self._guidance = guidance.substitute()

    async def judge(self, newer: Statement, older: Statement, account: Account | None = None) -> Judgement | None:
        """The decision; None if the answer is unclear. Raises ModelUnavailable or ModelRefused."""
        data = {"older": _as_data(older), "newer": _as_data(newer)}
        question = Question(Role.CONFLICTS, self._guidance, data, reply_parsing.CONFLICT, repeated=False)
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
