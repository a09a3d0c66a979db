"""Chats with assistants: ChatGPT's and Claude's `conversations.json`, Letta's agent files, LangGraph's checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import PurePosixPath
from typing import Any

from memstream.importers.memories import open_sqlite, postgres_rows
from memstream.importers.records import (
    ROLES,
    InvalidSource,
    Options,
    Record,
    Report,
    digest_of,
    plain_metadata,
    time_of,
)
from memstream.importers.sources import Source
from memstream.values import Role

_CONVERSATIONS = re.compile(r"conversations(-\d+)?\.json")
"""Large exports of ChatGPT have several numbered files."""


def conversation_files(source: Source) -> list[str]:
    """The members of a ChatGPT or Claude export that have conversations; or the only file, whatever its name."""
    named = [one for one in source.names if _CONVERSATIONS.fullmatch(PurePosixPath(one).name)]
    if named or source.path is None or source.path.is_dir():
        return sorted(named)
    return [one for one in source.names if one.endswith(".json")] if len(source.names) == 1 else []


def read_chatgpt(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """The current branch of each conversation, from its root to `current_node`."""
    for name in conversation_files(source):
        with source.open(name) as entries:
            for number, chat in entries.items("item"):
                place = f"{name}: conversation {number}"
                if not isinstance(chat, dict) or not isinstance(chat.get("mapping"), dict):
                    report.skip("is no conversation: it has no mapping", place)
                    continue
                found = list(_read_tree(chat, report, place))
                report.keep("conversations", bool(found))
                if not found:
                    report.skip("has no message", place)
                yield from found


def _read_tree(chat: Mapping[str, Any], report: Report, place: str) -> Iterator[Record]:
    mapping: Mapping[str, Any] = chat["mapping"]
    branch = _current_branch(mapping, chat.get("current_node"), place)
    has_text = sum(1 for node in mapping.values() if isinstance(node, dict) and _chatgpt_parts(node.get("message"))[0])
    session = str(chat.get("conversation_id") or chat.get("id") or place)
    title = {"title": chat.get("title") or ""}
    kept = 0
    for node in branch:
        message = mapping[node].get("message")
        text, others = _chatgpt_parts(message)
        report.lose("images, files and other parts", others)
        if not text or message is None:
            continue
        kept += 1
        about = message.get("metadata") or {}
        author = message.get("author") or {}
        role = ROLES.get(str(author.get("role")))
        if about.get("is_visually_hidden_from_conversation") or role is Role.SYSTEM:
            report.lose("hidden and system messages")
            continue
        report.lose("attachments", len(about.get("attachments") or ()))
        yield Record(
            id=str(message.get("id") or node),
            text=text,
            session=session,
            speaker=str(author.get("name") or author.get("role") or ""),
            role=role,
            time=time_of(message.get("create_time") or chat.get("create_time")),
            metadata=plain_metadata({**title, "model": about.get("model_slug")}),
            place=f"{place}, message {node}",
        )
    report.lose("messages of other branches (edited or generated again)", has_text - kept)


def _current_branch(mapping: Mapping[str, Any], last: object, place: str) -> list[str]:
    """The ids of the nodes from the root to `last`; without `last` to the node that was added last."""
    node = last if isinstance(last, str) and last in mapping else next(reversed(list(mapping)), None)
    branch: list[str] = []
    seen: set[str] = set()
    while isinstance(node, str) and isinstance(mapping.get(node), dict):
        if node in seen:
            raise InvalidSource(f"{place}: its tree of messages has a circle at {node}")
        seen.add(node)
        branch.append(node)
        node = mapping[node].get("parent")
    return branch[::-1]


def _chatgpt_parts(message: object) -> tuple[str, int]:
    """The text of a message, and the number of its parts that are none."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, dict):
        return "", 0
    parts = content.get("parts")
    if not isinstance(parts, list):
        parts = [content.get("text") or content.get("result") or content.get("content")]
    texts = [one if isinstance(one, str) else _spoken(one) for one in parts if one is not None]
    return "\n".join(one for one in texts if one and one.strip()).strip(), sum(1 for one in texts if one is None)


def _spoken(part: object) -> str | None:
    """The text of a part: of a transcript of speech; None if it has none."""
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else None


