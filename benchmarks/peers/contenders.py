"""Who is compared, in which environment, and what a reader of the table has to know of each."""

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
    """One row. `module` is its runner; `environment` None: the one that the driver runs in."""

    title: str
    module: str
    packages: Sequence[str]
    note: str
    variant: str = ""
    environment: Environment | None = None
    in_memory: bool = False
    """Keeps nothing on disk: what only a dictionary in the process can win is no comparison."""

    def python(self) -> Path:
        """The interpreter, installed first where it is not there yet. Raises tests.toolchains.programs.Absent."""
        return Path(sys.executable) if self.environment is None else self.environment.python()

    @property
    def versions(self) -> str:
        """Of its packages, as they are locked."""
        if self.environment is None:
            return ", ".join(f"{name} {version(name)}" for name in self.packages)
        locked = dict(re.findall(r"^([\w.-]+)==(\S+)", self.environment.requirements.read_text("utf-8"), re.M))
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
    "A server on the defaults, in a process of its own, through the SDK; vectors are sent with every observation and "
    "query. Observe stream; *one at a time* waits for *stored* each time, which is on disk (fsync).",
    variant="given",
)
CONTENDERS = (
    MEMSTREAM,
    Contender(
        "memstream, embedding itself",
        "benchmarks.peers.memstream",
        ["memstream"],
        "The same, but the server makes the vectors: its time contains that of the model. Short-term fragments are "
        "then compared by their words alone, as in production.",
        variant="own",
    ),
    Contender(
        "DB-GPT LongTermMemory, Chroma",
        "benchmarks.peers.dbgpt",
        ["dbgpt", "dbgpt-ext", "chromadb"],
        "`write_batch` and `read`, no LLM: `_default_importance=0.5`. As shipped it answers with 4 whatever is asked "
        "(`_k`); that was raised to what the others give.",
        variant="long_term",
        environment=_DBGPT,
    ),
    Contender(
        "DB-GPT HybridMemory, Chroma",
        "benchmarks.peers.dbgpt",
        ["dbgpt", "dbgpt-ext", "chromadb"],
        "`from_vstore` with its defaults, no LLM: no importance scorer (everything is 5 x 0.9), no insight extractor. "
        "What is not enhanced three times while it is in short-term (10) is discarded: that is its policy, and why it "
        "holds little. `_k` was raised here, too.",
        variant="hybrid",
        environment=_DBGPT,
    ),
    Contender(
        "LangChain time-weighted, Chroma",
        "benchmarks.peers.langchain",
        ["langchain-classic", "langchain-chroma", "chromadb"],
        "TimeWeightedVectorStoreRetriever. Chroma refuses the times that it writes into metadata: they are left out. "
        "Its `memory_stream` is a list in the process: Chroma keeps the vectors, but a retriever made anew over them "
        "cannot answer. It knows no time but the machine's, so that recency sets nothing apart here.",
        environment=_environment("langchain"),
    ),
    Contender(
        "LangGraph SqliteStore",
        "benchmarks.peers.langgraph",
        ["langgraph-checkpoint", "langgraph-checkpoint-sqlite", "sqlite-vec"],
        "`batch` of PutOps and `search` with its index (sqlite-vec, exact scan); through pysqlite3 where "
        "Python's own SQLite loads no extensions.",
        variant="sqlite",
        environment=_LANGGRAPH,
    ),
    Contender(
        "LangGraph InMemoryStore",
        "benchmarks.peers.langgraph",
        ["langgraph-checkpoint"],
        "The same in a dictionary of the process; nothing is on disk.",
        variant="memory",
        environment=_LANGGRAPH,
        in_memory=True,
    ),
    Contender(
        "mem0, Qdrant",
        "benchmarks.peers.mem0",
        ["mem0ai", "qdrant-client"],
        "`infer=False`, Qdrant in a directory (the default store), threshold 0. Without its BM25, whose model is "
        "fetched when first used, and without spaCy's lemmas and entities.",
        variant="qdrant",
        environment=_MEM0,
    ),
    Contender(
        "mem0, Milvus Lite",
        "benchmarks.peers.mem0",
        ["mem0ai", "milvus-lite", "pymilvus"],
        "The same on Milvus Lite, whose BM25 needs no model. But its scores are negative there, and mem0 leaves such "
        "out: it ranks by the vectors alone here, too. After a restart mem0 does not load its collection; the runner "
        "does.",
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
