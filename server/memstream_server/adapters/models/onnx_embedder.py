"""Embeddings from a sentence-transformers model exported to ONNX, in this process: no endpoint, no torch.

A directory is read as sentence-transformers writes it: `model.onnx` (there or in `onnx/`), `tokenizer.json`,
`config.json`, and where they are there `sentence_bert_config.json` (the longest input) and `1_Pooling/config.json`.

Rule 1. One thread that does not spin: two spinning ones beside a busy server take 230 ms for a sentence instead of 18.
Rule 2. A batch at a time in a worker thread, so that the event loop goes on and a query waits for one batch at most.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memstream_server.ports.models import EmbeddingModel, ModelRefused

Floats = npt.NDArray[np.float32]
BATCH_TEXTS = 32
TOKENS_MAX = 512
"""Longest input where the directory does not say."""
CHARACTERS_PER_TOKEN_MAX = 16
"""Longer texts are cut before they are split into tokens, which would take long only to be thrown away."""
_READING = EmbeddingModel(name="", dimension=0)


class OnnxModelError(ValueError):
    """The directory holds no model that can be used here; the text says why. The operator must correct it."""


class OnnxEmbedder:
    """ports.models.Embedder over onnxruntime. Loads in the constructor: a second or so. Use from one event loop."""

    def __init__(self, directory: Path, reading: EmbeddingModel = _READING) -> None:
        """`reading` says how the model's cosines are read. Raises OnnxModelError."""
        file = next(
            (path for path in (directory / "model.onnx", directory / "onnx/model.onnx") if path.is_file()), None
        )
        if file is None:
            raise OnnxModelError(f"{directory} has no model.onnx, nor has its folder onnx")
        _check_pooling(directory)
        self._session = _session(file)
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._tokens_max = _tokens_max(directory)
        self._tokenizer = _tokenizer(directory, self._tokens_max)
        with file.open("rb") as model:
            digest = hashlib.file_digest(model, lambda: hashlib.blake2b(digest_size=4)).hexdigest()
        # The file's hash is part of the name: other weights under the same name are another space.
        name = f"{directory.resolve().name}@{digest}"
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="onnx")
        self._dimension = 0
        self._dimension = self._tried(file)
        self._model = replace(reading, name=name, dimension=self._dimension)

    async def model(self) -> EmbeddingModel:
        """The space, known since loading."""
        return self._model

    async def embed(self, texts: Sequence[str]) -> Floats:
        """(len(texts), dimension), rows of unit length. Raises ModelRefused for texts without any token."""
        loop = asyncio.get_running_loop()
        vectors = np.zeros((len(texts), self._dimension), np.float32)
        # Texts of like length together: a batch is as long as its longest.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for start in range(0, len(order), BATCH_TEXTS):
            places = order[start : start + BATCH_TEXTS]
            batch = [texts[place] for place in places]
            vectors[places] = await loop.run_in_executor(self._worker, self._vectors, batch)
        refused = np.flatnonzero(~vectors.any(axis=1)).tolist()
        if refused:
            raise ModelRefused(f"{len(refused)} of {len(texts)} texts have no token of the model's", refused)
        return vectors

    async def close(self) -> None:
        """Let the batch under way end."""
        await asyncio.to_thread(self._worker.shutdown)

    def _tried(self, file: Path) -> int:
        """The dimension of a vector."""
        try:
            vectors = self._vectors(["memory"])
        except Exception as error:  # the runtime's own exceptions have no public base
            raise OnnxModelError(f"{file} gives no vectors: {str(error)[:300]}") from error
        if vectors.ndim != 2 or not vectors.shape[1]:
            raise OnnxModelError(f"{file} gives no vectors, or its tokenizer no tokens")
        return int(vectors.shape[1])

    def _vectors(self, texts: Sequence[str]) -> Floats:
        cut = [text[: self._tokens_max * CHARACTERS_PER_TOKEN_MAX] for text in texts]
        encoded = self._tokenizer.encode_batch(cut)
        mask = np.array([each.attention_mask for each in encoded], np.int64)
        given = {
            "input_ids": np.array([each.ids for each in encoded], np.int64),
            "attention_mask": mask,
            "token_type_ids": np.array([each.type_ids for each in encoded], np.int64),
        }
        if not mask.shape[1]:  # no text has a token
            return np.zeros((len(texts), self._dimension), np.float32)
        (found, *_) = self._session.run(None, {name: given[name] for name in self._inputs})
        return unit_means(np.asarray(found, np.float32), mask)


def unit_means(tokens: Floats, mask: npt.NDArray[np.int64]) -> Floats:
    """(texts, dimension) of unit length: the mean over the tokens that `mask` (texts, tokens) counts.

    `tokens` is (texts, tokens, dimension), or (texts, dimension) from a model that has pooled already. A text
    without tokens becomes zeros.
    """
    means = tokens
    if tokens.ndim == 3:
        counts = np.maximum(mask.sum(axis=1, keepdims=True), 1)
        means = np.einsum("ntd,nt->nd", tokens, mask.astype(np.float32)) / counts
    means = np.where(mask.any(axis=1, keepdims=True), means, 0)
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    unit: Floats = (means / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return unit


def _session(file: Path) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise OnnxModelError("onnxruntime is not installed: pip install 'memstream[server,onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's own exceptions have no public base
        raise OnnxModelError(f"{file} cannot be loaded: {str(error)[:300]}") from error
    known = {"input_ids", "attention_mask", "token_type_ids"}
    unknown = sorted({each.name for each in session.get_inputs()} - known)
    if unknown:
        raise OnnxModelError(f"{file} asks for {', '.join(unknown)}; it is no export of a sentence model")
    return session


def _tokenizer(directory: Path, tokens_max: int) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise OnnxModelError("tokenizers is not installed: pip install 'memstream[server,onnx]'") from error
    file = directory / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # what tokenizers raises is Exception itself
        raise OnnxModelError(f"{file} cannot be loaded: {str(error)[:300]}") from error
    padding = tokenizer.padding or {}
    tokenizer.enable_truncation(tokens_max)
    # The file may ask for a fixed length, at which every short text would cost as much as the longest.
    tokenizer.enable_padding(pad_id=padding.get("pad_id", 0), pad_token=padding.get("pad_token", "[PAD]"))
    return tokenizer


def _tokens_max(directory: Path) -> int:
    asked = _json(directory / "sentence_bert_config.json").get("max_seq_length")
    possible = _json(directory / "config.json").get("max_position_embeddings")
    limits = [limit for limit in (asked, possible) if isinstance(limit, int) and limit > 0]
    return min(limits, default=TOKENS_MAX)


def _check_pooling(directory: Path) -> None:
    pooling = _json(directory / "1_Pooling" / "config.json")
    if pooling and not pooling.get("pooling_mode_mean_tokens"):
        raise OnnxModelError(f"{directory} is a model of another pooling than the mean of its tokens")


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OnnxModelError(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
