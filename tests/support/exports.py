"""Small exports of other programs in their real shapes, and what an import of each must keep."""

from __future__ import annotations

import json
import sqlite3
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memstream.values import Role

MONDAY, MINUTE_LATER = 1_683_547_200.0, 1_683_547_260.0
"""2023-05-08 12:00 UTC."""


@dataclass(frozen=True)
class Export:
    """`build` writes the source below a directory and returns its path. `facts`: session, speaker, role and text of
    every observation, in order; `lost`: what the report must count."""

    name: str
    build: Callable[[Path], Path]
    facts: list[tuple[str, str, Role | None, str]]
    lost: dict[str, int] = field(default_factory=dict)
    first_time: str = "2023-05-08T12:00:00"
    options: tuple[str, ...] = ()
    skipped: int = 0


def zipped(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def chatgpt_chat(number: int, texts: list[str]) -> dict[str, Any]:
    """One conversation; user and assistant take turns."""
    mapping: dict[str, Any] = {"root": {"id": "root", "message": None, "parent": None, "children": ["n0"]}}
    for place, text in enumerate(texts):
        message = {
            "id": f"m{number}-{place}",
            "author": {"role": ("user", "assistant")[place % 2], "name": None},
            "create_time": MONDAY + 60 * place,
            "content": {"content_type": "text", "parts": [text]},
            "metadata": {"model_slug": "model-4"} if place % 2 else {},
        }
        parent = f"n{place - 1}" if place else "root"
        mapping[f"n{place}"] = {"id": f"n{place}", "message": message, "parent": parent, "children": [f"n{place + 1}"]}
    last = f"n{len(texts) - 1}" if texts else "root"
    return {"conversation_id": f"c{number}", "title": f"Talk {number}", "mapping": mapping, "current_node": last}


def chatgpt(path: Path) -> Path:
    talk = chatgpt_chat(1, ["My bees are on the roof", "How many hives?"])
    other = {**talk["mapping"]["n1"]["message"], "id": "other", "content": {"parts": ["An answer that was replaced"]}}
    talk["mapping"]["x1"] = {"id": "x1", "message": other, "parent": "n0", "children": []}
    picture = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://1"}
    talk["mapping"]["n0"]["message"]["content"]["parts"].append(picture)
    talk["mapping"]["n0"]["message"]["metadata"] = {"attachments": [{"name": "a.pdf"}]}
    hidden = {"author": {"role": "system"}, "content": {"parts": ["You are helpful"]}}
    talk["mapping"]["root"]["message"] = hidden
    members = {"conversations.json": json.dumps([talk, chatgpt_chat(2, [])]), "chat.html": "<html>", "../../up": "x"}
    return zipped(path / "chatgpt.zip", members)


def claude(path: Path) -> Path:
    said = [
        {
            "uuid": "m1",
            "sender": "human",
            "created_at": "2023-05-08T12:00:00.000000Z",
            "text": "old form",
            "content": [{"type": "text", "text": "My sister lives in Ulm"}],
            "attachments": [{"file_name": "note.txt", "extracted_content": "The train leaves at noon"}],
            "files": [{"file_name": "a.png"}],
        },
        {
            "uuid": "m2",
            "sender": "assistant",
            "created_at": "2023-05-08T12:01:00Z",
            "text": "",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Noted."}],
        },
        {"uuid": "m3", "sender": "human", "created_at": "2023-05-08T12:02:00Z", "text": "", "content": []},
    ]
    talk = {"uuid": "c1", "name": "Ulm", "created_at": "2023-05-08T12:00:00Z", "chat_messages": said}
    return written(path / "conversations.json", json.dumps([talk]))


def slack(path: Path) -> Path:
    users = [{"id": "U1", "name": "bob", "profile": {"display_name": "Bob"}}, {"id": "U2", "name": "ann"}]
    day = [
        {
            "type": "message",
            "user": "U1",
            "ts": "1683547200.000100",
            "text": "<@U2> see <https://a.example|plan> &amp; go",
            "reactions": [{"name": "+1", "count": 2}],
        },
        {"type": "message", "subtype": "channel_join", "user": "U2", "ts": "1683547201.000100", "text": "joined"},
        {
            "type": "message",
            "user": "U2",
            "ts": "1683547260.000200",
            "thread_ts": "1683547250.000100",
            "text": "In a thread",
            "edited": {"ts": "1"},
            "files": [{"id": "F1"}],
        },
        {"user": "U1", "ts": "1683547300.000100", "text": "A root", "thread_ts": "1683547300.000100", "reply_count": 1},
        {
            "user": "U1",
            "ts": "1683547310.000100",
            "text": "An old root",
            "replies": [{"user": "U2", "ts": "1683547320.1"}],
        },
    ]
    members = {
        "users.json": json.dumps(users),
        "channels.json": json.dumps([{"name": "general"}]),
        "general/2023-05-08.json": json.dumps(day),
        "general/2023-05-09.json": json.dumps([{"user": "U1", "ts": "1683633600.000100", "text": "Next day"}]),
    }
    return zipped(path / "slack.zip", members)


WHATSAPP = (
    "\u200e[08.05.23, 12:00:00] Family: \u200eMessages and calls are end-to-end encrypted.\n"
    "[08.05.23, 12:00:00] Bob: Bring eggs\nand flour\n"
    "[08.05.23, 12:01:00] Ann: \u200eimage omitted\n"
    "[13.05.23, 12:01:00] Ann: I will <This message was edited>\n"
    "[13.05.23, 12:02:00] Bob created this group\n"
)


def whatsapp(path: Path) -> Path:
    return zipped(path / "WhatsApp Chat - Family.zip", {"_chat.txt": WHATSAPP, "photo.jpg": "x"})


def telegram(path: Path) -> Path:
    messages = [
        {"id": 1, "type": "service", "action": "create_group", "actor": "Bob"},
        {
            "id": 2,
            "type": "message",
            "date": "2023-05-08T14:00:00",
            "date_unixtime": "1683547200",
            "from": "Bob",
            "from_id": "user1",
            "text": ["See ", {"type": "bold", "text": "this"}],
            "reactions": [{"count": 3}],
        },
        {
            "id": 3,
            "type": "message",
            "date_unixtime": "1683547260",
            "from": "Ann",
            "from_id": "user2",
            "text": "Fine",
            "edited": "2023-05-08T14:02:00",
            "reply_to_message_id": 2,
        },
        {"id": 4, "type": "message", "date_unixtime": "1683547260", "from": "Ann", "photo": "p.jpg", "text": ""},
    ]
    chat = {"name": "Family", "type": "private_group", "id": 77, "messages": messages}
    account = {"about": "Here is your data", "chats": {"about": "…", "list": [chat]}}
    return written(path / "export" / "result.json", json.dumps(account, ensure_ascii=False)).parent


def mcp_memory(path: Path) -> Path:
    lines = [
        {
            "type": "entity",
            "name": "Bob",
            "entityType": "person",
            "observations": ["keeps bees", "keeps bees", "is 40"],
        },
        {"type": "entity", "name": "Ulm", "entityType": "city", "observations": []},
        {"type": "relation", "from": "Bob", "to": "Ulm", "relationType": "lives_in"},
    ]
    return written(path / "memory.json", "\n".join(map(json.dumps, lines)))


def mem0(path: Path) -> Path:
    rows = [
        {
            "id": "1",
            "memory": "Likes tea",
            "hash": "h",
            "user_id": "bob",
            "run_id": "r1",
            "metadata": {"topic": "food"},
            "created_at": "2023-05-08T05:00:00-07:00",
            "updated_at": "2023-06-08T05:00:00-07:00",
        },
        {"id": "2", "memory": " "},
    ]
    relations = [{"source": "bob", "relationship": "likes", "target": "tea"}]
    return written(path / "mem0.json", json.dumps({"results": rows, "relations": relations}))


def letta(path: Path) -> Path:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "You are Joy"}]},
        {
            "id": "m1",
            "role": "user",
            "created_at": "2023-05-08T12:00:00+00:00",
            "content": [{"type": "text", "text": '{"type": "user_message", "message": "I am Bob"}'}],
        },
        {"id": "m2", "role": "user", "content": [{"type": "text", "text": '{"type": "heartbeat"}'}]},
        {
            "id": "m3",
            "role": "assistant",
            "created_at": "2023-05-08T12:00:05+00:00",
            "content": [],
            "tool_calls": [{"function": {"name": "send_message", "arguments": '{"message": "Hello Bob"}'}}],
        },
    ]
    blocks = [{"label": "human", "value": "Bob keeps bees"}]
    agent = {"id": "agent-0", "name": "joy", "agent_type": "memgpt_v2_agent", "messages": messages}
    return written(path / "joy.af", json.dumps({"agents": [agent], "blocks": blocks, "tools": [{"name": "t"}]}))


