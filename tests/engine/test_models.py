"""Scorer, LLM and embedder in the engine: the models are scripted, everything else is real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.app.models import Models
from memstream_server.core.events import Event, EventType, ModelUse, Purpose
from memstream_server.core.filters import Listing
from memstream_server.core.policy import DBGPT, DEFAULT, Policy, with_value
from memstream_server.core.values import Fragment, FragmentKind, MemoryKind, Tier
from memstream_server.engine.background import jobs
from memstream_server.engine.errors import StorageIsFull
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.memory.actor import Actor
from memstream_server.engine.requests import AckLevel, NewMemory, Query
from memstream_server.ports.journal.records import Job
from memstream_server.ports.journal.rows import Terms
from memstream_server.ports.models import Account, ModelRefused, ModelUnavailable
from tests.engine.conftest import open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.support.scripted_models import ScriptedEmbedder, ScriptedInsights, ScriptedScorer
from tests.support.waiting import until

TEA = "Bob likes tea more than anything"


async def memory(engine: PartsEngine, kind: MemoryKind = MemoryKind.HYBRID, policy: Policy = DEFAULT) -> None:
    await engine.memories.create(NewMemory("test", "joy", kind, policy))


async def observe(engine: PartsEngine, *texts: str, level: AckLevel = AckLevel.STORED) -> None:
    for text in texts:
        await engine.observe_batch("test", "joy", "", 1, [observation(text)], level)


async def fragments(engine: PartsEngine) -> list[Fragment]:
    return (await engine.fragments.list_page("test", "joy", Listing(), -1, 1_000))[0]


async def insights(engine: PartsEngine) -> list[Fragment]:
    return [one for one in await fragments(engine) if one.kind is FragmentKind.INSIGHT]


async def test_scorer_rates_observations_without_importance(tmp_path: Path) -> None:
    scorer = ScriptedScorer({TEA: 0.9})
    async with open_engine(tmp_path, models=Models(ScriptedEmbedder(), scorer, scorer_name="scripted")) as engine:
        await memory(engine)
        given = observation("The client knows", importance=0.2)
        await engine.observe_batch("test", "joy", "", 1, [observation(TEA), given], AckLevel.STORED)
        assert {one.content: one.importance for one in await fragments(engine)} == {TEA: 0.9, "The client knows": 0.2}
        assert scorer.calls == 1


async def events(engine: PartsEngine) -> list[Event]:
    record = await engine.memories.get("test", "joy")
    return [event for one in await engine.journal.list_events(record.uid, 0, 1_000) for event in one.events]


async def test_recovered_scorer_rates_defaults_of_its_outage(tmp_path: Path) -> None:
    scorer = ScriptedScorer({TEA: 0.9})
    scorer.fail()
    async with open_engine(tmp_path, models=Models(ScriptedEmbedder(), scorer)) as engine:
        await memory(engine)
        await observe(engine, TEA)

        async def rated() -> list[Event]:
            return [event for event in await events(engine) if event.type is EventType.RATED]

        (event,) = await until(rated)
        assert [(one.id, one.importance) for one in await fragments(engine)] == [(event.fragment, 0.9)]
        observed, *_ = [one for one in await events(engine) if one.type is EventType.OBSERVED]
        assert observed.importance == 0.5  # the values at the decision


async def test_late_rating_skips_refused_texts_and_changed_values(tmp_path: Path) -> None:
    scorer = ScriptedScorer({TEA: 0.9}, default=0.7)
    async with open_engine(tmp_path, models=Models(ScriptedEmbedder(), scorer)) as engine:
        await memory(engine)
        scorer.fail(ModelUnavailable("down"), times=2)  # for the observations, and for the job's first attempt
        scorer.fail(ModelRefused("not this one", [1]))
        batch = [observation(TEA), observation("Refused"), observation("Changed")]
        await engine.observe_batch("test", "joy", "", 1, batch, AckLevel.STORED)
        changed = next(one for one in await fragments(engine) if one.content == "Changed")
        await engine.fragments.update("test", "joy", FragmentChange(changed.id, importance=0.1))

        async def rated() -> bool:
            return any(event.type is EventType.RATED for event in await events(engine))

        await until(rated)
        assert {one.content: one.importance for one in await fragments(engine)} == {
            TEA: 0.9,
            "Refused": 0.5,
            "Changed": 0.1,
        }


async def test_recovered_scorer_rates_texts_updated_in_its_outage(tmp_path: Path) -> None:
    scorer = ScriptedScorer({"Bob likes tea": 0.2, "Bob likes coffee": 0.9})
    async with open_engine(tmp_path, models=Models(ScriptedEmbedder(), scorer)) as engine:
        await memory(engine)
        said = [observation(text, external_id="drink") for text in ("Bob likes tea", "Bob likes coffee")]
        await engine.observe_batch("test", "joy", "", 1, said[:1], AckLevel.STORED)
        scorer.fail()
        await engine.observe_batch("test", "joy", "", 1, said[1:], AckLevel.STORED)

        async def rated() -> bool:
            return not await engine.journal.list_jobs(10)

        await until(rated)
        assert [(one.content, one.importance) for one in await fragments(engine)] == [("Bob likes coffee", 0.9)]


async def test_quarantined_job_is_done_once_its_cause_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RETRY_S", 0.01)
    monkeypatch.setattr(jobs, "QUARANTINE_S", 0.05)
    do, tries = jobs.Jobs._run_job, 0

    async def full(self: jobs.Jobs, actor: Actor, job: Job, account: Account) -> None:
        nonlocal tries
        tries += 1
        if tries <= jobs.JOB_ATTEMPTS_MAX + 2:
            raise StorageIsFull("scripted", retry_after_s=0.01)
        await do(self, actor, job, account)

    monkeypatch.setattr(jobs.Jobs, "_run_job", full)
    scorer = ScriptedScorer({"Bob likes tea": 0.9})
    async with open_engine(tmp_path, models=Models(ScriptedEmbedder(), scorer)) as engine:
        await memory(engine)
        scorer.fail()
        await engine.observe_batch("test", "joy", "", 1, [observation("Bob likes tea")], AckLevel.STORED)

        async def rated() -> bool:
            return not await engine.journal.list_jobs(10)

        await until(rated)
        assert [(one.content, one.importance) for one in await fragments(engine)] == [("Bob likes tea", 0.9)]
    assert tries == jobs.JOB_ATTEMPTS_MAX + 3


async def test_llm_cost_is_an_event_of_the_memory(tmp_path: Path) -> None:
    scripted = ScriptedInsights(["Bob is a tea drinker"])
    models = Models(ScriptedEmbedder(), ScriptedScorer(), insights=scripted)
    async with open_engine(tmp_path, models=models) as engine:
        await memory(engine)
        texts = [TEA, *(f"{TEA} {ending}" for ending in ("today", "tomorrow", "always"))]
        await engine.observe_batch("test", "joy", "", 1, list(map(observation, texts)), AckLevel.STORED)
        await until(lambda: insights(engine))
        uses = [event.use for event in await events(engine) if event.type is EventType.MODEL_ASKED]
        assert uses == [
            ModelUse(Purpose.IMPORTANCE, "scripted", 1, 40, 4),
            ModelUse(Purpose.INSIGHT, "scripted", 2, 50, 5),  # the insight and its rating
        ]


async def test_dbgpt_profile_waits_for_a_scorer_that_is_down(tmp_path: Path) -> None:
    scorer = ScriptedScorer({TEA: 0.9})
    scorer.fail()
    async with open_engine(tmp_path, models=Models(ScriptedEmbedder(), scorer)) as engine:
        await memory(engine, policy=DBGPT)
        await observe(engine, TEA)
        assert [one.importance for one in await fragments(engine)] == [0.9]
        assert scorer.calls == 2


async def test_promotion_makes_an_insight_with_sources(tmp_path: Path) -> None:
    scripted = ScriptedInsights(["Bob is a tea drinker"])
    async with open_engine(tmp_path, models=Models(ScriptedEmbedder(), insights=scripted)) as engine:
        await memory(engine)
        await observe(engine, TEA, *(f"{TEA} {ending}" for ending in ("today", "tomorrow", "always")))
        (insight,) = await until(lambda: insights(engine))
        assert insight.content == "Bob is a tea drinker"
        assert insight.tier is Tier.LONG_TERM
        anchor = next(one for one in await fragments(engine) if one.content == TEA)
        assert anchor.tier is Tier.LONG_TERM
        assert insight.sources == (anchor.id, *anchor.sources)
        assert scripted.shown == [(TEA, f"{TEA} today", f"{TEA} tomorrow", f"{TEA} always")]
        answer = await engine.recall("test", "joy", Query(text="Who is a tea drinker?", limit=1))
        assert [found.fragment.id for found in answer.recollections] == [insight.id]


async def test_reflection_cites_evidence_and_resets_the_aggregate(tmp_path: Path) -> None:
    scripted = ScriptedInsights(questions=["What does Bob like?"], reflections=[("Bob likes hot drinks", (0, 1))])
    policy = with_value(DEFAULT, "reflection.threshold", 1.5)
    async with open_engine(tmp_path, models=Models(ScriptedEmbedder(), insights=scripted)) as engine:
        await memory(engine, MemoryKind.LONG_TERM, policy)
        await observe(engine, "Bob likes tea", "Bob likes coffee", "It rained on Monday")
        (insight,) = await until(lambda: insights(engine))
        evidence = {one.id: one.content for one in await fragments(engine)}
        assert {evidence[source] for source in insight.sources} == {"Bob likes tea", "Bob likes coffee"}
        assert (await engine.memories.get("test", "joy")).reflection_aggregate == 0.0


async def test_insight_is_retried_after_an_outage_and_kept_once(tmp_path: Path) -> None:
    scripted = ScriptedInsights(["Bob is a tea drinker"])
    scripted.fail()
    async with open_engine(tmp_path, models=Models(ScriptedEmbedder(), insights=scripted)) as engine:
        await memory(engine)
        await observe(engine, TEA, *(f"{TEA} {ending}" for ending in ("today", "tomorrow", "always")))
        await until(lambda: insights(engine))
        assert scripted.calls == 2
        assert len(await insights(engine)) == 1


async def test_jobs_of_a_failing_model_do_not_block_other_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PAGE", 2)
    monkeypatch.setattr(jobs, "RETRY_S", 0.01)
    embedder, llm = ScriptedEmbedder(), ScriptedInsights()
    llm.fail(times=1_000_000)
    async with open_engine(tmp_path, models=Models(embedder, insights=llm)) as engine:
        await memory(engine, policy=with_value(DEFAULT, "short_term.enhance_threshold", 1))
        for topic in ("tea", "trains", "snails"):
            await observe(
                engine, f"Bob likes {topic} more than anything", f"Bob likes {topic} more than anything today"
            )

        async def waiting() -> bool:
            return [job.type for job in await engine.journal.list_jobs(9)].count("insight") >= 3

        await until(waiting)
        embedder.fail()
        await observe(engine, "the heron stands in the canal")
        assert not (await fragments(engine))[-1].model

        async def embedded() -> bool:
            return bool((await fragments(engine))[-1].model)

        await until(embedded)


async def test_failing_job_behind_waiting_ones_is_quarantined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PAGE", 2)
    monkeypatch.setattr(jobs, "RETRY_S", 0.01)
    tries, rounds, llm, scorer = 0, 0, ScriptedInsights(), ScriptedScorer()
    do, whole_round = jobs.Jobs._run_job, jobs.Jobs._run_round

    async def counted(self: jobs.Jobs) -> bool:
        nonlocal rounds
        rounds += 1
        return await whole_round(self)

    async def full(self: jobs.Jobs, actor: Actor, job: Job, account: Account) -> None:
        nonlocal tries
        if job.type != "rating":
            return await do(self, actor, job, account)
        tries += 1
        raise StorageIsFull("scripted", retry_after_s=0.01)

    monkeypatch.setattr(jobs.Jobs, "_run_job", full)
    monkeypatch.setattr(jobs.Jobs, "_run_round", counted)
    llm.fail(times=1_000_000)
    async with open_engine(tmp_path, models=Models(ScriptedEmbedder(), scorer, insights=llm)) as engine:
        await memory(engine, policy=with_value(DEFAULT, "short_term.enhance_threshold", 1))
        for topic in ("tea", "trains", "snails", "herons"):
            await observe(
                engine, f"Bob likes {topic} more than anything", f"Bob likes {topic} more than anything today"
            )

        async def waiting() -> bool:
            return [job.type for job in await engine.journal.list_jobs(9)].count("insight") >= 4

        await until(waiting)
        scorer.fail()
        await observe(engine, "the kingfisher waits")

        first = rounds

        async def often() -> bool:
            return rounds > first + jobs.JOB_ATTEMPTS_MAX + 1

        await until(often)
        assert tries == jobs.JOB_ATTEMPTS_MAX


async def test_lexical_search_answers_until_the_vector_is_made(tmp_path: Path) -> None:
    embedder = ScriptedEmbedder()
    async with open_engine(tmp_path, models=Models(embedder)) as engine:
        await memory(engine)
        embedder.fail(times=2)
        await observe(engine, TEA)
        answer = await engine.recall("test", "joy", Query(text="Who likes tea?"))
        assert [found.fragment.content for found in answer.recollections] == [TEA]
        assert "lexical legs only" in answer.degraded

        async def filled() -> bool:
            return all(one.model for one in await fragments(engine))

        await until(filled)
        answer = await engine.recall("test", "joy", Query(text="Who likes tea?", explain=True))
        assert answer.degraded == ""
        assert answer.recollections[0].scored.cosine is not None


class DownForMerged(ScriptedEmbedder):
    """Fails on the first call with a merged text."""

    failed = False

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        if not self.failed and any(";" in text for text in texts):
            self.failed = True
            self.fail()
        return await super().embed(texts)


async def test_merged_text_without_a_vector_gets_it_later(tmp_path: Path) -> None:
    embedder = DownForMerged()
    policy = with_value(with_value(DEFAULT, "short_term.merge_content", True), "short_term.enhance_threshold", 1)
    async with open_engine(tmp_path, models=Models(embedder)) as engine:
        await memory(engine, policy=policy)
        await observe(engine, TEA)
        await observe(engine, f"{TEA} today")
        assert embedder.failed

        async def vectored() -> bool:
            return all(one.model for one in await fragments(engine))

        await until(vectored)
        assert f"{TEA};{TEA} today" in [one.content for one in await fragments(engine)]


async def test_refused_text_is_stored_without_a_vector(tmp_path: Path) -> None:
    embedder = ScriptedEmbedder()
    async with open_engine(tmp_path, models=Models(embedder)) as engine:
        await memory(engine)
        embedder.fail(ModelRefused("not this", (0, 2)))
        both = [observation("what the model refuses"), observation(TEA)]
        await engine.observe_batch("test", "joy", "", 1, both, AckLevel.STORED)
        assert [bool(one.model) for one in await fragments(engine)] == [False, True]
        events = [event async for event in _events(engine)]
        assert [event for event in events if event[0] is EventType.UNVECTORED] == [
            (EventType.UNVECTORED, (await fragments(engine))[0].id)
        ]


async def _events(engine: PartsEngine) -> AsyncIterator[tuple[EventType, str]]:
    watch = engine.watch("test", "joy", "", 0, 0)
    try:
        current = (await engine.memories.get("test", "joy")).revision
        revision = 0
        while revision < current:
            _, revision, _, events = await anext(watch)
            for event in events:
                yield event.type, event.fragment
    finally:
        await watch.aclose()


class Noting(ScriptedEmbedder):
    """Records the namespace of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.namespaces: set[str] = set()

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        self.namespaces.add(namespace)
        return await super().embed(texts)


async def test_texts_are_embedded_under_their_own_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On observe, recall, offer, forget, restore and put: adapters cache texts by namespace."""
    embedder, analyzed = Noting(), set[str]()
    terms = SnowballAnalyzer.terms

    def noted(
        self: SnowballAnalyzer, text: str, language: str = "english", namespace: str = "", prefix: str = ""
    ) -> Terms:
        analyzed.add(namespace)
        return terms(self, text, language, namespace, prefix)

    monkeypatch.setattr(SnowballAnalyzer, "terms", noted)
    async with open_engine(tmp_path, models=Models(embedder)) as engine:
        await memory(engine)
        await observe(engine, TEA, f"{TEA} today", "Ann likes coffee")
        await engine.recall("test", "joy", Query(text="Who likes tea?", reinforce=True))
        ids = [one.id for one in await fragments(engine)]
        await engine.fragments.forget("test", "joy", ids[:2], None)
        await engine.fragments.restore("test", "joy", ids[:2], None)
    assert embedder.namespaces == {"test"}
    assert analyzed == {"test"}
