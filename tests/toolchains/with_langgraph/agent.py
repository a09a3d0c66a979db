"""LangGraph agents to be driven: `store` keeps the messages as items of a store, `saver` in the checkpoints of a graph.

The third, `puts`, is no agent: "20" puts that many items, and "die KEY COUNT" puts a text of so many facts and ends the
process when the server has stored it, before the put returns.
"""

from __future__ import annotations

import asyncio
import operator
import sys
from typing import Annotated, Any, TypedDict

import httpx
from langgraph.graph import END, START, StateGraph

import memstream
from memstream.langgraph import MemstreamSaver, MemstreamStore
from memstream.sync import Client
from tests.toolchains.with_frameworks import driver

TOOLS = {"read_log": driver.read_log, "crash": driver.crash}


class Talk(TypedDict):
    session: str
    messages: Annotated[list[dict[str, Any]], operator.add]


def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
    answer = httpx.post(f"{driver.MODEL}/chat/completions", json={"model": "m", "messages": messages}, timeout=None)
    answer.raise_for_status()
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def open_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of the last message that have no output yet."""
    return (messages[-1].get("tool_calls") or []) if messages else []


def outputs(calls: list[dict[str, Any]], *, cut_off: bool = False) -> list[dict[str, Any]]:
    def run(call: dict[str, Any]) -> str:
        return "The process ended." if cut_off else TOOLS[call["function"]["name"]]()

    return [{"role": "tool", "tool_call_id": call["id"], "content": run(call)} for call in calls]


def make_graph(store: MemstreamStore | None, saver: MemstreamSaver | None) -> Any:
    def keep(talk: Talk, new: list[dict[str, Any]]) -> dict[str, Any]:
        for place, message in enumerate(new, len(talk["messages"])):
            if store is not None:
                store.put(("talks", talk["session"]), f"{place:06}", message)
        return {"messages": new}

    graph = StateGraph(Talk)
    graph.add_node("ask", lambda talk: keep(talk, [complete(talk["messages"])]))
    graph.add_node("act", lambda talk: keep(talk, outputs(open_calls(talk["messages"]))))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", lambda talk: "act" if open_calls(talk["messages"]) else END)
    graph.add_edge("act", "ask")
    return graph.compile(store=store, checkpointer=saver)


class RememberingAgent:
    def __init__(self, client: Client, kind: str) -> None:
        self._store = MemstreamStore(client, driver.NAMESPACE) if kind == "store" else None
        self._saver = None if self._store else MemstreamSaver(client, driver.NAMESPACE)
        self._graph = make_graph(self._store, self._saver)

    def answer(self, session: str, text: str) -> str:
        config = {"configurable": {"thread_id": session}}
        if self._store is None:
            known = self._graph.get_state(config).values.get("messages", [])
        else:
            items = self._store.search(("talks", session), limit=1_000)
            known = [item.value for item in sorted(items, key=lambda item: item.key)]
        new = [*outputs(open_calls(known), cut_off=True), {"role": "user", "content": text}]
        if self._store is None:
            given = new
        else:
            for place, message in enumerate(new, len(known)):
                self._store.put(("talks", session), f"{place:06}", message)
            given = known + new
        # With a checkpointer, each step is stored before the next one begins.
        stored: Any = {} if self._store else {"durability": "sync"}
        done = self._graph.invoke({"session": session, "messages": given}, config, **stored)
        return str(done["messages"][-1]["content"])


class Putting:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._store = MemstreamStore(client, driver.NAMESPACE)

    def answer(self, where: str, text: str) -> str:
        first, *rest = text.split()
        if first == "die":
            key, count = rest
            die_before_answer(self._client.asynchronous)
            self._store.put((where,), key, {"text": "a fact " * int(count)})
        for number in range(int(first)):
            self._put(where, f"{number:04}", {"number": number, "text": "a fact"})
        return "done"

    def _put(self, where: str, key: str, value: dict[str, Any]) -> None:
        while True:
            try:
                return self._store.put((where,), key, value)
            except (memstream.Unavailable, memstream.DeadlineExceeded):
                continue  # as a program does while the server is away


def die_before_answer(client: memstream.Client) -> None:
    """The process ends when the server has stored a put, before the put returns."""
    small, large = type(client.memory("any/memory")), type(client)

    def ending(call: Any) -> Any:
        async def called(*arguments: Any, **named: Any) -> Any:
            await call(*arguments, **named)
            driver.crash()

        return called

    small.observe_batch = ending(small.observe_batch)  # type: ignore[method-assign]
    large.write_together = ending(large.write_together)  # type: ignore[method-assign]


async def main(kind: str) -> None:
    with memstream.sync.connect(driver.TARGET) as client:
        made = Putting(client) if kind == "puts" else RememberingAgent(client, kind)

        async def answer(session: str, text: str) -> str:
            return await asyncio.to_thread(made.answer, session, text)

        await driver.take_turns(answer)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
