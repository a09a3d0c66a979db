"""The mixed load of the soak test: every client operation on a bounded set of data, with a ledger of acknowledgements.

Run as a program (`python soak_load.py ADDRESS NAME`), it is a client that will be killed: it writes a line "received
stored" as its acknowledgements advance.
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
from functools import partial
from typing import Any

from texts import SentenceSource

import memstream
from memstream import Filter, Memory, MemoryKind, MemstreamError, Observation, Plan, Tier

NAMESPACE = "soak"
SHARED = 6
"""Memories that live as long as the load, of all kinds and policies."""
KEYS = 40
"""external_ids that are put repeatedly."""
KILLED_AFTER_S = (3.0, 20.0)
BOUNDED: dict[str, Any] = {
    "retention": {"long_term_capacity": 400, "forget_grace": 5, "ttl": 120, "event_retention": 60},
}
"""Limits the size of a memory however long the load runs."""
KINDS = (MemoryKind.HYBRID, MemoryKind.LONG_TERM, MemoryKind.ENHANCED_SHORT_TERM, MemoryKind.SHORT_TERM)
PATIENT = memstream.Retry(first_s=60.0, later_s=120.0, delay_max_s=1.0)


class Lost(Exception):
    """An acknowledged item is missing or duplicated."""


@dataclass(slots=True)
class Acknowledged:
    """The highest acknowledged numbers of a producer."""

    received: int = 0
    stored: int = 0

    def advance_to(self, received: int, stored: int) -> None:
        """Raise the levels; they never go back."""
        self.received, self.stored = max(self.received, received), max(self.stored, stored)


@dataclass
class Ledger:
    """Everything the server has acknowledged, and counts of all operations."""

    producers: dict[tuple[str, str], Acknowledged] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    """The last acknowledged version of each external_id."""
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    """Observations of short-lived memories that were read back, each exactly once."""

    def producer(self, memory: str, name: str) -> Acknowledged:
        """The entry of a producer, created on first use."""
        return self.producers.setdefault((memory, name), Acknowledged())


class Load:
    """Runs until cancelled; then `check_acknowledged` compares the server with the ledger."""

    def __init__(self, address: str, seed: int = 1) -> None:
        self.address = address
        self.ledger = Ledger()
        self._random = random.Random(seed)
        self._talk = SentenceSource(seed)
        self._client: memstream.Client
        self._shared: list[Memory] = []

    async def create_memories(self, client: memstream.Client) -> None:
        """Create the memories that stay."""
        self._client = client
        for number in range(SHARED):
            kind = KINDS[number % len(KINDS)]
            policy = BOUNDED | ({"profile": "dbgpt"} if number == SHARED - 1 else {})
            self._shared.append(await client.create_memory(f"{NAMESPACE}/shared-{number}", kind=kind, policy=policy))
        await client.create_memory(f"{NAMESPACE}/keyed", kind=MemoryKind.LONG_TERM, policy=_event_retention())
        await client.create_memory(f"{NAMESPACE}/killed", policy=BOUNDED)

    async def run(self) -> None:
        """Run all operations concurrently until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number, memory in enumerate(self._shared):
                group.create_task(
                    self._repeat_forever("observe", partial(self._observe_stream, memory, f"talker-{number}"))
                )
                group.create_task(self._repeat_forever("watch", partial(self._watch_events, memory, slow=False)))
                group.create_task(self._repeat_forever("slow watch", partial(self._watch_events, memory, slow=True)))
            for _ in range(3):
                group.create_task(self._repeat_forever("recall stream", self._recall_stream))
            for number in range(2):
                group.create_task(self._repeat_forever("killed client", partial(self._run_victim, f"victim-{number}")))
                group.create_task(self._repeat_forever("talk", partial(self._hold_conversation, f"talk-{number}")))
                group.create_task(self._repeat_forever("short life", self._live_shortly))
            for act in (
                self._recall_once,
                self._observe_batch,
                self._put_version,
                self._change_fragments,
                self._read_and_label,
            ):
                group.create_task(self._repeat_forever(act.__name__.strip("_"), act))

    async def _repeat_forever(self, name: str, act: Callable[[], Awaitable[None]]) -> None:
        """Repeat an operation. Typed errors are expected and counted; any other exception ends the soak."""
        while True:
            try:
                await act()
                self.ledger.done[name] += 1
            except MemstreamError as error:
                self.ledger.refused[f"{name}: {type(error).__name__}"] += 1
                await asyncio.sleep(0.5)
            await asyncio.sleep(self._random.random() * 0.5)

    # ---- streams
    async def _observe_stream(self, memory: Memory, name: str) -> None:
        """One stream's life: closed, abandoned by an error, or cancelled with work in flight."""
        acknowledged = self.ledger.producer(memory.path, name)
        ending = self._random.choice(("close", "abandon", "cancel", "supersede"))
        with contextlib.suppress(_Abandoned, TimeoutError, memstream.ProducerSuperseded):
            async with memory.observe(name, session=name, outcomes=self._random.random() < 0.5) as stream:
                _check_acknowledged(stream, acknowledged, memory.path)
                async with asyncio.timeout(2.0 if ending == "cancel" else 30.0):
                    for _ in range(self._random.randint(1, 15)):
                        for _ in range(self._random.randint(1, 12)):
                            await stream.send(self._make_observation())
                        acknowledged.advance_to(stream.received, stream.stored)
                        await asyncio.sleep(self._random.random())
                        if self._random.random() < 0.3:
                            await stream.flush()
                if ending == "supersede":
                    async with memory.observe(name, session=name):
                        await stream.send("superseded")
                        await stream.flush()
                acknowledged.advance_to(stream.received, stream.stored)
                if ending == "abandon":
                    raise _Abandoned
            acknowledged.advance_to(stream.received, stream.stored)

    async def _recall_stream(self) -> None:
        """Many queries in flight on a stream, some cancelled; sometimes on a separate connection."""
        async with contextlib.AsyncExitStack() as stack:
            memory = self._random.choice(self._shared)
            if self._random.random() < 0.3:
                other = await stack.enter_async_context(memstream.connect(self.address))
                memory = other.memory(memory.path)
            stream = await stack.enter_async_context(memory.recall(session="asker"))
            for _ in range(self._random.randint(1, 15)):
                asked = [
                    asyncio.create_task(stream.query(self._make_question(), limit=self._random.randint(1, 50)))
                    for _ in range(self._random.randint(1, 12))
                ]
                for one in asked:
                    if self._random.random() < 0.15:
                        one.cancel()
                answers = await asyncio.gather(*asked, return_exceptions=True)
                self.ledger.done["query"] += sum(not isinstance(one, BaseException) for one in answers)
                await asyncio.sleep(self._random.random())

    async def _watch_events(self, memory: Memory, slow: bool) -> None:
        """Watch from the beginning, if still retained; a slow watch falls behind and finds its cursor compacted."""
        until = asyncio.get_running_loop().time() + self._random.uniform(5.0, 90.0 if slow else 30.0)
        start: Any = self._random.choice(("now", "beginning"))
        with contextlib.suppress(memstream.CursorCompacted, TimeoutError):
            async with memory.watch(start, include_fragments=self._random.random() < 0.5) as watch:
                async with asyncio.timeout_at(until):
                    async for _ in watch:
                        self.ledger.done["event"] += 1
                        if slow:
                            await asyncio.sleep(0.2)

    # ---- unary calls
    async def _recall_once(self) -> None:
        memory = self._random.choice(self._shared)
        with contextlib.suppress(memstream.DeadlineExceeded, memstream.RevisionNotReached):
            await memory.recall_once(self._make_question(), token_budget=self._random.choice((0, 500)))
            if self._random.random() < 0.05:  # an unreachable revision: the deadline ends the call
                await memory.recall_once(self._make_question(), min_revision=2**40, timeout_s=0.3)

    async def _observe_batch(self) -> None:
        memory = self._random.choice(self._shared)
        await memory.observe_batch([self._make_observation() for _ in range(self._random.randint(1, 30))])

    async def _put_version(self) -> None:
        """Put version n of a key. At the end each key must have the last acknowledged version or a later one."""
        key = f"key-{self._random.randrange(KEYS)}"
        version = self.ledger.keys.get(key, 0) + 1
        memory = self._client.memory(f"{NAMESPACE}/keyed")
        await memory.put_fragment(
            Observation(f"version {version} of {key} {self._talk.make_sentence()}", external_id=key)
        )
        self.ledger.keys[key] = version

    async def _change_fragments(self) -> None:
        memory = self._random.choice(self._shared)
        fragments = [one async for one in _take_first(memory.list_fragments(page_size=20), 20)]
        if not fragments:
            return
        chosen = [one.id for one in self._random.sample(fragments, min(5, len(fragments)))]
        with contextlib.suppress(
            memstream.FragmentNotFound, memstream.EtagMismatch
        ):  # other tasks forget fragments concurrently
            await memory.forget_fragments(chosen)
            await memory.restore_fragments(chosen[:2])
            await memory.update_fragment(chosen[0], importance=0.7, pinned=False)
            await memory.update_fragment(chosen[0], content=self._talk.make_sentence())
        if self._random.random() < 0.02:
            await memory.clear([self._random.choice(list(Tier))])
        if self._random.random() < 0.05:
            await memory.forget_fragments(filter=Filter(sessions=["talker-0"]))

    async def _read_and_label(self) -> None:
        """All read-only calls, and a memory's labels."""
        memory = self._random.choice(self._shared)
        await memory.describe()
        await memory.stats()
        await memory.update(labels={"at": str(self.ledger.done["changes"])})
        async for _ in self._client.list_memories(NAMESPACE):
            pass
        async for _ in self._client.list_namespaces():
            pass

    # ---- complete lifecycles
    async def _live_shortly(self) -> None:
        """Create a memory, write it over several broken streams, read it back completely, clone and delete it."""
        name = f"{NAMESPACE}/short-{self._random.getrandbits(40):x}"
        memory = await self._client.create_memory(name, kind=MemoryKind.LONG_TERM)
        sentences: list[str] = []
        for _ in range(self._random.randint(1, 6)):
            with contextlib.suppress(_Abandoned):
                async with memory.observe("writer", session="life") as stream:
                    for _ in range(self._random.randint(1, 80)):
                        number = stream.expected_sequence
                        del sentences[number - 1 :]
                        sentences.append(f"{number} {self._talk.make_sentence()}")
                        await stream.send(sentences[-1])
                    await stream.flush()
                    if self._random.random() < 0.5:
                        raise _Abandoned
        await memory.recall_once(sentences[-1], limit=3)
        found = [one.content async for one in memory.list_fragments(page_size=50)]
        if found != sentences:
            raise Lost(f"{name}: {len(sentences)} were stored, {len(found)} are listed")
        self.ledger.checked += len(found)
        if self._random.random() < 0.3:
            await (await memory.clone(f"{name}-clone")).delete()
        await memory.delete()

    async def _hold_conversation(self, name: str) -> None:
        conversation = self._client.conversation(f"{NAMESPACE}/{name}")
        watch = conversation.watch()
        listening = asyncio.create_task(_read_all(watch))
        try:
            for number in range(self._random.randint(1, 15)):
                await conversation.append("ann", self._talk.make_sentence(), receiver="bob")
                await conversation.save_plans([Plan(number=number % 5 + 1, content=self._talk.make_sentence())])
                await conversation.complete_plan(number % 5 + 1, "done")
                [one async for one in conversation.messages("ann", "bob")]
            await conversation.complete()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await watch.aclose()
        await conversation.delete_messages()
        await conversation.remove_plans()

    async def _run_victim(self, name: str) -> None:
        """Kill a client process at a random moment; the next run resumes its producer by name."""
        acknowledged = self.ledger.producer(f"{NAMESPACE}/killed", name)
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, self.address, name, stdout=asyncio.subprocess.PIPE, env=os.environ
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._random.uniform(*KILLED_AFTER_S) + 3.0):
                async for line in process.stdout:
                    received, stored = map(int, line.split())
                    acknowledged.advance_to(received, stored)
            raise Lost(f"client {name} exited unexpectedly; its output is above")
        except TimeoutError:
            self.ledger.done["kill"] += 1
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    # ---- after the load
    async def check_acknowledged(self, client: memstream.Client) -> list[str]:
        """Acknowledged items that the server does not have; empty if none is missing."""
        problems: list[str] = []
        for (path, name), acknowledged in self.ledger.producers.items():
            async with client.memory(path).observe(name) as stream:
                if stream.received < acknowledged.received or stream.stored < acknowledged.stored:
                    problems.append(
                        f"{path} {name}: acknowledged {acknowledged}, the server has {stream.received}, {stream.stored}"
                    )
        memory = client.memory(f"{NAMESPACE}/keyed")
        for key, version in self.ledger.keys.items():
            content = (await memory.get_fragment(external_id=key)).content
            if int(content.split()[1]) < version:
                problems.append(f"{key}: version {version} was acknowledged, the server has {content[:30]!r}")
        return problems

    async def delete_memories(self, client: memstream.Client) -> None:
        """Delete all memories."""
        paths = [f"{one.namespace}/{one.name}" async for one in client.list_memories(NAMESPACE)]
        for path in paths:
            await client.delete_memory(path)

    # ---- text
    def _make_observation(self) -> Observation:
        ttl = timedelta(seconds=self._random.randint(1, 30)) if self._random.random() < 0.2 else None
        return Observation(self._talk.make_sentence(), speaker=self._random.choice(("Ada", "Grace")), ttl=ttl)

    def _make_question(self) -> str:
        return self._talk.draw_question(self._talk.make_sentence())