def langgraph(path: Path) -> Path:
    with sqlite3.connect(path / "store.sqlite") as database:
        database.execute(
            "CREATE TABLE store (prefix text NOT NULL, key text NOT NULL, value text NOT NULL, "
            "created_at TIMESTAMP, updated_at TIMESTAMP, PRIMARY KEY (prefix, key))"
        )
        rows = [
            ("memories.bob", "1", '{"content": "Likes tea", "who": "bob"}', "2023-05-08 12:00:00"),
            ("memories.bob", "2", '{"a": 1}', "2023-05-08 12:01:00"),
        ]
        database.executemany("INSERT INTO store VALUES (?, ?, ?, ?, NULL)", rows)
    database.close()
    return path / "store.sqlite"


def chroma(path: Path) -> Path:
    folder = path / "vstore"
    folder.mkdir()
    with sqlite3.connect(folder / "chroma.sqlite3") as database:
        database.executescript(
            """CREATE TABLE collections (id TEXT PRIMARY KEY, name TEXT NOT NULL, dimension INTEGER);
            CREATE TABLE segments (id TEXT PRIMARY KEY, type TEXT, scope TEXT, collection TEXT);
            CREATE TABLE embeddings (id INTEGER PRIMARY KEY, segment_id TEXT, embedding_id TEXT, seq_id BLOB,
                created_at TIMESTAMP);
            CREATE TABLE embedding_metadata (id INTEGER, key TEXT, string_value TEXT, int_value INTEGER,
                float_value REAL, bool_value INTEGER, PRIMARY KEY (id, key));
            INSERT INTO collections VALUES ('c', 'agent_memory', 4), ('o', 'other', 4);
            INSERT INTO segments VALUES ('s', 'urn:vector', 'VECTOR', 'c'), ('m', 'urn:metadata', 'METADATA', 'c');
            INSERT INTO embeddings VALUES (1, 'm', 'x1', 1, '2023-05-08 12:00:00'), (2, 'm', 'x2', 2, '2023-05-08');
            INSERT INTO embedding_metadata VALUES (1, 'chroma:document', 'The train leaves at noon', NULL, NULL, NULL),
                (1, 'importance', NULL, NULL, 0.75, NULL), (1, 'author', 'bob', NULL, NULL, NULL),
                (2, 'author', 'ann', NULL, NULL, NULL);"""
        )
    database.close()
    return folder


