"""DB-GPT's LongTermMemory and HybridMemory on Chroma, without an LLM.

The defaults of its documentation: no importance scorer, so HybridMemory rates everything 5 x 0.9 and LongTermMemory
uses its `_default_importance` of 0.5; no insight extractor. `now` is the creation time, as in HybridMemory. One change:
as shipped, its retriever returns 4 results for any limit (`_k`); here it may return as many as the others.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

from dbgpt.agent import AgentMemoryFragment, HybridMemory, LongTermMemory
from dbgpt.core import Embeddings
from dbgpt_ext.storage.vector_store.chroma_store import ChromaStore, ChromaVectorConfig

from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, Vectors, own_process, run_peer

_NUMBER = re.compile(r"^\[\d+] ")
"""The prefix that LongTermMemory adds to every text."""


class Table(Embeddings):
    """DB-GPT's embedder over the table."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._vectors.look_up(texts)

    def embed_query(self, text: str) -> list[float]:
        return self._vectors.look_up_one(text)


@dataclass(frozen=True)
class Held:
    """One memory with its long-term part and store."""

    memory: LongTermMemory[AgentMemoryFragment] | HybridMemory[AgentMemoryFragment]
    long_term: LongTermMemory[AgentMemoryFragment]
    store: ChromaStore


class DbGpt:
    def __init__(self, given: PeerOptions) -> None:
        self._given = given
        self._embeddings = Table(given.vectors)
        self._executor = ThreadPoolExecutor()
        self._held: dict[str, Held] = {}

    async def open(self, memory: str) -> None:
        if memory not in self._held:
            self._held[memory] = await asyncio.to_thread(self._make, memory)

    def _make(self, name: str) -> Held:
        config = ChromaVectorConfig(persist_path=str(self._given.directory))
        store = ChromaStore(config, name=name, embedding_fn=self._embeddings)
        now = datetime.now()
        if self._given.variant == "hybrid":
            memory = HybridMemory.from_vstore(store, self._embeddings, executor=self._executor, now=now)
            long_term = memory._long_term_memory
        else:
            memory = long_term = LongTermMemory(self._executor, store, now=now, _default_importance=0.5)
        memory.initialize("bench", real_memory_fragment_class=AgentMemoryFragment)
        return Held(memory, long_term, store)

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        held = self._held[memory]
        fragments = [AgentMemoryFragment(item.line) for item in items]
        if self._given.variant == "hybrid":
            for fragment in fragments:  # its write_batch writes nothing to long-term
                await held.memory.write(fragment)
        else:
            await held.memory.write_batch(fragments, now=held.long_term.now)

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        held = self._held[memory]
        held.long_term.memory_retriever._k = k
        found = await held.memory.read(query.text)
        return [_NUMBER.sub("", one.raw_observation) for one in found[:k]]

    async def lines(self, memory: str) -> list[str]:
        held = self._held[memory]
        kept = [_NUMBER.sub("", text) for text in held.store._collection.get()["documents"]]
        if self._given.variant == "hybrid":
            kept += [one.raw_observation for one in held.memory._short_term_memory.short_term_memories]
        return kept

    def processes(self) -> Processes:
        return own_process()

    async def close(self) -> None:
        self._executor.shutdown()


async def make_peer(given: PeerOptions) -> DbGpt:
    return DbGpt(given)


if __name__ == "__main__":
    run_peer(make_peer)