class _Abandoned(Exception):
    """A client's error in the middle of a stream."""


def _event_retention() -> dict[str, Any]:
    return {"retention": {"event_retention": 60}}


def _check_acknowledged(stream: memstream.ObserveStream, acknowledged: Acknowledged, path: str) -> None:
    if stream.received < acknowledged.received or stream.stored < acknowledged.stored:
        raise Lost(
            f"{path} {stream.producer}: acknowledged {acknowledged}, the server has {stream.received}, {stream.stored}"
        )


async def _take_first(listing: AsyncIterator[memstream.Fragment], count: int) -> AsyncIterator[memstream.Fragment]:
    for _ in range(count):
        one = await anext(listing, None)
        if one is None:
            return
        yield one


async def _read_all(watch: memstream.ConversationWatch) -> None:
    async for _ in watch:
        pass


async def _run_until_killed(address: str, name: str) -> None:
    """Observe, recall and watch until killed."""
    talk = SentenceSource(os.getpid())
    async with memstream.connect(address, retry=PATIENT) as client:
        memory = client.memory(f"{NAMESPACE}/killed")
        async with memory.observe(name, session=name) as stream, memory.recall() as recall, memory.watch() as watch:
            following = asyncio.create_task(_read_events(watch))
            for number in itertools.count():
                await stream.send(talk.make_sentence())
                if number % 20 == 0:
                    await recall.query(talk.draw_question(talk.make_sentence()))
                    print(stream.received, stream.stored, flush=True)
                await asyncio.sleep(0.05)
            following.cancel()


async def _read_events(watch: memstream.Watch) -> None:
    async for _ in watch:
        pass


if __name__ == "__main__":
    asyncio.run(_run_until_killed(sys.argv[1], sys.argv[2]))
