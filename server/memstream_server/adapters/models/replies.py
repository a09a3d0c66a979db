"""Extracts the answer from a chat completion, in the wrappings that models and servers use.

Rule 1. Wrappings: thoughts (`<think>`, with or without the opening tag), words before and after the answer, code
fences, a tool call, content as a list of parts.
Rule 2. The answer is the only JSON object of the required form. Two different ones are malformed: one of them may come
from a text that the model quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from memstream_server.adapters.models.resilience import MalformedError, NoCompletionError, RefusedError

Value = TypeVar("Value")
Read = Callable[[Any], Value]
"""Reads a value from the JSON of an answer. Raises MalformedError for another form."""
_OBJECTS_MAX = 64
"""Limit of candidate objects in a reply."""
_TAG = r"(?:think|thinking|thought|reasoning)"
_THOUGHT_BEGINS = re.compile(rf"\A\s*<{_TAG}>", re.IGNORECASE)
_THOUGHT_ENDS = re.compile(rf"</{_TAG}>", re.IGNORECASE)
_CALL_FIELDS = frozenset({"name", "arguments", "parameters", "type", "id", "function"})


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request, as the endpoint reports them."""

    prompt: int
    completion: int


def usage_of(reply: Mapping[str, Any]) -> Usage:
    """The tokens that a reply reports; zeros if it reports none."""
    said = reply.get("usage")
    counts = [said.get(name) if isinstance(said, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (count if isinstance(count, int) and count > 0 else 0 for count in counts)
    return Usage(prompt, completion)


def answer_of(reply: Mapping[str, Any], read: Read[Value]) -> Value:
    """The value that `read` returns for the answer in a reply.

    Raises RefusedError if the model refuses, MalformedError for a reply without an answer of the required form.
    """
    try:
        choice = reply["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        refusal, content = message.get("refusal"), message.get("content")
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise NoCompletionError(f"not a chat completion: {type(error).__name__}") from error
    if refusal or reason == "content_filter" or _is_refused(content):
        raise RefusedError("the model refuses to answer")  # without its words, which may quote a memory
    if reason == "length":
        raise MalformedError("the answer was cut short")
    text = _content_text(content)
    if text.strip():
        return _read_text(text, read)
    if (call := _tool_arguments(message)) is not None:
        return read(call)
    return _read_reasoning(message, read)


def _is_refused(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("refusal") for part in content)


def _content_text(content: Any) -> str:
    """The text of a content, which is a string or a list of parts; without thoughts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") in ("text", "output_text"):
            text = part.get("text")
            texts.append(text if isinstance(text, str) else "")
    return "".join(texts)


def _tool_arguments(message: Mapping[str, Any]) -> Any:
    """The arguments of the only tool call; None without one."""
    calls = message.get("tool_calls")
    call = calls[0] if isinstance(calls, list) and len(calls) == 1 else {"function": message.get("function_call")}
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return _load_json(arguments) if isinstance(arguments, str) else arguments


def _read_reasoning(message: Mapping[str, Any], read: Read[Value]) -> Value:
    """Read an answer from the reasoning field, where some servers misplace it. Only bare JSON counts as an answer."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(reasoning, str) or not reasoning.strip():
        raise MalformedError("no answer in the reply")
    try:
        return read(_load_json(reasoning))
    except MalformedError as error:
        raise MalformedError("no answer in the reply, only reasoning") from error


def _read_text(text: str, read: Read[Value]) -> Value:
    try:
        return _read_value(_load_json(text), read)
    except MalformedError as error:
        failure = error
    for rest in _without_thoughts(text):
        found: list[Value] = []
        for value in _find_objects(rest):
            try:
                answer = _read_value(value, read)
            except MalformedError as error:
                failure = error
                continue
            if answer not in found:
                found.append(answer)
        if len(found) == 1:
            return found[0]
        if found:
            failure = MalformedError("two answers that differ")
    raise failure


def _read_value(value: Any, read: Read[Value]) -> Value:
    """Read the value, or the arguments if it describes a tool call."""
    try:
        return read(value)
    except MalformedError:
        if not (isinstance(value, dict) and value.keys() <= _CALL_FIELDS):
            raise
        function = value.get("function")
        call: dict[str, Any] = function if isinstance(function, dict) else value
        arguments = call.get("arguments", call.get("parameters"))
        if arguments is None:
            raise
        return read(_load_json(arguments) if isinstance(arguments, str) else arguments)


def _without_thoughts(text: str) -> Iterator[str]:
    """Candidates for the answer: the text after each end tag of a thought (a thought may quote one), or all of it."""
    ends = [end.end() for end in _THOUGHT_ENDS.finditer(text)]
    if ends:
        yield from (text[end:] for end in dict.fromkeys((ends[0], ends[-1])))
    elif _THOUGHT_BEGINS.match(text):
        raise MalformedError("the thought before the answer does not end")
    else:
        yield text


def _find_objects(text: str) -> Iterator[Any]:
    """The outermost JSON objects in a text."""
    decoder = json.JSONDecoder()
    place = 0
    for _ in range(_OBJECTS_MAX):
        start = text.find("{", place)
        if start < 0:
            return
        try:
            value, place = decoder.raw_decode(text, start)
        except RecursionError as error:
            raise MalformedError("nested too deeply") from error
        except ValueError:
            place = start + 1
        else:
            yield value


def _load_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError("not JSON") from error
