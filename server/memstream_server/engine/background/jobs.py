"""Background jobs of transitions: insights, reflections, missing vectors and importances, decisions about suspicions.
Rows of the journal, each done once.

Rule 1. A job's result and its end are one commit: a crash repeats the model call, but never the result.
Rule 2. A job whose model is down is retried soon. A job that fails otherwise is quarantined after JOB_ATTEMPTS_MAX
attempts and retried every QUARANTINE_S: the cause may pass (a full disk), but each attempt may call a model.
Rule 3. A job about a suspicion decides only what the LLM read: the suspicion is still open, and both fragments are as
they were. Then the decision cannot fail: neither fragment is forgotten, and neither supersedes the other. One answer
ends it. An unclear one leaves the suspicion open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import structlog

from memstream_server.core import lifecycle
from memstream_server.core.events import Purpose
from memstream_server.core.filters import visible
from memstream_server.core.policy import Truth
from memstream_server.core.rendering import indexed_text
from memstream_server.core.suspicions import may_be_suspected
from memstream_server.core.transition import Transition, join_all
from memstream_server.core.values import Fragment, FragmentKind, Held, MemoryKind, Tier, Vector
from memstream_server.engine.background.task import BackgroundTask
from memstream_server.engine.conflicts import Verdict, decide_suspicion
from memstream_server.engine.errors import CapabilityMissing, EngineError, KindMismatch, MemoryNotFound, ModelDown
from memstream_server.engine.lifecycle import drop_expired, read_fragments
from memstream_server.engine.memory.decide import effective_policy, jobs_of
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.memory.enrich import EnrichedFragment
from memstream_server.engine.operations.runner import AnswerOf, OperationRunner, Progress
from memstream_server.engine.recall.recall import Recaller
from memstream_server.engine.recall.reinforcement import unpack_vector
from memstream_server.engine.requests import Query
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import Answer, Job, Made
from memstream_server.ports.models import Account, Insights, ModelError, ModelRefused, ModelUnavailable, Statement
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.models import ConflictJudge

log = structlog.get_logger(__name__)

BACKFILL = "backfill"
"""Type of the job that embeds a memory's fragments without a vector."""
PAGE = 100
"""Jobs, or fragments of a backfill, read at once."""
RETRY_S = 5.0
JOB_ATTEMPTS_MAX = 5
"""Attempts per process before a job is quarantined; failures because a model is down do not count."""
QUARANTINE_S = 600.0
"""Retry interval of quarantined jobs."""


_PURPOSES = {
    "rating": Purpose.IMPORTANCE,
    "insight": Purpose.INSIGHT,
    "reflection": Purpose.REFLECTION,
    "conflict": Purpose.CONFLICT,
}


Cited: TypeAlias = tuple[str, tuple[str, ...]]
"""An insight's text and the ids of its sources."""
TYPE = "reflect"
UNIT = "reflections"
_WITH_LONG_TERM = (MemoryKind.HYBRID, MemoryKind.LONG_TERM)


