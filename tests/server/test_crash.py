"""kill -9 of the server while several producers send: nothing acknowledged is lost or duplicated.

MEMSTREAM_CRASH_ROUNDS sets more rounds (`make crash`). MEMSTREAM_CRASH_SEED repeats the random choices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

import memstream
from memstream import Memory
from tests.server.conftest import MakeServer, restarted, started, stopped
from tests.server.listing import contents, fragments, indexed, observed_once
from tests.server.producing import CORRECTS_EVERY, PATIENT, Producer, words
from tests.support.scripted_models import VECTOR_BYTES
from tests.support.seeds import rounds, seed_of
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

pytestmark = pytest.mark.with_index

ROUNDS = int(os.environ.get("MEMSTREAM_CRASH_ROUNDS", rounds(5, 3)))
SEED = seed_of("MEMSTREAM_CRASH_SEED")
LOOKS = 10
"""Everything is listed after about one in this many kills, because the listing grows."""
LOSING = "dbgpt"
"""A memory whose policy drops fragments; the others keep everything."""


async def test_producers_survive_kills_of_the_server(make_server: MakeServer) -> None:
    draw = random.Random(SEED)
    server = await started(make_server(listen=free_address(), dense_bytes_max=200 * VECTOR_BYTES))
    async with memstream.connect(server.address, retry=PATIENT) as client:
        keeping = [
            await client.create_memory("crash/hybrid"),
            await client.create_memory("crash/long", kind=memstream.MemoryKind.LONG_TERM),
        ]
        losing = await client.create_memory(f"crash/{LOSING}", profile=memstream.Profile.DBGPT)
        producers = [
            Producer(memory, f"{memory.name}-{number}", random.Random(draw.random()), corrects=memory in keeping)
            for memory in (*keeping, losing)
            for number in range(2)
        ]
        await _killed_again_and_again(server, producers, draw)
        for producer in producers:
            await producer.finish()
        total = lost = doubled = 0
        for memory in keeping:
            said = Counter(words(one.name, n) for one in producers if one.memory is memory for n in _numbers(one))
            kept = Counter(await contents(memory))
            total, lost, doubled = total + said.total(), lost + (said - kept).total(), doubled + (kept - said).total()
        print(f"{ROUNDS} kills, {total} observations acknowledged, {lost} lost, {doubled} doubled, seed {SEED}")
        assert (lost, doubled) == (0, 0), f"seed {SEED}"
        for producer in producers:
            if producer.corrects:
                await _check_chain(producer)
        for memory in (*keeping, losing):
            assert await observed_once(memory) == sum(len(_numbers(one)) for one in producers if one.memory is memory)
        await until(lambda: indexed(client, *keeping, losing))


async def _killed_again_and_again(server: ServerProcess, producers: Sequence[Producer], draw: random.Random) -> None:
    """In every round a producer's process dies, sometimes Milvus Lite alone, then the server; the producer continues
    after the server's progress."""
    talking = [asyncio.create_task(producer.run()) for producer in producers]
    try:
        for number in range(ROUNDS):
            received = [producer.ledger.received for producer in producers]
            await until(lambda received=received: _talking_again(producers, received))  # type: ignore[misc]  # binds the loop's value
            await asyncio.sleep(draw.uniform(0.05, 0.7))
            dead = draw.randrange(len(producers))
            talking[dead].cancel()
            await asyncio.gather(talking[dead], return_exceptions=True)
            if draw.random() < 0.3:
                _kill_milvus_lite(server)
            stored = [producer.ledger.stored for producer in producers]
            await restarted(server)
            if number % max(1, ROUNDS // LOOKS) == 0:
                await _holds(server, producers, stored)
            talking[dead] = asyncio.create_task(producers[dead].run())
            for task in talking:
                assert not task.done(), f"a producer gave up, seed {SEED}: {task.exception()!r}"
    finally:
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)


async def _talking_again(producers: Sequence[Producer], received: Sequence[int]) -> bool:
    """Whether a kill would hit an active producer: on a slow machine a reconnect may take longer than a round."""
    return any(one.ledger.received > last for one, last in zip(producers, received, strict=True))


def _kill_milvus_lite(server: ServerProcess) -> None:
    """If there is one, and the system shows it."""
    if sys.platform == "linux":
        for child in server.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


async def _holds(server: ServerProcess, producers: Sequence[Producer], stored: Sequence[int]) -> None:
    """Everything that the dead server acknowledged as stored is visible at once; *received* may follow later."""
    names = dict.fromkeys(one.memory.name for one in producers if one.memory.name != LOSING)
    alone = [("grpc.use_local_subchannel_pool", 1)]  # the producers' connection may still be in its reconnect delay
    async with memstream.connect(server.address, options=alone) as client:
        kept = {name: set(await contents(client.memory(f"crash/{name}"))) for name in names}
    for producer, last in zip(producers, stored, strict=True):
        if producer.memory.name in kept:
            said = kept[producer.memory.name]
            missing = [n for n in range(1, last + 1) if words(producer.name, n) not in said]
            assert not missing, f"{producer.name} got {missing[0]} to {last} acknowledged as stored, seed {SEED}"


async def _check_chain(producer: Producer) -> None:
    """Each correction that was acknowledged superseded the one before it, and the last one is current."""
    keyed = {one.external_id: one for one in await fragments(producer.memory) if one.external_id}
    numbers = _numbers(producer)[CORRECTS_EVERY - 1 :: CORRECTS_EVERY]
    newer = [keyed[producer.key(number)].superseded_by for number in numbers]
    assert newer == [*(keyed[producer.key(number)].id for number in numbers[1:]), ""], f"seed {SEED}"


def _numbers(producer: Producer) -> range:
    return range(1, producer.ledger.received + 1)


async def test_received_is_stored_after_kill_without_client(make_server: MakeServer) -> None:
    """Only received: the acknowledgement was for the journal alone."""
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("crash/received")
        with contextlib.suppress(asyncio.CancelledError):  # this producer ends abandoned, not closed
            async with memory.observe("joy", ack_level=memstream.AckLevel.RECEIVED) as stream:
                for _ in range(500):
                    await stream.send(words("joy", stream.expected_sequence))
                await stream.flush()
                assert stream.received == 500
                server.kill()
                raise asyncio.CancelledError
    await started(server)
    async with memstream.connect(server.address) as client:
        memory = client.memory("crash/received")
        await until(lambda: _all_stored(memory))  # reading statistics activates no memory
        assert sorted(await contents(memory)) == sorted(words("joy", n) for n in range(1, 501))
        assert await observed_once(memory) == 500


async def _all_stored(memory: Memory) -> bool:
    return (await memory.stats()).backlog == 0


async def test_a_stop_in_order_loses_nothing_either(make_server: MakeServer) -> None:
    server = await started(make_server(listen=free_address()))
    async with memstream.connect(server.address, retry=PATIENT) as client:
        memory = await client.create_memory("crash/stopped")
        producer = Producer(memory, "joy", random.Random(SEED))
        talking = asyncio.create_task(producer.run())
        for connections in (1, 2):
            await until(lambda connections=connections: _connected(producer, connections))  # type: ignore[misc]  # binds the loop's value
            assert await stopped(server) == 0
            await started(server)
        await until(lambda: _connected(producer, 3))
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        await producer.finish()
        assert sorted(await contents(memory)) == sorted(words("joy", n) for n in _numbers(producer))
        assert await observed_once(memory) == producer.ledger.received


async def _connected(producer: Producer, times: int) -> bool:
    return producer.connections >= times
