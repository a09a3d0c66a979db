"""LangChain's time-weighted retriever over Chroma on disk.

It uses the machine's clock only, so all replayed texts have the same age and recency distinguishes nothing. (With the
texts' own times, everything is years old except results of earlier questions, and those would win every later one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_chroma import Chroma
from langchain_classic.retrievers import TimeWeightedVectorStoreRetriever
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, Vectors, own_process, run_peer


class Table(Embeddings):
    """LangChain's embedder over the table."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._vectors.look_up(texts)

    def embed_query(self, text: str) -> list[float]:
        return self._vectors.look_up_one(text)


class WithoutTimes(Chroma):
    """Chroma rejects the times that the retriever writes into metadata; the retriever only reads its own copy."""

    def add_documents(self, documents: list[Document], **given: Any) -> list[str]:
        kept = [
            Document(page_content=one.page_content, metadata={"buffer_idx": one.metadata["buffer_idx"]})
            for one in documents
        ]
        return super().add_documents(kept, **given)


class LangChain:
    def __init__(self, given: PeerOptions) -> None:
        self._given = given
        self._held: dict[str, TimeWeightedVectorStoreRetriever] = {}

    async def open(self, memory: str) -> None:
        if memory not in self._held:
            store = WithoutTimes(
                memory,
                Table(self._given.vectors),
                persist_directory=str(self._given.directory),
                collection_metadata={"hnsw:space": "cosine"},
            )
            self._held[memory] = TimeWeightedVectorStoreRetriever(vectorstore=store)

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        self._held[memory].add_documents([Document(page_content=item.line) for item in items])

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        retriever = self._held[memory]
        retriever.k = k
        return [one.page_content for one in retriever.invoke(query.text)]

    async def lines(self, memory: str) -> list[str]:
        documents: list[str] = self._held[memory].vectorstore.get()["documents"]
        return documents

    def processes(self) -> Processes:
        return own_process()

    async def close(self) -> None: ...


async def make_peer(given: PeerOptions) -> LangChain:
    return LangChain(given)


if __name__ == "__main__":
    run_peer(make_peer)
