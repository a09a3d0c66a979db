"""A server is killed or stopped during a conversation: acknowledged writes are kept, and watches continue."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sized
from pathlib import Path

import pytest

import memstream
from memstream import NewMessage, Plan, PlanState
from tests.server.conftest import QUICK, check_log
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

RETRY = memstream.Retry(first_s=30.0, later_s=60.0, delay_min_s=0.01, delay_max_s=0.2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data", free_address(), **QUICK) as started:
        yield started
    check_log(started)


async def test_acknowledged_messages_survive_kill(server: ServerProcess) -> None:
    acknowledged: dict[int, str] = {}

    async def talking(talk: memstream.Conversation, name: str) -> None:
        for place in range(10_000):
            content = f"{name} {place}"
            try:
                acknowledged[(await talk.append(name, content)).number] = content
            except memstream.MemstreamError:
                if not server.is_running():
                    return

    async with memstream.connect(server.address) as client:
        talk = client.conversation("comedy/monday")
        await talk.save_plans([Plan(number=1)])
        await talk.update_plan(1, state=PlanState.RETRYING)
    # A time limit below the restart's: the running appends fail with an unknown outcome.
    async with memstream.connect(server.address, timeout_s=0.5) as client:
        talk = client.conversation("comedy/monday")
        writers = [asyncio.create_task(talking(talk, name)) for name in ("joy", "bob", "ann")]
        await until(lambda: _reached(acknowledged, 60))
        server.kill()
        await asyncio.gather(*writers)
    await asyncio.to_thread(server.start)
    async with memstream.connect(server.address) as client:
        talk = client.conversation("comedy/monday")
        found = {message.number: message.content async for message in talk.messages(page_size=1_000)}
        assert {number: found.get(number) for number in acknowledged} == acknowledged
        assert sorted(found) == list(range(1, len(found) + 1))
        assert len(set(found.values())) == len(found)  # nothing twice
        assert [plan.state async for plan in talk.plans()] == [PlanState.RETRYING]


async def test_acknowledged_plans_survive_kill(server: ServerProcess) -> None:
    """Two writers save plans with numbers of their own, three a call: each call is there whole."""
    saved: dict[int, str] = {}

    async def planning(client: memstream.Client, first: int) -> None:
        for number in range(first, 10_000, 6):
            plans = [Plan(number=number + 2 * place, title=f"step {number}") for place in range(3)]
            try:
                await client.conversation("comedy/monday").save_plans(plans)
            except memstream.MemstreamError:
                return
            saved.update((plan.number, plan.title) for plan in plans)

    async with memstream.connect(server.address, retry=memstream.Retry(calls_s=0)) as client:
        writers = [asyncio.create_task(planning(client, first)) for first in (1, 2)]
        await until(lambda: _reached(saved, 60))
        server.kill()
        await asyncio.gather(*writers)
    await asyncio.to_thread(server.start)
    async with memstream.connect(server.address, keepalive_s=61.0) as client:
        found = {plan.number: plan.title async for plan in client.conversation("comedy/monday").plans()}
    assert {number: found.get(number) for number in saved} == saved
    assert len(found) % 3 == 0


async def test_resent_batches_are_there_once_after_kill(server: ServerProcess) -> None:
    """Two writers send batches with ids of their own, and send each again until it is acknowledged.

    The bodies of one are small, those of the other are written in parts before their messages.
    """
    sent = {name: [f"{name}-{place}" for place in range(120)] for name in ("joy", "bob")}
    acknowledged: dict[str, int] = {}

    async def talking(name: str) -> None:
        async with memstream.connect(server.address, timeout_s=10.0, retry=RETRY) as client:
            talk, rest = client.conversation("comedy/monday"), sent[name]
            while rest:
                batch = [NewMessage(body=_body_of(one), client_id=one) for one in rest[:3]]
                with contextlib.suppress(memstream.MemstreamError):  # sent again
                    done = await talk.append_messages(batch)
                    acknowledged.update(zip(rest[:3], done.numbers, strict=True))
                    rest = rest[3:]

    writers = [asyncio.create_task(talking(name)) for name in sent]
    for count in (30, 90):
        await until(lambda count=count: _reached(acknowledged, count))  # type: ignore[misc]
        server.kill()
        await asyncio.to_thread(server.start)
    await asyncio.gather(*writers)
    async with memstream.connect(server.address, keepalive_s=61.0) as client:
        talk = client.conversation("comedy/monday")
        found = {message.client_id: message.number async for message in talk.messages(page_size=7)}
        bodies = [message.body async for message in talk.messages(newest_first=True)]
        assert found == acknowledged
        assert bodies == [_body_of(one) for one in sorted(found, key=found.__getitem__, reverse=True)]
        assert sorted(found) == sorted(one for each in sent.values() for one in each)


def _body_of(name: str) -> str:
    """Three of bob's have more than a slice (SLICE_BYTES of hidden_conversations.py)."""
    return json.dumps(name * (300 if name.startswith("joy") else 10_000))


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_watch_survives_restart(server: ServerProcess, how: str) -> None:
    async with memstream.connect(server.address, retry=RETRY) as client:
        talk = client.conversation("comedy/monday")
        seen: list[int] = []
        watch = talk.watch()

        async def watching() -> None:
            async for message in watch:
                seen.append(message.number)

        reader = asyncio.create_task(watching())
        for _ in range(3):
            await talk.append("joy", "before")
        await until(lambda: _reached(seen, 3))
        if how == "stopped":
            assert await asyncio.to_thread(server.stop) == 0
        await asyncio.to_thread(server.restart)
        # By a new client: the channel of the other one may be in its reconnect backoff. Channels with the same settings
        # share their connection, and with it the backoff: hence another keepalive.
        async with memstream.connect(server.address, keepalive_s=61.0) as fresh:
            for _ in range(3):
                await fresh.conversation(talk.path).append("joy", "after")
            await fresh.conversation(talk.path).complete()
        await reader
        assert seen == [1, 2, 3, 4, 5, 6]
        assert watch.connections > 1


async def _reached(what: Sized, size: int) -> bool:
    return len(what) >= size