def markdown(path: Path) -> Path:
    folder = path / "notes"
    written(folder / "CLAUDE.md", "---\ntitle: x\n---\n# Build\n\nRun make.\n\n- use ruff\n- no print\n  at all\n")
    written(folder / ".git" / "x.md", "not a note")
    written(folder / "daily" / "2023-05-08.md", "## Standup\n\n```\n# code, no heading\n```\n")
    return folder


def milvus(path: Path) -> Path:
    """A directory of Milvus Lite with vectors of the server's own model; keys that a filter must escape."""
    from milvus_lite.server_manager import server_manager_instance
    from pymilvus import DataType, MilvusClient

    from memstream_server.adapters.models.hashing import HashingEmbedder

    texts = {"b1": "I keep bees", 'the "second"\\': "The train leaves at noon", "e": " "}
    folder = path / "notes.db"
    client = MilvusClient(str(folder), dedicated=True)
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
    schema.add_field("pk", DataType.VARCHAR, is_primary=True, max_length=64)
    schema.add_field("text", DataType.VARCHAR, max_length=1_000)
    schema.add_field("vec", DataType.FLOAT_VECTOR, dim=384)
    client.create_collection("notes", schema=schema)
    vectors = HashingEmbedder().vectors(list(texts.values()))
    rows = zip(texts.items(), vectors, strict=True)
    client.insert(
        "notes",
        [
            {"pk": key, "text": text, "vec": vector, "author": "bob", "at": 1_683_547_200_000, "topic": {"n": 1}}
            for (key, text), vector in rows
        ],
    )
    client.flush("notes")
    client.close()
    server_manager_instance.release_server(str(folder))
    return folder


