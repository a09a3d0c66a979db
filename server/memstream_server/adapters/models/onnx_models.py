"""Models exported to ONNX, in this process, without torch: a sentence-transformers embedder, and a cross-encoder.

`onnx_files.py` reads the directory. The weights of a memory's ranking are those of the embedder in
core/fitted_weights.py. The cross-encoder reads question and text together, in one pass per pair, and returns one logit
(as models trained on MS MARCO do); the logistic function turns it into the probability that the text answers the
question.

Rule 1. The runtime uses one thread that does not spin.
Rule 2. A worker thread computes one batch at a time: the event loop is not blocked, and a query waits for at most one
batch, and a cancelled recall leaves at most one running.
Rule 3. The vector of a text does not depend on the other texts of its batch. A model in int8 quantizes the values of
all texts of a run together, so it runs one text at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memstream_server.adapters.models import onnx_files
from memstream_server.adapters.models.onnx_files import OnnxModelError
from memstream_server.core import fitted_weights
from memstream_server.ports.models import EmbeddingModel, ModelRefused, ModelUnavailable

Floats = npt.NDArray[np.float32]
BATCH_TEXTS = 8
"""The values between the layers of 8 texts fit the processor's cache: 200 texts/s of CPU, with 32 texts 165 (MiniLM in
float32, 140 characters). A query waits for a shorter batch, too."""
BATCH_PAIRS = 8
CHARACTERS_PER_TOKEN_MAX = 16
"""Longer texts are truncated before tokenization, which would otherwise spend time on discarded tokens."""
_PROBE = ("memory", "a text of more and other words than the first one")


class OnnxEmbedder:
    """ports.models.Embedder with onnxruntime. Use from one event loop. The constructor takes about a second."""

    def __init__(self, directory: Path) -> None:
        """Raises OnnxModelError."""
        file = onnx_files.model_file(directory)
        self._pooling = onnx_files.pooling(directory)
        self._session = onnx_files.session(file)
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._tokens_max = onnx_files.tokens_max(directory)
        self._tokenizer = onnx_files.tokenizer(directory, self._tokens_max)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="onnx")
        self._dimension = 0
        self._alone = False
        """Whether the model runs one text at a time."""
        self._dimension = self._try_model(file)
        self._alone = not np.allclose(self._embed_batch(_PROBE[:1]), self._embed_batch(_PROBE)[:1], atol=1e-4)
        fitted = fitted_weights.of_model(onnx_files.known_model(directory))
        self._model = EmbeddingModel(onnx_files.model_name(directory, file), self._dimension, fitted)

    async def model(self) -> EmbeddingModel:
        """The space, known from loading."""
        return self._model

    async def embed(self, texts: Sequence[str], namespace: str = "") -> Floats:
        """(len(texts), dimension), rows of unit length. Raises ModelRefused for texts without tokens."""
        loop = asyncio.get_running_loop()
        vectors = np.zeros((len(texts), self._dimension), np.float32)
        # Batch texts of similar length: a batch is padded to its longest text.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for start in range(0, len(order), BATCH_TEXTS):
            places = order[start : start + BATCH_TEXTS]
            batch = [texts[place] for place in places]
            vectors[places] = await loop.run_in_executor(self._worker, self._embed_texts, batch)
        refused = np.flatnonzero(~vectors.any(axis=1)).tolist()
        if refused:
            raise ModelRefused(f"{len(refused)} of {len(texts)} texts have no token of the model's", refused)
        return vectors

    async def close(self) -> None:
        """Wait for the current batch."""
        await asyncio.to_thread(self._worker.shutdown)

    def _try_model(self, file: Path) -> int:
        """The dimension of the model's vectors, from a trial run."""
        try:
            vectors = self._embed_batch(_PROBE[:1])
        except Exception as error:  # the runtime's own exceptions have no public base
            raise OnnxModelError(f"{file} gives no vectors: {str(error)[:300]}") from error
        if vectors.ndim != 2 or not vectors.shape[1]:
            raise OnnxModelError(f"{file} gives no vectors, or its tokenizer no tokens")
        return int(vectors.shape[1])

    def _embed_texts(self, texts: Sequence[str]) -> Floats:
        if not self._alone:
            return self._embed_batch(texts)
        return np.concatenate([self._embed_batch([text]) for text in texts])

    def _embed_batch(self, texts: Sequence[str]) -> Floats:
        cut = [text[: self._tokens_max * CHARACTERS_PER_TOKEN_MAX] for text in texts]
        given = onnx_files.inputs(self._tokenizer.encode_batch(cut))
        mask = given["attention_mask"]
        if not mask.shape[1]:  # no text has a token
            return np.zeros((len(texts), self._dimension), np.float32)
        (found, *_) = self._session.run(None, {name: given[name] for name in self._inputs})
        return unit_vectors(np.asarray(found, np.float32), mask, self._pooling)


