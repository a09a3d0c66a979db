"""The mixed load of the soak: everything a client can do, over a bounded set of data, with a ledger of what was told.

Run as a program (`python soak_load.py ADDRESS NAME`) it is one client to be killed: it writes a line "received stored"
whenever it was told of more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from texts import Talk

import memstream
from memstream import Filter, Memory, MemoryKind, MemstreamError, Observation, Plan, Tier

NAMESPACE = "soak"
SHARED = 6
"""Memories that live as long as the load, of all kinds and policies."""
KEYS = 40
"""external_ids that are put again and again."""
KILLED_AFTER_S = (3.0, 20.0)
BOUNDED: dict[str, Any] = {
    "retention": {"long_term_capacity": 400, "forget_grace": 5, "ttl": 120, "event_retention": 60},
}
"""What keeps a memory from growing however long the load goes on."""
KINDS = (MemoryKind.HYBRID, MemoryKind.LONG_TERM, MemoryKind.ENHANCED_SHORT_TERM, MemoryKind.SHORT_TERM)
PATIENT = memstream.Retry(first_s=60.0, later_s=120.0, delay_max_s=1.0)


class Lost(Exception):
    """Something acknowledged is not there, or is there twice."""


@dataclass(slots=True)
class Told:
    """The highest numbers a producer was told of."""

    received: int = 0
    stored: int = 0

    def note(self, received: int, stored: int) -> None:
        """Levels never go back."""
        self.received, self.stored = max(self.received, received), max(self.stored, stored)


@dataclass
class Ledger:
    """What the server has acknowledged, and how often everything was done."""

    producers: dict[tuple[str, str], Told] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    """The version of each external_id that was acknowledged last."""
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    """Observations of short-lived memories that were found again, each once."""

    def producer(self, memory: str, name: str) -> Told:
        """Where a producer stands."""
        return self.producers.setdefault((memory, name), Told())


class Load:
    """Runs until cancelled; then `check` asks the server for what was acknowledged."""

    def __init__(self, address: str, seed: int = 1) -> None:
        self.address = address
        self.ledger = Ledger()
        self._random = random.Random(seed)
        self._talk = Talk(seed)
        self._client: memstream.Client
        self._shared: list[Memory] = []

    async def prepare(self, client: memstream.Client) -> None:
        """The memories that stay."""
        self._client = client
        for number in range(SHARED):
            kind = KINDS[number % len(KINDS)]
            policy = BOUNDED | ({"profile": "dbgpt"} if number == SHARED - 1 else {})
            self._shared.append(await client.create_memory(f"{NAMESPACE}/shared-{number}", kind=kind, policy=policy))
        await client.create_memory(f"{NAMESPACE}/keyed", kind=MemoryKind.LONG_TERM, policy=_events_alone())
        await client.create_memory(f"{NAMESPACE}/killed", policy=BOUNDED)

    async def run(self) -> None:
        """Everything at once, for ever."""
        async with asyncio.TaskGroup() as group:
            for number, memory in enumerate(self._shared):
                group.create_task(self._again("observe", lambda m=memory, n=number: self._observe(m, f"talker-{n}")))
                group.create_task(self._again("watch", lambda m=memory: self._watch(m, slow=False)))
                group.create_task(self._again("slow watch", lambda m=memory: self._watch(m, slow=True)))
            for _ in range(3):
                group.create_task(self._again("recall stream", self._recall_stream))
            for number in range(2):
                group.create_task(self._again("killed client", lambda n=number: self._killed(f"victim-{n}")))
                group.create_task(self._again("talk", lambda n=number: self._converse(f"talk-{n}")))
                group.create_task(self._again("short life", self._short_life))
            for act in (self._unary, self._batch, self._put, self._lifecycle, self._changes):
                group.create_task(self._again(act.__name__.strip("_"), act))

    async def _again(self, name: str, act: Callable[[], Awaitable[None]]) -> None:
        """A refusal that has a name is part of life here; anything else ends the soak."""
        while True:
            try:
                await act()
                self.ledger.done[name] += 1
            except MemstreamError as error:
                self.ledger.refused[f"{name}: {type(error).__name__}"] += 1
                await asyncio.sleep(0.5)
            await asyncio.sleep(self._random.random() * 0.5)

    # ---- streams
    async def _observe(self, memory: Memory, name: str) -> None:
        """One stream's life: closed, abandoned by an error, or let go with things under way."""
        told = self.ledger.producer(memory.path, name)
        ending = self._random.choice(("close", "abandon", "cancel", "supersede"))
        with contextlib.suppress(_Abandoned, TimeoutError, memstream.ProducerSuperseded):
            async with memory.observe(name, session=name, outcomes=self._random.random() < 0.5) as stream:
                _check_told(stream, told, memory.path)
                async with asyncio.timeout(2.0 if ending == "cancel" else 30.0):
                    for _ in range(self._random.randint(1, 15)):
                        for _ in range(self._random.randint(1, 12)):
                            await stream.send(self._observation())
                        told.note(stream.received, stream.stored)
                        await asyncio.sleep(self._random.random())
                        if self._random.random() < 0.3:
                            await stream.flush()
                if ending == "supersede":
                    async with memory.observe(name, session=name):
                        await stream.send("superseded")
                        await stream.flush()
                told.note(stream.received, stream.stored)
                if ending == "abandon":
                    raise _Abandoned
            told.note(stream.received, stream.stored)

    async def _recall_stream(self) -> None:
        """Many queries in flight on a stream, some given up; a connection of its own now and then."""
        async with contextlib.AsyncExitStack() as stack:
            memory = self._random.choice(self._shared)
            if self._random.random() < 0.3:
                other = await stack.enter_async_context(memstream.connect(self.address))
                memory = other.memory(memory.path)
            stream = await stack.enter_async_context(memory.recall(session="asker"))
            for _ in range(self._random.randint(1, 15)):
                asked = [
                    asyncio.create_task(stream.query(self._question(), limit=self._random.randint(1, 50)))
                    for _ in range(self._random.randint(1, 12))
                ]
                for one in asked:
                    if self._random.random() < 0.15:
                        one.cancel()
                answers = await asyncio.gather(*asked, return_exceptions=True)
                self.ledger.done["query"] += sum(not isinstance(one, BaseException) for one in answers)
                await asyncio.sleep(self._random.random())

    async def _watch(self, memory: Memory, slow: bool) -> None:
        """From the beginning, if that is still kept; a slow one falls behind and finds its cursor compacted."""
        until = asyncio.get_running_loop().time() + self._random.uniform(5.0, 90.0 if slow else 30.0)
        start: Any = self._random.choice(("now", "beginning"))
        with contextlib.suppress(memstream.CursorCompacted, TimeoutError):
            async with memory.watch(start, include_fragments=self._random.random() < 0.5) as watch:
                async with asyncio.timeout_at(until):
                    async for _ in watch:
                        self.ledger.done["event"] += 1
                        if slow:
                            await asyncio.sleep(0.2)

    # ---- calls
    async def _unary(self) -> None:
        memory = self._random.choice(self._shared)
        with contextlib.suppress(memstream.DeadlineExceeded, memstream.RevisionNotReached):
            await memory.recall_once(self._question(), token_budget=self._random.choice((0, 500)))
            if self._random.random() < 0.05:  # what never comes is given up
                await memory.recall_once(self._question(), min_revision=2**40, timeout_s=0.3)

    async def _batch(self) -> None:
        memory = self._random.choice(self._shared)
        await memory.observe_batch([self._observation() for _ in range(self._random.randint(1, 30))])

    async def _put(self) -> None:
        """Version n of a key: at the end each key must show the last version that was acknowledged, or a later one."""
        key = f"key-{self._random.randrange(KEYS)}"
        version = self.ledger.keys.get(key, 0) + 1
        memory = self._client.memory(f"{NAMESPACE}/keyed")
        await memory.put_fragment(Observation(f"version {version} of {key} {self._talk.sentence()}", external_id=key))
        self.ledger.keys[key] = version

    async def _lifecycle(self) -> None:
        memory = self._random.choice(self._shared)
        fragments = [one async for one in _first(memory.list_fragments(page_size=20), 20)]
        if not fragments:
            return
        chosen = [one.id for one in self._random.sample(fragments, min(5, len(fragments)))]
        with contextlib.suppress(memstream.FragmentNotFound, memstream.EtagMismatch):  # others forget them, too
            await memory.forget_fragments(chosen)
            await memory.restore_fragments(chosen[:2])
            await memory.update_fragment(chosen[0], importance=0.7, pinned=False)
            await memory.update_fragment(chosen[0], content=self._talk.sentence())
        if self._random.random() < 0.02:
            await memory.clear([self._random.choice(list(Tier))])
        if self._random.random() < 0.05:
            await memory.forget_fragments(filter=Filter(sessions=["talker-0"]))

    async def _changes(self) -> None:
        """Everything that only looks, and a memory's labels."""
        memory = self._random.choice(self._shared)
        await memory.describe()
        await memory.stats()
        await memory.update(labels={"at": str(self.ledger.done["changes"])})
        async for _ in self._client.list_memories(NAMESPACE):
            pass
        async for _ in self._client.list_namespaces():
            pass

    # ---- whole lives
    async def _short_life(self) -> None:
        """A memory made, written over several broken streams, read back whole, cloned, and deleted."""
        name = f"{NAMESPACE}/short-{self._random.getrandbits(40):x}"
        memory = await self._client.create_memory(name, kind=MemoryKind.LONG_TERM)
        said: list[str] = []
        for _ in range(self._random.randint(1, 6)):
            with contextlib.suppress(_Abandoned):
                async with memory.observe("writer", session="life") as stream:
                    for _ in range(self._random.randint(1, 80)):
                        number = stream.expected_sequence
                        del said[number - 1 :]
                        said.append(f"{number} {self._talk.sentence()}")
                        await stream.send(said[-1])
                    await stream.flush()
                    if self._random.random() < 0.5:
                        raise _Abandoned
        await memory.recall_once(said[-1], limit=3)
        found = [one.content async for one in memory.list_fragments(page_size=50)]
        if found != said:
            raise Lost(f"{name}: {len(said)} were stored, {len(found)} are listed")
        self.ledger.checked += len(found)
        if self._random.random() < 0.3:
            await (await memory.clone(f"{name}-clone")).delete()
        await memory.delete()

    async def _converse(self, name: str) -> None:
        conversation = self._client.conversation(f"{NAMESPACE}/{name}")
        watch = conversation.watch()
        listening = asyncio.create_task(_listen(watch))
        try:
            for number in range(self._random.randint(1, 15)):
                await conversation.append("ann", self._talk.sentence(), receiver="bob")
                await conversation.save_plans([Plan(number=number % 5 + 1, content=self._talk.sentence())])
                await conversation.complete_plan(number % 5 + 1, "done")
                [one async for one in conversation.messages("ann", "bob")]
            await conversation.complete()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await watch.aclose()
        await conversation.delete_messages()
        await conversation.remove_plans()

    async def _killed(self, name: str) -> None:
        """A client in a process of its own: killed in the middle of everything, then continued by name."""
        told = self.ledger.producer(f"{NAMESPACE}/killed", name)
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, self.address, name, stdout=asyncio.subprocess.PIPE, env=os.environ
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._random.uniform(*KILLED_AFTER_S) + 3.0):
                async for line in process.stdout:
                    received, stored = map(int, line.split())
                    told.note(received, stored)
            raise Lost(f"the client {name} ended by itself; what it said is above")
        except TimeoutError:
            self.ledger.done["kill"] += 1
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    # ---- afterwards
    async def check(self, client: memstream.Client) -> list[str]:
        """What was acknowledged and is not there; empty when all is."""
        wrong: list[str] = []
        for (path, name), told in self.ledger.producers.items():
            async with client.memory(path).observe(name) as stream:
                if stream.received < told.received or stream.stored < told.stored:
                    wrong.append(f"{path} {name}: told {told}, the server has {stream.received}, {stream.stored}")
        memory = client.memory(f"{NAMESPACE}/keyed")
        for key, version in self.ledger.keys.items():
            content = (await memory.get_fragment(external_id=key)).content
            if int(content.split()[1]) < version:
                wrong.append(f"{key}: version {version} was acknowledged, the server has {content[:30]!r}")
        return wrong

    async def remove(self, client: memstream.Client) -> None:
        """Delete every memory there is."""
        paths = [f"{one.namespace}/{one.name}" async for one in client.list_memories(NAMESPACE)]
        for path in paths:
            await client.delete_memory(path)

    # ---- words
    def _observation(self) -> Observation:
        ttl = timedelta(seconds=self._random.randint(1, 30)) if self._random.random() < 0.2 else None
        return Observation(self._talk.sentence(), speaker=self._random.choice(("Ada", "Grace")), ttl=ttl)

    def _question(self) -> str:
        return self._talk.question(self._talk.sentence())


