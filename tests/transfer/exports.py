"""Small handwritten exports, complete or with an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

from memstream_server.core.policy import DEFAULT
from memstream_server.engine.operations.transfer import lines

Lines = list[dict[str, Any]]
TIME_US = 1_750_000_000_000_000
HEADER = {"type": "export", "format": "memstream-export", "version": 1, "server": "0", "time_us": 1, "vectors": False}


def ulid(number: int) -> str:
    return f"01J{number:023d}"


def memory(name: str = "joy", fragments: int = 0, **said: Any) -> dict[str, Any]:
    policy = json.loads(lines.encode_line(lines.policy_line(DEFAULT)))
    return {
        "type": "memory",
        "namespace": "ns",
        "name": name,
        "uid": ulid(sum(name.encode())),
        "kind": "hybrid",
        "policy": policy,
        "labels": {},
        "seed": "00" * 16,
        "revision": 7,
        "create_time_us": TIME_US,
        "update_time_us": TIME_US,
        "reflection_aggregate": 0.5,
        "fragments": fragments,
    } | said


def fragment(number: int, **said: Any) -> dict[str, Any]:
    return {
        "type": "fragment",
        "id": ulid(number),
        "position": number,
        "content": f"note {number} of the journey",
        "tier": "long_term",
        "importance": 0.5,
        "observe_time_us": TIME_US,
        "create_time_us": TIME_US,
    } | said


def conversation(name: str = "talk", messages: int = 0, plans: int = 0, **said: Any) -> dict[str, Any]:
    return {
        "type": "conversation",
        "namespace": "ns",
        "name": name,
        "last_number": messages,
        "completed": False,
        "completions": 0,
        "completed_number": 0,
        "create_time_us": TIME_US,
        "messages": messages,
        "plans": plans,
    } | said


def message(number: int, **said: Any) -> dict[str, Any]:
    times = {"create_time_us": TIME_US, "update_time_us": TIME_US}
    return {"type": "message", "number": number, "sender": "Ann", "content": "hello"} | times | said


def block(version: int, name: str = "persona", **said: Any) -> dict[str, Any]:
    times = {"create_time_us": TIME_US, "update_time_us": TIME_US}
    return {"type": "block", "version": version, "name": name, "text": "I am Joy"} | times | said


def plan(number: int, **said: Any) -> dict[str, Any]:
    return {"type": "plan", "number": number, "create_time_us": TIME_US, "update_time_us": TIME_US} | said


def whole() -> Lines:
    """Two memories and a conversation."""
    return [
        dict(HEADER),
        memory("joy", 3),
        fragment(1, external_id="a"),
        fragment(2, tier="short_term", enhancements=[{"id": ulid(9), "text": "again"}], enhancement_count=1),
        fragment(5, forget_time_us=TIME_US, sources=[ulid(1)], metadata={"page": 5, "ok": True, "by": "Bob"}),
        memory("sam", 1),
        fragment(1, structured={"thought": "it rains", "action": "stay"}, content="it rains\nstay"),
        conversation("talk", 2, 1),
        message(1),
        message(2),
        plan(1),
    ]


def raw_lines(said: Iterable[dict[str, Any] | bytes]) -> list[bytes]:
    return [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in said]


def ended(said: Sequence[dict[str, Any] | bytes], **other: Any) -> list[bytes]:
    """Returns the lines with a matching last line."""
    packed = raw_lines(said)
    types = [line["type"] for line in said if isinstance(line, dict)]
    names = ("memory", "fragment", "block", "conversation", "message", "plan")
    plural = {"memory": "memories"}
    counts: dict[str, Any] = {plural.get(name, f"{name}s"): types.count(name) for name in names}
    end = {"type": "end", **counts, "sha256": sha256(b"".join(packed)).hexdigest()} | other
    return [*packed, json.dumps(end).encode() + b"\n"]


def changed(place: int, **said: Any) -> Callable[[], list[bytes]]:
    """Returns a complete export with changed fields in line `place` (from 0); None removes a field."""

    def make() -> list[bytes]:
        made = whole()
        made[place] = {key: value for key, value in (made[place] | said).items() if value is not None}
        return ended(made)

    return make
