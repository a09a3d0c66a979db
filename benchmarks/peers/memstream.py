"""memstream: a server with default settings in its own process, driven through the SDK.

Variant `given`: vectors are sent with every observation and query. Otherwise the server embeds, and that time counts.
"Kept" means *stored*: committed to the journal with fsync and visible to every recall.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime

from served import BenchServer

import memstream
from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, own_process, run_peer
from memstream_server.core.rendering import date_text


class SdkClient:
    """The peer's calls through the SDK, to any server at `address` that takes them."""

    def __init__(self, given: PeerOptions, address: str) -> None:
        self._given = given
        self._client = memstream.connect(address)
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
        # All before the first is sent: the server must not work while the clock stands still.
        vectors: Sequence[list[float] | None] = [None] * len(items)
        if self._given.variant == "given":
            vectors = self._given.vectors.look_up([item.line for item in items])
        for item, vector in zip(items, vectors, strict=True):
            said = memstream.Observation(
                item.text,
                speaker=item.speaker,
                session=item.session,
                observe_time=_to_datetime(item.time_s),
                embedding=vector,
            )
            await stream.send(said)
        await stream.flush()

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        options = memstream.RecallOptions(limit=k, now=_to_datetime(query.now_s))
        if query.judged:
            options |= {"omit_working_memory": True, "reinforce": False}
        if self._given.variant == "given":
            options["embedding"] = self._given.vectors.look_up_one(query.text)
        return [_fragment_line(one.fragment) for one in await self._recalling[memory].query(query.text, **options)]

    async def lines(self, memory: str) -> list[str]:
        return [_fragment_line(one) async for one in self._memories[memory].list_fragments()]

    async def close(self) -> None:
        await self._opened.aclose()
        await self._client.close()


class Memstream(SdkClient):
    def __init__(self, given: PeerOptions, server: BenchServer) -> None:
        super().__init__(given, server.address)
        self._server = server

    @property
    def server_pid(self) -> int:
        """Process id of the server."""
        return self._server.pid

    def processes(self) -> Processes:
        """The server, Milvus Lite (which ends with it) and this process, the client side."""
        own = own_process()
        return Processes(
            [self._server.pid, *own.pids],
            sum(self._server.resident_mb()) + own.resident_mb,
            self._server.cpu_used().total + own.cpu_s,
        )

    async def close(self) -> None:
        await super().close()
        self._server.stop()


def _to_datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def format_line(text: str, speaker: str, when: datetime) -> str:
    """The line that memstream indexes and the peers store: "[8 May 2023] Ada: text"."""
    return f"[{date_text(round(when.timestamp() * 1e6))}] {speaker}: {text}"


def _fragment_line(fragment: memstream.Fragment) -> str:
    assert fragment.observe_time is not None, "every observation was sent with its time"
    return format_line(fragment.content, fragment.speaker, fragment.observe_time)


async def open_server(given: PeerOptions, *, probed: bool) -> BenchServer:
    """Start a server over the directory; return when its index is loaded."""
    settings = {"embedding": "onnx", "embedding_model_dir": given.model} if given.model else {}
    server = BenchServer(given.directory / "data", probed=probed, **settings).start()
    async with memstream.connect(server.address) as client:
        await _wait_for_index(client)
    return server


async def make_peer(given: PeerOptions) -> Memstream:
    return Memstream(given, await open_server(given, probed=True))


async def _wait_for_index(client: memstream.Client) -> None:
    """Wait for the index, which the server loads in the background; the peers have theirs at this point, too."""
    while True:
        if not (await client.server_info()).degraded:
            return
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    run_peer(make_peer)
