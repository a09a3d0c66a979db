"""Gathering: what a decision needs from models and analyzer, fetched before deciding."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import structlog

from memstream_server.core.policy import Policy, ShortTermKind
from memstream_server.core.rendering import clip_for_index, indexed_text, lexical_text
from memstream_server.core.values import Fragment, MemoryKind, Vector
from memstream_server.engine.turns import Turns
from memstream_server.ports.journal import MemoryRecord, Terms
from memstream_server.ports.models import Account, Analyzer, Embedder, ModelRefused, ModelUnavailable, Scorer

log = structlog.get_logger(__name__)


TURN = 64
"""Texts analysed in one turn: some 3 ms."""
_Vectors = tuple[Vector | None, Vector | None, bool, bool]
"""(indexed, of the content, refused, missing)"""


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A fragment with all that was fetched for it."""

    fragment: Fragment
    """With importance and `model` (the vector's space, empty without one) set."""
    terms: Terms
    vector: Vector | None
    """Of the indexed text."""
    content_vector: Vector | None
    """Of the content alone, where the policy compares it."""
    refused: bool = False
    """The model refuses this input for good."""
    missing: bool = False
    """The model was down: the vector is to be filled in later."""
    unrated: bool = False
    """The scorer was down: the importance is to be rated later."""


class Gatherer:
    """Asks analyzer, embedder and scorer for batches of fragments."""

    def __init__(
        self,
        analyzer: Analyzer,
        embedder: Embedder,
        model_name: str,
        scorer: Scorer | None,
        retry_s: float,
        turns: Turns,
    ) -> None:
        self._analyzer = analyzer
        self._embedder = embedder
        self._model = model_name
        self._scorer = scorer
        self._retry_s = retry_s
        self._turns = turns

    async def gather(
        self,
        fragments: Sequence[Fragment],
        own_vectors: Mapping[str, Vector],
        own_importances: Sequence[float | None],
        record: MemoryRecord,
        account: Account,
    ) -> list[Gathered]:
        """One Gathered per fragment, in order. Waits for models only where the policy of `record` does."""
        kind, policy = record.kind, record.policy
        importances, unrated = await self._importances(fragments, own_importances, policy, account)
        vectors = await self._vectors(fragments, own_vectors, compares_content(kind, policy), policy)
        found = list(zip(fragments, importances, vectors, strict=True))
        out: list[Gathered] = []
        for start in range(0, len(found), TURN):
            async with self._turns:
                out.extend(self._one(*each, policy.language) for each in found[start : start + TURN])
        return [replace(part, unrated=True) if place in unrated else part for place, part in enumerate(out)]

    def _one(self, fragment: Fragment, importance: float, vectors: _Vectors, language: str) -> Gathered:
        vector, content_vector, refused, missing = vectors
        return Gathered(
            fragment=fragment.but(importance=importance, model="" if vector is None else self._model),
            terms=self._analyzer.terms(lexical_text(fragment), language),
            vector=vector,
            content_vector=content_vector,
            refused=refused,
            missing=missing,
        )

    async def content_vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Vectors of contents alone, (len(texts), dimension). Raises ModelUnavailable or ModelRefused."""
        return await self._embedder.embed([clip_for_index(text) for text in texts])

    async def _importances(
        self, fragments: Sequence[Fragment], own: Sequence[float | None], policy: Policy, account: Account
    ) -> tuple[list[float], set[int]]:
        """An importance each, and the places of those that the scorer is to rate once it is back."""
        given = own or [None] * len(fragments)
        out = [policy.importance_default if value is None else value for value in given]
        wanted = [place for place, value in enumerate(given) if value is None]
        if not self.rates or not policy.score_importance or not wanted:
            return out, set()
        pause = self._retry_s
        while True:
            try:
                scores = await self.ratings([fragments[place].content for place in wanted], account)
            except ModelUnavailable as error:
                if not policy.wait_for_models:
                    log.warning("scorer_unavailable", error=str(error), observations=len(wanted))
                    return out, set(wanted)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 30.0)
            else:
                for place, score in zip(wanted, scores, strict=True):
                    out[place] = out[place] if score is None else score
                return out, set()

    @property
    def rates(self) -> bool:
        """Whether there is a scorer."""
        return self._scorer is not None

    async def ratings(self, texts: Sequence[str], account: Account) -> list[float | None]:
        """The scorer's importance of each text, None where it refuses to rate it. Raises ModelUnavailable."""
        out: list[float | None] = [None] * len(texts)
        places = list(range(len(texts)))
        while places and self._scorer is not None:
            try:
                scores = await self._scorer.score([texts[place] for place in places], account)
            except ModelRefused as error:
                refused = set(error.inputs) or set(range(len(places)))
                log.warning("scorer_refused", error=str(error), observations=len(refused))
                places = [place for number, place in enumerate(places) if number not in refused]
            else:
                for place, score in zip(places, scores, strict=True):
                    out[place] = score
                break
        return out

    async def _vectors(
        self, fragments: Sequence[Fragment], own: Mapping[str, Vector], content: bool, policy: Policy
    ) -> list[_Vectors]:
        wanted = [fragment for fragment in fragments if fragment.id not in own]
        texts = [indexed_text(fragment) for fragment in wanted]
        if content:
            texts += [clip_for_index(fragment.content) for fragment in wanted]
        found, missing = await self._embed(texts, policy)
        by_id = {
            fragment.id: (found[place], found[place + len(wanted)] if content else None)
            for place, fragment in enumerate(wanted)
        }
        out: list[_Vectors] = []
        for fragment in fragments:
            if fragment.id in own:
                out.append((own[fragment.id], own[fragment.id], False, False))
                continue
            vector, compared = by_id[fragment.id]
            out.append((vector, compared if content else vector, vector is None and not missing, missing))
        return out

    async def _embed(self, texts: list[str], policy: Policy) -> tuple[list[Vector | None], bool]:
        """A vector per text, None for refused ones; (all None, True) when the model is down and is not waited for."""
        out: list[Vector | None] = [None] * len(texts)
        places = list(range(len(texts)))
        pause = self._retry_s
        while places:
            try:
                rows = await self._embedder.embed([texts[place] for place in places])
            except ModelRefused as error:
                refused = set(error.inputs) or set(range(len(places)))
                log.warning("model_refused", error=str(error), inputs=len(refused))
                places = [place for number, place in enumerate(places) if number not in refused]
            except ModelUnavailable as error:
                if not policy.wait_for_models:
                    log.warning("embedder_unavailable", error=str(error), texts=len(places))
                    return [None] * len(texts), True
                await asyncio.sleep(pause)
                pause = min(pause * 2, 30.0)
            else:
                for place, row in zip(places, rows, strict=True):
                    out[place] = row
                break
        return out, False


def compares_content(kind: MemoryKind, policy: Policy) -> bool:
    """Whether this memory needs vectors of the content alone: its short-term tier enhances, and by content."""
    enhances = kind is MemoryKind.ENHANCED_SHORT_TERM or (
        kind is MemoryKind.HYBRID and policy.short_term.kind is ShortTermKind.ENHANCED
    )
    return enhances and policy.short_term.compare_content
