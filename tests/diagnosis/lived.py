"""Fills a data directory with a real server: every kind of change, in memories of every kind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import memstream
from memstream import MemoryKind, NewMessage, Observation, Plan, Profile, StateScope, Tier
from tests.server.conftest import WITH_INDEX
from tests.server.listing import fragments, indexed
from tests.support.server import ServerProcess
from tests.support.waiting import until

TOPICS = ["the ship and the island", "tea with milk", "snow on the roof", "a concert in Ulm", "Bob's cat"]


def about(number: int) -> str:
    return f"On day {number % 40} it was {TOPICS[number % len(TOPICS)]}, number {number % 40}."


async def live(data_dir: Path, **settings: str | float) -> None:
    """Run a server on the directory, make every kind of change, and stop it in order."""
    server = ServerProcess(data_dir).configure(**(WITH_INDEX | settings))
    await asyncio.to_thread(server.start)
    try:
        async with memstream.connect(server.address) as client:
            for profile in Profile:
                await _busy(client, f"lived/{profile.value}", profile)
            keyed = await client.create_memory(
                "lived/keyed", policy={"retention": {"forget_grace": 1}, "conflicts": {"ask_llm": True}}
            )
            await _keyed(keyed)
            doomed = await client.create_memory("lived/doomed", kind=MemoryKind.LONG_TERM)
            await doomed.observe_batch([about(number) for number in range(30)])
            await doomed.delete()
            await _talked(client)
            await keyed.blocks.put("persona", "I am Joy", metadata={"n": 1})
            await keyed.blocks.append("persona", "and I joke")
            await keyed.blocks.put("task", "none")
            await keyed.blocks.delete("task")
            await client.finished(await client.start_purge("lived", "keyed"))
            await until(lambda: indexed(client, keyed))
        assert await asyncio.to_thread(server.stop) == 0
    finally:
        server.kill()


async def _busy(client: memstream.Client, path: str, profile: Profile) -> None:
    memory = await client.create_memory(path, profile=profile, policy={"short_term": {"capacity": 6}})
    async with memory.observe("joy", session="monday") as stream:
        for number in range(80):
            await stream.send(about(number), importance=0.1 + number % 9 / 10)
        await stream.send("")  # rejected, keeps its number
        await stream.flush()
        for topic in TOPICS:
            await memory.recall_once(topic, receipt=True)
    listed = await fragments(memory)
    await memory.forget_fragments([one.id for one in listed[::3]])
    gone = await fragments(memory, forgotten=True)
    await memory.restore_fragments([one.id for one in gone[::2]])
    if profile is Profile.DEFAULT:  # the other one drops what overflows
        await _corrected(memory)
    await memory.update_fragment((await fragments(memory))[0].id, content="said otherwise", importance=0.3)
    await memory.clear([Tier.SHORT_TERM])
    await memory.update(labels={"kept": "yes"}, policy={"short_term": {"capacity": 3}})
    await memory.observe_batch([about(number) for number in range(7, 19)], producer="sam", first_sequence=1)


async def _corrected(memory: memstream.Memory) -> None:
    """Chains: one whose newest is forgotten, one whose middle is forgotten, and one that is undone."""
    for chain in range(3):
        for link in range(4):
            before = [f"c{chain}-{link - 1}"] if link else []
            said = Observation(f"price {chain} is {link}", external_id=f"c{chain}-{link}", supersedes=before)
            await memory.observe_batch([said])
    ids = {key: (await memory.get_fragment(external_id=key)).id for key in ("c0-3", "c1-1", "c2-0")}
    await memory.forget_fragments([ids["c0-3"], ids["c1-1"]])
    assert await memory.restore_fragments([ids["c2-0"]]) == 1


async def _keyed(memory: memstream.Memory) -> None:
    """Fragments that are put, put again, and forgotten until the grace period has passed and they are erased."""
    for number in range(12):
        await memory.put_fragment(Observation(about(number), external_id=f"k{number}"))
    for number in range(4):
        await memory.put_fragment(Observation(f"changed {number}", external_id=f"k{number}"))
    await memory.forget_fragments([(await memory.get_fragment(external_id="k7")).id])
    await until(lambda: _erased(memory))
    await memory.observe_batch(["I live in Munich now.", "I live in Berlin now."])  # suspected


async def _talked(client: memstream.Client) -> None:
    """A conversation that was cut once and is completed, an open one, one with a large body, one with only plans."""
    for name in ("closed", "open"):
        talk = client.conversation(f"lived/{name}")
        await talk.append("ann", "never mind")
        await talk.delete_messages()
        for number in range(6):
            await talk.append(("ann", "bob")[number % 2], about(number), receiver="all")
    await client.conversation("lived/closed").complete()
    large = NewMessage(body='"' + "x" * 299_998 + '"')  # written in parts
    await client.conversation("lived/large").append_messages([large])
    for scope in StateScope:
        await client.set_state("lived", scope, "closed", '{"step": 1}')
    await client.conversation("lived/planned").save_plans([Plan(number=2, title="look"), Plan(number=7, title="tell")])


async def _erased(memory: memstream.Memory) -> bool:
    return not await fragments(memory, forgotten=True)
