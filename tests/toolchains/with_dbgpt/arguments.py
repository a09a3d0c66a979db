"""Calls DB-GPT's interfaces with wrong arguments: prints the class and the first words of each error as JSON."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from dbgpt.agent.core.memory.agent_memory import AgentMemoryFragment
from dbgpt.agent.core.memory.gpts import GptsPlan

import memstream
from memstream import sync
from memstream.dbgpt import RemoteHybridMemory, RemotePlansMemory, RemoteSensoryMemory


async def refused(call: Callable[[], Any]) -> str:
    try:
        if inspect.isawaitable(result := call()):
            await result
    except memstream.MemstreamError as error:
        return f"{type(error).__name__} {getattr(error, 'argument', error.details.get('differs'))}"
    return "nothing"


async def main(client: sync.Client) -> None:
    hybrid, sensory = RemoteHybridMemory(client, "wrong/joy"), RemoteSensoryMemory(client, "wrong/joy")
    plans = RemotePlansMemory(client, "wrong")
    await hybrid.write(AgentMemoryFragment("My name is Bob"))
    plans.batch_save([GptsPlan(conv_id="talk", sub_task_num=1, sub_task_content="x")])
    calls: list[Callable[[], Any]] = [
        lambda: sensory.write(AgentMemoryFragment("x")),
        lambda: hybrid.write(AgentMemoryFragment("\ud800")),
        lambda: hybrid.read(7),
        lambda: RemoteHybridMemory(client, "wrong"),
        lambda: RemoteHybridMemory(client, "wrong/joy", profiles=1),
        lambda: RemoteHybridMemory(client, "wrong/joy", scope="all"),
        lambda: RemotePlansMemory(client, "a b"),
        lambda: plans.update_task("talk", 1, "nothing", 0),
        lambda: plans.update_task("talk", "one", "todo", 0),
        lambda: plans.update_task("talk", 1, "running", 1),
    ]
    print(json.dumps([await refused(call) for call in calls]))


with sync.connect(sys.argv[1]) as connected:
    asyncio.run(main(connected))
