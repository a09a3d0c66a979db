"""The mark `weak` on an answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from memstream_server.core.policy import DBGPT, DEFAULT, Policy, with_value
from memstream_server.core.values import MemoryKind
from memstream_server.engine.requests import AckLevel, NewMemory, Query, RecallAnswer
from tests.engine.conftest import open_engine
from tests.engine.memory import observation
from tests.support.tiny_model import write_model

TEXTS = ("Tea in the morning", "Rain on the roof", "A walk by the sea", "The bakery opens at six")
KNOWN, UNKNOWN = "When does the bakery open?", "Which guitar did Zoltan restring yesterday?"


async def ask(path: Path, text: str, policy: Policy = DEFAULT, floor: float | None = None) -> RecallAnswer:
    async with open_engine(path) as engine:
        await engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, policy, exist_ok=True))
        await engine.observe_batch("test", "joy", "once", 1, [observation(each) for each in TEXTS], AckLevel.STORED)
        return await engine.recall("test", "joy", Query(text, reinforce=False, weak_below=floor))


async def test_question_about_nothing_in_memory_is_weak(tmp_path: Path) -> None:
    answer = await ask(tmp_path, UNKNOWN)
    assert answer.weak
    assert answer.recollections, "a weak answer keeps its recollections"


async def test_question_with_an_answer_is_not_weak(tmp_path: Path) -> None:
    answer = await ask(tmp_path, KNOWN)
    assert not answer.weak


@pytest.mark.parametrize("size", [1, 2, 4])
async def test_a_shared_word_counts_at_any_size(tmp_path: Path, size: int) -> None:
    for text in TEXTS[:size]:
        async with open_engine(tmp_path / "small") as engine:
            await engine.memories.create(NewMemory("test", str(size), MemoryKind.HYBRID, DEFAULT, exist_ok=True))
            await engine.observe_batch("test", str(size), "", 1, [observation(text)], AckLevel.STORED)
            assert not (await engine.recall("test", str(size), Query(f"what about {text.split()[-1]}?"))).weak
            assert (await engine.recall("test", str(size), Query("which guitar did he restring?"))).weak


@pytest.mark.parametrize(
    ("question", "weak"),
    [
        ("Which car does Ann drive?", True),
        ("which car does ann drive?", True),
        ("Has the painter Emil a car?", True),
        ("Where does Ann paint?", False),
    ],
)
async def test_names_are_no_shared_words(tmp_path: Path, question: str, weak: bool) -> None:
    said = [observation("I paint in the attic", speaker="Ann"), observation("Emil sings", speaker="Bob")]
    async with open_engine(tmp_path) as engine:
        await engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, DEFAULT))
        await engine.observe_batch("test", "joy", "once", 1, said, AckLevel.STORED)
        assert (await engine.recall("test", "joy", Query(question))).weak is weak


async def test_empty_memory_answers_weakly(tmp_path: Path) -> None:
    async with open_engine(tmp_path) as engine:
        await engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, DEFAULT))
        assert (await engine.recall("test", "joy", Query(KNOWN))).weak


@pytest.mark.parametrize(
    ("set_by_policy", "set_by_query", "weak"),
    [(0.0, None, False), (None, 0.0, False), (0.0, 1.0, True), (1.0, 0.0, False), (1.0, None, True)],
)
async def test_query_and_policy_set_the_floor(
    tmp_path: Path, set_by_policy: float | None, set_by_query: float | None, weak: bool
) -> None:
    policy = with_value(DEFAULT, "recall.weak_below", set_by_policy)
    assert (await ask(tmp_path, UNKNOWN, policy, set_by_query)).weak is weak


async def test_dbgpt_ranking_has_no_floor_of_its_own(tmp_path: Path) -> None:
    assert not (await ask(tmp_path / "unset", UNKNOWN, DBGPT)).weak
    assert (await ask(tmp_path / "set", UNKNOWN, DBGPT, 1.0)).weak


@pytest.mark.parametrize(
    ("model", "cosine", "weak"), [("all-minilm-l6-v2", 0.5, False), ("all-minilm-l6-v2", 0.3, True), ("", 0.9, True)]
)
async def test_a_measured_model_vouches_for_an_answer(tmp_path: Path, model: str, cosine: float, weak: bool) -> None:
    pytest.importorskip("onnx", reason="the extra onnx is not installed")
    directory = write_model(tmp_path / "model")
    if model:
        (directory / "memstream.json").write_text(json.dumps({"model": model, "space": "tiny"}))
    said = observation("Espresso at noon", vector=np.array([1, 0, 0], np.float32))
    asked = np.array([cosine, (1 - cosine**2) ** 0.5, 0], np.float32)
    async with open_engine(tmp_path / "data", embedding="onnx", embedding_model_dir=directory) as engine:
        await engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, DEFAULT))
        await engine.observe_batch("test", "joy", "once", 1, [said], AckLevel.STORED)
        assert (await engine.recall("test", "joy", Query("favourite drink?", vector=asked))).weak is weak
