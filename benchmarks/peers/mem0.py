"""mem0 with `infer=False`: on Qdrant in a directory (its default), and on Milvus Lite.

On Qdrant, BM25 needs a model that is downloaded on first use, and lemmas and entities need a spaCy model; neither comes
with mem0's packages, and it continues without them. On Milvus Lite it runs BM25 but drops the results, because their
scores are negative there. Its threshold of 0.1 is set to 0, which hides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mem0 import Memory
from mem0.embeddings.base import EmbeddingBase

from benchmarks.peers.protocol import Item, PeerOptions, Processes, Query, Vectors, own_process, run_peer

_ALL = 16_384
"""Milvus' maximum for one listing."""


class Table(EmbeddingBase):
    """mem0's embedder over the table."""

    def __init__(self, vectors: Vectors) -> None:
        super().__init__()
        self._vectors = vectors

    def embed(self, text: str, memory_action: str | None = None) -> list[float]:
        return self._vectors.look_up_one(text)

    def embed_batch(self, texts: list[str], memory_action: str | None = "add") -> list[list[float]]:
        return self._vectors.look_up(texts)


class Mem0:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    async def open(self, memory: str) -> None: ...

    async def add(self, memory: str, items: Sequence[Item]) -> None:
        self._memory.add([{"role": "user", "content": item.line} for item in items], user_id=memory, infer=False)

    async def recall(self, memory: str, query: Query, k: int) -> list[str]:
        found = self._memory.search(query.text, filters={"user_id": memory}, top_k=k, threshold=0.0)
        return [one["memory"] for one in found["results"]]

    async def lines(self, memory: str) -> list[str]:
        return [one["memory"] for one in self._memory.get_all(filters={"user_id": memory}, top_k=_ALL)["results"]]

    def processes(self) -> Processes:
        return own_process()

    async def close(self) -> None:
        self._memory.close()


async def make_peer(given: PeerOptions) -> Mem0:
    given.directory.mkdir(parents=True, exist_ok=True)
    size = {"embedding_model_dims": given.vectors.dimension, "collection_name": "memories"}
    stores: dict[str, dict[str, Any]] = {
        "qdrant": {"path": str(given.directory / "qdrant"), "on_disk": True},
        "milvus": {"url": str(given.directory / "milvus.db"), "token": "", "metric_type": "COSINE"},
    }
    memory = Memory.from_config(
        {
            "vector_store": {"provider": given.variant, "config": stores[given.variant] | size},
            # Neither is called: with infer=False nothing is asked of a model, and the embedder is replaced below.
            "llm": {"provider": "openai", "config": {"api_key": "none"}},
            "embedder": {"provider": "openai", "config": {"api_key": "none"}},
            "history_db_path": str(given.directory / "history.db"),
        }
    )
    memory.embedding_model = Table(given.vectors)
    if given.variant == "milvus":
        memory.vector_store.client.load_collection(size["collection_name"])  # Milvus Lite releases it when it ends
    return Mem0(memory)


if __name__ == "__main__":
    run_peer(make_peer)
