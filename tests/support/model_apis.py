"""A scripted endpoint with the APIs of Anthropic and OpenAI, and their prompt caches.

    async with ModelApis() as apis:
        client = anthropic.AsyncAnthropic(base_url=apis.address, api_key="none")

Each request gets the next of `replies`. `read` has, for each request, the characters that a prompt cache had: of
Anthropic's API, those up to the last marked block whose beginning an earlier request had marked too; of OpenAI's, the
longest beginning that it has in common with an earlier request of the same key.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web

from tests.support.local_http import Handler, LocalHttp

JSON = dict[str, Any]
MARKERS_MAX = 4
"""Cache markers of a request that Anthropic's API takes."""


class ModelApis(LocalHttp):
    """The server."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: deque[str] = deque()
        self.prompts: list[str] = []
        """The text of each request."""
        self.read: list[int] = []
        self._marked: set[str] = set()
        self._by_key: dict[str, list[str]] = {}

    def routes(self) -> Mapping[str, Handler]:
        return {
            "/v1/messages": self._messages,
            "/v1/responses": self._responses,
            "/v1/chat/completions": self._chat,
        }

    async def _messages(self, request: web.Request) -> web.Response:
        body: JSON = await request.json()
        roles = [one["role"] for one in body["messages"]]
        if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            return _refuse("roles must alternate, beginning and ending with user")
        blocks = list(_blocks(body))
        marks = [place for place, block in enumerate(blocks) if block.get("cache_control") == {"type": "ephemeral"}]
        if len(marks) > MARKERS_MAX:
            return _refuse(f"at most {MARKERS_MAX} blocks may have cache_control")
        if any(not block["text"].strip() for block in blocks):
            return _refuse("text content blocks must contain non-whitespace text")
        beginnings = [json.dumps([block["text"] for block in blocks[: place + 1]]) for place in marks]
        had = max((place for place, text in zip(marks, beginnings, strict=True) if text in self._marked), default=-1)
        self._marked.update(beginnings)
        self.read.append(sum(len(block["text"]) for block in blocks[: had + 1]))
        self.prompts.append("".join(block["text"] for block in blocks))
        content = [{"type": "text", "text": self.replies.popleft()}]
        usage = {"input_tokens": 1, "output_tokens": 1, "cache_read_input_tokens": self.read[-1]}
        return web.json_response(
            {"id": "m", "type": "message", "role": "assistant", "model": body["model"], "content": content}
            | {"stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
        )

    async def _responses(self, request: web.Request) -> web.Response:
        body: JSON = await request.json()
        self._count_openai(body, [body.get("instructions", ""), *(one["content"] for one in body["input"])])
        content = [{"type": "output_text", "text": self.replies.popleft(), "annotations": []}]
        output = [{"id": "o", "type": "message", "role": "assistant", "status": "completed", "content": content}]
        fields = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}
        return web.json_response(
            {"id": "r", "object": "response", "created_at": 1, "model": body["model"], "output": output} | fields
        )

    async def _chat(self, request: web.Request) -> web.Response:
        body: JSON = await request.json()
        self._count_openai(body, [one["content"] for one in body["messages"]])
        choice = {"index": 0, "finish_reason": "stop"}
        choice["message"] = {"role": "assistant", "content": self.replies.popleft()}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        )

    def _count_openai(self, body: JSON, texts: list[str]) -> None:
        prompt, known = "".join(texts), self._by_key.setdefault(body["prompt_cache_key"], [])
        self.read.append(max((_common_length(prompt, one) for one in known), default=0))
        known.append(prompt)
        self.prompts.append(prompt)


def _common_length(one: str, other: str) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _blocks(body: JSON) -> Iterator[JSON]:
    yield from body.get("system", ())
    for message in body["messages"]:
        yield from message["content"]


def _refuse(why: str) -> web.Response:
    error = {"type": "invalid_request_error", "message": why}
    return web.json_response({"type": "error", "error": error}, status=400)
