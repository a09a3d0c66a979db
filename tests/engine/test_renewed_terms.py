"""Stored terms of an older analyzer: still readable, and analyzed again when the memory becomes active."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.adapters.models.analyzer import VERSION
from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.requests import AckLevel, NewMemory, Query
from tests.engine.conftest import open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.support.journals import change_rows, query_rows

TEXTS = ("The Wi-Fi at the cabin is slow", "Tôi sống ở Hà Nội", "My sister studies music in Bergen")
TERM_BYTES = 10


async def lexical_parts(engine: PartsEngine) -> list[float]:
    """The lexical leg of each text for the question that it answers."""
    found = []
    for question, text in zip(("wifi", "ha noi", "music"), TEXTS, strict=True):
        answer = await engine.recall("test", "joy", Query(question, reinforce=False, explain=True))
        scored = next(one.scored for one in answer.recollections if one.fragment.content == text)
        found.append(dict(zip(scored.names, scored.values, strict=True))["lexical"])
    return found


def rewrite_terms(data_dir: Path, old: bytes) -> int:
    return change_rows(data_dir, "UPDATE fragments SET terms = ?", old)


@pytest.mark.parametrize(
    "old",
    [
        pytest.param(bytes(8) + b"\1\0", id="without a version"),
        pytest.param(bytes(8) + b"\1\0" + (VERSION + 1).to_bytes(2, "little"), id="of another version"),
        pytest.param(b"", id="without terms"),
    ],
)
async def test_terms_of_another_analyzer_are_made_again(tmp_path: Path, old: bytes) -> None:
    async with open_engine(tmp_path) as engine:
        await engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, DEFAULT))
        await engine.observe_batch("test", "joy", "", 1, [observation(text) for text in TEXTS], AckLevel.STORED)
        before = await lexical_parts(engine)
    assert rewrite_terms(tmp_path, old) == len(TEXTS)
    async with open_engine(tmp_path) as engine:
        after = await lexical_parts(engine)
    assert after == before
    assert min(after) > 0


async def test_stored_terms_name_the_analyzers_version(tmp_path: Path) -> None:
    async with open_engine(tmp_path) as engine:
        await engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, DEFAULT))
        await engine.observe_batch("test", "joy", "", 1, [observation(text) for text in TEXTS], AckLevel.STORED)
    found = [terms for (terms,) in query_rows(tmp_path, "SELECT terms FROM fragments")]
    assert len(found) == len(TEXTS)
    for terms in found:
        assert len(terms) % TERM_BYTES == 2
        assert int.from_bytes(terms[-2:], "little") == VERSION
