"""What hosts send to `memstream mcp` and to hooks: one JSON file for each host.

A file says where its messages come from: `recorded` from a host that ran here (tests/toolchains/test_hosts.py compares
it with what that version sends), or `documented`, written from the host's documentation, public sources and logs.
What a host sent when a call was cancelled, and after its process of the command had ended, was recorded once; the runs
compare only its form, if the host sends it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOSTS = ("claude-code", "codex", "cursor", "vscode", "opencode", "gemini-cli")
_BY_HAND = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {}}


@dataclass(frozen=True, slots=True)
class Transcript:
    """The messages of a host's session in order, and the JSON that it gives to each hook."""

    host: str
    version: str
    source: str
    messages: Sequence[Mapping[str, Any]]
    hooks: Mapping[str, Mapping[str, Any]]
    """Empty: the host has none."""
    cancel: Mapping[str, Any] = field(default_factory=lambda: _BY_HAND)
    """Its notification that a call is cancelled, without the id of the call."""
    reconnect: Sequence[Mapping[str, Any]] = ()
    """What it sends to a new process, in place of one that has ended, before the next call. Empty: it starts none, or
    this is not known."""


def load(host: str) -> Transcript:
    """The transcript of a host."""
    return Transcript(**json.loads(Path(__file__).with_name(f"{host}.json").read_text("utf-8")))


def shape_of(message: Mapping[str, Any]) -> str:
    """A message without what differs from session to session: ids, arguments, and the values of a call's metadata."""
    params = dict(message.get("params", {}))
    if message["method"] == "tools/call":
        params = {"_meta": sorted(params.get("_meta", {})), "keys": sorted(params)}
    params.pop("requestId", None)
    return json.dumps([message["method"], params, type(message.get("id")).__name__], sort_keys=True)
