"""Runs in DB-GPT's environment, for interface.py: messages and plans, stored by DB-GPT's classes and by ours."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import Any

from dbgpt.agent.core.memory.gpts import (
    DefaultGptsMessageMemory,
    DefaultGptsPlansMemory,
    GptsMessage,
    GptsPlan,
)

import memstream
from memstream.dbgpt import RemoteGptsMemory, RemoteMessageMemory, RemotePlansMemory


def messages_of(memory: Any) -> Any:
    """The same calls to DB-GPT's own message memory and to ours."""
    said = [
        GptsMessage("c", "Human", "Comedians", "human", "Tell me a joke", rounds=1, current_goal="joke"),
        GptsMessage("c", "Comedians", "Human", "ai", "Two fish", 2, action_report='{"content": "x"}', model_name="m"),
        GptsMessage("c", "Comedians", "Critic", "ai", "Funny?", 3, is_success=False, context='{"a": 1}'),
    ]
    for message in said:
        memory.append(message)

    def plain(found: Any) -> list[dict[str, Any]]:
        rows = [one.to_dict() for one in found]
        times = ("created_at", "updated_at")
        assert all(row[name].tzinfo is None for row in rows for name in times)
        return [{name: value for name, value in row.items() if name not in times} for row in rows]

    seen = {
        "all": plain(memory.get_by_conv_id("c")),
        "agent": plain(memory.get_by_agent("c", "Human")),
        "between": plain(memory.get_between_agents("c", "Comedians", "Human")),
        "goal": plain(memory.get_between_agents("c", "Comedians", "Human", "joke")),
        "none": plain(memory.get_by_conv_id("other")),
        "nobody": plain(memory.get_by_agent("other", "Human")),
        "last_of_none": memory.get_last_message("other"),
    }
    memory.delete_by_conv_id("other")
    memory.delete_by_conv_id("c")
    return seen | {"deleted": plain(memory.get_by_conv_id("c"))}


def plans_of(memory: Any) -> Any:
    """The same calls to DB-GPT's own plans memory and to ours."""

    def plan(number: int, **given: Any) -> GptsPlan:
        return GptsPlan("c", number, f"do {number}", sub_task_agent="joy", **given)

    memory.batch_save([plan(1), plan(2, rely="1", state="retrying", max_retry_times=3), plan(3, state="running")])

    def plain(found: Any) -> list[dict[str, Any]]:
        return [one.to_dict() for one in found]

    seen = {
        "all": plain(memory.get_by_conv_id("c")),
        "numbers": plain(memory.get_by_conv_id_and_num("c", [1, 3])),
        "no_numbers": plain(memory.get_by_conv_id_and_num("c", [])),
        "to_do": plain(memory.get_todo_plans("c")),
    }
    memory.complete_task("c", 1, "the fish")
    memory.update_task("c", 2, "failed", 2, agent="critic", model="m", result="no")
    seen["changed"] = plain(memory.get_by_conv_id("c"))
    memory.remove_by_conv_id("c")
    return seen | {"removed": plain(memory.get_by_conv_id("c")), "none": plain(memory.get_todo_plans("other"))}


async def gpts(client: memstream.sync.Client) -> Any:
    """The same calls to DB-GPT's classes and to ours; and two of ours in one namespace."""
    namespace = f"t-{uuid.uuid4().hex[:12]}"
    own = [messages_of(DefaultGptsMessageMemory()), plans_of(DefaultGptsPlansMemory())]
    remote = [
        await asyncio.to_thread(messages_of, RemoteMessageMemory(client, namespace)),
        await asyncio.to_thread(plans_of, RemotePlansMemory(client, namespace)),
    ]
    here, there = RemoteGptsMemory(client, namespace), RemoteGptsMemory(client, namespace)
    for memory in (here, there):
        memory.init("shared")
    await here.append_message("shared", GptsMessage("shared", "Human", "Comedians", "human", "one"))
    await there.append_message("shared", GptsMessage("shared", "Comedians", "Human", "ai", "two"))
    seen = [[one.content for one in await memory.get_messages("shared")] for memory in (here, there)]
    await here.complete("shared")
    with client.conversation(f"{namespace}/shared").watch() as watch:
        watched = [message.content for message in watch]  # ends, because the conversation is complete
    last = there.message_memory.get_last_message("shared")
    return {
        "own": own,
        "remote": remote,
        "shared": [*seen, watched, last.content],
        "meanwhile": await appended_meanwhile(RemoteGptsMemory(client, namespace)),
    }


async def appended_meanwhile(memory: RemoteGptsMemory) -> list[list[str]]:
    """The content of DB-GPT's cache after a message was appended during a read of all."""
    found, read, loop = [], memory.message_memory.get_by_conv_id, asyncio.get_running_loop()
    for conv_id, appending_first in (("within", False), ("before", True)):
        memory.init(conv_id)
        begun, go_on = asyncio.Event(), threading.Event()

        def slow(conv_id: str, begun: asyncio.Event = begun, go_on: threading.Event = go_on) -> list[GptsMessage]:
            messages = read(conv_id)
            loop.call_soon_threadsafe(begun.set)
            go_on.wait()
            return messages

        def late(message: GptsMessage, go_on: threading.Event = go_on) -> None:
            go_on.wait()
            RemoteMessageMemory.append(memory.message_memory, message)

        memory.message_memory.get_by_conv_id = slow
        if appending_first:
            memory.message_memory.append = late
            appending = asyncio.create_task(memory.append_message(conv_id, told(conv_id)))
            await asyncio.sleep(0)
            reading = asyncio.create_task(memory.get_messages(conv_id))
            await begun.wait()
        else:
            reading = asyncio.create_task(memory.get_messages(conv_id))
            await begun.wait()
            appending = asyncio.create_task(memory.append_message(conv_id, told(conv_id)))
            await appending
        go_on.set()
        await asyncio.gather(reading, appending)
        found.append([one.content for one in memory.messages_cache[conv_id]])
    return found


def told(conv_id: str) -> GptsMessage:
    return GptsMessage(conv_id, "Human", "Comedians", "human", conv_id)
