"""Receipts of recalls: kept in the memory's order before the answer is sent, listed, and replayed.

Rule 1. A receipt is written by a commit with the event RECALLED; only then does the answer name it. It changes nothing
else.
Rule 2. A receipt holds no words that were erased before its commit: an answer from before an erasure is ranked again.
Rule 3. A replay ranks the memory as of the receipt's revision by its query, policy and times, and compares. It guesses
nothing: what is gone is absent and named.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as replaced
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from memstream_server.core.events import Event, EventType
from memstream_server.core.scores import Scored
from memstream_server.core.timeline import Loss
from memstream_server.engine.errors import NOT_READ, FragmentNotFound, JournalUnavailable
from memstream_server.engine.memory.decision import Decision, pack_vector
from memstream_server.engine.quotas import find_receipts_full
from memstream_server.engine.requests import AsOf, Evidence, Query, RecallAnswer
from memstream_server.engine.runtime.call_context import PRINCIPAL
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import RankedFragment, RecallReceipt

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.recall.answers import PartialAnswer
    from memstream_server.engine.recall.past import Past, PastMemory
    from memstream_server.engine.recall.recall import Recaller
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

NAMED_MAX = 1_000
"""Missing fragments that a replay names."""


class DifferenceType(StrEnum):
    """What differs between a receipt and its replay."""

    FRAGMENT_ERASED = "fragment_erased"
    FRAGMENT_REMOVED = "fragment_removed"
    VERSION_NOT_KEPT = "version_not_kept"
    QUERY_ERASED = "query_erased"
    FORMULA = "formula"
    EMBEDDING_MODEL = "embedding_model"
    LANGUAGE = "language"
    DEGRADED = "degraded"
    INDEX = "index"  # the vector index chose the candidates
    UNEXPLAINED = "unexplained"


_OF_LOSS = {
    Loss.ERASED: DifferenceType.FRAGMENT_ERASED,
    Loss.REMOVED: DifferenceType.FRAGMENT_REMOVED,
    Loss.VERSION_NOT_KEPT: DifferenceType.VERSION_NOT_KEPT,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: of a fragment, or of a value."""

    type: DifferenceType
    fragment: str = ""
    recorded: str = ""
    present: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A receipt, and the ranking as of its revision."""

    receipt: RecallReceipt
    answer: RecallAnswer | None
    """None if the query was erased."""
    same: bool
    """Whether ids, scores, relevances and parts are equal to the last bit."""
    differences: tuple[Difference, ...]


class RecallReceipts:
    """The receipts of all memories; a part of the engine."""

    def __init__(
        self,
        storage: Storage,
        models: EngineModels,
        runtime: Runtime,
        registry: Registry,
        past: Past,
        recaller: Recaller,
    ) -> None:
        self._journal = storage.journal
        self._models = models
        self._runtime = runtime
        self._registry = registry
        self._past = past
        self._recaller = recaller

    async def rank_and_keep(
        self, actor: Actor, query: Query, rank: Callable[[], Awaitable[PartialAnswer]]
    ) -> PartialAnswer:
        """The part of `rank`, and the memory's own answer with its receipt, which is durable; without one if the policy
        keeps none, or if the namespace's quota is used up: then `degraded` says so."""
        while True:
            part = await rank()
            answer = await self._recaller.complete([part], query)
            receipt = self._make_receipt(actor, query, answer)
            if receipt is None:
                return replaced(part, own=answer)
            full = await find_receipts_full(self._journal, self._runtime.limits, actor.working.record.namespace)
            if full is not None:
                return _with_receipt(part, answer, "", f"no receipt: {full.message}")
            is_outdated, is_kept = False, False

            def decide(now: Actor, receipt: RecallReceipt = receipt) -> Decision | None:
                nonlocal is_outdated, is_kept
                is_outdated = now.working.erase_revision > receipt.revision
                is_kept = not is_outdated and now.working.record.policy.history.receipts > 0
                event = Event(EventType.RECALLED, "", receipt=receipt.id)
                return Decision(events=(event,), recall_receipt=receipt) if is_kept else None

            await actor.run(decide)
            if not is_outdated:
                return _with_receipt(part, answer, receipt.id if is_kept else "")

    def _make_receipt(self, actor: Actor, query: Query, answer: RecallAnswer) -> RecallReceipt | None:
        evidence = answer.evidence
        if evidence is None or not actor.working.record.policy.history.receipts:
            return None
        ranking, names, weights = _build_ranking(answer)
        return RecallReceipt(
            id=self._runtime.ids.next_id(),
            revision=answer.revision,
            time_us=evidence.expiry_us,
            now_us=evidence.now_us,
            formula=answer.formula,
            space=evidence.space,
            policy=evidence.policy,
            query=query.receipt,
            vector=self._vector_to_keep(actor, evidence),
            embedded=evidence.vector is not None,
            terms=evidence.terms.hashes,
            analyzer=evidence.terms.version,
            ranking=ranking,
            names=names,
            weights=weights,
            suspicions=evidence.suspicions,
            accesses=evidence.accesses,
            indexed=evidence.indexed,
            principal=PRINCIPAL.get(),
            degraded=answer.degraded,
        )

    def _vector_to_keep(self, actor: Actor, evidence: Evidence) -> bytes | None:
        """Of an embedder that may give another vector, or costs a request; a client's is part of the query."""
        if evidence.vector is None or not evidence.embedded or actor.working.embedding.model.instant:
            return None
        return pack_vector(evidence.vector)

    async def list_page(
        self, namespace: str, name: str, before: int | None, limit: int
    ) -> tuple[list[tuple[int, RecallReceipt]], bool, str]:
        """((revision of the commit, receipt) before that revision, the latest first; whether there are more; memory
        uid)."""
        record = await self._registry.read_record(namespace, name)
        found, more = await self._journal.list_recall_receipts(record.uid, before, limit)
        return found, more, record.uid

    async def replay(self, namespace: str, name: str, receipt_id: str, read_query: Callable[[bytes], Query]) -> Replay:
        """Rank again. Raises FragmentNotFound for an unknown receipt, CursorCompacted.

        read_query: reads the query as the client sent it.
        """
        record = await self._registry.read_record(namespace, name)
        receipt = await self._journal.get_recall_receipt(record.uid, receipt_id)
        if receipt is None:
            raise FragmentNotFound(f"{namespace}/{name} has no receipt {receipt_id!r}", id=receipt_id)
        erased = [Difference(DifferenceType.FRAGMENT_ERASED, id_) for id_ in receipt.erased]
        if receipt.is_query_erased:
            return Replay(receipt, None, False, (Difference(DifferenceType.QUERY_ERASED), *erased))
        query = self._restore_query(receipt, read_query(receipt.query))
        try:
            async with self._past.limit_loads():
                past = await self._past.load(namespace, name, AsOf(revision=receipt.revision), receipt)
                answer = await self._recaller.recall(past, query)
        except JournalError as error:
            raise JournalUnavailable(NOT_READ, retry_after_s=0.5) from error
        same = _list_scores(receipt) == _list_scores_of(answer)
        found = [*_list_missing(receipt, past), *_list_changed(receipt, answer, past)]
        if record.policy.language != receipt.policy.language:
            found.append(
                Difference(DifferenceType.LANGUAGE, recorded=receipt.policy.language, present=record.policy.language)
            )
        if not same and not found:
            found.append(Difference(DifferenceType.UNEXPLAINED))
        return Replay(receipt, replace(answer, as_of_revision=answer.revision), same, tuple(found))

    def _restore_query(self, receipt: RecallReceipt, query: Query) -> Query:
        space = self._models.embeddings.in_force.name
        known = None if receipt.vector is None or space != receipt.space else np.frombuffer(receipt.vector, "<f4")
        return replace(
            query,
            vector=query.vector if known is None else known,
            unembedded="" if receipt.embedded else receipt.degraded or "the recall had no query vector",
            now_us=receipt.now_us,
            expiry_us=receipt.time_us,
            explain=True,
            min_revision=0,
            time_s=None,
            reinforce=False,
            receipt=b"",
        )


