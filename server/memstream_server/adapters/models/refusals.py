"""Questions about texts of a memory that the endpoint or the model may refuse.

If the endpoint refuses a question, the client sends a harmless one. If the endpoint refuses that too, it counts as
unavailable, so that a misconfigured endpoint does not fail jobs permanently.
"""

from __future__ import annotations

from dataclasses import replace

from memstream_server.adapters.models.openai_chat import HARMLESS, ChatModel, Question, number_texts
from memstream_server.adapters.models.openai_errors import RefusedError
from memstream_server.adapters.models.replies import Read, Value
from memstream_server.ports.models import Account, ModelRefused, ModelUnavailable


async def ask_or_refuse(
    chat: ChatModel, question: Question, read: Read[Value], account: Account | None, texts: int
) -> Value:
    """As ChatModel.ask_model; raises ModelRefused for all `texts` texts of the question if only these are refused."""
    try:
        return await chat.ask_model(question, read, account)
    except RefusedError as error:
        await _ask_harmless(chat, question, account)
        raise ModelRefused(f"the model will not take these {texts} texts: {error}", range(texts)) from error


async def _ask_harmless(chat: ChatModel, question: Question, account: Account | None) -> None:
    data = {name: number_texts([HARMLESS]) if name == "texts" else HARMLESS for name in question.data}
    try:
        await chat.ask_model(replace(question, data=data, harmless=True), lambda answer: answer, account)
    except RefusedError as error:
        chat.renegotiate_later()
        raise ModelUnavailable(f"the endpoint refuses any question: {error}", summary=error.summary) from error
