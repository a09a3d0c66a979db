"""A LangGraph graph whose nodes store what they learn on a memstream server. Run it twice: the facts are still there.

pip install '.[langgraph]' langgraph
memstream serve                              # in another terminal
python examples/langgraph_store.py [ADDRESS]
"""

from __future__ import annotations

import sys
from typing import TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.store.base import BaseStore

import memstream
from memstream.langgraph import MemstreamStore

ABOUT_BOB = ("users", "bob", "facts")


class Turn(TypedDict):
    """One question of a user."""

    question: str
    answer: str


def learn(turn: Turn, *, store: BaseStore) -> dict[str, str]:
    """A node that writes. The key makes repeated runs of the node write the same item."""
    store.put(ABOUT_BOB, "plays", {"text": "Bob likes plays about trains"})
    store.put(ABOUT_BOB, "tea", {"text": "Bob takes his tea without milk"})
    return {}


def answer(turn: Turn, *, store: BaseStore) -> dict[str, str]:
    """A node that searches."""
    (best,) = store.search(("users", "bob"), query=turn["question"], limit=1)
    return {"answer": str(best.value["text"])}


def main(address: str) -> None:
    """Ask a graph two questions."""
    with memstream.sync.connect(address) as client:
        store = MemstreamStore(client, "langgraph-example", fields=["text"])
        graph = StateGraph(Turn)
        graph.add_node("learn", learn)
        graph.add_node("answer", answer)
        graph.add_edge(START, "learn")
        graph.add_edge("learn", "answer")
        graph.add_edge("answer", END)
        agent = graph.compile(store=store)
        for question in ("Which plays does he like?", "How does he take his tea?"):
            print(f"{question} {agent.invoke({'question': question, 'answer': ''})['answer']}")
        print(f"{len(store.search(ABOUT_BOB))} facts about Bob, in {store.list_namespaces()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700")