EXPORTS = (
    Export(
        "chatgpt",
        chatgpt,
        [("c1", "user", Role.USER, "My bees are on the roof"), ("c1", "assistant", Role.ASSISTANT, "How many hives?")],
        {
            "messages of other branches (edited or generated again)": 1,
            "images, files and other parts": 1,
            "attachments": 1,
            "hidden and system messages": 1,
        },
        skipped=1,
    ),
    Export(
        "claude",
        claude,
        [
            ("c1", "user", Role.USER, "My sister lives in Ulm\n\nnote.txt:\nThe train leaves at noon"),
            ("c1", "assistant", Role.ASSISTANT, "Noted."),
        ],
        {"files": 1, "thoughts and tool calls": 1},
        skipped=1,
    ),
    Export(
        "slack",
        slack,
        [
            ("general", "Bob", None, "@ann see plan (https://a.example) & go"),
            ("general/1683547250.000100", "ann", None, "In a thread"),
            ("general/1683547300.000100", "Bob", None, "A root"),
            ("general/1683547310.000100", "Bob", None, "An old root"),
            ("general", "Bob", None, "Next day"),
        ],
        {"reactions": 2, "notices (joins, topics, pins)": 1, "files": 1, "earlier words of edited messages": 1},
    ),
    Export(
        "whatsapp",
        whatsapp,
        [("Family", "Bob", None, "Bring eggs\nand flour"), ("Family", "Ann", None, "I will")],
        {
            "notices (encryption, joins, calls)": 2,
            "photos, files and stickers": 1,
            "earlier words of edited messages": 1,
        },
        options=("--time-zone", "Europe/Berlin"),
        first_time="2023-05-08T10:00:00",
    ),
    Export(
        "telegram",
        telegram,
        [("77", "Bob", None, "See this"), ("77", "Ann", None, "Fine")],
        {"notices (joins, calls, pins)": 1, "reactions": 3, "earlier words of edited messages": 1},
        skipped=1,
    ),
    Export(
        "mcp-memory",
        mcp_memory,
        [("", "", None, text) for text in ("Bob: keeps bees", "Bob: is 40", "Ulm: city", "Bob lives in Ulm")],
        first_time="",
    ),
    Export(
        "mem0",
        mem0,
        [("r1", "", None, "Likes tea")],
        {"relations of the graph": 1, "times of updates": 1},
        skipped=1,
    ),
    Export(
        "letta",
        letta,
        [("joy", "user", Role.USER, "I am Bob"), ("joy", "assistant", Role.ASSISTANT, "Hello Bob")],
        {"tools": 1, "tool calls": 1, "system messages and heartbeats": 2, "system prompts and model settings": 1},
    ),
    Export(
        "langgraph",
        langgraph,
        [("", "bob", None, "Likes tea"), ("", "", None, '{"a": 1}')],
        options=("--field", "speaker=who"),
    ),
    Export(
        "chroma",
        chroma,
        [("", "bob", None, "The train leaves at noon")],
        {"embeddings (the server embeds the texts again)": 1},
        options=(
            "--collection", "agent_memory", "--field", "importance=importance", "--field", "speaker=author",
            "--profile", "dbgpt",
        ),
        skipped=1,
    ),
    Export(
        "milvus",
        milvus,
        [("", "bob", None, "I keep bees"), ("", "bob", None, "The train leaves at noon")],
        options=("--field", "speaker=author", "--field", "time=at", "--model", "hashing-1"),
        skipped=1,
    ),
    Export(
        "markdown",
        markdown,
        [
            ("CLAUDE.md", "", None, "Build: Run make."),
            ("CLAUDE.md", "", None, "Build: use ruff"),
            ("CLAUDE.md", "", None, "Build: no print\n  at all"),
            ("daily/2023-05-08.md", "", None, "Standup: ```\n# code, no heading\n```"),
        ],
        {"front matter": 1},
        first_time="",
    ),
)  # fmt: skip
