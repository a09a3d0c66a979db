"""The input of every peer: the same lines, the same questions, and one table with a vector for each of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peers.memstream import format_line
from benchmarks.peers.protocol import Item, Query
from benchmarks.quality import Turn
from benchmarks.texts import SentenceSource
from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.ports.models import Embedder

SAMPLE = 20
"""Number of lines that are searched by their own words after a kill."""
_BATCH = 256


def make_item(text: str, speaker: str, session: str, when: datetime) -> Item:
    """An observation in the form that runners take."""
    return Item(format_line(text, speaker, when), text, speaker, session, when.timestamp())


def item_of_turn(turn: Turn) -> Item:
    """A turn of the measure, whose times are naive UTC."""
    return make_item(turn.text, turn.speaker, str(turn.session), turn.timestamp.replace(tzinfo=UTC))


@dataclass(frozen=True)
class Load:
    """The input of one round."""

    items: Sequence[Item]
    """Added to one memory at full speed."""
    queries: Sequence[Query]
    """Asked of that memory, one at a time."""
    single: Sequence[Item]
    """Added to another memory, one at a time, before the kill."""

    @property
    def sample(self) -> list[Query]:
        """Evenly spaced lines of `single` as questions, including the last one."""
        step = max(1, len(self.single) // SAMPLE)
        return [Query(one.line, self.queries[0].now_s) for one in self.single[::-1][::step][:SAMPLE]]

    @property
    def texts(self) -> list[str]:
        """All texts that need a vector."""
        return [one.line for one in (*self.items, *self.single)] + [one.text for one in self.queries]


def made_up(count: int, questions: int, single: int) -> Load:
    """Generated sentences (benchmarks/texts.py), and questions of four words of one of them."""
    talk = SentenceSource()
    sentences = [(str(one.body), one) for one in talk.make_observations(count + single)]
    items = [make_item(text, one.speaker, one.session, one.observe_time or datetime.max) for text, one in sentences]
    asked = random.Random(2).choices(items[:count], k=questions)
    now_s = items[-1].time_s + timedelta(hours=1).total_seconds()
    queries = [Query(talk.draw_question(one.text), now_s) for one in asked]
    return Load(items[:count], queries, items[count:])


class Table:
    """A vector for each text, in a file that runners read: float32 rows, with their texts as JSON in a second file."""

    def __init__(self, file: Path, model: Path | None = None) -> None:
        self.file = file
        self.model = model
        self._embedder = _open_embedder(model)
        self._loop = asyncio.Runner()

    def close(self) -> None:
        """Close the model."""
        self._loop.run(self._embedder.close())
        self._loop.close()

    def write_vectors(self, texts: Sequence[str]) -> None:
        """Embed every text once and write the table."""
        different = list(dict.fromkeys(texts))
        rows = np.concatenate([self._embed(different[at : at + _BATCH]) for at in range(0, len(different), _BATCH)])
        rows.tofile(self.file)
        self.file.with_suffix(".json").write_text(json.dumps([rows.shape[1], different]), "utf-8")

    def vectors(self, texts: Sequence[str]) -> list[list[float]]:
        """Unit vectors for texts that a peer derived from the given ones."""
        found: list[list[float]] = self._embed(texts).tolist()
        return found

    def _embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self._loop.run(self._embedder.embed(texts))


def _open_embedder(model: Path | None) -> Embedder:
    if model is None:
        return HashingEmbedder()
    from memstream_server.adapters.models.onnx_models import OnnxEmbedder

    return OnnxEmbedder(model)