class Jobs(BackgroundTask):
    """The runner: one job at a time. The engine starts and stops it."""

    def __init__(
        self, storage: Storage, models: EngineModels, runtime: Runtime, registry: Registry, recaller: Recaller
    ) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._registry = registry
        self._recaller = recaller
        self._wake = asyncio.Event()
        self._failures: dict[str, int] = {}
        self._quarantined: dict[str, float] = {}
        """Event-loop times at which quarantined jobs are retried, by job id."""

    def start(self) -> None:
        """Also jobs that were running are done again."""
        self._wake.set()
        super().start()

    def notify_jobs(self) -> None:
        """Called after a commit with jobs."""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            try:
                left = await self._run_round()
            except JournalError as error:
                log.warning("jobs_not_read", error=error)
                left = True
            if left:
                await asyncio.sleep(RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUARANTINE_S if self._quarantined else None):
                    await self._wake.wait()

    async def _run_round(self) -> bool:
        """Run the waiting jobs; True if some must be retried."""
        self._wake.clear()
        left = False
        away: set[str] = set()
        """Job types without a success in this round: their model may be down, while that of other types is not."""
        while waiting := await self._next_jobs(away):
            failed = [job.type for job in waiting if not await self._try_job(job)]
            left = left or bool(failed)
            if len(waiting) >= PAGE and not left:
                self._wake.set()  # there may be more
            if len(failed) < len(waiting):
                break
            away.update(failed)
        return left

    async def _next_jobs(self, away: Collection[str]) -> list[Job]:
        """The oldest jobs that this process must do. Jobs of other processes, quarantined ones and those of failing
        types must not hide them.
        """
        tended = await self._registry.ownership.select_tended()
        limit = PAGE + len(self._failures)
        while True:
            jobs = await self._storage.journal.list_jobs(limit)
            if len(jobs) < limit:
                self._forget_all_but({job.id for job in jobs})
            now_s = asyncio.get_running_loop().time()
            tried = [job for job in jobs if self._quarantined.get(job.id, now_s) <= now_s and job.type not in away]
            mine = [job for job in tried if tended(job.memory)]
            if mine or len(jobs) < limit:
                return mine
            limit *= 2

    def _forget_all_but(self, there: Collection[str]) -> None:
        """The jobs of a deleted memory are gone too."""
        self._failures = {id_: failures for id_, failures in self._failures.items() if id_ in there}
        self._quarantined = {id_: again_s for id_, again_s in self._quarantined.items() if id_ in there}

    async def _try_job(self, job: Job) -> bool:
        try:
            async with self._registry.use_uid(job.memory) as actor:
                await self._finish_job(actor, job)
        except MemoryNotFound:
            self._failures.pop(job.id, None)  # deleted with its memory
        except ModelError as error:
            log.info("job_waits_for_model", type=job.type, error=error)
            return False
        except (EngineError, JournalError, ValueError) as error:
            self._record_failure(job, error)
            return False
        except Exception as error:  # an unexpected error must not stop the other jobs
            log.exception("job_failed_unexpectedly", type=job.type)
            self._record_failure(job, error)
            return False
        else:
            self._failures.pop(job.id, None)
        return True

    def _record_failure(self, job: Job, error: Exception) -> None:
        self._failures[job.id] = self._failures.get(job.id, 0) + 1
        if self._failures[job.id] >= JOB_ATTEMPTS_MAX:
            self._quarantined[job.id] = asyncio.get_running_loop().time() + QUARANTINE_S
        log.warning("job_failed", type=job.type, attempt=self._failures[job.id], error=error)

    async def _finish_job(self, actor: Actor, job: Job) -> None:
        account = account_of(actor.working.record)
        try:
            await self._run_job(actor, job, account)
        except ModelRefused as error:
            # The model would refuse it again, at a price: end the job without a result.
            log.warning("job_refused_by_model", type=job.type, error=error)
            await actor.run(lambda _: _end_job(job, account))

    async def _run_job(self, actor: Actor, job: Job, account: Account) -> None:
        insights, judge = self._models.insights, self._models.judge
        if job.type == BACKFILL:
            await self._backfill_vectors(actor, job)
        elif job.type == "rating" and self._models.enricher.has_scorer:
            await self._rate_fragments(actor, job, account)
        elif job.type == "insight" and insights is not None:
            await self._derive_insights(actor, job, insights, account)
        elif job.type == "reflection" and insights is not None:
            since = actor.revision
            found = await self.derive_reflections(actor, account)
            await self.store_insights(actor, found, Decision(finish_jobs=(job.id,)), account, Purpose.REFLECTION, since)
        elif job.type == "conflict" and judge is not None:
            await ask_about_conflict(actor, job, judge, account, self._storage, self._runtime)
        elif job.type in _PURPOSES:
            await actor.run(lambda _: _end_job(job, account))  # the LLM that it needs is no longer configured
        else:
            raise ValueError(f"unknown job type {job.type!r}; a newer server may have entered it")

    # ---- insights
    async def _derive_insights(self, actor: Actor, job: Job, insights: Insights, account: Account) -> None:
        ids: list[str] = json.loads(job.payload)["fragments"]
        since = actor.revision
        sources = await self._read_unexpired(actor, ids)
        texts = [source.content for source in sources]
        said = await insights.promotion_insights(texts, account) if texts else []
        known = tuple(source.id for source in sources)
        end = Decision(finish_jobs=(job.id,))
        await self.store_insights(actor, [(text, known) for text in said], end, account, Purpose.INSIGHT, since)

    async def derive_reflections(self, actor: Actor, account: Account) -> list[Cited]:
        """Insights from questions about the latest fragments, with the evidence that they cite; empty without an LLM.

        Generative Agents (arXiv 2304.03442, section 4.2). Raises ModelUnavailable, ModelRefused.
        """
        insights = self._models.insights
        if insights is None:
            return []
        policy = actor.working.record.policy.reflection
        latest = await self._latest_fragments(actor, policy.fragments)
        found: list[Cited] = []
        for question in await insights.derive_questions([one.content for one in latest], policy.questions, account):
            answer = await self._recaller.recall(actor, Query(text=question, reinforce=False, working_memory=False))
            evidence = [recollection.fragment for recollection in answer.recollections]
            texts = [one.content for one in evidence]
            for text, cited in await insights.reflect(question, texts, policy.insights, account):
                found.append((text, tuple(evidence[place].id for place in cited if place < len(evidence))))
        return found

    async def _latest_fragments(self, actor: Actor, count: int) -> list[Fragment]:
        columns = actor.working.columns
        ttl_s = actor.working.record.policy.retention.ttl_s
        now_us = self._runtime.clock.now_us()
        there = visible(columns, now_us, ttl_s) & columns.tier_is((Tier.LONG_TERM,))
        current = columns.is_current(now_us) if actor.working.record.policy.recall.truth is Truth.CURRENT else None
        if current is not None:  # questions about outdated fragments would find no evidence
            there &= current
        return await self._read_unexpired(actor, [columns.ids[slot] for slot in there.nonzero()[0][-count:]])

    async def _read_unexpired(self, actor: Actor, ids: Sequence[str]) -> list[Fragment]:
        """Those of these ids that have not expired."""
        there = await self._storage.journal.get_fragments(actor.uid, ids)
        return drop_expired(there, actor.working.record, self._runtime.clock.now_us())

    async def store_insights(
        self, actor: Actor, found: Sequence[Cited], end: Decision, account: Account, purpose: Purpose, since: int
    ) -> None:
        """Insert insights into long-term with their sources, in one commit with `end`, the result of the job or
        operation.

        Skips insights with a source that was erased or rewritten after revision `since`: the LLM had read its old text.
        """
        fragments = [self._new_insight(actor, text, sources) for text, sources in found if text.strip()]
        record = actor.working.record
        gathered = await self._models.enricher.enrich_fragments(
            fragments, {}, [None] * len(fragments), record, account, actor.working.embedding
        )

        async def decide(now: Actor) -> Decision:  # reads the insights again: a request may have changed one
            stale = {id_ for id_, revision in now.working.stale.items() if revision > since}
            clean = [part for part in gathered if stale.isdisjoint(part.fragment.sources)]
            seen = [part.in_space(now.working.embedding.name) for part in clean]
            decision = self._decide_insights(now, end, seen, await self._insights_of(now))
            return decision.with_cost(account, purpose)

        await actor.run(decide)

    def _new_insight(self, actor: Actor, text: str, sources: tuple[str, ...]) -> Fragment:
        now_us = self._runtime.clock.now_us()
        return Fragment(
            id=self._runtime.ids.next_id(),
            content=text,
            tier=Tier.LONG_TERM,
            kind=FragmentKind.INSIGHT,
            observe_time_us=now_us,
            create_time_us=now_us,
            access_time_us=now_us,
            sources=sources,
            position=actor.producers.take_position(),
        )

    async def _insights_of(self, actor: Actor) -> list[Held]:
        ids = sorted(actor.working.insights)
        known = await self._read_unexpired(actor, ids)
        vectors = await self._storage.journal.get_vectors(actor.uid, actor.working.embedding.name, ids)
        return [Held(one, unpack_vector(vectors.get(one.id))) for one in known if one.forget_time_us is None]

    def _decide_insights(
        self, actor: Actor, end: Decision, gathered: Sequence[EnrichedFragment], others: Sequence[Held]
    ) -> Decision:
        working = actor.working
        policy = effective_policy(working.record.policy, self._models)
        state, steps, known = working.state, [], [other for other in others if other.fragment.id in working.columns]
        for part in gathered:
            step = lifecycle.insert_insight(state, Held(part.fragment, part.vector), known, policy)
            known = _add_insight(known, step, part.fragment.id, part.vector)
            state = step.state
            steps.append(step)
        if not steps:
            return end
        parts = {part.fragment.id: part for part in gathered}
        transition = join_all(steps)
        jobs = jobs_of(working, transition, gathered, self._runtime)
        return replace(end, transition=transition, gathered=parts, jobs=jobs)

    # ---- missing importances
    async def _rate_fragments(self, actor: Actor, job: Job, account: Account) -> None:
        """Rate fragments that were stored while the scorer was down, unless their importance was changed since."""
        payload = json.loads(job.payload)
        default: float = payload["importance"]
        lacking = await read_fragments(actor, payload["fragments"], self._storage)
        scores = await self._models.enricher.rate_texts([one.content for one in lacking], account)
        rated = {one.id: (one.content, score) for one, score in zip(lacking, scores, strict=True) if score is not None}

        async def decide(now: Actor) -> Decision:
            changed = [
                one.but(importance=rated[one.id][1])
                for one in await read_fragments(now, list(rated), self._storage)
                if not one.own_importance and one.importance == default and one.content == rated[one.id][0]
            ]
            transition = lifecycle.set_importances(now.working.state, changed) if changed else None
            return replace(_end_job(job, account), transition=transition)

        await actor.run(decide)

    # ---- missing vectors
    async def _backfill_vectors(self, actor: Actor, job: Job) -> None:
        """Embed fragments that have no vector: they were stored while the model was down, or it refused them before.
        Those that it refuses now stay without one, and are counted.

        Includes forgotten fragments, which may be restored.
        """
        for forgotten in (False, True):
            query = FragmentQuery(forgotten=forgotten, limit=PAGE)
            while page := await self._storage.journal.list_fragments(actor.uid, query):
                query = replace(query, after=page[-1].position)
                lacking = [fragment for fragment in page if not fragment.model]
                if lacking:
                    await self._fill_page(actor, lacking)
        await actor.run(lambda _: Decision(finish_jobs=(job.id,)))

    async def _fill_page(self, actor: Actor, lacking: Sequence[Fragment]) -> None:
        record, space = actor.working.record, actor.working.embedding.name
        gathered = await self._models.enricher.enrich_fragments(
            lacking,
            {},
            [fragment.importance for fragment in lacking],
            record,
            account_of(record),
            actor.working.embedding,
        )
        if any(part.is_missing for part in gathered):
            raise ModelError("the embedding model is still down")
        refused = [Made(part.fragment.id, part.fragment.version, None) for part in gathered if part.is_refused]
        if refused:
            await self._storage.journal.add_vectors(actor.uid, space, refused)
        filled = {part.fragment.id: part for part in gathered if part.vector is not None}
        if filled:

            async def decide(now: Actor) -> Decision | None:
                seen = {id_: part.in_space(now.working.embedding.name) for id_, part in filled.items()}
                made = {id_: part for id_, part in seen.items() if part.vector is not None}
                return _decide_fill(now, made, await read_fragments(now, list(made), self._storage))

            await actor.run(decide)


