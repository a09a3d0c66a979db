"""An agent of the Microsoft Agent Framework whose history is on a memstream server. Run it twice: it knows your name.

pip install '.[agent-framework]' agent-framework-openai
memstream serve                              # in another terminal
OPENAI_API_KEY=... python examples/frameworks/with_agent_framework.py [ADDRESS]
"""

from __future__ import annotations

import asyncio
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

import memstream
from memstream.agent_framework import MemstreamHistoryProvider


async def main(address: str) -> None:
    """Take two turns."""
    async with memstream.connect(address) as client:
        history = MemstreamHistoryProvider(client, "agent-framework-example", user="bob")
        model = OpenAIChatCompletionClient(model="gpt-5-mini")
        joy = Agent(model, "Answer in one sentence.", context_providers=[history])
        session = joy.create_session(session_id="bob-monday")
        for text in ("What is my name?", "I am Bob"):
            print(text, (await joy.run(text, session=session)).text)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
