"""What every peer is given: the same lines, the same questions, and one table with a vector for each of them."""

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

from benchmarks.peers.memstream import line
from benchmarks.peers.protocol import Item, Query
from benchmarks.quality import Turn
from benchmarks.texts import Talk
from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.ports.models import Embedder

SAMPLE = 20
"""Lines that are asked for by their own words after a kill."""
_BATCH = 256


def item(text: str, speaker: str, session: str, when: datetime) -> Item:
    """An observation in the form that runners take."""
    return Item(line(text, speaker, when), text, speaker, session, when.timestamp())


def item_of_turn(turn: Turn) -> Item:
    """A turn of the measure's, whose times are naive UTC."""
    return item(turn.text, turn.speaker, str(turn.session), turn.timestamp.replace(tzinfo=UTC))


@dataclass(frozen=True)
class Load:
    """What one round gives to each peer."""

    items: Sequence[Item]
    """Into one memory, as fast as the peer takes them."""
    queries: Sequence[Query]
    """Asked of that memory, one at a time."""
    single: Sequence[Item]
    """Into another memory, one at a time; then the kill."""

    @property
    def sample(self) -> list[Query]:
        """Lines of `single` as questions, evenly spread, the last one among them."""
        step = max(1, len(self.single) // SAMPLE)
        return [Query(one.line, self.queries[0].now_s) for one in self.single[::-1][::step][:SAMPLE]]

    @property
    def texts(self) -> list[str]:
        """All that needs a vector."""
        return [one.line for one in (*self.items, *self.single)] + [one.text for one in self.queries]


def made_up(count: int, questions: int, single: int) -> Load:
    """Sentences by rule (benchmarks/texts.py); questions of four words of one of them."""
    talk = Talk()
    said = [(str(one.body), one) for one in talk.observations(count + single)]
    items = [item(text, one.speaker, one.session, one.observe_time or datetime.max) for text, one in said]
    asked = random.Random(2).choices(items[:count], k=questions)
    now_s = items[-1].time_s + timedelta(hours=1).total_seconds()
    queries = [Query(talk.question(one.text), now_s) for one in asked]
    return Load(items[:count], queries, items[count:])


class Table:
    """A vector for each text, in a file that runners read: rows of float32, and beside it their texts as JSON."""

    def __init__(self, file: Path, model: Path | None = None) -> None:
        self.file = file
        self.model = model
        self._embedder = _embedder(model)
        self._loop = asyncio.Runner()

    def close(self) -> None:
        """Lets the model go."""
        self._loop.run(self._embedder.close())
        self._loop.close()

    def write(self, texts: Sequence[str]) -> None:
        """Embeds every text once."""
        different = list(dict.fromkeys(texts))
        rows = np.concatenate([self._embed(different[at : at + _BATCH]) for at in range(0, len(different), _BATCH)])
        rows.tofile(self.file)
        self.file.with_suffix(".json").write_text(json.dumps([rows.shape[1], different]), "utf-8")

    def vectors(self, texts: Sequence[str]) -> list[list[float]]:
        """Of texts that a peer has made of the given ones; of unit length."""
        found: list[list[float]] = self._embed(texts).tolist()
        return found

    def _embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return self._loop.run(self._embedder.embed(texts))


def _embedder(model: Path | None) -> Embedder:
    if model is None:
        return HashingEmbedder()
    from memstream_server.adapters.models.onnx_embedder import OnnxEmbedder

    return OnnxEmbedder(model)
