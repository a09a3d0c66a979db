"""What hosts tell hooks, and what they take from them, as each host documents it. Standard library alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRANSCRIPT_BYTES_MAX = 1 << 20
"""Of a transcript's end, in which the last turn is looked for."""
_EVENT_NAMES = {"session-start": "SessionStart", "prompt": "UserPromptSubmit"}
_GEMINI_EVENT_NAMES = {"session-start": "SessionStart", "prompt": "BeforeAgent"}
_HOOK_CONTEXT = re.compile(r"\A(?:<hook_context>.*?</hook_context>\s*)+", re.DOTALL)
"""The context of hooks at session start, which Gemini CLI without a person puts before the prompt that other hooks get.
It escapes "<" in it, so the first closing tag is the end."""
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class Told:
    """What a host says about an event; empty: nothing. `reply` and `prompt` are of the turn."""

    session: str
    directory: str
    prompt: str
    reply: str


def read_input(given: Mapping[str, Any]) -> Told:
    """Reads a host's JSON: the names of Claude Code, Codex and VS Code, or those of Cursor or Gemini CLI."""
    roots = given.get("workspace_roots")
    root = roots[0] if isinstance(roots, list) and roots else ""
    return Told(
        session=_text(given, "session_id") or _text(given, "conversation_id"),
        directory=_text(given, "cwd") or (root if isinstance(root, str) else ""),
        prompt=_HOOK_CONTEXT.sub("", _text(given, "prompt")),
        reply=_text(given, "last_assistant_message") or _text(given, "prompt_response") or _text(given, "text"),
    )


def write_output(event: str, host: str, context: str) -> str:
    """The JSON with which the host adds the context; empty if there is nothing to add."""
    if not context or event not in _EVENT_NAMES:
        return ""
    if host == "cursor":  # its page documents `continue` for prompts; its client takes the context too, since 3.20
        return json.dumps(({"continue": True} if event == "prompt" else {}) | {"additional_context": context})
    name = (_GEMINI_EVENT_NAMES if host == "gemini-cli" else _EVENT_NAMES)[event]
    return json.dumps({"hookSpecificOutput": {"hookEventName": name, "additionalContext": context}})


def read_last_turn(transcript: Path) -> tuple[str, str]:
    """(prompt, reply) of the last turn in a transcript of JSON lines; empty texts for what is not found."""
    try:
        with transcript.open("rb") as file:
            file.seek(max(0, transcript.stat().st_size - TRANSCRIPT_BYTES_MAX))
            lines = file.read(TRANSCRIPT_BYTES_MAX).splitlines()
    except OSError:
        return "", ""
    replies: list[str] = []
    for role, text in _messages(reversed(lines)):
        if role == "user":
            return text, "\n".join(reversed(replies))
        replies.append(text)
    return "", "\n".join(reversed(replies))


def _messages(lines: Iterator[bytes]) -> Iterator[tuple[str, str]]:
    """(role, text) of the messages of people and assistants."""
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # the first line may be cut
            continue
        if not isinstance(entry, dict) or entry.get("isMeta"):
            continue
        kind = str(entry.get("type", ""))
        message = next(
            (entry[name] for name in ("message", "payload", "data") if isinstance(entry.get(name), dict)), entry
        )
        role = message.get("role") or kind.partition(".")[0]
        text = _content(message.get("content"))
        if role in ("user", "assistant") and text:
            yield role, text


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part for part in content if isinstance(part, dict) and part.get("type") in _TEXT_PARTS]
    return "\n".join(str(part.get("text", "")) for part in parts)


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    return value if isinstance(value, str) else ""
