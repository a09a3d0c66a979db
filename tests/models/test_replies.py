"""The answer in a chat completion, however a model or a server wraps it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memstream_server.adapters.models import llm_questions
from memstream_server.adapters.models.replies import answer_of, usage_of
from memstream_server.adapters.models.resilience import MalformedError, RefusedError

GOOD = '{"scores": [{"number": 1, "score": 7}]}'
OTHER = '{"scores": [{"number": 1, "score": 1}]}'


def read(answer: Any) -> list[float]:
    return llm_questions.parse_scores(answer, 1)


def reply(message: Any, finish_reason: str | None = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return reply({"role": "assistant", "content": content} | more)


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        f"  {GOOD}\n",
        f"Sure! {GOOD}",
        f"{GOOD}\n\nLet me know if that helps.",
        f"Here it is:\n{GOOD}\nIt is {{so}} because it is.",
        *(f"{tag}\n{GOOD}\n```" for tag in ("```json", "```JSON", "```Json5", "```", "```javascript", "``` json")),
        f"Of course:\n```json\n{GOOD}\n```\nDone.",
        f"```json\n{GOOD}",  # a fence that does not end
        f"~~~\n{GOOD}\n~~~",
        *(f"<{tag}>so {{many}}\n{OTHER} thoughts</{tag}>\n{GOOD}" for tag in ("think", "thinking", "Think", "THOUGHT")),
        f"so many thoughts {OTHER}\n</think>\n\n```json\n{GOOD}\n```",
        f"</think>{GOOD}",
        f"<think></think>{GOOD}",
        f"<think>a </think> is how a thought ends, as in {OTHER}</think>{GOOD}",
        f"<think>two {OTHER}</think> {GOOD} and once more {GOOD}",
        f'<tool_call>\n{{"name": "scores", "arguments": {GOOD}}}\n</tool_call>',
        json.dumps({"name": "scores", "arguments": GOOD}),
        json.dumps({"name": "scores", "parameters": json.loads(GOOD)}),
        json.dumps({"type": "function", "function": {"name": "scores", "arguments": json.loads(GOOD)}}),
        f'The data is {{"texts": [{{"number": 1, "text": "{{scores}}"}}]}}. {GOOD}',
        [{"type": "text", "text": GOOD}],
        [{"type": "text", "text": GOOD[:9]}, {"type": "text", "text": GOOD[9:]}],
        [{"type": "thinking", "thinking": [{"type": "text", "text": OTHER}]}, {"type": "text", "text": GOOD}],
        [{"type": "reasoning", "text": OTHER}, {"type": "output_text", "text": GOOD}],
        [{"text": GOOD}],
        [GOOD],
        f"[{GOOD}]",
    ],
)
def test_wrapping_is_taken_off(content: Any) -> None:
    assert answer_of(said(content), read) == [0.7]


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "tool_calls": [{"id": "1", "function": {"name": "scores", "arguments": GOOD}}]},
        {"content": "", "tool_calls": [{"id": "1", "function": {"name": "scores", "arguments": json.loads(GOOD)}}]},
        {"content": None, "function_call": {"name": "scores", "arguments": GOOD}},
        {"content": None, "reasoning_content": GOOD},
        {"content": "\n", "reasoning": f" {GOOD}\n"},
        {"content": GOOD, "reasoning_content": f"I would say {OTHER}", "tool_calls": []},
        {"reasoning": GOOD},
    ],
)
def test_answer_beside_the_content_is_found(message: Any) -> None:
    assert answer_of(reply(message), read) == [0.7]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        [],
        "Rating: 7",
        "7",
        "[]",
        GOOD[:-1],
        f"<think>{GOOD}",  # a thought that does not end
        f"The text says {OTHER}. My answer is {GOOD}",
        f"{GOOD} {OTHER}",
        f"```json\n{GOOD}\n```\n```json\n{OTHER}\n```",
        json.dumps({"texts": GOOD}),  # a repeated text is no answer
        json.dumps({"name": "scores", "arguments": "no JSON"}),
        json.dumps({"name": "scores", "arguments": GOOD, "also": 1}),
        "{" * 100_000,
        '{"a":' * 100_000,
        [{"type": "image_url"}],
        {"scores": 1},
    ],
)
def test_anything_else_is_malformed(content: Any) -> None:
    with pytest.raises(MalformedError):
        answer_of(said(content), read)


@pytest.mark.parametrize(
    ("message", "finish_reason", "complaint"),
    [
        ({"content": GOOD}, "length", "cut short"),
        ({"content": None, "reasoning_content": f"Perhaps {GOOD}"}, "stop", "only reasoning"),
        ({"content": None}, "stop", "no answer"),
        ({"content": None, "tool_calls": [{"function": {"arguments": GOOD}}] * 2}, "stop", "no answer"),
        (None, "stop", "no chat completion|not a chat completion"),
    ],
)
def test_complaint_says_what_is_missing(message: Any, finish_reason: str, complaint: str) -> None:
    with pytest.raises(MalformedError, match=complaint):
        answer_of(reply(message, finish_reason), read)


@pytest.mark.parametrize("document", [{}, {"choices": []}, {"choices": None}, {"choices": {"0": 1}}, {"choices": [7]}])
def test_no_chat_completion_is_malformed(document: Any) -> None:
    with pytest.raises(MalformedError):
        answer_of(document, read)


@pytest.mark.parametrize(
    "document",
    [
        reply({"content": None, "refusal": "I would rather not"}),
        reply({"content": GOOD}, "content_filter"),
        said([{"type": "refusal", "refusal": "No."}]),
    ],
)
def test_refusal_is_no_malformed_reply(document: Any) -> None:
    with pytest.raises(RefusedError, match="refuses to answer"):
        answer_of(document, read)


@pytest.mark.parametrize("usage", [None, [], {"prompt_tokens": None}, {"prompt_tokens": "7"}, {"prompt_tokens": -1}])
def test_usage_that_says_nothing_is_zero(usage: Any) -> None:
    assert usage_of({"usage": usage}).prompt == 0