class _Abandoned(Exception):
    """A client's mistake in the middle of a stream."""


def _events_alone() -> dict[str, Any]:
    return {"retention": {"event_retention": 60}}


def _check_told(stream: memstream.ObserveStream, told: Told, path: str) -> None:
    if stream.received < told.received or stream.stored < told.stored:
        raise Lost(f"{path} {stream.producer}: told {told}, the server has {stream.received}, {stream.stored}")


async def _first(listing: AsyncIterator[memstream.Fragment], count: int) -> AsyncIterator[memstream.Fragment]:
    for _ in range(count):
        one = await anext(listing, None)
        if one is None:
            return
        yield one


async def _listen(watch: memstream.ConversationWatch) -> None:
    async for _ in watch:
        pass


async def _victim(address: str, name: str) -> None:
    """Observes, recalls and watches until killed."""
    talk = Talk(os.getpid())
    async with memstream.connect(address, retry=PATIENT) as client:
        memory = client.memory(f"{NAMESPACE}/killed")
        async with memory.observe(name, session=name) as stream, memory.recall() as recall, memory.watch() as watch:
            following = asyncio.create_task(_follow(watch))
            for number in itertools.count():
                await stream.send(talk.sentence())
                if number % 20 == 0:
                    await recall.query(talk.question(talk.sentence()))
                    print(stream.received, stream.stored, flush=True)
                await asyncio.sleep(0.05)
            following.cancel()


async def _follow(watch: memstream.Watch) -> None:
    async for _ in watch:
        pass


if __name__ == "__main__":
    asyncio.run(_victim(sys.argv[1], sys.argv[2]))
