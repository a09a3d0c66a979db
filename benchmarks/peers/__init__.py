"""memstream compared with other memory systems: same texts, same vectors, same machine, one run.

`python -m benchmarks.peers` runs the comparison. A runner module imports nothing of memstream, because it runs in its
peer's own environment.

    __main__: the command line
    compare: interleaved rounds, the kill, and recall quality
    contenders: the peers, their environments, and notes for the reader of the table
    load: the texts and questions of a round, and the table of vectors
    protocol: the runner side: JSON requests on standard input, timing of the peer's calls
    runner: the driver side: starts, asks and kills a runner process
    results: the comparison as a Markdown page and as JSON
    memstream: runner of memstream
    dbgpt: runner of DB-GPT's LongTermMemory and HybridMemory
    langchain: runner of LangChain's time-weighted retriever
    langgraph: runner of LangGraph's stores
    llamaindex: runner of LlamaIndex's vector index
    mem0: runner of mem0
    servers: the comparison with servers, a program of its own
"""

import sys
from pathlib import Path

# The benchmarks in the parent folder are scripts that import each other by bare names. The folder comes last on the
# path, so that it hides no module of a peer.
sys.path.append(str(Path(__file__).parents[1]))
