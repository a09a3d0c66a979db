"""Enrichment: fetches what a decision needs from models and the analyzer, before the decision.

A working set belongs to the embedding space that was in force when it was loaded. Vectors of two spaces are never
compared: callers embed with the model of the working set, and `EnrichedFragment.in_space` converts results after a
switch. `Embeddings` has the spaces of this process: the one in force, and the next one while it is filled.

Stored terms of another version of the analyzer are made again while a memory is read (`renew_terms`). The journal keeps
the old ones: they are replaced when the fragment is next written with its content. A change of the analyzer therefore
needs no migration, and an older server with the same journal does the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import structlog

from memstream_server.core.policy import Policy, ShortTermKind
from memstream_server.core.rendering import clip_for_index, indexed_text, text_prefix
from memstream_server.core.values import Fragment, MemoryKind, Vector, round_vectors
from memstream_server.engine.runtime.turns import pause_if_due
from memstream_server.engine.settings import EngineLimits
from memstream_server.ports.journal.records import MemoryRecord, Space
from memstream_server.ports.journal.rows import RowBlock, Terms
from memstream_server.ports.models import (
    Account,
    Analyzer,
    Embedder,
    EmbeddingModel,
    ModelRefused,
    ModelUnavailable,
    Scorer,
)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A space and the embedder that makes its vectors."""

    model: EmbeddingModel
    embedder: Embedder
    name: str = field(init=False)
    """The model's, which every step of a batch compares."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.model.name)

    def as_space(self, index_layout: int) -> Space:
        return Space(self.model.name, self.model.dimension, index_layout)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """The model that the settings name as the next one."""

    embedder: Embedder
    name: str = ""
    """The name of its space; empty if only the model endpoint knows it."""

    async def find_name(self) -> str:
        return self.name or (await self.embedder.model()).name

    async def make_embedding(self, known: Space | None) -> Embedding:
        """The candidate's space; `known` is the journal's record of an earlier answer. Raises ModelUnavailable."""
        if self.name and known is not None and known.model == self.name:
            return Embedding(EmbeddingModel(self.name, known.dimension), self.embedder)
        return Embedding(await self.embedder.model(), self.embedder)


@dataclass(slots=True, eq=False)
class Embeddings:
    """The spaces in use. Only operations/reembed.py changes them."""

    in_force: Embedding
    """The space of every memory that is loaded from now on."""
    next: Embedding | None = None
    """The space that new fragments are embedded in as well, until all older ones are."""
    candidate: Candidate | None = None
    """The model that can become the next one."""

    def other_than(self, name: str) -> Embedding | None:
        """The second space in which a memory of space `name` keeps vectors; None if there is only one space."""
        for one in (self.next, self.in_force):
            if one is not None and one.name != name:
                return one
        return None


log = structlog.get_logger(__name__)


OTHER_SPACE_PAUSE_S = 10.0
"""Pause of the second space's model after it did not answer in time."""
ANALYZED_PER_SLICE = 8
"""Texts analyzed per slice, about 0.4 ms."""
EMBEDDED_PER_SLICE = 32
"""Texts embedded per slice with an in-process model, about 0.7 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """A fragment's vectors in one space."""

    space: str
    vector: Vector | None = None
    """Vector of the indexed text."""
    content_vector: Vector | None = None
    """Vector of the content alone, if the policy compares it."""
    refused: bool = False
    """The model refuses this input permanently."""
    missing: bool = False
    """The model was down: a backfill job makes the vector later."""
    computed: bool = False
    """The vectors follow from the text, in a space that is computed."""


@dataclass(frozen=True, slots=True, eq=False)
class EnrichedFragment:
    """A fragment with its terms, vectors and importance."""

    fragment: Fragment
    """With importance and `model` set; `model` is the space of the vector, empty without a vector."""
    terms: Terms
    embedded: Embedded
    beside: Embedded | None = None
    """Its vectors in the second space, while there are two."""
    unrated: bool = False
    """The scorer was down: a job rates the importance later."""

    @property
    def vector(self) -> Vector | None:
        return self.embedded.vector

    @property
    def content_vector(self) -> Vector | None:
        return self.embedded.content_vector

    @property
    def is_refused(self) -> bool:
        return self.embedded.refused

    @property
    def is_missing(self) -> bool:
        return self.embedded.missing

    def in_space(self, space: str) -> EnrichedFragment:
        """A view for a memory in `space`, which may have changed since the enrichment."""
        if space == self.embedded.space:
            return self
        seen = self.beside if self.beside is not None and self.beside.space == space else Embedded(space, missing=True)
        model = "" if seen.vector is None else space
        fragment = self.fragment.but(model=model, own_vector=False)
        return replace(self, fragment=fragment, embedded=seen, beside=self.embedded)


