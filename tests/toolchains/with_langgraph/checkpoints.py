"""LangGraph's conformance suite of checkpointers on ours, and graphs that continue in another process.

test_langgraph.py runs this in LangGraph's environment, with MEMSTREAM_TARGET set.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime
from typing import Any, TypedDict

import numpy as np
import pytest
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

import memstream
from memstream.langgraph import MemstreamSaver
from memstream.sync import Client

BASE = ("put", "put_writes", "get_tuple", "list", "delete_thread")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with memstream.sync.connect(os.environ["MEMSTREAM_TARGET"]) as connected:
        yield connected


@pytest.fixture
def namespace() -> str:
    return f"cp-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def saver(client: Client, namespace: str) -> MemstreamSaver:
    return MemstreamSaver(client, namespace, user="bob")


@pytest.mark.parametrize("capability", BASE)
def test_langgraphs_conformance_suite_passes(client: Client, capability: str) -> None:
    @checkpointer_test(name=f"memstream-{capability}")
    async def made() -> AsyncGenerator[MemstreamSaver, None]:
        yield MemstreamSaver(client, f"cp-{uuid.uuid4().hex[:12]}")

    report = asyncio.run(validate(made, capabilities={capability}))
    result = report.results[capability]
    assert result.passed is True, result.failures
    assert result.tests_passed > 3


class Talk(TypedDict):
    said: list[str]
    odd: Any


def make_graph(saver: MemstreamSaver, odd: Any = None) -> Any:
    def ask(talk: Talk) -> Any:
        name = interrupt("What is your name?")
        return {"said": [*talk["said"], name], "odd": odd}

    graph = StateGraph(Talk)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", END)
    return graph.compile(checkpointer=saver)


def test_an_interrupted_graph_continues_with_another_saver(
    client: Client, saver: MemstreamSaver, namespace: str
) -> None:
    config: Any = {"configurable": {"thread_id": "bob@home/monday"}}
    large = "x" * 1_000_000
    make_graph(saver).invoke({"said": [large], "odd": None}, config)
    later = make_graph(MemstreamSaver(client, namespace))
    assert later.get_state(config).next == ("ask",)
    assert later.invoke(Command(resume="Bob"), config)["said"] == [large, "Bob"]
    assert asyncio.run(make_graph(saver).aget_state(config)).values["said"] == [large, "Bob"]
    assert len(list(make_graph(saver).get_state_history(config))) > 2
    assert client.erase_user(namespace, "bob") == 1
    assert saver.get_tuple(config) is None


@pytest.mark.parametrize(
    "odd", [None, {"a": [None, {"b": 1.5}]}, datetime(2026, 5, 1, tzinfo=UTC), b"\x00\xff", {1, 2}], ids=type
)
def test_odd_values_are_kept(saver: MemstreamSaver, odd: Any) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    graph = make_graph(saver, odd)
    graph.invoke({"said": [], "odd": None}, config)
    graph.invoke(Command(resume="Bob"), config)
    assert graph.get_state(config).values["odd"] == odd


def test_arrays_of_numpy_are_kept(saver: MemstreamSaver) -> None:
    config: Any = {"configurable": {"thread_id": "t"}}
    graph = make_graph(saver, np.arange(3))
    graph.invoke({"said": [], "odd": None}, config)
    graph.invoke(Command(resume="Bob"), config)
    assert graph.get_state(config).values["odd"].tolist() == [0, 1, 2]
