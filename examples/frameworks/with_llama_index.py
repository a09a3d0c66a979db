"""An agent of LlamaIndex whose chat is on a memstream server. Run it twice: it knows your name.

pip install '.[llama-index]' llama-index-llms-openai-like
memstream serve                              # in another terminal
OPENAI_API_KEY=... python examples/frameworks/with_llama_index.py [ADDRESS]
"""

from __future__ import annotations

import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike

import memstream
from memstream.llama_index import MemstreamChatStore


async def main(address: str) -> None:
    """Take two turns."""
    model = OpenAILike(
        "gpt-5-mini",
        api_base=os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1"),
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )
    joy = FunctionAgent(llm=model, system_prompt="Answer in one sentence.", streaming=False)  # type: ignore[arg-type]
    with memstream.sync.connect(address) as client:
        store = MemstreamChatStore(client, "llama-index-example")
        memory = ChatMemoryBuffer.from_defaults(chat_store=store, chat_store_key="bob-monday", llm=model)
        for text in ("What is my name?", "I am Bob"):
            print(text, await joy.run(text, memory=memory))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
