"""A scripted model for coding agents: the streaming APIs of Anthropic (Messages), OpenAI (Responses) and Gemini.

    async with HostModel(answer) as model:
        ...  # a host with ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL, or a provider of OpenAI's kind at ADDRESS/v1

`answer` decides each reply from the request: a text, or calls of the tools that the host offers. Requests without tools
(titles of sessions, probes) get a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.support.local_http import Handler, LocalHttp

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its text since the user's last words, the whole text, and the names of the tools."""

    fresh: str
    text: str
    tools: Sequence[str]
    results: Sequence[str]
    """Of the calls since the user's last words."""


@dataclass(frozen=True, slots=True)
class Called:
    """A call of the tool whose name ends with `tool`."""

    tool: str
    arguments: JSON


Reply = str | Sequence[Called]


class HostModel(LocalHttp):
    """The server."""

    def __init__(self, answer: Callable[[Asked], Reply]) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self.bodies: list[JSON] = []
        self._answer = answer
        self._count = 0

    def routes(self) -> Mapping[str, Handler]:
        return {
            "/v1/messages": self._messages,
            "/v1/responses": self._responses,
            "/v1beta/models/{call}": self._contents,
        }

    def _decide(self, body: JSON, asked: Asked) -> list[tuple[str, str, JSON]]:
        """(id, tool, arguments) of each call; a text is (id, "", {"text": ...})."""
        self.bodies.append(body)
        self.asked.append(asked)
        reply = self._answer(asked) if asked.tools else "Noted"
        calls = [Called("", {"text": reply})] if isinstance(reply, str) else reply
        found = []
        for call in calls:
            self._count += 1
            name = next((one for one in asked.tools if call.tool and one.endswith(call.tool)), "")
            if call.tool and not name:
                raise AssertionError(f"no tool {call.tool} among {asked.tools}")
            found.append((f"call_{self._count}", name, call.arguments))
        return found

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body: JSON = await request.json()
        parts = [(one["role"], part) for one in body["messages"] for part in _list_parts(one["content"])]
        asked = _describe(
            [(role == "user" and part["type"] == "text", part) for role, part in parts],
            body,
            [one["name"] for one in body.get("tools", ())],
            "tool_result",
            "content",
        )
        said = self._decide(body, asked)
        if not body.get("stream"):
            return web.json_response(_message(body, [_block(one) for one in said], said))
        return await _stream(request, _list_message_events(body, said))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body: JSON = await request.json()
        items = [one for one in body["input"] if isinstance(one, dict)]
        asked = _describe(
            [(one.get("role") == "user", one) for one in items],
            body,
            list(_list_tools(body.get("tools", ()))),
            "function_call_output",
            "output",
        )
        return await _stream(request, _list_response_events(body, self._decide(body, asked)))

    async def _contents(self, request: web.Request) -> web.StreamResponse:
        body: JSON = await request.json()
        parts = [one for content in body["contents"] for one in _list_gemini_items(content)]
        asked = _describe(
            [(one.get("role") == "user", one) for one in parts],
            body,
            [one["name"] for tool in body.get("tools", ()) for one in tool["functionDeclarations"]],
            "functionResponse",
            "response",
        )
        said = [_gemini_part(one) for one in self._decide(body, asked)]
        candidate = {"content": {"role": "model", "parts": said}, "finishReason": "STOP", "index": 0}
        usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
        whole = {"candidates": [candidate], "usageMetadata": usage}
        if request.match_info["call"].endswith(":streamGenerateContent"):
            return await _stream(request, iter([whole]))
        return web.json_response(whole)


def _describe(parts: list[tuple[bool, JSON]], body: JSON, tools: Sequence[str], kind: str, field: str) -> Asked:
    last = max((place for place, (ours, _) in enumerate(parts) if ours), default=0)
    fresh = [part for _, part in parts[last:]]
    results = [json.dumps(part[field], ensure_ascii=False) for part in fresh if part.get("type") == kind]
    return Asked(json.dumps(fresh, ensure_ascii=False), json.dumps(body, ensure_ascii=False), tools, results)


def _list_parts(content: object) -> list[JSON]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)  # type: ignore[call-overload]


def _list_tools(tools: Sequence[JSON]) -> Iterator[str]:
    """Names of functions, also of those in a group, as NAMESPACE and name in one."""
    for tool in tools:
        if tool.get("type") == "namespace":
            yield from (f"{tool['name']}/{one}" for one in _list_tools(tool["tools"]))
        elif "name" in tool:
            yield tool["name"]


def _block(said: tuple[str, str, JSON]) -> JSON:
    id, tool, given = said
    return {"type": "tool_use", "id": id, "name": tool, "input": given} if tool else {"type": "text", **given}


def _list_gemini_items(content: JSON) -> Iterator[JSON]:
    """A content as one item, but for answers of functions, each of which is one."""
    answers = [part["functionResponse"] for part in content["parts"] if "functionResponse" in part]
    yield from ({"type": "functionResponse", **one} for one in answers)
    if not answers:
        yield content


def _gemini_part(said: tuple[str, str, JSON]) -> JSON:
    id, tool, given = said
    return {"functionCall": {"id": id, "name": tool, "args": given}} if tool else given


def _message(body: JSON, content: list[JSON], said: list[tuple[str, str, JSON]]) -> JSON:
    reason = "tool_use" if any(tool for _, tool, _ in said) else "end_turn"
    usage = {"input_tokens": 1, "output_tokens": 1, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    return {"id": f"msg_{said[0][0]}", "type": "message", "role": "assistant", "model": body["model"]} | {
        "content": content,
        "stop_reason": reason if content else None,
        "stop_sequence": None,
        "usage": usage,
    }


def _list_message_events(body: JSON, said: list[tuple[str, str, JSON]]) -> Iterator[JSON]:
    yield {"type": "message_start", "message": _message(body, [], said)}
    for index, one in enumerate(said):
        block = _block(one)
        if one[1]:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(one[2])}
        else:
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": one[2]["text"]}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    whole = _message(body, [_block(one) for one in said], said)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 1}}
    yield {"type": "message_stop"}


def _list_response_events(body: JSON, said: list[tuple[str, str, JSON]]) -> Iterator[JSON]:
    response = {"id": f"resp_{said[0][0]}", "object": "response", "created_at": 1, "model": body["model"]}
    yield {"type": "response.created", "response": response | {"status": "in_progress", "output": []}}
    items = []
    for index, (id, tool, given) in enumerate(said):
        if tool:
            space, _, name = tool.rpartition("/")
            item = {"type": "function_call", "id": f"fc_{id}", "call_id": id, "name": name}
            item |= {"arguments": json.dumps(given), "status": "completed"} | ({"namespace": space} if space else {})
        else:
            content = [{"type": "output_text", "text": given["text"], "annotations": []}]
            item = {"type": "message", "id": f"m_{id}", "role": "assistant", "status": "completed", "content": content}
        items.append(item)
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    yield {
        "type": "response.completed",
        "response": response | {"status": "completed", "output": items, "usage": usage},
    }


async def _stream(request: web.Request, events: Iterator[JSON]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
    await response.write_eof()
    return response
