"""Images of several servers on PostgreSQL: each has its own, and none keeps what another server erased."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from memstream_server.adapters.journal.store import open_journal
from memstream_server.adapters.models.hashing import computed_spaces
from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import OwnedElsewhere
from memstream_server.engine.requests import NewMemory, Query
from memstream_server.engine.runtime.clock import Clock
from tests.engine.assembled import NAMESPACE, Assembled, assembled, hasty
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.engine.test_fragments import observe
from tests.engine.test_images import (
    SAID,
    check_same,
    files,
    leave_ram,
    needles_of,
    read_vector,
    reads,
    small,
    until_done,
)
from tests.support.waiting import until
from tests.toolchains.postgres import Cluster

__all__ = ["hasty", "small"]
pytestmark = [pytest.mark.toolchain, pytest.mark.usefixtures("hasty", "small")]


@pytest.fixture
def url(postgres: Cluster) -> str:
    return postgres.database()


@asynccontextmanager
async def joined(data_dir: Path, url: str) -> AsyncIterator[Assembled]:
    """One of several engines on the database, with a data directory of its own."""
    journal = await open_journal(
        data_dir, url=url, shared=True, lease_s=600.0, clock_us=Clock().now_us, computed=computed_spaces()
    )
    settings = {"lease_s": 600.0, "lease_renew_s": 0.1, "access_flush_interval_s": 3_600}
    async with assembled(data_dir, own_journal=journal, **settings) as parts:
        yield parts


async def remember(engine: PartsEngine, postgres: Cluster, url: str) -> tuple[str, dict[str, bytes]]:
    """(a fragment of a new memory, bytes of it that an image holds)."""
    await engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.LONG_TERM, DEFAULT))
    secret, _ = await observe(engine, SAID, observation("Bob likes tea"))
    ((terms,),) = postgres.execute(url, "SELECT terms FROM fragments WHERE id = %s", secret)
    return secret, needles_of(secret, await read_vector(engine, secret), terms)


def held_in(data_dir: Path, needles: Mapping[str, bytes]) -> set[str]:
    """Which of them any file of the directory has."""
    found = []
    for file in data_dir.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):  # an engine may remove a file meanwhile
            found.append(file.read_bytes())
    return {name for name, needle in needles.items() if any(needle in data for data in found)}


async def erase(engine: PartsEngine, secret: str) -> None:
    await until_done(engine, (await engine.erasing.start(NAMESPACE, "joy", [secret])).id)


async def until_gone(data_dir: Path) -> None:
    async def gone() -> bool:
        return files(data_dir) == []

    await until(gone)


async def test_a_living_server_drops_what_another_one_erases(postgres: Cluster, url: str, tmp_path: Path) -> None:
    async with joined(tmp_path / "one", url) as one, joined(tmp_path / "two", url) as two:
        secret, needles = await remember(one.engine, postgres, url)
        await leave_ram(one.engine)
        assert held_in(tmp_path / "one", needles) == needles.keys()
        await erase(two.engine, secret)
        await until_gone(tmp_path / "one")
        assert held_in(tmp_path, needles) == set()
        with pytest.raises(OwnedElsewhere):
            await one.engine.recall(NAMESPACE, "joy", Query("tea"))
        await leave_ram(two.engine)
        await one.engine.recall(NAMESPACE, "joy", Query("tea"))
        await leave_ram(one.engine)
        assert held_in(tmp_path, needles) == set()
        await check_same(one.engine)


async def test_a_stopped_server_drops_at_its_start_what_another_erased(
    postgres: Cluster, url: str, tmp_path: Path
) -> None:
    async with joined(tmp_path / "one", url) as one:
        secret, needles = await remember(one.engine, postgres, url)
    assert held_in(tmp_path / "one", needles) == needles.keys()
    async with joined(tmp_path / "two", url) as two:
        await erase(two.engine, secret)
    async with joined(tmp_path / "one", url) as one:
        await until_gone(tmp_path / "one")
        await check_same_after_use(one)
    assert held_in(tmp_path, needles) == set()


async def check_same_after_use(parts: Assembled) -> None:
    await parts.engine.recall(NAMESPACE, "joy", Query("tea"))
    await leave_ram(parts.engine)
    await check_same(parts.engine)


async def test_a_late_image_of_a_former_owner_is_dropped(
    postgres: Cluster, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(tmp_path / "one", url) as one, joined(tmp_path / "two", url) as two:
        secret, needles = await remember(one.engine, postgres, url)
        images = one.engine.storage.images
        written: list[partial[object]] = []

        async def write_late(*arguments: object) -> None:
            written.append(partial(type(images).write, images, *arguments))

        monkeypatch.setattr(images, "write", write_late)
        await leave_ram(one.engine)
        await erase(two.engine, secret)
        assert held_in(tmp_path, needles) == set()
        await written[0]()  # type: ignore[misc]  # of a process that was suspended
        await until_gone(tmp_path / "one")
        assert held_in(tmp_path, needles) == set()


async def test_an_image_serves_its_owner_until_another_owns(url: str, tmp_path: Path) -> None:
    async with joined(tmp_path / "one", url) as one, joined(tmp_path / "two", url) as two:
        await one.engine.memories.create(NewMemory(NAMESPACE, "joy", MemoryKind.HYBRID, DEFAULT))
        await observe(one.engine, observation("Bob likes tea"))
        await leave_ram(one.engine)
        for _ in range(3):
            await check_same_after_use(one)
        assert reads(one) == {"miss": 1, "hit": 6}
        (image,) = files(tmp_path / "one")
        await observe(two.engine, observation("Ann sold the garden"))
        await leave_ram(two.engine)
        await one.engine.recall(NAMESPACE, "joy", Query("garden"))
        assert reads(one) == {"miss": 2, "hit": 6}
        await leave_ram(one.engine)
        assert image not in files(tmp_path / "one")
        await check_same(one.engine)