def _end_job(job: Job, account: Account) -> Decision:
    """The end of a job without a result, with its cost."""
    return Decision(finish_jobs=(job.id,)).with_cost(account, _PURPOSES[job.type])


def _add_insight(known: Sequence[Held], step: Transition, fragment_id: str, vector: Vector | None) -> list[Held]:
    """The known insights after a step: adds the new one, or updates the one that absorbed it."""
    changed = {put.id: put for put in step.puts}
    out = [replace(one, fragment=changed.get(one.fragment.id, one.fragment)) for one in known]
    if fragment_id in changed:
        out.append(Held(changed[fragment_id], vector))
    return out


def _decide_fill(actor: Actor, filled: dict[str, EnrichedFragment], found: Sequence[Fragment]) -> Decision | None:
    """A decision that adds vectors to those fragments of `found` that lack one and still have the embedded text."""
    current = [
        one.but(model=filled[one.id].fragment.model)
        for one in found
        if not one.model and indexed_text(one) == indexed_text(filled[one.id].fragment)
    ]
    if not current:
        return None
    transition = lifecycle.fill_vectors(
        actor.working.state, [Held(one, filled[one.id].content_vector) for one in current]
    )
    return Decision(transition=transition, gathered={one.id: filled[one.id] for one in current})


async def ask_about_conflict(
    actor: Actor, job: Job, judge: ConflictJudge, account: Account, storage: Storage, runtime: Runtime
) -> None:
    """Ask, decide, and end the job in the commit of the decision. Raises ModelUnavailable, ModelRefused."""
    named = json.loads(job.payload)
    newer, older = named["newer"], named["older"]
    asked = await _read_statements(actor, newer, older, storage, runtime)
    judgement = None if asked is None else await judge.judge(*asked, account)

    async def decide(now: Actor) -> Decision:
        end = Decision(finish_jobs=(job.id,)).with_cost(account, Purpose.CONFLICT)
        if judgement is None or await _read_statements(now, newer, older, storage, runtime) != asked:
            return end
        verdict = Verdict(newer, older, judgement.decision, f"{account.model}: {judgement.reason}")
        decision, _ = await decide_suspicion(now, verdict, storage, runtime)
        return replace(decision, finish_jobs=end.finish_jobs, events=(*decision.events, *end.events))

    await actor.run(decide)


