"""What the journal stores of vectors, and the conversion of what an earlier server stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from memstream_server.app.models import Models
from memstream_server.core.policy import DEFAULT, with_value
from memstream_server.core.values import MemoryKind
from memstream_server.engine.background import vectors
from memstream_server.engine.requests import NewMemory, Query
from memstream_server.ports.models import EmbeddingModel
from tests.engine.assembled import NAMESPACE, assembled, check
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.engine.test_fragments import observe
from tests.support.journals import change_rows, query_rows
from tests.support.scripted_models import ScriptedEmbedder

TEXTS = [f"{who} likes {what} on {day}" for who in ("Ann", "Bob") for what in ("tea", "jam", "figs") for day in "abc"]
MODEL = "remote-384"


class Remote(ScriptedEmbedder):
    """A model whose vectors are stored."""

    async def model(self) -> EmbeddingModel:
        return dataclasses.replace(await super().model(), name=MODEL, computed=False, instant=False)

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        return await super().embed(texts, namespace)


def stored_lengths(data_dir: Path, table: str) -> dict[int, int]:
    """How many vectors have each number of bytes."""
    rows = query_rows(data_dir, f"SELECT length(vector), count(*) FROM {table} WHERE vector IS NOT NULL GROUP BY 1")
    return dict(rows)


async def fill(engine: PartsEngine, receipts: int = 0) -> None:
    policy = with_value(DEFAULT, "history.receipts", receipts)
    await engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, policy))
    own = np.zeros(384, np.float32)
    own[:3] = np.array([0.6, 0.64, 0.48], np.float32)
    await observe(engine, observation("a vector of my own", vector=own), *[observation(text) for text in TEXTS])


async def asked(engine: PartsEngine) -> list[tuple[str, float]]:
    answer = await engine.recall(NAMESPACE, "joy", Query("what does Bob like", now_us=1_900_000_000_000_000, limit=9))
    return [(one.fragment.id, one.scored.score) for one in answer.recollections]


async def store_as_before(engine: PartsEngine, data_dir: Path, noise: float = 0.0) -> None:
    """Write all vectors as an earlier server did: float32, and `noise` that float16 cannot hold."""
    image = await check(engine, "joy")
    (number,) = query_rows(data_dir, "SELECT number FROM memories")[0]
    for row in image.rows:
        assert row.vector is not None
        packed = (np.frombuffer(row.vector, "<f4") * np.float32(1 - noise)).tobytes()
        key = number << 32 | row.fragment.position
        change_rows(data_dir, f"UPDATE vectors SET vector = ? WHERE key = {key}", packed)
    for held in (*image.sensory, *image.short_term):
        assert held.vector is not None
        packed = (held.vector * np.float32(1 - noise)).tobytes()
        change_rows(data_dir, f"UPDATE anchors SET vector = ? WHERE id = '{held.fragment.id}'", packed)
    change_rows(data_dir, "DELETE FROM meta WHERE name = 'vectors_compacted' AND 1 = ?", 1)


async def test_vectors_that_a_text_gives_are_not_stored(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await fill(parts.engine)
        await check(parts.engine, "joy")
        assert stored_lengths(tmp_path, "vectors") == {0: len(TEXTS), 4 * 384: 1}
        assert stored_lengths(tmp_path, "anchors").keys() <= {0, 2}
        before = await asked(parts.engine)
    async with assembled(tmp_path) as parts:
        assert await asked(parts.engine) == before


async def test_vectors_of_a_model_take_half_the_bytes(tmp_path: Path) -> None:
    async with assembled(tmp_path, models=Models(Remote())) as parts:
        await fill(parts.engine)
        await check(parts.engine, "joy")
        assert stored_lengths(tmp_path, "vectors") == {2 * 384 + 1: len(TEXTS), 4 * 384: 1}
        before = await asked(parts.engine)
    async with assembled(tmp_path, models=Models(Remote())) as parts:
        assert await asked(parts.engine) == before


async def test_vectors_of_an_earlier_server_are_no_longer_stored(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await fill(parts.engine)
        before = await asked(parts.engine)
        await parts.engine.wait_for_compaction()
        await store_as_before(parts.engine, tmp_path)
        assert stored_lengths(tmp_path, "vectors") == {4 * 384: len(TEXTS) + 1}
    async with assembled(tmp_path) as parts:
        assert await asked(parts.engine) == before
        await parts.engine.wait_for_compaction()
        assert await asked(parts.engine) == before
        await check(parts.engine, "joy")
    assert stored_lengths(tmp_path, "vectors") == {0: len(TEXTS), 4 * 384: 1}
    assert stored_lengths(tmp_path, "anchors").keys() <= {0, 2}


@pytest.mark.parametrize("receipts", [0, 5])
async def test_only_a_memory_without_receipts_is_rounded(tmp_path: Path, receipts: int) -> None:
    async with assembled(tmp_path, models=Models(Remote())) as parts:
        await fill(parts.engine, receipts)
        await parts.engine.wait_for_compaction()
        if receipts:
            await parts.engine.recall(NAMESPACE, "joy", Query("what does Bob like", receipt=b"kept"))
        await store_as_before(parts.engine, tmp_path, noise=1e-5)
    async with assembled(tmp_path, models=Models(Remote())) as parts:
        before = await asked(parts.engine)
        await parts.engine.wait_for_compaction()
        after = await asked(parts.engine)
        await check(parts.engine, "joy")  # the active memory has what the journal has
    if receipts:
        assert stored_lengths(tmp_path, "vectors") == {4 * 384: len(TEXTS) + 1}
        assert after == before
    else:
        assert stored_lengths(tmp_path, "vectors") == {2 * 384 + 1: len(TEXTS), 4 * 384: 1}
        assert dict(after) == pytest.approx(dict(before), abs=5e-4)


async def test_a_conversion_continues_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "PAUSE_S", 3_600.0)
    monkeypatch.setattr(vectors, "SLICE", 4)
    async with assembled(tmp_path) as parts:
        await fill(parts.engine)
        await parts.engine.wait_for_compaction()
        before = await asked(parts.engine)
        await store_as_before(parts.engine, tmp_path)
    left: set[int] = set()
    for _ in range(3):  # each start converts one slice, and then waits
        async with assembled(tmp_path) as parts:
            assert await asked(parts.engine) == before
            record = await parts.engine.memories.get(NAMESPACE, "joy")
            await parts.journal.compact_vectors(record.uid, -1, 4)
            assert await asked(parts.engine) == before
        left.add(stored_lengths(tmp_path, "vectors")[4 * 384])
    assert len(left) == 3
    monkeypatch.setattr(vectors, "PAUSE_S", 0.0)
    async with assembled(tmp_path) as parts:
        await parts.engine.wait_for_compaction()
        assert await asked(parts.engine) == before
    assert stored_lengths(tmp_path, "vectors") == {0: len(TEXTS), 4 * 384: 1}
