"""DB-GPT's agent memory on a memstream server.

    client = memstream.sync.connect("127.0.0.1:7700")
    memory = AgentMemory(
        memory=RemoteHybridMemory(client, "comedy/joy"),
        gpts_memory=RemoteGptsMemory(client, "comedy"),
    )
    joy = await JoyAgent().bind(context).bind(LLMConfig(llm_client=llm)).bind(memory).build()

`AgentMemory`, agents and everything else are DB-GPT's (0.8), which the extra `dbgpt` installs. Failed calls
raise a MemstreamError (see memstream.errors).

Modules:
memory: DB-GPT's Memory classes.
gpts: DB-GPT's GptsMemory, for messages and plans.
fragments: converts DB-GPT's fragments to observations, and fragments back.
"""

from memstream.frameworks import framework

with framework("dbgpt"):
    from memstream.dbgpt.gpts import RemoteGptsMemory, RemoteMessageMemory, RemotePlansMemory
    from memstream.dbgpt.memory import (
        RemoteEnhancedShortTermMemory,
        RemoteHybridMemory,
        RemoteLongTermMemory,
        RemoteMemory,
        RemoteSensoryMemory,
        RemoteShortTermMemory,
        Scope,
    )

__all__ = [
    "RemoteEnhancedShortTermMemory",
    "RemoteGptsMemory",
    "RemoteHybridMemory",
    "RemoteLongTermMemory",
    "RemoteMemory",
    "RemoteMessageMemory",
    "RemotePlansMemory",
    "RemoteSensoryMemory",
    "RemoteShortTermMemory",
    "Scope",
]
