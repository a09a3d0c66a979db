"""DB-GPT's LongTermMemory and HybridMemory on Chroma, without an LLM.

Its documents' defaults: no importance scorer, so that HybridMemory gives everything 5 x 0.9, and LongTermMemory its
`_default_importance` of 0.5; no insight extractor. `now` is that of the making, as HybridMemory has it. One thing is
not as shipped: its retriever answers with 4 whatever is asked (`_k`); here it may answer with as many as the others.
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

from benchmarks.peers.protocol import Given, Item, Processes, Query, Vectors, main, own_process

_NUMBER = re.compile(r"^\[\d+] ")
"""What LongTermMemory puts in front of every text."""


class Table(Embeddings):
    """DB-GPT's embedder over the table."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._vectors.of(texts)

    def embed_query(self, text: str) -> list[float]:
        return self._vectors.one(text)


@dataclass(frozen=True)
class Held:
    """One memory and what is below it."""

    memory: LongTermMemory[AgentMemoryFragment] | HybridMemory[AgentMemoryFragment]
    long_term: LongTermMemory[AgentMemoryFragment]
    store: ChromaStore


class DbGpt:
    def __init__(self, given: Given) -> None:
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
            for fragment in fragments:  # its write_batch is for what was kept before: nothing reaches long-term
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


async def make(given: Given) -> DbGpt:
    return DbGpt(given)


if __name__ == "__main__":
    main(make)
