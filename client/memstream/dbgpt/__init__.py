"""DB-GPT's agents with their memory on a memstream server.

    client = memstream.sync.connect("127.0.0.1:7700")
    memory = AgentMemory(
        memory=RemoteHybridMemory(client, "comedy/joy"),
        gpts_memory=RemoteGptsMemory(client, "comedy"),
    )
    joy = await JoyAgent().bind(context).bind(LLMConfig(llm_client=llm)).bind(memory).build()

`AgentMemory`, agents and all else are DB-GPT's own (0.8), which the extra `memstream[dbgpt]` installs. What is refused
or not reached raises a MemstreamError (see memstream.errors).
"""

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
