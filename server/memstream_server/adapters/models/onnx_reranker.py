"""A cross-encoder exported to ONNX, in this process. It reads question and text together, in one pass per pair.

`onnx_files.py` reads the directory. The model returns one logit per pair (as models trained on MS MARCO do); the
logistic function turns it into the probability that the text answers the question.

Rule 1. The runtime uses one thread that does not spin.
Rule 2. A worker thread computes one batch at a time: the event loop is not blocked, and a cancelled recall leaves at
most one batch running.
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
from memstream_server.ports.models import ModelUnavailable

Floats = npt.NDArray[np.float32]
BATCH_PAIRS = 8
CHARACTERS_PER_TOKEN_MAX = 16
"""Longer texts are truncated before tokenization, which would otherwise spend time on discarded tokens."""


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
