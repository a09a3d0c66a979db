"""Converts DB-GPT's memory fragments to observations, and fragments back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from hashlib import blake2b
from typing import Any

from dbgpt.agent.core.memory.agent_memory import AgentMemoryFragment, StructuredAgentMemoryFragment

from memstream.kinds import kind_of
from memstream.values import Fragment, FragmentKind, MetadataValue, Observation, Structured

IMPORTANCE_SCALE = 10
"""DB-GPT's importances are 1 to 10, ours 0 to 1."""
MERGED = ";"
"""Separates plain contents that a promotion merged."""
_TEXT = kind_of(str)
_INSIGHT = "dbgpt_insight"
_SNAPSHOT = "dbgpt_snapshot_path"
_KEY = re.compile(r"dbgpt-(\d+)-[0-9a-f]{16}")
_PARTS = tuple(each.name for each in fields(Structured))
_DIGITS = {digit: value for value, digit in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}


def key_of(fragment: AgentMemoryFragment) -> str:
    """The external_id of a DB-GPT fragment: its id and a digest of its content.

    The id alone is not unique: all DB-GPT processes generate ids with the same instance number, so two can generate the
    same id in the same millisecond, and the second fragment would replace the first.
    """
    _TEXT.check("raw_observation", fragment.raw_observation)
    digest = blake2b(fragment.raw_observation.encode(), digest_size=8).hexdigest()
    return f"dbgpt-{fragment.id}-{digest}"


def observation_of(
    fragment: AgentMemoryFragment, now: datetime | None, importance: float | None, speaker: str
) -> Observation:
    """The observation of a DB-GPT fragment. A `now` without a zone is local time, as in DB-GPT."""
    metadata: dict[str, MetadataValue] = dict(fragment.metadata)
    if fragment.is_insight:
        metadata[_INSIGHT] = True
    if snapshot := getattr(fragment, "snapshot_path", None):  # since 0.8.2
        metadata[_SNAPSHOT] = snapshot
    return Observation(
        _body(fragment),
        speaker=speaker,
        observe_time=None if now is None else now.astimezone(),
        importance=importance,
        metadata=metadata,
        external_id=key_of(fragment),
    )


def importance_of(importance: float | None) -> float | None:
    """An importance in [0, 1]; a value above 1 is on DB-GPT's scale."""
    return importance / IMPORTANCE_SCALE if importance is not None and importance > 1 else importance


def fragment_from(fragment: Fragment, make: type[AgentMemoryFragment]) -> AgentMemoryFragment:
    """Converts a fragment to DB-GPT's class `make`; a structured one becomes JSON, as in DB-GPT."""
    words = _words(fragment)
    return make.build_from(
        observation=_steps(words) if issubclass(make, StructuredAgentMemoryFragment) else words,
        memory_id=_id(fragment),
        importance=fragment.importance,
        is_insight=fragment.kind is FragmentKind.INSIGHT or bool(fragment.metadata.get(_INSIGHT)),
        last_accessed_time=_local(fragment.access_time or fragment.create_time),
        snapshot_path=fragment.metadata.get(_SNAPSHOT),
    )


def _body(fragment: AgentMemoryFragment) -> str | Structured:
    """A Structured if that loses nothing; else the raw observation (JSON)."""
    text: str = fragment.raw_observation
    if not isinstance(fragment, StructuredAgentMemoryFragment):
        return text
    parts = json.loads(text)
    if not isinstance(parts, Mapping):
        return text
    given: dict[str, Any] = {name: value for name, value in parts.items() if value is not None}
    if not given or not all(name in _PARTS and isinstance(value, str) for name, value in given.items()):
        return text
    return Structured(**given)


def _words(fragment: Fragment) -> str:
    if fragment.structured is None:
        return fragment.content
    parts = {name: getattr(fragment.structured, name) for name in _PARTS}
    return json.dumps({name: value for name, value in parts.items() if value}, ensure_ascii=False)


def _steps(words: str) -> str:
    """Content as the JSON that DB-GPT's structured class reads: one step, or a list of merged steps."""
    steps: list[Any] = []
    at, decoder = 0, json.JSONDecoder()
    try:
        while at <= len(words):
            step, at = decoder.raw_decode(words, at)
            if not isinstance(step, Mapping | list) or words[at : at + 1] not in ("", MERGED):
                raise ValueError("no steps")
            steps.append(step)
            at += 1
    except ValueError:  # plain text, for instance an insight
        return json.dumps({"observation": words}, ensure_ascii=False)
    return words if len(steps) == 1 else json.dumps(steps, ensure_ascii=False)


def _id(fragment: Fragment) -> int:
    """DB-GPT's id if the fragment came from DB-GPT; else the number that our id (base 32) encodes."""
    if key := _KEY.fullmatch(fragment.external_id):
        return int(key[1])
    number = 0
    for digit in fragment.id:
        number = number * 32 + _DIGITS[digit]
    return number


def _local(time: datetime | None) -> datetime | None:
    return None if time is None else time.astimezone().replace(tzinfo=None)