def read_claude(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """The messages of each conversation; text of attachments is a message's own part."""
    for name in conversation_files(source):
        with source.open(name) as entries:
            for number, chat in entries.items("item"):
                place = f"{name}: conversation {number}"
                messages = chat.get("chat_messages") if isinstance(chat, dict) else None
                if not isinstance(messages, list):
                    report.skip("is no conversation: it has no chat_messages", place)
                    continue
                report.keep("conversations", bool(messages))
                if not messages:
                    report.skip("has no message", place)
                for order, message in enumerate(messages, 1):
                    if isinstance(message, dict):
                        yield from _read_claude_message(chat, message, report, f"{place}, message {order}")


def _read_claude_message(
    chat: Mapping[str, Any], message: Mapping[str, Any], report: Report, place: str
) -> Iterator[Record]:
    blocks = [one for one in message.get("content") or () if isinstance(one, dict)]
    texts = [one["text"] for one in blocks if one.get("type") == "text" and isinstance(one.get("text"), str)]
    report.lose("thoughts and tool calls", sum(1 for one in blocks if one.get("type") != "text"))
    attached = [one for one in message.get("attachments") or () if isinstance(one, dict)]
    report.lose("files", len(message.get("files") or ()))
    report.lose("attachments without text", sum(1 for one in attached if not one.get("extracted_content")))
    texts = texts or [str(message.get("text") or "")]
    texts += [f"{one.get('file_name') or 'attachment'}:\n{one['extracted_content']}" for one in attached if
              one.get("extracted_content")]  # fmt: skip
    text = "\n\n".join(one for one in texts if one.strip())
    if not text:
        report.skip("has no text", place)
        return
    sender = "user" if message.get("sender") == "human" else str(message.get("sender") or "")
    yield Record(
        id=str(message.get("uuid") or place),
        text=text,
        session=str(chat.get("uuid") or place.partition(", ")[0]),
        speaker=sender,
        role=ROLES.get(sender),
        time=time_of(message.get("created_at") or chat.get("created_at")),
        metadata=plain_metadata({"title": chat.get("name") or ""}),
        place=place,
    )


def read_letta(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """Blocks become blocks, messages become observations; both forms of agent files."""
    name = source.names[0]
    with source.open(name) as entries:
        _, file = next(entries.items(""), (0, None))
    if not isinstance(file, dict):
        raise InvalidSource(f"{name}: is no agent file")
    agents: list[dict[str, Any]] = file["agents"] if isinstance(file.get("agents"), list) else [file]
    blocks = file.get("blocks") or [one for agent in agents for one in agent.get("core_memory") or ()]
    for number, block in enumerate(blocks, 1):
        yield from _read_letta_block(block, report, f"{name}: block {number}")
    for key, what in (("tools", "tools"), ("files", "files"), ("sources", "sources"), ("mcp_servers", "MCP servers")):
        report.lose(what, len(file.get(key) or ()))
    for agent in agents:
        report.lose("system prompts and model settings")
        report.keep("agents")
        for order, message in enumerate(agent.get("messages") or (), 1):
            yield from _read_letta_message(agent, message, report, f"{name}: message {order}")


def _read_letta_block(block: Mapping[str, Any], report: Report, place: str) -> Iterator[Record]:
    label, value = block.get("label"), block.get("value")
    if not isinstance(label, str) or not isinstance(value, str) or not value.strip():
        report.skip("the block has no label or no text", place)
        return
    report.keep("blocks")
    yield Record(id=f"block/{label}", text=value, block=label, place=place)


def _read_letta_message(
    agent: Mapping[str, Any], message: Mapping[str, Any], report: Report, place: str
) -> Iterator[Record]:
    content = message.get("content") or message.get("text")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [one["text"] for one in parts if isinstance(one, dict) and isinstance(one.get("text"), str)]
    report.lose("images and other parts", len(parts) - len(texts) if content else 0)
    report.lose("tool calls", len(message.get("tool_calls") or ()))
    role = ROLES.get(str(message.get("role")))
    said = _unwrap_letta("\n".join(texts))
    if role is Role.SYSTEM or said is None:
        report.lose("system messages and heartbeats")
        return
    said = said or _sent_by_tool(message)
    if not said:
        report.skip("has no text", place)
        return
    yield Record(
        id=str(message.get("id") or place),
        text=said,
        session=str(agent.get("name") or agent.get("id") or "letta"),
        speaker=str(message.get("name") or message.get("role") or ""),
        role=role,
        time=time_of(message.get("created_at")),
        place=place,
    )


def _unwrap_letta(text: str) -> str | None:
    """The words inside the JSON in which Letta wraps a user's message; None for a heartbeat or another event."""
    if not text.startswith("{"):
        return text
    try:
        wrapped = json.loads(text)
    except (ValueError, RecursionError):
        return text
    kind = wrapped.get("type") if isinstance(wrapped, dict) else None
    if kind == "user_message":
        return str(wrapped.get("message") or "")
    return None if kind in ("heartbeat", "login", "system_alert") else text


def _sent_by_tool(message: Mapping[str, Any]) -> str:
    """What an assistant said by the tool `send_message`."""
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and function.get("name") == "send_message":
            try:
                return str(json.loads(function.get("arguments") or "{}").get("message") or "")
            except (ValueError, AttributeError):
                return ""
    return ""


# Checkpoints of LangGraph.

_SQLITE_CHECKPOINTS = """
    SELECT thread_id, type, checkpoint, max(checkpoint_id) FROM checkpoints WHERE checkpoint_ns = '' GROUP BY thread_id
"""
_POSTGRES_CHECKPOINTS = """
    SELECT latest.thread_id, latest.checkpoint ->> 'ts', blobs.type, blobs.blob
    FROM (SELECT DISTINCT ON (thread_id) * FROM checkpoints WHERE checkpoint_ns = ''
          ORDER BY thread_id, checkpoint_id DESC) latest
    JOIN checkpoint_blobs blobs ON blobs.thread_id = latest.thread_id AND blobs.checkpoint_ns = ''
        AND blobs.channel = 'messages' AND blobs.version = latest.checkpoint -> 'channel_versions' ->> 'messages'
    ORDER BY latest.thread_id
"""


def read_checkpoints(source: Source, options: Options, report: Report) -> Iterator[Record]:
    """The messages of the last checkpoint of each thread, of SqliteSaver (a file) or PostgresSaver (a URI).

    They have the time of that checkpoint: LangGraph keeps none of theirs.
    """
    for thread, time, messages in _last_checkpoints(source):
        report.keep("conversations")
        for order, message in enumerate(messages, 1):
            yield from _read_langchain_message(str(thread), time, message, report, f"{thread}: message {order}")


def _last_checkpoints(source: Source) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Thread, time and messages. Raises InvalidSource."""
    if source.path is None:
        for thread, time, kind, blob in postgres_rows(source.uri, _POSTGRES_CHECKPOINTS):
            yield thread, time, _listed(_unpacked(kind, blob, f"{thread}"))
        return
    with closing(open_sqlite(source, source.names[0])) as database:
        for thread, kind, blob, _ in database.execute(_SQLITE_CHECKPOINTS):
            read = _unpacked(kind, blob, f"{source.shown}: {thread}")
            found = read if isinstance(read, dict) else {}
            values = found.get("channel_values")
            yield thread, found.get("ts"), _listed(values.get("messages") if isinstance(values, dict) else None)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _unpacked(kind: Any, blob: bytes, place: str) -> Any:
    """A value as LangGraph packs it, with objects as their fields: no class of the source is made."""
    try:
        import ormsgpack
    except ImportError as error:
        raise InvalidSource("checkpoints need ormsgpack: pip install '.[langgraph]'") from error

    def fields_of(code: int, data: bytes) -> Any:
        found = ormsgpack.unpackb(data, ext_hook=fields_of, option=ormsgpack.OPT_NON_STR_KEYS)
        return found[2] if isinstance(found, list) and len(found) > 2 else found  # module, class, fields, method

    try:
        if kind == "json":
            return json.loads(blob)
        return ormsgpack.unpackb(blob, ext_hook=fields_of, option=ormsgpack.OPT_NON_STR_KEYS)
    except (ValueError, RecursionError) as error:
        raise InvalidSource(f"{place}: is no checkpoint that can be read ({error})") from error


def _read_langchain_message(thread: str, time: Any, message: Any, report: Report, place: str) -> Iterator[Record]:
    said = message if isinstance(message, dict) else {}
    role = {"human": "user", "ai": "assistant"}.get(str(said.get("type")), "")
    report.lose("tool calls", len(_listed(said.get("tool_calls"))))
    if not role:
        report.lose("system messages and outputs of tools")
        return
    blocks = said.get("content")
    texts = [blocks] if isinstance(blocks, str) else [
        one if isinstance(one, str) else one.get("text") for one in _listed(blocks) if isinstance(one, str | dict)
    ]  # fmt: skip
    report.lose("images, files and other parts", sum(1 for one in texts if not isinstance(one, str)))
    text = "\n\n".join(one for one in texts if isinstance(one, str) and one.strip())
    if not text:
        if not said.get("tool_calls"):
            report.skip("has no text", place)
        return
    yield Record(
        id=f"{thread}/{said.get('id') or digest_of(place)}",
        text=text,
        session=thread,
        speaker=str(said.get("name") or role),
        role=ROLES[role],
        time=time_of(time),
        place=place,
    )
