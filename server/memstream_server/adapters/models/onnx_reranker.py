"""A cross-encoder exported to ONNX, in this process: question and text are read together, which costs a pass each.

The directory is read by `onnx_files.py`; the model gives one number a pair (a logit, as those trained on MS MARCO do),
of which the logistic function makes what it was trained to be: the probability that the text answers the question.

Rule 1. One thread that does not spin.
Rule 2. A batch at a time in a worker thread, so that the event loop goes on, and a recall that no longer waits leaves
no more than one batch behind.
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
"""Longer texts are cut before they are split into tokens, which would take long only to be thrown away."""


class OnnxReranker:
    """ports.models.Reranker over onnxruntime. Loads in the constructor: a second or so. Use from one event loop."""

    def __init__(self, directory: Path) -> None:
        """Raises OnnxModelError."""
        file = onnx_files.model_file(directory)
        self._session = onnx_files.session(file)
        self._inputs = {each.name for each in self._session.get_inputs()}
        self._characters_max = onnx_files.tokens_max(directory) * CHARACTERS_PER_TOKEN_MAX
        self._tokenizer = onnx_files.tokenizer(directory, onnx_files.tokens_max(directory))
        try:
            self._closeness("What is remembered?", ["memory"])
        except Exception as error:  # the runtime's own exceptions have no public base
            raise OnnxModelError(f"{file} does not rate pairs of texts: {str(error)[:300]}") from error
        self._name = onnx_files.model_name(directory, file)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="onnx-reranker")

    @property
    def name(self) -> str:
        """The directory's name and a hash of the weights."""
        return self._name

    async def closeness(self, question: str, texts: Sequence[str]) -> Floats:
        """(len(texts),) in [0, 1]. Raises ModelUnavailable when the runtime fails, or gives what is no number."""
        loop = asyncio.get_running_loop()
        found = np.zeros(len(texts), np.float32)
        # Texts of like length together: a batch is as long as its longest.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for start in range(0, len(order), BATCH_PAIRS):
            places = order[start : start + BATCH_PAIRS]
            batch = [texts[place] for place in places]
            try:
                found[places] = await loop.run_in_executor(self._worker, self._closeness, question, batch)
            except Exception as error:  # the runtime's own exceptions have no public base
                raise ModelUnavailable(f"{self._name}: {str(error)[:300]}") from error
        return found

    async def close(self) -> None:
        """Let the batch under way end."""
        await asyncio.to_thread(self._worker.shutdown)

    def _closeness(self, question: str, texts: Sequence[str]) -> Floats:
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
