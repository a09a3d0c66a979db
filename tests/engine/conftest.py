"""A real engine on a real journal and a real Milvus Lite, without rpcs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from memstream_server.app.dependencies import build_limits, engine_parts
from memstream_server.app.models import Models, models_of
from memstream_server.app.running import choose_index, record_space
from memstream_server.engine.runtime.clock import Clock
from memstream_server.observability import Metrics
from memstream_server.settings import Settings
from tests.engine.engine_parts import PartsEngine
from tests.support import journals

OpenEngine = Callable[..., AbstractAsyncContextManager[PartsEngine]]


@asynccontextmanager
async def open_engine(
    data_dir: Path, *, models: Models | None = None, clock: Clock | None = None, **settings: object
) -> AsyncIterator[PartsEngine]:
    """An engine on `data_dir`, composed as in the server."""
    chosen = Settings(data_dir=data_dir, index_flush_interval_s=0.2, **settings)  # type: ignore[arg-type]  # pydantic checks
    now = clock or Clock()
    journal = await journals.open_test_journal(data_dir, now.now_us)
    metrics = Metrics()
    used = models or models_of(chosen, metrics)
    space, embedding = await record_space(journal, used.embedder, chosen)
    half = build_limits(chosen).dense_max(embedding.dimension) // 2
    index = await choose_index(chosen).open(journal.count_largest_memory, half)
    engine = PartsEngine(engine_parts(chosen, journal, index, used, embedding, metrics, now), space)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        await index.close()
        await journal.close()


@pytest.fixture
def engines() -> OpenEngine:
    return open_engine


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[PartsEngine]:
    async with open_engine(tmp_path / "data") as opened:
        yield opened
