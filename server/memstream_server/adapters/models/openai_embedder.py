"""Embeddings from any OpenAI-compatible endpoint, through the `openai` package.

Rule 1. The package's own retries are off: attempts, waits and the deadline are resilience.py's.
Rule 2. A reply that is not exactly what was asked for, or has no end, is a failed attempt, never a vector.
Rule 3. Calls share requests (batches.py). When nothing of a call is accepted, a harmless text is tried before its
inputs are blamed: a misconfigured endpoint must not strip a memory of vectors.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import openai

from memstream_server.adapters.models.batches import Batches
from memstream_server.adapters.models.openai_errors import RefusedError, bounded, translated
from memstream_server.adapters.models.resilience import Resilience, ResilientCalls, TransientError
from memstream_server.ports.models import EmbeddingModel, ModelRefused, ModelUnavailable

Floats = npt.NDArray[np.float32]
REPLY_BYTES_MAX = 32 << 20
"""64 vectors of 20,000 numbers, written out."""
_HARMLESS = "memory"
"""What the dimension is asked with."""


@dataclass(frozen=True, slots=True)
class OpenAIEmbedding:
    """Settings of the endpoint. `reading` says how the model's cosines are read; its name and dimension are ignored."""

    model: str
    base_url: str
    api_key: str = field(default="", repr=False)
    """Empty for endpoints that need none."""
    dimensions: int | None = None
    """Asks the model for shorter vectors; only some can."""
    batch_texts: int = 64
    batch_characters: int = 100_000
    input_characters: int = 8_000
    """Longer texts are cut: 8,000 characters are 2,000 tokens of English and at most about 8,000 of any language."""
    concurrency: int = 4
    """Requests in flight."""
    timeout_s: float = 15.0
    """For one attempt."""
    resilience: Resilience = field(default_factory=Resilience)
    reading: EmbeddingModel = field(default_factory=lambda: EmbeddingModel(name="", dimension=0))


class OpenAIEmbedder:
    """ports.models.Embedder over HTTP. Use from one event loop."""

    def __init__(
        self,
        settings: OpenAIEmbedding,
        calls: ResilientCalls | None = None,
        spent: Callable[[float], None] | None = None,
    ) -> None:
        """`spent` is told the tokens of every reply that says how many it took."""
        self._settings = settings
        self._client = openai.AsyncOpenAI(
            base_url=settings.base_url,
            api_key=settings.api_key or "none",
            max_retries=0,
            timeout=settings.timeout_s,
        )
        self._calls = calls or ResilientCalls(settings.resilience)
        self._batches: Batches[Floats] = Batches(
            self._vectors,
            texts_max=settings.batch_texts,
            characters_max=settings.batch_characters,
            concurrency=settings.concurrency,
        )
        self._asking, self._doubting = asyncio.Lock(), asyncio.Lock()
        self._spent = spent
        self._model: EmbeddingModel | None = None

    async def model(self) -> EmbeddingModel:
        """The space; the endpoint is asked for its dimension the first time. Raises ModelUnavailable."""
        async with self._asking:
            if self._model is None:
                dimension = (await self._harmless()).shape[1]
                self._model = replace(self._settings.reading, name=self._settings.model, dimension=dimension)
            return self._model

    async def embed(self, texts: Sequence[str]) -> Floats:
        """(len(texts), dimension), rows of unit length.

        Raises ModelUnavailable, or ModelRefused with the places of the texts the model will never take.
        """
        model = await self.model()
        found = await self._batches.answers([text[: self._settings.input_characters] for text in texts])
        refused = [place for place, vector in enumerate(found) if vector is None]
        if refused and len(refused) == len(texts):
            async with self._doubting:  # one at a time, beside those that are shared
                await self._harmless()
        if refused:
            raise ModelRefused(f"{self._settings.model} refuses {len(refused)} of {len(texts)} texts", refused)
        vectors = [vector for vector in found if vector is not None]
        return np.stack(vectors) if vectors else np.zeros((0, model.dimension), np.float32)

    async def close(self) -> None:
        """Close the connections."""
        await self._batches.close()
        await self._client.close()

    async def _vectors(self, texts: list[str]) -> list[Floats | None]:
        """Of unit length; None of one that has no direction at all. Raises RefusedError, ModelUnavailable."""
        found = await self._request(texts, (await self.model()).dimension)
        lengths = np.linalg.norm(found.astype(np.float64), axis=1)
        unit = (found / np.where(lengths > 0, lengths, 1.0)[:, None]).astype(np.float32)
        return [vector if length > 0 else None for vector, length in zip(unit, lengths, strict=True)]

    async def _harmless(self) -> Floats:
        """A vector of a text no model refuses. Raises ModelUnavailable when even that is refused, or has no length."""
        try:
            found = await self._request([_HARMLESS], None)
        except RefusedError as error:
            raise ModelUnavailable(f"the endpoint refuses any input: {error}") from error
        if not found.any():
            raise ModelUnavailable("the endpoint answers with zeros")
        return found

    async def _request(self, texts: list[str], dimension: int | None) -> Floats:
        return await self._calls.run(lambda: self._attempt(texts, dimension))

    async def _attempt(self, texts: list[str], dimension: int | None) -> Floats:
        with translated():
            # The reply's bytes: the package builds objects without checking them, and we check all of it.
            async with self._client.embeddings.with_streaming_response.create(
                model=self._settings.model,
                input=texts,
                extra_body=None if self._settings.dimensions is None else {"dimensions": self._settings.dimensions},
            ) as reply:
                content = await bounded(reply, REPLY_BYTES_MAX)
        return parsed(content, len(texts), dimension, self._spent)


def parsed(content: bytes, count: int, dimension: int | None, spent: Callable[[float], None] | None = None) -> Floats:
    """The (count, dimension) vectors of a reply, by their `index`, as they came (not of unit length).

    Numbers may come as a list or as base64 of little-endian float32. Raises TransientError for a malformed reply:
    another count, repeated or missing indices, unequal lengths or another dimension than asked, not finite.
    `spent` is told the tokens that it says it took, where it does.
    """
    try:
        document = json.loads(content)
        items = document["data"]
        by_index = {int(item["index"]): _numbers(item["embedding"]) for item in items}
        if len(items) != count or sorted(by_index) != list(range(count)):
            raise TransientError(f"malformed reply: {len(items)} vectors for {count} texts, or wrong indices")
        vectors = np.stack([by_index[place] for place in range(count)])
        usage = document.get("usage")
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, binascii.Error) as error:
        raise TransientError(f"malformed reply: {error!r}") from error
    if vectors.ndim != 2 or vectors.shape[1] != (dimension or vectors.shape[1]) or not vectors.shape[1]:
        raise TransientError(f"malformed reply: vectors of shape {vectors.shape[1:]}, not {dimension} numbers")
    if not np.isfinite(vectors).all():
        raise TransientError("malformed reply: a vector is not finite")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if spent is not None and isinstance(tokens, int) and tokens > 0:
        spent(tokens)
    return vectors


def _numbers(embedding: object) -> Floats:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
    return np.asarray(embedding, np.float32)
