"""Images of memories that another process has owned since: they are not used, and leave the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.requests import AckLevel, NewMemory
from tests.engine.assembled import NAMESPACE, hasty
from tests.engine.memory import observation
from tests.engine.test_fragments import observe
from tests.engine.test_images import check_same, files, leave_ram, opened, small

__all__ = ["hasty", "small"]
pytestmark = pytest.mark.usefixtures("hasty", "small")


async def test_images_of_other_owners_or_of_nobody_are_dropped(tmp_path: Path) -> None:
    async with opened(tmp_path) as parts:
        engine, uids = parts.engine, {}
        for name in ("joy", "joan", "jim"):
            await engine.memories.create(NewMemory(NAMESPACE, name, MemoryKind.LONG_TERM, DEFAULT))
            await engine.observe_batch(NAMESPACE, name, "", 1, [observation("Bob likes tea")], AckLevel.STORED)
            await leave_ram(engine, name)
            uids[name] = (await engine.memories.get(NAMESPACE, name)).uid
        await engine.journal.own_memory(uids["joan"])  # as another process does
        await engine.journal.delete_memory(uids["jim"])
        await engine.drop_outdated_images()
    assert [file.name.partition(".")[0] for file in files(tmp_path)] == [uids["joy"]]


async def test_an_image_from_before_another_owner_is_not_used(tmp_path: Path) -> None:
    async with opened(tmp_path) as parts:
        await parts.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, DEFAULT))
        await observe(parts.engine, observation("Bob likes tea"))
        await leave_ram(parts.engine)
        await check_same(parts.engine)
        for _ in range(2):
            await parts.journal.own_memory((await parts.engine.memories.get(NAMESPACE, "joy")).uid)
        with pytest.raises(AssertionError):
            await check_same(parts.engine)
    assert files(tmp_path) == []
