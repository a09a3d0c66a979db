"""Quotas of stored bytes of a namespace: what they refuse, what they allow, and where they show."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

import memstream
from memstream import MemoryKind, Plan
from tests.server.conftest import MakeServer, restarted, started, stopped
from tests.server.listing import contents
from tests.server.test_process import run
from tests.server.test_transfer import chunks, exported
from tests.support.journals import journal_url, only_sqlite
from tests.support.metrics import scrape_metrics
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

KB = 1 << 10
MOST = 200 * KB


def text_of(number: int) -> str:
    """Some kilobytes that compress badly."""
    drawn = random.Random(number)
    return " ".join(f"{drawn.randrange(1 << 40):x}" for _ in range(400))


async def space_of(client: memstream.Client, name: str = "full") -> memstream.Namespace:
    return {one.name: one async for one in client.list_namespaces()}[name]


async def fill(memory: memstream.Memory) -> int:
    """Observes until the namespace is full; how many observations were stored."""
    for number in range(1_000):
        try:
            await memory.observe_batch([text_of(number)])
        except memstream.QuotaExceeded as refused:
            said = refused.code, refused.retry_after, refused.details
            expected = {"quota": "namespace_bytes_max", "limit": str(MOST)}
            if said != (grpc.StatusCode.RESOURCE_EXHAUSTED, 60, expected):
                raise
            return number
    raise AssertionError("the namespace never became full")


async def test_full_namespace_refuses_content_until_some_is_erased(make_server: MakeServer) -> None:
    server = await started(make_server(namespace_bytes_max=MOST))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("full/joy", kind=MemoryKind.LONG_TERM)
        stored = await fill(memory)
        full = await space_of(client)
        assert full.bytes_max == MOST <= full.stored.total < MOST + 30 * KB
        assert full.stored.fragments > 0.9 * full.stored.total

        some = [one.id async for one in memory.list_fragments()][:4]
        talk = client.conversation("full/talk")
        for refused in (
            memory.put_fragment("one", external_id="one"),
            memory.update_fragment(some[0], content="other"),
            client.create_memory("full/second"),
            memory.clone("full/copy"),
            talk.append("ann", "hello"),
            talk.save_plans([Plan(number=1, content="look")]),
        ):
            with pytest.raises(memstream.QuotaExceeded):
                await refused
        async with memory.observe("p") as stream:
            sent = await stream.send("one more")
            await stream.flush()
            assert stream.rejected_count == 1
            with pytest.raises(memstream.QuotaExceeded):
                await sent
        assert len(await contents(memory)) == stored
        assert (await memory.recall_once("which one", limit=1)).recollections
        other = await client.create_memory("other/joy")
        await other.observe_batch(["another namespace has room"])

        await memory.forget_fragments(some)
        await memory.restore_fragments(some)
        await client.finished(await memory.erase_fragments(some))
        assert (await space_of(client)).stored.total < MOST
        await memory.observe_batch(["room again"])
        assert len(await contents(memory)) == stored - len(some) + 1


async def test_count_survives_a_kill_and_ends_with_the_memory(make_server: MakeServer) -> None:
    metrics = free_address()
    server = await started(make_server(namespace_bytes_max=MOST, metrics_listen=metrics))
    async with memstream.connect(server.address) as client:
        small = await client.create_memory("full/small")
        before = (await space_of(client)).stored
        await fill(await client.create_memory("full/joy", kind=MemoryKind.LONG_TERM))
        full = (await space_of(client)).stored
    server.kill()
    await started(server)
    series = 'memstream_quota_used_ratio{quota="namespace_bytes_max"}'
    ratio = await until(lambda: asyncio.to_thread(lambda: scrape_metrics(metrics).get(series)))
    assert ratio == full.total / MOST
    async with memstream.connect(server.address) as client:
        assert (await space_of(client)).stored == full
        with pytest.raises(memstream.QuotaExceeded):
            await client.memory("full/small").observe_batch(["one"])
        await client.memory("full/joy").delete()
        after = (await space_of(client)).stored
        assert after.fragments == before.fragments
        assert after.history == before.history
        await client.memory("full/small").observe_batch(["one"])
    assert small.path == "full/small"


async def test_count_falls_with_what_is_removed(make_server: MakeServer) -> None:
    server = await started(make_server())
    at_once = {"retention": {"forget_grace": timedelta(0)}}
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("full/joy", kind=MemoryKind.LONG_TERM, policy=at_once)
        await memory.observe_batch(["kept"])
        base = (await space_of(client)).stored.fragments

        async def is_base() -> bool:
            return (await space_of(client)).stored.fragments == base

        async def store() -> list[str]:
            outcomes = (await memory.observe_batch([text_of(number) for number in range(3)])).outcomes
            assert (await space_of(client)).stored.fragments > base + 3 * 4_000
            return [one.fragment_id for one in outcomes]

        await memory.forget_fragments(await store())
        await client.finished(await client.start_purge("full", "joy"))
        await until(is_base)
        await client.finished(await memory.erase_fragments(await store()))
        await until(is_base)
        for stored in await store():
            await memory.update_fragment(stored, expire_time=datetime.now(UTC))
        await until(is_base)
        assert await contents(memory) == ["kept"]
    assert await asyncio.to_thread(verify, server) == 0


@only_sqlite("`backup` copies a data directory; for a database it is pg_dump")
async def test_count_is_that_of_the_backup_after_a_restore(make_server: MakeServer, tmp_path: Path) -> None:
    server, file = await started(make_server()), str(tmp_path / "monday.memstream")
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("full/joy", kind=MemoryKind.LONG_TERM)
        await memory.observe_batch([text_of(1)])
        await client.conversation("full/talk").append("ann", "hello")
        before = (await space_of(client)).stored
        assert (await asyncio.to_thread(run, "backup", file, "--data", str(server.data_dir))).returncode == 0
        await memory.observe_batch([text_of(2)])
        assert (await space_of(client)).stored.fragments > before.fragments
    await stopped(server)
    restored = await asyncio.to_thread(run, "restore", file, "--data", str(server.data_dir), "--force")
    assert restored.returncode == 0
    assert await asyncio.to_thread(verify, server) == 0
    await started(server)
    async with memstream.connect(server.address) as client:
        assert (await space_of(client)).stored == before


async def test_namespace_of_conversations_alone_is_listed(shared: ServerProcess, path: str) -> None:
    namespace = path.partition("/")[0]
    async with memstream.connect(shared.address) as client:
        await client.conversation(f"{namespace}/talk").append("ann", "hello")
        space = await space_of(client, namespace)
        assert (space.memories, space.stored.memories) == (0, 0)
        assert space.stored.conversations > len("hello")


async def test_memories_without_content_fill_a_namespace(make_server: MakeServer) -> None:
    server = await started(make_server(namespace_bytes_max=MOST))
    labels = {f"label-{number}": "x" * 60 for number in range(30)}
    async with memstream.connect(server.address) as client:

        async def create_many() -> None:
            for number in range(200):
                await client.create_memory(f"full/memory-{number}", labels=labels)

        with pytest.raises(memstream.QuotaExceeded):
            await create_many()
        stored = (await space_of(client)).stored
        assert stored.total >= MOST
        assert stored.memories > 0.5 * stored.total
        await client.memory("full/memory-0").delete()
        await client.create_memory("full/again")


def verify(server: ServerProcess) -> int:
    """Whether the counts are what the rows sum up to, among all else; 0 is sound."""
    url = journal_url(server.data_dir)
    return run("verify", *(("--journal-url", url) if url else ("--data", str(server.data_dir)))).returncode


async def test_repeated_request_gets_its_answer_in_a_full_namespace(make_server: MakeServer) -> None:
    server = await started(make_server(namespace_bytes_max=MOST))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("full/joy", kind=MemoryKind.LONG_TERM)
        first = await memory.observe_batch(["one", "two"], producer="p", first_sequence=1)
        await fill(memory)
        again = await memory.observe_batch(["one", "two"], producer="p", first_sequence=1)
        assert (again.rejected, again.stored) == ((), first.stored)


async def test_import_beyond_the_quota_leaves_nothing(make_server: MakeServer) -> None:
    server = await started(make_server(namespace_bytes_max=MOST))
    open_ = await started(make_server("open"))
    async with memstream.connect(server.address) as client, memstream.connect(open_.address) as source:
        memory = await source.create_memory("large/joy", kind=MemoryKind.LONG_TERM)
        await memory.observe_batch([text_of(number) for number in range(90)])
        kept = await client.create_memory("full/kept")
        before = (await space_of(client)).stored
        lines = await exported(source, "large")
        with pytest.raises(memstream.QuotaExceeded, match="namespace full has reached its quota of 204800") as refused:
            await client.finished(await client.import_("full", chunks(lines)))
        assert refused.value.details == {"quota": "namespace_bytes_max", "limit": str(MOST)}
        assert refused.value.retry_after == 60
        assert [one.name async for one in client.list_memories("full")] == ["kept"]
        assert (await space_of(client)).stored.fragments == before.fragments
        await kept.observe_batch(["room"])


async def test_recall_beyond_the_quota_of_receipts_has_none(make_server: MakeServer) -> None:
    server = await started(make_server(namespace_receipts_bytes_max=4 * KB))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("full/joy", kind=MemoryKind.LONG_TERM)
        await memory.observe_batch([f"Ann lives in street {number}" for number in range(20)])
        answers = [await memory.recall_once("Where does Ann live?", receipt=True) for _ in range(8)]
        kept = [one for one in answers if one.receipt_id]
        assert 0 < len(kept) < 8
        assert all("no receipt" not in one.degraded for one in kept)
        for one in answers[len(kept) :]:
            assert (one.receipt_id, len(one.recollections)) == ("", len(answers[0].recollections))
            assert "no receipt: namespace full has reached its quota" in one.degraded
        space = await space_of(client)
        assert space.receipts_bytes_max == 4 * KB <= space.stored.receipts
        await memory.update(policy={"history": {"receipts": 1}})
        assert (await memory.recall_once("Where does Ann live?", receipt=True)).receipt_id
    await restarted(server)
