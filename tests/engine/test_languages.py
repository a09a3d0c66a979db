"""Memories with texts in several languages, and servers without a language detector."""

# ruff: noqa: RUF001 - other alphabets have letters that look like Latin ones

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memstream_server.adapters.models import analyzer
from memstream_server.core.policy import AUTO_LANGUAGE, DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import CapabilityMissing
from memstream_server.engine.requests import AckLevel, MemoryChange, NewMemory, Query
from tests.engine.conftest import open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation

pytest.importorskip("py3langid", reason="the extra languages is not installed")

AUTO = replace(DEFAULT, language=AUTO_LANGUAGE)
TEXTS = (
    "Die Bäckerei in der Elmstraße hat mich als Bäcker eingestellt",
    "Мы видели восход солнца в горах",
    "My sister studies music in Bergen",
)


async def asked(engine: PartsEngine, question: str) -> tuple[str, float]:
    """The best answer and its lexical leg."""
    answer = await engine.recall("test", "joy", Query(question, reinforce=False, explain=True))
    best = answer.recollections[0]
    return best.fragment.content, dict(zip(best.scored.names, best.scored.values, strict=True))["lexical"]


async def test_recall_finds_inflected_words_in_any_language(tmp_path: Path) -> None:
    async with open_engine(tmp_path) as engine:
        await engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, AUTO))
        await engine.observe_batch("test", "joy", "", 1, [observation(text) for text in TEXTS], AckLevel.STORED)
        for question, text in zip(
            ("Welche Bäckereien gibt es dort?", "Что было видно на горе?", "Whose sisters study?"), TEXTS, strict=True
        ):
            found, lexical = await asked(engine, question)
            assert found == text
            assert lexical > 0


async def test_auto_language_without_detector_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_engine(tmp_path) as engine:
        await engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, AUTO))
    analyzer._loaded.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    async with open_engine(tmp_path) as engine:
        with pytest.raises(CapabilityMissing, match=r"language is auto: py3langid is not installed"):
            await asked(engine, "Anything?")
        with pytest.raises(CapabilityMissing):
            await engine.memories.create(NewMemory("test", "other", MemoryKind.HYBRID, AUTO))
        await engine.memories.create(NewMemory("test", "other", MemoryKind.HYBRID, DEFAULT))
        with pytest.raises(CapabilityMissing):
            await engine.memories.update("test", "other", MemoryChange(policy=AUTO))
        assert (await engine.memories.get("test", "other")).policy.language == "english"
