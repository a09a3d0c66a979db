"""LangGraph's stores with an index: InMemoryStore, and SqliteStore (sqlite-vec) in a file."""

from __future__ import annotations

import contextlib
import importlib
import sqlite3
import sys
from collections.abc import Sequence

if not hasattr(sqlite3.Connection, "enable_load_extension"):  # sqlite-vec is one
    sys.modules["sqlite3"] = importlib.import_module("pysqlite3")

from langgraph.store.base import BaseStore, PutOp
from langgraph.store.memory import InMemoryStore
from langgraph.store.sqlite import SqliteStore

from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, own_process, run_peer

_ALL = 1_000_000


class LangGraph:
    def __init__(self, store: BaseStore, opened: contextlib.ExitStack) -> None:
        self._store = store
        self._opened = opened
        self._next: dict[str, int] = {}

    async def open(self, memory: str) -> None:
        self._next[memory] = len(await self.lines(memory))

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        start = self._next[memory]
        self._next[memory] += len(items)
        self._store.batch(
            PutOp((memory,), str(number), {"text": item.line}) for number, item in enumerate(items, start)
        )

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        return [one.value["text"] for one in self._store.search((memory,), query=query.text, limit=k)]

    async def lines(self, memory: str) -> list[str]:
        return [one.value["text"] for one in self._store.search((memory,), limit=_ALL)]

    def processes(self) -> Processes:
        return own_process()

    async def close(self) -> None:
        self._opened.close()


async def make_peer(given: PeerOptions) -> LangGraph:
    index = {"dims": given.vectors.dimension, "embed": given.vectors.look_up, "fields": ["text"]}
    opened = contextlib.ExitStack()
    if given.variant == "memory":
        return LangGraph(InMemoryStore(index=index), opened)
    given.directory.mkdir(parents=True, exist_ok=True)
    store = opened.enter_context(SqliteStore.from_conn_string(str(given.directory / "store.db"), index=index))
    store.setup()
    return LangGraph(store, opened)


if __name__ == "__main__":
    run_peer(make_peer)
