"""An agent of Pydantic AI whose conversation is on a memstream server. Run it twice: it knows your name.

pip install '.[pydantic-ai]' 'pydantic-ai-slim[openai]'
memstream serve                              # in another terminal
OPENAI_API_KEY=... python examples/frameworks/with_pydantic_ai.py [ADDRESS]
"""

from __future__ import annotations

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.conversation import Conversation

import memstream
from memstream.pydantic_ai import MemstreamConversationStore


async def main(address: str) -> None:
    """Take two turns."""
    joy = Agent("openai-chat:gpt-5-mini", instructions="Answer in one sentence.")
    async with memstream.connect(address) as client:
        store = MemstreamConversationStore(client, "pydantic-ai-example")
        for text in ("What is my name?", "I am Bob"):
            conversation = await store.load("monday") or Conversation(conversation_id="monday")
            result = await joy.run(text, conversation=conversation)
            await store.save(result, scope="bob")
            print(text, result.output)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
