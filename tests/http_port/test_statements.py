"""Random histories of one attribute, by every road into a memory: the last statement leads, and nothing is lost.

A history is three to seven statements of one speaker about one thing, in which a value may come back, with other
remarks between them. It goes in by a stream, batches, puts, the HTTP port or the tools of MCP; with times of its own,
in order or late, or without; without sessions, in one, or each statement in its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import memstream
from memstream import Observation
from memstream.mcp.tools import Tools
from tests.support.server import ServerProcess

START = datetime(2026, 1, 5, 9, tzinfo=UTC)
ATTRIBUTES = (
    ("My meeting with Grace is on {}.", "When is the meeting with Grace?", ["Monday", "Tuesday", "Friday", "Sunday"]),
    ("I live in {} near the river.", "Where does Ada live?", ["Munich", "Berlin", "Oslo", "Rome"]),
    ("My favourite colour is {}.", "What is Ada's favourite colour?", ["blue", "green", "red", "grey"]),
    ("Mein Chef heißt {} Schmidt.", "Wie heißt der Chef?", ["Anna", "Bernd", "Clara", "Dieter"]),
    ("我住在{}的河边。", "她住在哪里", ["北京", "上海", "广州", "成都"]),
)
REMARKS = ("The train was late today.", "We had soup for lunch.", "My bicycle has a yellow basket.")
ROADS = ("stream", "batches", "puts", "http", "mcp")


@dataclass(frozen=True)
class History:
    """Statements in the order in which they are sent, of which the last one of the attribute is `last`."""

    observations: tuple[Observation, ...]
    question: str
    last: str
    said: frozenset[str]
    """All that was said about the attribute."""


def draw_history(draw: random.Random, road: str) -> History:
    form, question, values = draw.choice(ATTRIBUTES)
    chosen: list[str] = []
    for _ in range(draw.randint(3, 7)):
        chosen.append(draw.choice([value for value in values if not chosen or value != chosen[-1]]))
    texts = [form.format(value) for value in chosen]
    timed, sessions, late = draw.random() < 0.5, draw.choice(("none", "one", "own")), draw.random() < 0.5
    made: list[Observation] = []
    for number, text in enumerate(texts):
        when: dict[str, Any] = {"observe_time": START + timedelta(days=number)} if timed else {}
        session = {"none": "", "one": "letters", "own": f"letter-{number}"}[sessions]
        made.append(Observation(text, speaker="Ada", session=session, **when))
    if timed and late:
        draw.shuffle(made)
    for remark in REMARKS:
        made.insert(draw.randint(0, len(made)), Observation(remark, speaker="Ada", session=made[0].session))
    return History(tuple(made), question, texts[-1], frozenset(texts))


def list_rows(history: History, road: str) -> int:
    """How many rows the history needs: a repeat without a time, key and session of its own needs none."""
    if road == "puts":
        return len(history.observations)
    return len({(one.body, one.session, one.observe_time) for one in history.observations})


async def send(client: memstream.Client, memory: memstream.Memory, address: str, history: History, road: str) -> None:
    if road == "stream":
        async with memory.observe(producer="letters") as stream:
            for one in history.observations:
                await stream.send(one)
    elif road == "batches":
        middle = len(history.observations) // 2
        for some in (history.observations[:middle], history.observations[middle:]):
            await memory.observe_batch(some)
    elif road == "puts":
        for number, one in enumerate(history.observations):
            await memory.put_fragment(
                Observation(
                    one.body,
                    speaker=one.speaker,
                    session=one.session,
                    observe_time=one.observe_time,
                    external_id=f"letter-{number}",
                )
            )
    elif road == "mcp":
        tools = Tools(client, memory.path)
        for one in history.observations:
            when = one.observe_time.isoformat() if one.observe_time is not None else None
            await tools.observe(str(one.body), speaker=one.speaker, session=one.session, time=when)
    else:
        for one in history.observations:
            said = {"content": one.body, "speaker": one.speaker, "session": one.session}
            if one.observe_time is not None:
                said["observeTime"] = one.observe_time.isoformat()
            body = {"namespace": memory.namespace, "memory": memory.name, "observations": [said]}
            await asyncio.to_thread(post, f"http://{address}/memstream.v1.StreamService/ObserveBatch", body)


def post(path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("seed", range(12))
async def test_the_last_statement_leads_and_none_is_lost(
    http_server: tuple[ServerProcess, str], road: str, seed: int
) -> None:
    server, address = http_server
    history = draw_history(random.Random(f"{seed}"), road)
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory(f"histories/{road}-{seed}", policy={"language": "auto"})
        await send(client, memory, address, history, road)
        answer = await memory.recall_once(history.question, omit_working_memory=True)
        found = [one.fragment.content for one in answer]
        about = [content for content in found if content in history.said]
        assert about[0] == history.last, (found, history)
        assert set(about) == history.said
        counts = await memory.stats()
        assert counts.short_term + counts.long_term == list_rows(history, road)
