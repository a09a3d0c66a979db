"""Reranking in recall, with a scripted reranker; everything else is real."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from memstream_server.app.models import Models
from memstream_server.core.policy import DBGPT, DEFAULT, Policy, RecallPolicy
from memstream_server.core.ranking import FORMULA, Stage
from memstream_server.core.values import MemoryKind
from memstream_server.engine.requests import AckLevel, NewMemory, Query, RecallAnswer
from memstream_server.ports.models import ModelUnavailable
from tests.engine.conftest import open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.support.scripted_models import ScriptedEmbedder, ScriptedReranker

TEXTS = ("Tea in the morning", "Tea, tea and more tea", "Rain on the roof", "Coffee before tea", "A walk by the sea")


def opened(path: Path, reranker: ScriptedReranker, **settings: object) -> AbstractAsyncContextManager[PartsEngine]:
    return open_engine(path, models=Models(ScriptedEmbedder(), reranker=reranker), **settings)


async def ask(
    engine: PartsEngine, kind: MemoryKind = MemoryKind.HYBRID, policy: Policy = DEFAULT, **query: object
) -> RecallAnswer:
    await engine.memories.create(NewMemory("test", "joy", kind, policy, exist_ok=True))
    await engine.observe_batch("test", "joy", "once", 1, [observation(text) for text in TEXTS], AckLevel.STORED)
    asked = Query("Who likes tea?", reinforce=False, **query)  # type: ignore[arg-type]  # any field of Query
    return await engine.recall("test", "joy", asked)


def contents(answer: RecallAnswer) -> list[str]:
    return [one.fragment.content for one in answer.recollections]


async def test_reranker_reorders_the_best_and_explains_its_part(tmp_path: Path) -> None:
    reranker = ScriptedReranker({"Rain": 0.9, "Coffee": 0.4})
    async with opened(tmp_path, reranker) as engine:
        answer = await ask(engine, limit=2, near_misses=2)
    assert contents(answer) == ["Rain on the roof", "Coffee before tea"], "the limit counts after reranking"
    assert (answer.formula, answer.degraded) == (f"{FORMULA}+rerank/1", "")
    assert "rerank" in answer.timings_s
    best = answer.recollections[0].scored
    assert (best.parts[-1].name, best.parts[-1].weight) == ("rerank", 1.0)
    assert best.score == math.fsum(part.contribution for part in best.parts)
    assert best.parts[-1].contribution == pytest.approx(0.9)
    assert best.relevance < 0.5, "which is of the legs alone"
    assert [missed.stage for missed in answer.near_misses] == [Stage.LIMIT] * 2
    ((question, texts),) = reranker.shown
    assert question == "Who likes tea?"
    assert len(texts) == len(TEXTS)
    assert any(text.endswith("Rain on the roof") and text.startswith("[") for text in texts), "with date and speaker"


async def test_reranker_scores_only_the_best_candidates(tmp_path: Path) -> None:
    reranker = ScriptedReranker({"": 0.0, "Coffee": 0.5})
    async with opened(tmp_path, reranker, reranker_candidates=3, reranker_weight=0.5) as engine:
        with_it = await ask(engine)
        reranker.fail(ModelUnavailable("down"))
        without = await ask(engine)
    assert len(reranker.shown[0][1]) == 3
    assert contents(with_it)[3:] == contents(without)[3:]
    assert {part.weight for one in with_it.recollections for part in one.scored.parts if part.name == "rerank"} == {0.5}
    leading = [one for one in with_it.recollections if not one.later_id]  # an earlier statement follows its later one
    scores = [one.scored.score for one in leading]
    assert len(scores) > 2
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(("late", "why"), [(False, "not reranked: scripted outage"), (True, "no answer in time")])
async def test_failing_reranker_keeps_the_order_and_degrades(tmp_path: Path, late: bool, why: str) -> None:
    reranker = ScriptedReranker({"Rain": 1.0})
    async with open_engine(tmp_path / "none", models=Models(ScriptedEmbedder())) as engine:
        plain = await ask(engine, limit=3)
    async with opened(tmp_path / "failing", reranker, reranker_timeout_s=0.05) as engine:
        reranker.late = late
        if not late:
            reranker.fail()
        answer = await ask(engine, limit=3)
        reranker.late = False
        healed = await ask(engine, limit=3)
    assert contents(answer) == contents(plain)
    assert why in answer.degraded
    assert (answer.formula, plain.formula, plain.degraded) == (FORMULA, FORMULA, "")
    assert contents(healed)[0] == "Rain on the roof"


@pytest.mark.parametrize(
    ("kind", "policy", "query"),
    [
        (MemoryKind.SHORT_TERM, DEFAULT, {}),
        (MemoryKind.LONG_TERM, DBGPT, {}),
        (MemoryKind.HYBRID, DEFAULT, {"beta": 0.0}),
        (MemoryKind.HYBRID, replace(DEFAULT, recall=RecallPolicy(beta=0.0)), {}),
    ],
)
async def test_reranker_is_not_called_without_effect(
    tmp_path: Path, kind: MemoryKind, policy: Policy, query: Mapping[str, object]
) -> None:
    reranker = ScriptedReranker({"Rain": 1.0})
    async with opened(tmp_path, reranker) as engine:
        answer = await ask(engine, kind, policy, limit=2, **query)
    assert not reranker.shown
    assert len(answer.recollections) == 2
    assert "rerank" not in answer.formula


async def test_empty_result_calls_no_reranker(tmp_path: Path) -> None:
    reranker = ScriptedReranker({})
    async with opened(tmp_path, reranker) as engine:
        answer = await ask(engine, min_relevance=1.0)
    assert (answer.recollections, answer.degraded, reranker.shown) == ((), "", [])
