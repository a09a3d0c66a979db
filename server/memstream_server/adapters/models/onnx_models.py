"""Models exported to ONNX, in this process, without torch: a sentence-transformers embedder, and a cross-encoder.

The directory is that of a sentence-transformers model exported to ONNX: `model.onnx` (there or in `onnx/`),
`tokenizer.json`, `config.json`, and optionally `sentence_bert_config.json` (the input limit), `1_Pooling/config.json`
(mean, or the first token) and `memstream.json` (the model and the name of the space, for a model that `memstream models
install` built). The weights of a memory's ranking are those of the embedder in core/fitted_weights.py. The
cross-encoder reads question and text together, in one pass per pair, and returns one logit (as models trained on MS
MARCO do); the logistic function turns it into the probability that the text answers the question.

Rule 1. The runtime uses one thread that does not spin.
Rule 2. A worker thread computes one batch at a time: the event loop is not blocked, and a query waits for at most one
batch, and a cancelled recall leaves at most one running.
Rule 3. The vector of a text does not depend on the other texts of its batch. A model in int8 quantizes the values of
all texts of a run together, so it runs one text at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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
Inputs = dict[str, npt.NDArray[np.int64]]
TOKENS_MAX = 512
"""Input limit if the directory specifies none."""
MEMSTREAM = "memstream.json"
POOLING_DIR = "1_Pooling"
POOLING_KEYS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
"""The keys of 1_Pooling/config.json for the kinds of pooling that the embedder knows."""
_KNOWN = ("input_ids", "attention_mask", "token_type_ids")
_SLOW_OPTIMIZERS = ["SkipLayerNormFusion"]
"""Optimizers of onnxruntime that make a model slower. This one's operator takes several times as long as the addition
and the normalization that it replaces: MiniLM in int8 embeds 330 texts/s with it, 400 without it."""


class OnnxModelError(ValueError):
    """The directory has no usable model; the text says why. The operator must correct it."""


def model_file(directory: Path) -> Path:
    """The path of the exported model. Raises OnnxModelError if there is none."""
    for file in (directory / "model.onnx", directory / "onnx/model.onnx"):
        if file.is_file():
            return file
    message = f"{directory} has no model.onnx, nor has its folder onnx"
    if folders := sorted(file.parent.name for file in directory.glob("*/model.onnx")):  # of an installed model
        message += f"; name one of its folders instead: {', '.join(str(directory / name) for name in folders)}"
    raise OnnxModelError(message)


def model_name(directory: Path, file: Path) -> str:
    """The directory's name and a hash of the weights, so that other weights are another model.

    A model that memstream built has its name in `memstream.json`, with the hash of the published weights: versions of
    onnx may write the same model in other bytes.
    """
    built = read_json(directory / MEMSTREAM).get("space")
    if isinstance(built, str) and built:
        return built
    with file.open("rb") as model:
        digest = hashlib.file_digest(model, lambda: hashlib.blake2b(digest_size=4)).hexdigest()
    return f"{directory.resolve().name}@{digest}"


def known_model(directory: Path) -> str:
    """The name in the table of `memstream models`, for a model that memstream built; else empty."""
    return str(read_json(directory / MEMSTREAM).get("model", ""))


def pooling(directory: Path) -> str:
    """A key of POOLING_KEYS; mean if the directory specifies none. Raises OnnxModelError for another, or several."""
    found = read_json(directory / POOLING_DIR / "config.json")
    asked = {key for key, value in found.items() if key.startswith("pooling_mode_") and value is True}
    kinds = [kind for kind, key in POOLING_KEYS.items() if asked == {key}]
    if found and not kinds:
        raise OnnxModelError(f"{directory} is a model of another pooling than {' or '.join(POOLING_KEYS)}")
    return kinds[0] if kinds else "mean"


def session(file: Path) -> Any:
    """An onnxruntime session with one thread that does not spin. On a busy server, two spinning threads take 230 ms a
    sentence instead of 18. Raises OnnxModelError.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise OnnxModelError("onnxruntime is not installed: pip install '.[server,onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        made = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"], disabled_optimizers=_SLOW_OPTIMIZERS
        )
    except Exception as error:  # the runtime's own exceptions have no public base
        raise OnnxModelError(f"{file} cannot be loaded: {str(error)[:300]}") from error
    unknown = sorted({each.name for each in made.get_inputs()} - set(_KNOWN))
    if unknown:
        raise OnnxModelError(f"{file} asks for {', '.join(unknown)}; it is no export of a sentence model")
    return made