def unit_vectors(tokens: Floats, mask: npt.NDArray[np.int64], pooling: str = "mean") -> Floats:
    """(texts, dimension), rows of unit length: the mean over the tokens in `mask` (texts, tokens), or the first token.

    `tokens` is (texts, tokens, dimension), or (texts, dimension) from a model that pools itself. A text without tokens
    becomes zeros.
    """
    pooled = tokens
    if tokens.ndim == 3 and pooling == "cls":
        pooled = tokens[:, 0]
    elif tokens.ndim == 3:
        counts = np.maximum(mask.sum(axis=1, keepdims=True), 1)
        pooled = np.einsum("ntd,nt->nd", tokens, mask.astype(np.float32)) / counts
    pooled = np.where(mask.any(axis=1, keepdims=True), pooled, 0)
    lengths = np.linalg.norm(pooled, axis=1, keepdims=True)
    unit: Floats = (pooled / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return unit


class OnnxReranker:
    """ports.models.Reranker with onnxruntime. Use from one event loop. The constructor takes about a second."""

    def __init__(self, directory: Path) -> None:
        """Raises OnnxModelError."""
        file = onnx_files.model_file(directory)
        self._session = onnx_files.session(file)
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._characters_max = onnx_files.tokens_max(directory) * CHARACTERS_PER_TOKEN_MAX
        self._tokenizer = onnx_files.tokenizer(directory, onnx_files.tokens_max(directory))
        try:
            self._rate_batch("What is remembered?", ["memory"])
        except Exception as error:  # the runtime's own exceptions have no public base
            raise OnnxModelError(f"{file} does not rate pairs of texts: {str(error)[:300]}") from error
        self._name = onnx_files.model_name(directory, file)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="onnx-reranker")

    @property
    def name(self) -> str:
        """The directory's name and a hash of the weights."""
        return self._name

    async def closeness(self, question: str, texts: Sequence[str]) -> Floats:
        """float32[len(texts)] in [0, 1]. Raises ModelUnavailable if the runtime fails or returns non-finite numbers."""
        loop = asyncio.get_running_loop()
        found = np.zeros(len(texts), np.float32)
        # Batch texts of similar length: a batch is padded to its longest text.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for start in range(0, len(order), BATCH_PAIRS):
            places = order[start : start + BATCH_PAIRS]
            batch = [texts[place] for place in places]
            try:
                found[places] = await loop.run_in_executor(self._worker, self._rate_batch, question, batch)
            except Exception as error:  # the runtime's own exceptions have no public base
                raise ModelUnavailable(f"{self._name}: {str(error)[:300]}") from error
        return found

    async def close(self) -> None:
        """Wait for the current batch."""
        await asyncio.to_thread(self._worker.shutdown)

    def _rate_batch(self, question: str, texts: Sequence[str]) -> Floats:
        pairs = [(question[: self._characters_max], text[: self._characters_max]) for text in texts]
        given = onnx_files.inputs(self._tokenizer.encode_batch(pairs))
        (found, *_) = self._session.run(None, {name: given[name] for name in self._inputs})
        logits = np.asarray(found, np.float64)
        if logits.shape not in ((len(texts),), (len(texts), 1)):
            raise ValueError(f"it gives numbers of shape {logits.shape} for {len(texts)} pairs, not one each")
        if not np.isfinite(logits).all():
            raise ValueError("it gives what is no number")
        closeness: Floats = (1 / (1 + np.exp(-logits.reshape(-1).clip(-50, 50)))).astype(np.float32)
        return closeness
