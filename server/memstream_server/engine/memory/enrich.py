"""Gathering: what a decision needs from models and analyzer, fetched before deciding."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import structlog

from memstream_server.core.policy import Policy, ShortTermKind
from memstream_server.core.rendering import clip_for_index, indexed_text, text_prefix
from memstream_server.core.values import Fragment, MemoryKind, Vector
from memstream_server.engine.runtime.embedding_spaces import Embedding, Embeddings
from memstream_server.engine.runtime.fair_scheduler import Turns
from memstream_server.engine.settings import Limits
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.rows import Terms
from memstream_server.ports.models import Account, Analyzer, ModelRefused, ModelUnavailable, Scorer

log = structlog.get_logger(__name__)


BESIDE_PAUSE_S = 10.0
"""How long the model of another space is left alone after it gave no answer in time."""
TURN = 8
"""Texts analysed in one turn: some 0.4 ms."""
TEXTS = 32
"""Texts that become vectors in one turn, of a model that nobody waits for: some 0.7 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """A fragment's vectors in one space."""

    space: str
    vector: Vector | None = None
    """Of the indexed text."""
    content_vector: Vector | None = None
    """Of the content alone, where the policy compares it."""
    refused: bool = False
    """The model refuses this input for good."""
    missing: bool = False
    """The model was down: the vector is to be filled in later."""


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A fragment with all that was fetched for it."""

    fragment: Fragment
    """With importance and `model` (the vector's space, empty without one) set."""
    terms: Terms
    embedded: Embedded
    beside: Embedded | None = None
    """The same in another space, while there are two."""
    unrated: bool = False
    """The scorer was down: the importance is to be rated later."""

    @property
    def vector(self) -> Vector | None:
        return self.embedded.vector

    @property
    def content_vector(self) -> Vector | None:
        return self.embedded.content_vector

    @property
    def refused(self) -> bool:
        return self.embedded.refused

    @property
    def missing(self) -> bool:
        return self.embedded.missing

    def under(self, space: str) -> Gathered:
        """As a memory in that space sees it, which may have changed since it was gathered."""
        if space == self.embedded.space:
            return self
        seen = self.beside if self.beside is not None and self.beside.space == space else Embedded(space, missing=True)
        model = "" if seen.vector is None else space
        fragment = self.fragment.but(model=model, own_vector=False)
        return replace(self, fragment=fragment, embedded=seen, beside=self.embedded)


class Gatherer:
    """Asks analyzer, embedder and scorer for batches of fragments."""

    def __init__(
        self,
        analyzer: Analyzer,
        embeddings: Embeddings,
        scorer: Scorer | None,
        limits: Limits,
        turns: Turns,
    ) -> None:
        self._analyzer = analyzer
        self._embeddings = embeddings
        self._scorer = scorer
        self._retry_s = limits.model_retry_s
        self._beside_s = limits.embed_deadline_s
        self._turns = turns
        self._beside_again_s = 0.0
        """When a model that was asked beside and did not answer is asked again, on the event loop's clock."""

    async def gather(
        self,
        fragments: Sequence[Fragment],
        own_vectors: Mapping[str, Vector],
        own_importances: Sequence[float | None],
        record: MemoryRecord,
        account: Account,
        embedding: Embedding | None = None,
    ) -> list[Gathered]:
        """One Gathered per fragment, in order. Waits for models only where the policy of `record` does.

        embedding: the space of the memory they are for, the one in force if None; vectors are made in the other one,
        too, while there are two. `own_vectors` are of the space in force.
        """
        kind, policy = record.kind, record.policy
        using = embedding or self._embeddings.in_force
        other = self._embeddings.beside(using.name)
        importances, unrated = await self._importances(fragments, own_importances, policy, account)
        content = compares_content(kind, policy)
        own = self._own(own_vectors, using)
        in_space = self._vectors(fragments, own, content, record, using)
        beside: Sequence[Embedded | None] = [None] * len(fragments)
        if other is None or not fragments:
            vectors = await in_space
        else:
            in_other = self._beside(fragments, self._own(own_vectors, other), content, record, other)
            vectors, beside = await asyncio.gather(in_space, in_other)
        flagged = [one.but(own_vector=one.id in own) if one.own_vector else one for one in fragments]
        found = list(zip(flagged, importances, vectors, beside, strict=True))
        out: list[Gathered] = []
        for start in range(0, len(found), TURN):
            async with self._turns.of(record.namespace):
                out.extend(self._one(*each, record) for each in found[start : start + TURN])
        return [replace(part, unrated=True) if place in unrated else part for place, part in enumerate(out)]

    def _own(self, vectors: Mapping[str, Vector], embedding: Embedding) -> Mapping[str, Vector]:
        return vectors if embedding.name == self._embeddings.in_force.name else {}

    def _one(
        self, fragment: Fragment, importance: float, embedded: Embedded, beside: Embedded | None, record: MemoryRecord
    ) -> Gathered:
        return Gathered(
            fragment=fragment.but(importance=importance, model="" if embedded.vector is None else embedded.space),
            terms=analyze_fragment(self._analyzer, fragment, record),
            embedded=embedded,
            beside=beside,
        )

    async def content_vectors(
        self, texts: Sequence[str], record: MemoryRecord, embedding: Embedding
    ) -> npt.NDArray[np.float32]:
        """Vectors of contents alone, (len(texts), dimension). Raises ModelUnavailable or ModelRefused."""
        return await embedding.embedder.embed([clip_for_index(text) for text in texts], record.namespace)

    async def embedded(
        self, fragments: Sequence[Fragment], content: bool, record: MemoryRecord, embedding: Embedding
    ) -> list[Embedded]:
        """Vectors in one space, in order. Waits for the model only where the memory's policy does."""
        return await self._vectors(fragments, {}, content, record, embedding)

    async def _beside(
        self,
        fragments: Sequence[Fragment],
        own: Mapping[str, Vector],
        content: bool,
        record: MemoryRecord,
        embedding: Embedding,
    ) -> Sequence[Embedded | None]:
        """The same in another space, if its model answers in time: what it misses is found later."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._beside_again_s:
            return [None] * len(fragments)
        try:
            async with asyncio.timeout(self._beside_s):
                made = await self._vectors(fragments, own, content, record, embedding)
        except TimeoutError:
            made = []
        if not made or made[0].missing:  # not every group is to wait for it
            self._beside_again_s = now_s + BESIDE_PAUSE_S
            return [None] * len(fragments)
        return made

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
                    log.warning("scorer_unavailable", error=error, observations=len(wanted))
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
                log.warning("scorer_refused", error=error, observations=len(refused))
                places = [place for number, place in enumerate(places) if number not in refused]
            else:
                for place, score in zip(places, scores, strict=True):
                    out[place] = score
                break
        return out

    async def _vectors(
        self,
        fragments: Sequence[Fragment],
        own: Mapping[str, Vector],
        content: bool,
        record: MemoryRecord,
        embedding: Embedding,
    ) -> list[Embedded]:
        wanted = [fragment for fragment in fragments if fragment.id not in own]
        texts = [indexed_text(fragment) for fragment in wanted]
        if content:
            texts += [clip_for_index(fragment.content) for fragment in wanted]
        found, missing = await self._embed(texts, record, embedding)
        by_id = {
            fragment.id: (found[place], found[place + len(wanted)] if content else None)
            for place, fragment in enumerate(wanted)
        }
        out: list[Embedded] = []
        for fragment in fragments:
            if fragment.id in own:
                out.append(Embedded(embedding.name, own[fragment.id], own[fragment.id]))
                continue
            vector, compared = by_id[fragment.id]
            shown = compared if content else vector
            out.append(Embedded(embedding.name, vector, shown, vector is None and not missing, missing))
        return out

    async def _embed(
        self, texts: list[str], record: MemoryRecord, embedding: Embedding
    ) -> tuple[list[Vector | None], bool]:
        """A vector per text, None for refused ones; (all None, True) when the model is down and is not waited for."""
        out: list[Vector | None] = [None] * len(texts)
        places = list(range(len(texts)))
        pause = self._retry_s
        while places:
            try:
                rows = await self._rows([texts[place] for place in places], record, embedding)
            except ModelRefused as error:
                refused = set(error.inputs) or set(range(len(places)))
                log.warning("model_refused", error=error, inputs=len(refused))
                places = [place for number, place in enumerate(places) if number not in refused]
            except ModelUnavailable as error:
                if not record.policy.wait_for_models:
                    log.warning("embedder_unavailable", error=error, texts=len(places))
                    return [None] * len(texts), True
                await asyncio.sleep(pause)
                pause = min(pause * 2, 30.0)
            else:
                for place, row in zip(places, rows, strict=True):
                    out[place] = row
                break
        return out, False

    async def _rows(self, texts: list[str], record: MemoryRecord, embedding: Embedding) -> Sequence[Vector]:
        """One each, of nothing that is refused. What is computed here takes turns."""
        if not embedding.model.instant:
            return list(await embedding.embedder.embed(texts, record.namespace))
        rows: list[Vector] = []
        for start in range(0, len(texts), TEXTS):
            async with self._turns.of(record.namespace):
                rows.extend(await embedding.embedder.embed(texts[start : start + TEXTS], record.namespace))
        return rows


def analyze_fragment(analyzer: Analyzer, fragment: Fragment, record: MemoryRecord) -> Terms:
    """The terms under which a fragment is indexed. A long content is clipped."""
    content = clip_for_index(fragment.content)
    return analyzer.terms(content, record.policy.language, record.namespace, text_prefix(fragment))


def enhances_short_term(kind: MemoryKind, policy: Policy) -> bool:
    """Whether new fragments are compared with those in short-term."""
    if kind is MemoryKind.HYBRID:
        return policy.short_term.kind is ShortTermKind.ENHANCED
    return kind is MemoryKind.ENHANCED_SHORT_TERM


def compares_content(kind: MemoryKind, policy: Policy) -> bool:
    """Whether this memory needs vectors of the content alone: its short-term tier enhances, and by content."""
    return enhances_short_term(kind, policy) and policy.short_term.compare_content
