"""Chroma's server (`chroma run`) over HTTP, with one collection for each memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import chromadb
from chromadb.api.models.Collection import Collection
from chromadb.config import Settings

from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, run_peer
from benchmarks.peers.servers.processes import ServerProcess, accepts, find_free_port


class Chroma:
    def __init__(self, given: PeerOptions, server: ServerProcess, port: int) -> None:
        self._given = given
        self._server = server
        self._client = chromadb.HttpClient("127.0.0.1", port, settings=Settings(anonymized_telemetry=False))
        self._collections: dict[str, Collection] = {}
        self._next: dict[str, int] = {}

    async def open(self, memory: str) -> None:
        found = self._client.get_or_create_collection(
            f"memory-{memory}", embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
        )
        self._collections[memory], self._next[memory] = found, found.count()

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        start = self._next[memory]
        self._next[memory] += len(items)
        lines = [item.line for item in items]
        ids = [str(start + place) for place in range(len(items))]
        self._collections[memory].add(ids, self._given.vectors.look_up(lines), documents=lines)

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        vector = self._given.vectors.look_up_one(query.text)
        found = self._collections[memory].query([vector], n_results=k, include=["documents"])
        return list((found["documents"] or [[]])[0])

    async def lines(self, memory: str) -> list[str]:
        return list(self._collections[memory].get(include=["documents"])["documents"] or [])

    def processes(self) -> Processes:
        return self._server.measure()

    async def close(self) -> None:
        self._server.stop()


async def make_peer(given: PeerOptions) -> Chroma:
    port = find_free_port()
    program = Path(sys.executable).with_name("chroma")
    place = ("--host", "127.0.0.1", "--port", str(port), "--path", str(given.directory / "data"))
    server = ServerProcess([str(program), "run", *place], given.directory)
    server.wait_until(lambda: accepts(port))
    return Chroma(given, server, port)


if __name__ == "__main__":
    run_peer(make_peer)
