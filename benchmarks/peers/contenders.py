"""The compared systems, their environments, and what the reader of the table must know about each."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.toolchains.environments import ROOT, Environment

_REQUIREMENTS = "benchmarks/peers/requirements"


@dataclass(frozen=True)
class Contender:
    """One row. `module` is its runner; `environment` None: the driver's own environment."""

    title: str
    module: str
    packages: Sequence[str]
    note: str
    variant: str = ""
    environment: Environment | None = None
    in_memory: bool = False
    """Keeps nothing on disk, so it is not compared in figures that a dictionary in the process always wins."""

    def python(self) -> Path:
        """The interpreter, installed first if missing. Raises tests.toolchains.programs.Absent."""
        return Path(sys.executable) if self.environment is None else self.environment.python()

    @property
    def versions(self) -> str:
        """Locked versions of its packages."""
        if self.environment is None:
            return ", ".join(f"{name} {version(name)}" for name in self.packages)
        text = self.environment.requirements.read_text("utf-8")
        locked = dict(re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)", text, re.M))
        return ", ".join(f"{name} {locked[name]}" for name in self.packages)


def _environment(name: str, only: str = "") -> Environment:
    return Environment(name, only, ROOT / _REQUIREMENTS, memstream=False)


_DBGPT = _environment("dbgpt", "3.11")
_LANGGRAPH = _environment("langgraph")
_MEM0 = _environment("mem0")

MEMSTREAM = Contender(
    "memstream",
    "benchmarks.peers.memstream",
    ["memstream"],
    "A server with default settings in its own process, through the SDK; vectors are sent with every observation and "
    "query. Observe stream; *one at a time* waits for *stored* each time, which is on disk (fsync).",
    variant="given",
)
CONTENDERS = (
    MEMSTREAM,
    Contender(
        "memstream, embedding itself",
        "benchmarks.peers.memstream",
        ["memstream"],
        "The same, but the server computes the vectors: its time includes the model's. Short-term fragments are "
        "then compared by their words alone, as in production.",
        variant="own",
    ),
    Contender(
        "DB-GPT LongTermMemory, Chroma",
        "benchmarks.peers.dbgpt",
        ["dbgpt", "dbgpt-ext", "chromadb"],
        "`write_batch` and `read`, no LLM: `_default_importance=0.5`. As shipped it returns 4 results for any limit "
        "(`_k`); the benchmark raises that to the others' limit.",
        variant="long_term",
        environment=_DBGPT,
    ),
    Contender(
        "DB-GPT HybridMemory, Chroma",
        "benchmarks.peers.dbgpt",
        ["dbgpt", "dbgpt-ext", "chromadb"],
        "`from_vstore` with its defaults, no LLM: no importance scorer (everything is 5 x 0.9), no insight extractor. "
        "Its policy discards texts that are not enhanced three times while in short-term (10), so it holds little. "
        "`_k` is raised here, too.",
        variant="hybrid",
        environment=_DBGPT,
    ),
    Contender(
        "LangChain time-weighted, Chroma",
        "benchmarks.peers.langchain",
        ["langchain-classic", "langchain-chroma", "chromadb"],
        "TimeWeightedVectorStoreRetriever. Chroma rejects the times that it writes into metadata: they are left out. "
        "Its `memory_stream` is a list in the process: Chroma keeps the vectors, but a new retriever over them cannot "
        "answer. It uses the machine's clock only, so recency distinguishes nothing here.",
        environment=_environment("langchain"),
    ),
    Contender(
        "LangGraph SqliteStore",
        "benchmarks.peers.langgraph",
        ["langgraph-checkpoint", "langgraph-checkpoint-sqlite", "sqlite-vec"],
        "`batch` of PutOps and `search` with its index (sqlite-vec, exact scan); through pysqlite3 if Python's own "
        "SQLite cannot load extensions.",
        variant="sqlite",
        environment=_LANGGRAPH,
    ),
    Contender(
        "LangGraph InMemoryStore",
        "benchmarks.peers.langgraph",
        ["langgraph-checkpoint"],
        "The same with a dictionary in the process; nothing is on disk.",
        variant="memory",
        environment=_LANGGRAPH,
        in_memory=True,
    ),
    Contender(
        "mem0, Qdrant",
        "benchmarks.peers.mem0",
        ["mem0ai", "qdrant-client"],
        "`infer=False`, Qdrant in a directory (the default store), threshold 0. Without its BM25, whose model is "
        "downloaded on first use, and without spaCy's lemmas and entities.",
        variant="qdrant",
        environment=_MEM0,
    ),
    Contender(
        "mem0, Milvus Lite",
        "benchmarks.peers.mem0",
        ["mem0ai", "milvus-lite", "pymilvus"],
        "The same on Milvus Lite, whose BM25 needs no model. But its scores are negative there and mem0 drops negative "
        "scores: it ranks by the vectors alone here, too. After a restart mem0 does not load its collection; the "
        "runner does.",
        variant="milvus",
        environment=_MEM0,
    ),
    Contender(
        "LlamaIndex, Chroma",
        "benchmarks.peers.llamaindex",
        ["llama-index-core", "llama-index-vector-stores-chroma", "chromadb"],
        "VectorStoreIndex: `insert_nodes`, `as_retriever`.",
        environment=_environment("llamaindex"),
    ),
)
