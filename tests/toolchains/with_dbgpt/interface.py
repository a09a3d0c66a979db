"""Runs in DB-GPT's environment: calls the drop-in as DB-GPT does; prints JSON by name.

Argument: the server's address.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from dbgpt.agent import AgentMemory, AgentMemoryFragment, StructuredAgentMemoryFragment
from dbgpt.agent.core.memory import short_term
from dbgpt.agent.core.memory.base import ImportanceScorer, WriteOperation
from dbgpt.agent.core.memory.short_term import EnhancedShortTermMemory

import memstream
from memstream.dbgpt import (
    RemoteEnhancedShortTermMemory,
    RemoteHybridMemory,
    RemoteLongTermMemory,
    RemoteMemory,
    RemoteSensoryMemory,
    RemoteShortTermMemory,
)
from tests.toolchains.with_dbgpt.conversations import gpts
from tests.toolchains.with_dbgpt.defects import Same

Said = AgentMemoryFragment
Client = memstream.sync.Client


def new_path() -> str:
    return f"t-{uuid.uuid4().hex[:12]}/joy"


def built(memory: RemoteMemory, session: str = "monday_Comedians_Joy") -> AgentMemory:
    """The memory as a built agent has it."""
    agent = AgentMemory(memory=memory)
    agent.initialize("Joy", session_id=session)
    return agent.structure_clone()


async def words(memory: Any, question: str = "anything") -> list[str]:
    return [fragment.raw_observation for fragment in await memory.read(question)]


def short(client: Client, path: str, capacity: int, **given: Any) -> RemoteShortTermMemory:
    return RemoteShortTermMemory(client, path, policy={"short_term": {"capacity": capacity}}, **given)


def events(client: Client, path: str) -> int:
    """Counts all events of the memory."""
    return int(client.memory(path).describe().revision)


async def clones(client: Client) -> Any:
    """A clone, a clone of it, and another handle see the same memory."""
    path = new_path()
    memory = built(RemoteHybridMemory(client, path))
    await memory.write(Said("tea"))
    again, other = memory.structure_clone(datetime.now()), built(RemoteHybridMemory(client, path), "tuesday")
    await again.write(Said("rain"))
    return [await words(memory), await words(other), again.memory.session_id]


async def batches(client: Client) -> Any:
    """A history written once, twice, and longer; what overflowed is not brought back."""
    path = new_path()
    history = [Said(word) for word in ("one", "two", "three", "four")]
    memory = built(short(client, path, 2))
    await memory.write_batch(history)
    held, revision = await words(memory), events(client, path)
    again = [Said.build_from(one.raw_observation, memory_id=one.id) for one in history]
    await built(short(client, path, 2)).write_batch(again)
    unchanged = events(client, path) == revision
    await memory.write_batch([*again, Said("five")])
    await memory.write_batch([])
    return [held, unchanged, await words(memory)]


async def same_id(client: Client) -> Any:
    """Two processes may give one id at the same time: both fragments stay."""
    memory = built(RemoteHybridMemory(client, new_path()))
    await memory.write(Said("tea", memory_id=7))
    await memory.write(Said("rain", memory_id=7))
    await memory.write(Said("rain", memory_id=7))
    return await words(memory)


async def scopes(client: Client) -> Any:
    path, seen = new_path(), {}
    for scope in ("memory", "session"):
        first, second = (
            built(short(client, f"{path}-{scope}", 5, scope=scope), f"{day}_Comedians/Joy") for day in ("mon", "tue")
        )
        await first.write(Said("on monday"))
        await second.write(Said("on tuesday"))
        await second.structure_clone().write(Said("and again"))
        seen[scope] = [await words(first), await words(second)]
    try:
        await short(client, path, 5, scope="session").write(Said("nobody's"))
    except memstream.InvalidRequest as error:
        seen["without"] = "session_id" in str(error)
    return seen


class Scores(ImportanceScorer[AgentMemoryFragment]):
    def __init__(self, score: float) -> None:
        self.score = score

    async def score_importance(self, memory_fragment: Said, llm_client: object = None) -> float:
        return self.score


async def importances(client: Client) -> Any:
    memory = RemoteLongTermMemory(client, new_path())
    memory.initialize("Joy", session_id="monday")
    for number, importance in enumerate((0.3, 1.0, 8.0, None)):
        await memory.write(Said(f"tea {number}", importance=importance))
    for number, score in enumerate((7.0, 1.0, 0.0), 4):
        memory.initialize("Joy", session_id="monday", importance_scorer=Scores(score))
        await memory.write(Said(f"tea {number}"))
    try:
        await memory.write(Said("too much", importance=30.0))
    except memstream.InvalidRequest:
        listed = client.memory(memory.path).list_fragments()
        return [round(fragment.importance, 6) for fragment in listed]
    return None


async def fragments(client: Client) -> Any:
    """Class, id, words and time come back; structured ones keep their parts; a retrieval is not written."""
    memory = built(RemoteHybridMemory(client, new_path()))
    plain = Said("tea", importance=0.4, is_insight=True, snapshot_path="/snapshots/1")
    step = StructuredAgentMemoryFragment({"thought": "look", "action": "search", "observation": None})
    other = StructuredAgentMemoryFragment({"thought": "look", "persisted_path": "/there"})
    for fragment in (plain, step, other):
        await memory.write(fragment, now=datetime(2024, 5, 8, 12))
    await memory.memory.write(Said("recalled"), op=WriteOperation.RETRIEVAL)
    found = await memory.read("tea")
    at = {one.observe_time for one in client.memory(memory.memory.path).list_fragments()}
    return {
        "classes": sorted({type(one).__name__ for one in found}),
        "ids": [one.id for one in found] == [plain.id, step.id, other.id],
        "words": [one.raw_observation for one in found],
        "first": [found[0].importance, found[0].is_insight, found[0].snapshot_path, found[0].last_accessed_time.tzinfo],
        "times": at == {datetime(2024, 5, 8, 12).astimezone()},
        "speakers": sorted({one.speaker for one in client.memory(memory.memory.path).list_fragments()}),
    }


async def merged(client: Client) -> Any:
    """What DB-GPT's own short-term makes of structured fragments it promotes, then what ours says it is; and of plain
    contents: one that has more than our parts, and an insight.
    """
    said = [{"question": "rain?", "thought": f"look {n}", "action": "search"} for n in range(3)]
    own: EnhancedShortTermMemory[Said] = EnhancedShortTermMemory(Same(), ThreadPoolExecutor(1), 5, 0.0, 2)
    own.initialize("Joy", real_memory_fragment_class=StructuredAgentMemoryFragment)
    short_term.random = SimpleNamespace(random=lambda: 0.0)
    left = [await own.write(StructuredAgentMemoryFragment(step)) for step in said]
    policy = {"short_term": {"enhance_threshold": 2, "similarity_rule": "cosine", "similarity_min": 0.1}}
    found = []
    for more in ({}, {"persisted_path": "/there"}):
        memory = RemoteHybridMemory(client, new_path(), policy=policy)
        memory.initialize("Joy", real_memory_fragment_class=StructuredAgentMemoryFragment)
        for step in said:
            await memory.write(StructuredAgentMemoryFragment(step | more, importance=0.9))
        found.append([json.loads(one) for one in await words(memory)])
    client.memory(memory.path).observe_batch(["plain; words"])
    found.append(json.loads((await words(memory, "plain words"))[-1]))
    return [[json.loads(one.raw_observation) for one in left[-1].discarded_memory_fragments], *found]


async def kinds(client: Client) -> Any:
    """Every kind takes three fragments and returns those of its tiers; after a clear it is empty."""
    made: dict[str, RemoteMemory] = {
        "sensory": RemoteSensoryMemory(client, new_path(), policy={"sensory": {"capacity": 2}}),
        "short_term": short(client, new_path(), 2),
        "enhanced": RemoteEnhancedShortTermMemory(client, new_path()),
        "long_term": RemoteLongTermMemory(client, new_path()),
        "hybrid": RemoteHybridMemory(client, new_path()),
    }
    seen = {}
    for name, memory in made.items():
        for word in ("tea with Bob", "rain in Cork", "more tea"):
            await memory.write(Said(word))
        before = sorted(await words(memory, "tea"))
        cleared = sorted(one.raw_observation for one in await memory.clear())
        seen[name] = [before, cleared, await words(memory, "tea")]
    return seen


async def weights(client: Client) -> Any:
    memory = RemoteLongTermMemory(client, new_path())
    await memory.write(Said("tea, tea, nothing but tea", importance=0.1))
    await memory.write(Said("a fire in the tea house", importance=1.0))
    return [
        (await memory.read("nothing but tea", alpha=0, beta=beta, gamma=gamma))[0].raw_observation
        for beta, gamma in ((1, 0), (0, 1))
    ]


async def replies(client: Client) -> Any:
    """An assistant's reply, stored by another way in, comes after the user's message that it answers."""
    path = new_path()
    memory = RemoteLongTermMemory(client, path)
    await memory.write(Said("a ladder is in the shed"))
    chat = [
        memstream.Observation("how do I reach the harbour?", role=memstream.Role.USER),
        memstream.Observation("take the tram over the iron bridge", role=memstream.Role.ASSISTANT),
    ]
    client.memory(path).update(policy={"recall": {"ranking": "absolute"}})
    client.memory(path).observe_batch(chat, session="s")
    return (await words(memory, "which tram reaches the harbour?"))[:2]


def loops(address: str) -> Any:
    """A memory outlives the event loops it is used from."""
    with memstream.sync.connect(address) as client:
        memory = RemoteHybridMemory(client, new_path())
        asyncio.run(memory.write(Said("tea")))
        return asyncio.run(words(memory))


CHECKS: tuple[Callable[[Client], Awaitable[Any]], ...] = (
    clones,
    batches,
    same_id,
    scopes,
    importances,
    fragments,
    merged,
    kinds,
    weights,
    replies,
    gpts,
)


async def main(address: str) -> dict[str, Any]:
    with memstream.sync.connect(address) as client:
        return {check.__name__: await check(client) for check in CHECKS}


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1])) | {"loops": loops(sys.argv[1])}
    print(json.dumps(found, default=str))
