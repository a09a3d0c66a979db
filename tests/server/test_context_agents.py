"""Agents of two real SDKs, whose models' prompt caches read what the context of each turn keeps."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import anthropic
import openai
import pytest

import memstream
from memstream import Observation
from tests.support.model_apis import ModelApis

NOW = datetime(2026, 5, 8, tzinfo=UTC)
SYSTEM = "You are Joy, who helps Bob."
TURNS = (
    ("What is Bob allergic to?", "To nuts."),
    ("Where does Bob live?", "In Paris, near the river."),
    ("What does his sister play?", "The cello."),
    ("May he eat marzipan?", "No, it is made of almonds."),
)
Agent = Callable[[memstream.Context, ModelApis], Awaitable[str]]


async def ask_anthropic(ctx: memstream.Context, apis: ModelApis) -> str:
    async with anthropic.AsyncAnthropic(base_url=apis.address, api_key="none", max_retries=0) as client:
        answer = await client.messages.create(model="m", max_tokens=100, **ctx.to_anthropic(system=SYSTEM))
    return "".join(block.text for block in answer.content if block.type == "text")


async def ask_responses(ctx: memstream.Context, apis: ModelApis) -> str:
    async with openai.AsyncOpenAI(base_url=f"{apis.address}/v1", api_key="none", max_retries=0) as client:
        answer = await client.responses.create(model="m", **ctx.to_openai(system=SYSTEM))
    return answer.output_text


async def ask_chat(ctx: memstream.Context, apis: ModelApis) -> str:
    async with openai.AsyncOpenAI(base_url=f"{apis.address}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="m", **ctx.to_openai_chat(system=SYSTEM))
    return answer.choices[0].message.content or ""


@pytest.fixture
async def bob(client: memstream.Client) -> memstream.Memory:
    memory = await client.create_memory(f"agents-{uuid.uuid4().hex[:10]}/bob")
    texts = ["I am allergic to nuts", "I live in Paris near the river", "my sister plays the cello"]
    await memory.observe_batch(
        [
            Observation(text, speaker="Bob", observe_time=datetime(2023, 5, day, tzinfo=UTC))
            for day, text in enumerate(texts, 1)
        ]
    )
    await memory.blocks.put("persona", "Joy answers in one sentence.")
    return memory


@pytest.mark.parametrize("ask", [ask_anthropic, ask_responses, ask_chat])
async def test_a_models_cache_reads_all_of_the_turn_before(
    client: memstream.Client, bob: memstream.Memory, ask: Agent
) -> None:
    position, talk = b"", f"{bob.path}-talk"
    async with ModelApis() as apis:
        apis.replies.extend(reply for _, reply in TURNS)
        for question, reply in TURNS:
            turn = await client.context(
                [bob.path],
                question,
                conversation=talk,
                blocks=[f"{bob.path}#persona"],
                budget=2000,
                after=position,
                now=NOW,
                parts_timeout_s=60.0,
            )
            assert await ask(turn, apis) == reply
            await turn.record(question, reply)
            position = turn.position  # all that an agent keeps between its turns
    assert apis.read[0] == 0
    for number, prompt in enumerate(apis.prompts[1:], 1):
        before = apis.prompts[number - 1]
        assert prompt.startswith(before)
        assert apis.read[number] >= len(before), "all of the turn before is read from the cache"
    last = apis.prompts[-1]
    assert all(last.count(said) == 1 for said in ("allergic to nuts", "near the river\n", "plays the cello", SYSTEM))
    stored = [one.content async for one in bob.list_fragments()]
    assert sorted(stored[3:]) == sorted(text for turn in TURNS for text in turn), "each turn once, without its context"
