"""memstream: a server with the defaults in a process of its own, driven through the SDK.

Variant `given`: vectors come with every observation and query. Otherwise the server embeds for itself (the time is
its own). "Kept" is *stored*: committed to the journal with fsync, and seen by every recall.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime

from served import Served

import memstream
from benchmarks.peers.protocol import Given, Item, Processes, Query, main, own_process
from memstream_server.core.rendering import date_text


class Memstream:
    def __init__(self, given: Given, server: Served) -> None:
        self._given = given
        self._server = server
        self._client = memstream.connect(server.address)
        self._opened = contextlib.AsyncExitStack()
        self._memories: dict[str, memstream.Memory] = {}
        self._observing: dict[str, memstream.ObserveStream] = {}
        self._recalling: dict[str, memstream.RecallStream] = {}

    async def open(self, memory: str) -> None:
        if memory in self._memories:
            return
        made = self._memories[memory] = await self._client.create_memory(f"peers/{memory}", exist_ok=True)
        self._observing[memory] = await self._opened.enter_async_context(made.observe("bench"))
        self._recalling[memory] = await self._opened.enter_async_context(made.recall())

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        stream = self._observing[memory]
        for item in items:
            said = memstream.Observation(
                item.text,
                speaker=item.speaker,
                session=item.session,
                observe_time=_time(item.time_s),
                embedding=self._given.vectors.one(item.line) if self._given.variant == "given" else None,
            )
            await stream.send(said)
        await stream.flush()

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        options = memstream.RecallOptions(limit=k, now=_time(query.now_s))
        if query.judged:
            options |= {"omit_working_memory": True, "reinforce": False}
        if self._given.variant == "given":
            options["embedding"] = self._given.vectors.one(query.text)
        return [_line(one.fragment) for one in await self._recalling[memory].query(query.text, **options)]

    async def lines(self, memory: str) -> list[str]:
        return [_line(one) async for one in self._memories[memory].list_fragments()]

    def processes(self) -> Processes:
        """The server, Milvus Lite (which ends with it) and this process, which is what an agent has of it."""
        own = own_process()
        return Processes(
            [self._server.pid, *own.pids],
            sum(self._server.resident_mb()) + own.resident_mb,
            self._server.cpu().both + own.cpu_s,
        )

    async def close(self) -> None:
        await self._opened.aclose()
        await self._client.close()
        self._server.stop()


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def line(text: str, speaker: str, when: datetime) -> str:
    """ "[8 May 2023] Ada: text": what memstream indexes, and what the peers are given as their text."""
    return f"[{date_text(round(when.timestamp() * 1e6))}] {speaker}: {text}"


def _line(fragment: memstream.Fragment) -> str:
    assert fragment.observe_time is not None, "every observation was sent with its time"
    return line(fragment.content, fragment.speaker, fragment.observe_time)


async def make(given: Given) -> Memstream:
    settings = {"embedding": "onnx", "embedding_model_dir": given.model} if given.model else {}
    server = Served(given.directory / "data", **settings).start()
    async with memstream.connect(server.address) as client:
        await _whole(client)
    return Memstream(given, server)


async def _whole(client: memstream.Client) -> None:
    """Waits for the index, which the server brings up while it serves; the peers have theirs by now, too."""
    while True:
        if not (await client.server_info()).degraded:
            return
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    main(make)
