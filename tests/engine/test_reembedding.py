"""Cancelled re-embedding that is not running at that time."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.app.models import Models
from memstream_server.core.values import MemoryKind
from memstream_server.engine.memory.enrich import Candidate
from memstream_server.engine.operations import reembed, runner
from memstream_server.ports.journal.records import Spaces
from memstream_server.ports.operations import OperationState
from tests.engine.assembled import assembled
from tests.engine.engine_parts import PartsEngine
from tests.engine.test_fragments import TEA, create, live, observe
from tests.support.faulty_journal import Fault
from tests.support.scripted_models import ScriptedEmbedder
from tests.support.waiting import until


def models() -> Models:
    """The next model answers only requests for its space."""
    following = ScriptedEmbedder({TEA: [1.0, 0.0]}, dimension=2)
    following.fail(times=1_000_000)
    return Models(ScriptedEmbedder(), next=Candidate(following))


async def spaces(engine: PartsEngine) -> Spaces:
    return await engine.journal.get_spaces()


async def alone(engine: PartsEngine) -> bool:
    """Whether only the space in force is left, or will be."""
    found = await spaces(engine)
    return found.next is None and found.old is None and engine.models.embeddings.next is None


async def begun(engine: PartsEngine) -> bool:
    return (await spaces(engine)).next is not None


async def test_cancel_then_kill_leaves_no_second_space(tmp_path: Path) -> None:
    async with assembled(tmp_path, models=models()) as parts:
        await create(parts.engine)
        await observe(parts.engine, TEA)
        operation = await parts.engine.reindexing.start(embed=True)
        await until(lambda: begun(parts.engine))
        # the process ends before it processes the cancellation
        await parts.engine.storage.operations.ask_cancel(operation.id)
    async with assembled(tmp_path, models=models()) as parts:
        ended = await parts.engine.operations.wait_for_end(operation.id)
        assert ended.state is OperationState.CANCELLED
        await until(lambda: alone(parts.engine))


async def test_cancel_during_retry_pause_leaves_no_second_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.05)
    async with assembled(tmp_path, models=models()) as parts:
        await create(parts.engine)
        await observe(parts.engine, TEA)
        parts.journal.fail_at(1, Fault.LOST, "all_memories")
        operation = await parts.engine.reindexing.start(embed=True)

        async def failed() -> bool:
            return parts.journal.failed == "all_memories"

        await until(failed)
        await parts.engine.operations.cancel(operation.id)
        ended = await parts.engine.operations.wait_for_end(operation.id)
        assert ended.state is OperationState.CANCELLED
        await until(lambda: alone(parts.engine))


async def test_missing_vector_behind_pages_of_refused_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reembed, "PAGE", 2)
    embedder = ScriptedEmbedder()
    embedder.fail(times=1_000_000)
    async with assembled(tmp_path, models=Models(embedder)) as parts:
        uid = await create(parts.engine, kind=MemoryKind.LONG_TERM)
        await observe(parts.engine, *(f"{TEA} {number}" for number in range(5)))
        refused = {(one.id, one.version) for one in (await live(parts.engine))[:4]}
        entered: list[str] = []
        monkeypatch.setattr(reembed, "_enter_job", lambda job, _: entered.append(job.memory))
        await parts.engine.reembedding._backfill_leftovers(refused)
        assert entered == [uid]
