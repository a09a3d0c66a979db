"""LlamaIndex's vector index over Chroma on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chromadb
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import TextNode
from llama_index.vector_stores.chroma import ChromaVectorStore
from pydantic import PrivateAttr

from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, Vectors, own_process, run_peer


class Table(BaseEmbedding):
    """LlamaIndex's embedder over the table."""

    _vectors: Vectors = PrivateAttr()

    def __init__(self, vectors: Vectors) -> None:
        super().__init__(model_name="table", embed_batch_size=512)
        self._vectors = vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._vectors.look_up_one(text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._vectors.look_up(texts)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vectors.look_up_one(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


class LlamaIndex:
    def __init__(self, given: PeerOptions) -> None:
        self._embedder = Table(given.vectors)
        settings = chromadb.Settings(anonymized_telemetry=False)
        self._chroma = chromadb.PersistentClient(str(given.directory), settings=settings)
        self._held: dict[str, tuple[VectorStoreIndex, Any]] = {}

    async def open(self, memory: str) -> None:
        if memory not in self._held:
            collection = self._chroma.get_or_create_collection(memory, metadata={"hnsw:space": "cosine"})
            store = ChromaVectorStore(chroma_collection=collection)
            self._held[memory] = VectorStoreIndex.from_vector_store(store, embed_model=self._embedder), collection

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        self._held[memory][0].insert_nodes([TextNode(text=item.line) for item in items])

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        retriever = self._held[memory][0].as_retriever(similarity_top_k=k)
        return [one.node.get_content() for one in retriever.retrieve(query.text)]

    async def lines(self, memory: str) -> list[str]:
        documents: list[str] = self._held[memory][1].get()["documents"]
        return documents

    def processes(self) -> Processes:
        return own_process()

    async def close(self) -> None: ...


async def make_peer(given: PeerOptions) -> LlamaIndex:
    return LlamaIndex(given)


if __name__ == "__main__":
    run_peer(make_peer)
