"""A LangGraph graph that waits for a person. Run it twice: the second process continues where the first one stopped.

pip install '.[langgraph]' langgraph
memstream serve                              # in another terminal
python examples/langgraph_checkpoints.py [ADDRESS]
"""

from __future__ import annotations

import sys
from typing import TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

import memstream
from memstream.langgraph import MemstreamSaver


class Talk(TypedDict):
    """What the graph knows."""

    name: str


def ask(talk: Talk) -> dict[str, str]:
    """A node that waits for an answer."""
    return {"name": interrupt("What is your name?")}


def main(address: str) -> None:
    """Start the graph, or continue it."""
    with memstream.sync.connect(address) as client:
        graph = StateGraph(Talk)
        graph.add_node("ask", ask)
        graph.add_edge(START, "ask")
        graph.add_edge("ask", END)
        agent = graph.compile(checkpointer=MemstreamSaver(client, "langgraph-threads", user="bob"))
        thread = {"configurable": {"thread_id": "bob@home/monday"}}
        if agent.get_state(thread).next:
            print("Hello", agent.invoke(Command(resume="Bob"), thread)["name"])
        else:
            print(agent.invoke({"name": ""}, thread)["__interrupt__"][0].value)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700")
