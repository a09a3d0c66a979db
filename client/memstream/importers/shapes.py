"""The shapes that an import knows: what each is recognised by, and its reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from memstream.importers import assistants, markdown, memories, messengers, milvus
from memstream.importers.records import InvalidSource, Options, Record, Report
from memstream.importers.sources import Source, is_sqlite

Reader: TypeAlias = Callable[[Source, Options, Report], Iterator[Record]]
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Shape:
    """`name` as in --from; `mark`: what it is recognised by, for people; `chat`: whether it has conversations."""

    name: str
    mark: str
    recognise: Callable[[Source], bool]
    read: Reader
    chat: bool = False


def _only_json(source: Source) -> bytes:
    """The first bytes of the only file if it is JSON; empty otherwise."""
    if source.path is None or len(source.names) != 1:
        return b""
    head = source.head(source.names[0], _HEAD_BYTES).lstrip()
    return head if head[:1] in (b"{", b"[") else b""


def _chat_export_with(key: bytes) -> Callable[[Source], bool]:
    """Whether the first conversations of an export have a key."""

    def recognise(source: Source) -> bool:
        return any(
            key in head and b'"type": "export"' not in head[:200]
            for name in assistants.conversation_files(source)[:1]
            if (head := source.head(name, _HEAD_BYTES).lstrip()).startswith(b"[")
        )

    return recognise


def _is_telegram(source: Source) -> bool:
    name = source.find("result.json") or (source.names[0] if len(source.names) == 1 else None)
    head = source.head(name, _HEAD_BYTES).lstrip() if name else b""
    return head.startswith(b"{") and (b'"chats"' in head or (b'"messages"' in head and b'"from_id"' in head))


def _is_mcp_memory(source: Source) -> bool:
    head = _only_json(source)
    first = head.split(b"\n", 1)[0]
    try:
        line = json.loads(first)
    except ValueError:
        return head.startswith(b"{") and b'"entities"' in head[:200]
    return isinstance(line, dict) and (
        line.get("type") in ("entity", "relation") or {"entities", "relations"} <= set(line)
    )


def _is_mem0(source: Source) -> bool:
    head = _only_json(source)
    listed = head.startswith(b"[") or b'"results"' in head[:200] or b'"memories"' in head[:200]
    return listed and b'"memory"' in head


def _is_letta(source: Source) -> bool:
    head = _only_json(source)
    by_name = source.path is not None and source.path.suffix == ".af"
    return head.startswith(b"{") and (by_name or b'"core_memory"' in head or b'"agent_type"' in head)


def _is_langgraph(source: Source) -> bool:
    if source.path is None:
        return source.uri.startswith(("postgresql://", "postgres://"))
    columns = {"prefix", "key", "value", "created_at"}
    return len(source.names) == 1 and memories.has_table(source, source.names[0], "store", columns)


def _is_checkpoints(source: Source) -> bool:
    if source.path is None or len(source.names) != 1:
        return False
    return memories.has_table(source, source.names[0], "checkpoints", {"thread_id", "checkpoint_ns", "checkpoint"})


SHAPES = (
    Shape(
        "chatgpt",
        "conversations.json with a mapping",
        _chat_export_with(b'"mapping"'),
        assistants.read_chatgpt,
        chat=True,
    ),
    Shape(
        "claude",
        "conversations.json with chat_messages",
        _chat_export_with(b'"chat_messages"'),
        assistants.read_claude,
        chat=True,
    ),
    Shape("slack", "users.json, and days in directories of channels", messengers.is_slack, messengers.read_slack, True),
    Shape(
        "whatsapp",
        "a text whose lines begin with a date and a time",
        lambda source: messengers.whatsapp_file(source) is not None,
        messengers.read_whatsapp,
        chat=True,
    ),
    Shape("letta", "an agent file (.af)", _is_letta, assistants.read_letta, chat=True),
    Shape("telegram", "result.json with messages", _is_telegram, messengers.read_telegram, chat=True),
    Shape("mcp-memory", "entities and relations, as JSON or JSON Lines", _is_mcp_memory, memories.read_mcp_memory),
    Shape("mem0", "a list of objects with memory, as get_all returns", _is_mem0, memories.read_mem0),
    Shape("langgraph", "postgresql://, or SQLite with a table store", _is_langgraph, memories.read_langgraph),
    Shape(
        "langgraph-checkpoints",
        "SQLite with a table checkpoints; of postgresql:// by name",
        _is_checkpoints,
        assistants.read_checkpoints,
        chat=True,
    ),
    Shape(
        "chroma",
        "a directory with chroma.sqlite3",
        lambda source: memories.chroma_file(source) is not None,
        memories.read_chroma,
    ),
    Shape("milvus", "http://, or a directory of Milvus Lite", milvus.is_milvus, milvus.read_milvus),
    Shape(
        "markdown",
        "files that end with .md",
        lambda source: bool(markdown.markdown_files(source)),
        markdown.read_markdown,
    ),
)
"""In the order in which they are tried: the more specific ones first."""


def known_shapes() -> str:
    """The shapes and their marks, a line each."""
    return "\n".join(f"  {shape.name}: {shape.mark}" for shape in SHAPES)


def choose_shape(source: Source, wanted: str = "") -> Shape:
    """The shape of that name, or the one that the source has. Raises InvalidSource, which lists the known ones."""
    if wanted:
        return next(shape for shape in SHAPES if shape.name == wanted)
    for shape in SHAPES:
        if shape.recognise(source):
            return shape
    what = "it is a SQLite database, " if any(is_sqlite(source, one) for one in source.names[:1]) else ""
    raise InvalidSource(f"{source.shown}: {what}its shape is none of these; --from names one\n{known_shapes()}")