async def _read_statements(
    actor: Actor, newer: str, older: str, storage: Storage, runtime: Runtime
) -> tuple[Statement, Statement] | None:
    """The newer and the older statement.

    None if there is nothing to ask: the policy is off, the suspicion has ended, or a fragment may not be suspected now.
    """
    working = actor.working
    policy = working.record.policy.conflicts
    if not (policy.suspect and policy.ask_llm and working.suspicions.is_open(newer, older)):
        return None
    read = await read_fragments(actor, (newer, older), storage)
    found = [one for one in drop_expired(read, working.record, runtime.clock.now_us()) if may_be_suspected(one)]
    return (_statement_of(found[0]), _statement_of(found[1])) if len(found) == len((newer, older)) else None


def _statement_of(fragment: Fragment) -> Statement:
    return Statement(fragment.content, fragment.speaker, fragment.observe_time_us)


class Reflecting:
    """Starts and runs the operation "reflect": a memory reflects now, whatever its aggregate.

    The insights and a mark of their completion are one commit. A repeat after a crash may call the LLM again, but keeps
    its result only once.
    """

    def __init__(
        self,
        runner: OperationRunner,
        jobs: Jobs,
        registry: Registry,
        storage: Storage,
        models: EngineModels,
        runtime: Runtime,
    ) -> None:
        self._runner = runner
        self._jobs = jobs
        self._registry = registry
        self._storage = storage
        self._models = models
        self._runtime = runtime
        runner.register_type(TYPE, UNIT, self._run_reflect)

    async def start(self, namespace: str, memory: str, answer: AnswerOf = None) -> Operation:
        """Raises MemoryNotFound, KindMismatch without a long-term tier, CapabilityMissing without an LLM."""
        record = await self._registry.read_record(namespace, memory)
        if record.kind not in _WITH_LONG_TERM:
            raise KindMismatch(f"a memory of kind {record.kind.name} has no long-term tier to reflect on")
        self._check_model()
        return await self._runner.start(TYPE, namespace, memory, "{}", answer)

    async def _run_reflect(self, operation: Operation, progress: Progress) -> None:
        self._check_model()
        mark = f"operation\n{operation.id}"
        if await self._storage.journal.get_answer(mark) is None:
            async with self._registry.use(operation.namespace, operation.memory) as actor:
                account = account_of(actor.working.record)
                done = Answer(mark, b"", b"", self._runtime.clock.now_us())
                since = actor.revision
                try:
                    found = await self._jobs.derive_reflections(actor, account)
                except ModelUnavailable as error:
                    raise ModelDown(f"the LLM does not answer: {error.summary}", retry_after_s=5.0) from error
                except ModelRefused:  # a permanent refusal: no insight can be derived
                    found = []
                await self._jobs.store_insights(actor, found, Decision(answer=done), account, Purpose.REFLECTION, since)
        await progress.report_done(1, 1)

    def _check_model(self) -> None:
        if self._models.insights is None:
            raise CapabilityMissing(
                "this server has no LLM for insights: set llm_model (and llm_insights), and restart it",
                capability="REFLECTION",
            )