def tokenizer(directory: Path, tokens_max: int) -> Any:
    """The directory's tokenizer, truncating at `tokens_max` and padding to the longest. Raises OnnxModelError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise OnnxModelError("tokenizers is not installed: pip install '.[server,onnx]'") from error
    file = directory / "tokenizer.json"
    try:
        made = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise OnnxModelError(f"{file} cannot be loaded: {str(error)[:300]}") from error
    padding = made.padding or {}
    made.enable_truncation(tokens_max)
    # Override a fixed padding length in the file, with which every short text would cost as much as the longest.
    made.enable_padding(pad_id=padding.get("pad_id", 0), pad_token=padding.get("pad_token", "[PAD]"))
    return made


def load_counters(directory: Path) -> dict[str, Callable[[str], int]]:
    """Functions that count the tokens of a text, by name: one for each NAME.json of the directory. Raises
    OnnxModelError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise OnnxModelError("tokenizers is not installed: pip install '.[server,onnx]'") from error

    def load(file: Path) -> Callable[[str], int]:
        try:
            made = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise OnnxModelError(f"{file} cannot be loaded: {str(error)[:300]}") from error
        made.no_truncation()
        made.no_padding()
        return lambda text: len(made.encode(text, add_special_tokens=False).ids)

    files = sorted(directory.glob("*.json"))
    if not files:
        raise OnnxModelError(f"{directory} has no tokenizer: NAME.json")
    return {file.stem: load(file) for file in files}


def inputs(encoded: Sequence[Any]) -> Inputs:
    """The possible model inputs of a batch of encodings, each (texts, tokens)."""
    columns = ([each.ids for each in encoded], [each.attention_mask for each in encoded])
    types = [each.type_ids for each in encoded]
    return {name: np.array(rows, np.int64) for name, rows in zip(_KNOWN, (*columns, types), strict=True)}


def tokens_max(directory: Path) -> int:
    """The input limit in tokens: what the model was trained for and accepts. Raises OnnxModelError."""
    asked = read_json(directory / "sentence_bert_config.json").get("max_seq_length")
    possible = read_json(directory / "config.json").get("max_position_embeddings")
    limits = [limit for limit in (asked, possible) if isinstance(limit, int) and limit > 0]
    return min(limits, default=TOKENS_MAX)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist. Raises OnnxModelError."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OnnxModelError(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


class OnnxEmbedder:
    """ports.models.Embedder with onnxruntime. Use from one event loop. The constructor takes about a second."""

    def __init__(self, directory: Path) -> None:
        """Raises OnnxModelError."""
        file = model_file(directory)
        self._pooling = pooling(directory)
        self._session = session(file)
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._tokens_max = tokens_max(directory)
        self._tokenizer = tokenizer(directory, self._tokens_max)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="onnx")
        self._dimension = 0
        self._alone = False
        """Whether the model runs one text at a time."""
        self._dimension = self._try_model(file)
        self._alone = not np.allclose(self._embed_batch(_PROBE[:1]), self._embed_batch(_PROBE)[:1], atol=1e-4)
        fitted = fitted_weights.of_model(known_model(directory))
        self._model = EmbeddingModel(model_name(directory, file), self._dimension, fitted)

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
        given = inputs(self._tokenizer.encode_batch(cut))
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
        file = model_file(directory)
        self._session = session(file)
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._characters_max = tokens_max(directory) * CHARACTERS_PER_TOKEN_MAX
        self._tokenizer = tokenizer(directory, tokens_max(directory))
        try:
            self._rate_batch("What is remembered?", ["memory"])
        except Exception as error:  # the runtime's own exceptions have no public base
            raise OnnxModelError(f"{file} does not rate pairs of texts: {str(error)[:300]}") from error
        self._name = model_name(directory, file)
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
        given = inputs(self._tokenizer.encode_batch(pairs))
        (found, *_) = self._session.run(None, {name: given[name] for name in self._inputs})
        logits = np.asarray(found, np.float64)
        if logits.shape not in ((len(texts),), (len(texts), 1)):
            raise ValueError(f"it gives numbers of shape {logits.shape} for {len(texts)} pairs, not one each")
        if not np.isfinite(logits).all():
            raise ValueError("it gives what is no number")
        closeness: Floats = (1 / (1 + np.exp(-logits.reshape(-1).clip(-50, 50)))).astype(np.float32)
        return closeness