class Enricher:
    """Calls the analyzer, the embedder and the scorer for batches of fragments."""

    def __init__(self, analyzer: Analyzer, embeddings: Embeddings, scorer: Scorer | None, limits: EngineLimits) -> None:
        self._analyzer = analyzer
        self._embeddings = embeddings
        self._scorer = scorer
        self._retry_s = limits.model_retry_s
        self._other_timeout_s = limits.embed_deadline_s
        self._other_retry_at_s = 0.0
        """Event-loop time of the next attempt after the second space's model did not answer."""

    async def enrich_fragments(
        self,
        fragments: Sequence[Fragment],
        own_vectors: Mapping[str, Vector],
        own_importances: Sequence[float | None],
        record: MemoryRecord,
        account: Account,
        embedding: Embedding | None = None,
    ) -> list[EnrichedFragment]:
        """One EnrichedFragment per fragment, in order. Waits for a model that is down only if the policy of `record`
        says so.

        embedding: the space of their memory; None: the space in force. While there are two spaces, vectors are made in
        both. `own_vectors` are in the space in force.
        """
        kind, policy = record.kind, record.policy
        using = embedding or self._embeddings.in_force
        other = self._embeddings.other_than(using.name)
        importances, unrated = await self._rate_importances(fragments, own_importances, policy, account)
        content = compares_content(kind, policy)
        own = self._own_vectors(own_vectors, using)
        in_space = self._make_vectors(fragments, own, content, record, using)
        beside: Sequence[Embedded | None] = [None] * len(fragments)
        if other is None or not fragments:
            vectors = await in_space
        else:
            in_other = self._embed_in_other(fragments, self._own_vectors(own_vectors, other), content, record, other)
            vectors, beside = await asyncio.gather(in_space, in_other)
        flagged = [one.but(own_vector=one.id in own) if one.own_vector else one for one in fragments]
        out: list[EnrichedFragment] = []
        for place, each in enumerate(zip(flagged, importances, vectors, beside, strict=True)):
            if place and place % ANALYZED_PER_SLICE == 0:
                await pause_if_due()
            out.append(self._enrich_one(*each, record, place in unrated))
        return out

    def _own_vectors(self, vectors: Mapping[str, Vector], embedding: Embedding) -> Mapping[str, Vector]:
        return vectors if embedding.name == self._embeddings.in_force.name else {}

    def _enrich_one(
        self,
        fragment: Fragment,
        importance: float,
        embedded: Embedded,
        beside: Embedded | None,
        record: MemoryRecord,
        unrated: bool,
    ) -> EnrichedFragment:
        return EnrichedFragment(
            fragment=fragment.but(importance=importance, model="" if embedded.vector is None else embedded.space),
            terms=analyze_fragment(self._analyzer, fragment, record),
            embedded=embedded,
            beside=beside,
            unrated=unrated,
        )

    async def embed_contents(
        self, texts: Sequence[str], record: MemoryRecord, embedding: Embedding
    ) -> npt.NDArray[np.float32]:
        """Vectors of contents alone, shape (len(texts), dimension). Raises ModelUnavailable or ModelRefused."""
        rows = await embedding.embedder.embed([clip_for_index(text) for text in texts], record.namespace)
        return rows if embedding.model.computed else round_vectors(rows)

    async def embed_fragments(
        self, fragments: Sequence[Fragment], content: bool, record: MemoryRecord, embedding: Embedding
    ) -> list[Embedded]:
        """Vectors in one space, in order. Waits for a model that is down only if the memory's policy says so."""
        return await self._make_vectors(fragments, {}, content, record, embedding)

    async def _embed_in_other(
        self,
        fragments: Sequence[Fragment],
        own: Mapping[str, Vector],
        content: bool,
        record: MemoryRecord,
        embedding: Embedding,
    ) -> Sequence[Embedded | None]:
        """Vectors in the second space if its model answers in time; a later pass finds those that are missing."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._other_retry_at_s:
            return [None] * len(fragments)
        try:
            async with asyncio.timeout(self._other_timeout_s):
                made = await self._make_vectors(fragments, own, content, record, embedding)
        except TimeoutError:
            made = []
        if not made or made[0].missing:  # later groups do not wait for it
            self._other_retry_at_s = now_s + OTHER_SPACE_PAUSE_S
            return [None] * len(fragments)
        return made

    async def _rate_importances(
        self, fragments: Sequence[Fragment], own: Sequence[float | None], policy: Policy, account: Account
    ) -> tuple[list[float], set[int]]:
        """One importance each, and the indexes of those that a job must rate later."""
        given = own or [None] * len(fragments)
        out = [policy.importance_default if value is None else value for value in given]
        wanted = [place for place, value in enumerate(given) if value is None]
        if not self.has_scorer or not policy.score_importance or not wanted:
            return out, set()
        pause = self._retry_s
        while True:
            try:
                scores = await self.rate_texts([fragments[place].content for place in wanted], account)
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
    def has_scorer(self) -> bool:
        """Whether there is a scorer."""
        return self._scorer is not None

    async def rate_texts(self, texts: Sequence[str], account: Account) -> list[float | None]:
        """The scorer's importance of each text; None if the scorer refuses to rate it. Raises ModelUnavailable."""
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

    async def _make_vectors(
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
        found, missing = await self._embed_texts(texts, record, embedding)
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
            refused, computed = vector is None and not missing, embedding.model.computed
            out.append(Embedded(embedding.name, vector, shown, refused, missing, computed))
        return out

    async def _embed_texts(
        self, texts: list[str], record: MemoryRecord, embedding: Embedding
    ) -> tuple[list[Vector | None], bool]:
        """One vector per text, None for refused ones. Returns (all None, True) if the model is down and the policy does
        not wait.
        """
        out: list[Vector | None] = [None] * len(texts)
        places = list(range(len(texts)))
        pause = self._retry_s
        while places:
            try:
                rows = await self._embed_in_slices([texts[place] for place in places], record, embedding)
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

    async def _embed_in_slices(self, texts: list[str], record: MemoryRecord, embedding: Embedding) -> Sequence[Vector]:
        """One vector each; no text is refused. An in-process model computes in slices."""
        if not embedding.model.instant:
            made = await embedding.embedder.embed(texts, record.namespace)
            return list(made if embedding.model.computed else round_vectors(made))
        rows: list[Vector] = []
        for start in range(0, len(texts), EMBEDDED_PER_SLICE):
            if start:
                await pause_if_due()
            rows.extend(await embedding.embedder.embed(texts[start : start + EMBEDDED_PER_SLICE], record.namespace))
        return rows


def analyze_fragment(analyzer: Analyzer, fragment: Fragment, record: MemoryRecord) -> Terms:
    """The terms under which a fragment is indexed. A long content is clipped."""
    content = clip_for_index(fragment.content)
    return analyzer.terms(content, record.policy.language, record.namespace, text_prefix(fragment))


def enhances_short_term(kind: MemoryKind, policy: Policy) -> bool:
    """Whether new fragments are compared with short-term ones."""
    if kind is MemoryKind.HYBRID:
        return policy.short_term.kind is ShortTermKind.ENHANCED
    return kind is MemoryKind.ENHANCED_SHORT_TERM


def compares_content(kind: MemoryKind, policy: Policy) -> bool:
    """Whether the memory needs vectors of the content alone: short-term enhances, and compares contents."""
    return enhances_short_term(kind, policy) and policy.short_term.compare_content


def renew_terms(block: RowBlock, analyzer: Analyzer, record: MemoryRecord) -> RowBlock:
    """The block with all terms in the analyzer's version; the block itself if they are. About 40 µs per fragment.

    Raises ValueError if the analyzer lacks the language of the memory.
    """
    stale = block.versions != analyzer.version
    if not stale.any():
        return block
    cuts = np.cumsum(block.sizes)[:-1]
    hashes, counts = np.split(block.hashes, cuts), np.split(block.counts, cuts)
    for place in np.flatnonzero(stale).tolist():
        terms = analyze_fragment(analyzer, block.fragments[place], record)
        hashes[place], counts[place] = np.frombuffer(terms.hashes, "<u8"), np.frombuffer(terms.counts, "<u2")
    return replace(
        block,
        hashes=np.concatenate(hashes),
        counts=np.concatenate(counts),
        sizes=np.array([len(each) for each in hashes], np.int64),
        versions=np.full(len(hashes), analyzer.version, np.uint16),
    )