def _with_receipt(part: PartialAnswer, own: RecallAnswer, receipt_id: str, lacks: str = "") -> PartialAnswer:
    def kept(answer: RecallAnswer) -> RecallAnswer:
        degraded = "; ".join(filter(None, (answer.degraded, lacks)))
        return replace(answer, receipt_id=receipt_id, degraded=degraded)

    return replaced(part, answer=kept(part.answer), own=kept(own))


def _build_ranking(
    answer: RecallAnswer,
) -> tuple[tuple[RankedFragment, ...], tuple[tuple[str, ...], ...], tuple[tuple[float, ...], ...]]:
    """(ranking, names, weights): what recollections share is stored once."""
    names: dict[tuple[str, ...], int] = {}
    weights: dict[tuple[float, ...], int] = {}
    ranking = tuple(
        RankedFragment(
            scored.id,
            scored.score,
            scored.relevance,
            names.setdefault(scored.names, len(names)),
            weights.setdefault(scored.weights, len(weights)),
            scored.values,
            is_companion,
        )
        for scored, is_companion in _list_scored(answer)
    )
    return ranking, tuple(names), tuple(weights)


def _list_scored(answer: RecallAnswer) -> Iterator[tuple[Scored, bool]]:
    """The recollections, each followed by its companion; whether it is one."""
    for one in answer.recollections:
        yield one.scored, False
        if one.companion is not None:
            yield one.companion.scored, True


_Scores = list[tuple[str, float, float, tuple[str, ...], tuple[float, ...], tuple[float, ...]]]


def _list_scores(receipt: RecallReceipt) -> _Scores:
    return [
        (one.id, one.score, one.relevance, receipt.names[one.names], one.values, receipt.weights[one.weights])
        for one in receipt.ranking
    ]


def _list_scores_of(answer: RecallAnswer) -> _Scores:
    scored = (one for one, _ in _list_scored(answer))
    return [(one.id, one.score, one.relevance, one.names, one.values, one.weights) for one in scored]


def _list_missing(receipt: RecallReceipt, past: PastMemory) -> Iterator[Difference]:
    """The fragments that are absent: first those of the ranking."""
    ranked = {one.id for one in receipt.ranking}
    first = sorted(past.missing, key=lambda id_: id_ not in ranked)
    for id_ in first[:NAMED_MAX]:
        yield Difference(_OF_LOSS[past.missing[id_]], id_)


def _list_changed(receipt: RecallReceipt, answer: RecallAnswer, past: PastMemory) -> Iterator[Difference]:
    """What the server computes otherwise now, or may."""
    values = (
        (DifferenceType.FORMULA, receipt.formula, answer.formula),
        (DifferenceType.EMBEDDING_MODEL, receipt.space, past.working.embedding.name),
        (DifferenceType.DEGRADED, receipt.degraded, answer.degraded),
    )
    for kind, recorded, present in values:
        if recorded != present:
            yield Difference(kind, recorded=recorded, present=present)
    if receipt.indexed:
        yield Difference(DifferenceType.INDEX)
