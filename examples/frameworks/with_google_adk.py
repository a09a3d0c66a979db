"""An agent of Google's ADK whose sessions and memory are on a memstream server. Run it twice: it knows your name.

pip install '.[google-adk]' openai
memstream serve                              # in another terminal
OPENAI_API_KEY=... python examples/frameworks/with_google_adk.py [ADDRESS]

An agent with `model="gemini-..."` needs none of `ChatModel`; ADK asks other models by litellm.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.genai import types
from openai import AsyncOpenAI

import memstream
from memstream.google_adk import MemstreamMemoryService, MemstreamSessionService


class ChatModel(BaseLlm):
    """Asks a model with OpenAI's interface, for texts alone."""

    async def generate_content_async(self, llm_request: LlmRequest, stream: bool = False) -> AsyncIterator[LlmResponse]:
        """One answer."""
        messages = [
            {"role": "user" if content.role == "user" else "assistant", "content": part.text or ""}
            for content in llm_request.contents
            for part in content.parts or []
        ]
        async with AsyncOpenAI() as client:
            done = await client.chat.completions.create(model=self.model, messages=messages)  # type: ignore[arg-type]
        text = done.choices[0].message.content
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text=text)]))


async def main(address: str) -> None:
    """Take two turns."""
    async with memstream.connect(address) as client:
        memory = MemstreamMemoryService(client)
        runner = Runner(
            app_name="adk-example",
            agent=LlmAgent(name="joy", model=ChatModel(model="gpt-5-mini")),
            session_service=MemstreamSessionService(client),
            memory_service=memory,
            auto_create_session=True,
        )
        for text in ("What is my name?", "I am Bob"):
            asked = types.Content(role="user", parts=[types.Part(text=text)])
            async for event in runner.run_async(user_id="bob", session_id="monday", new_message=asked):
                if event.is_final_response() and event.content and event.content.parts:
                    print(text, event.content.parts[0].text)
        session = await runner.session_service.get_session(app_name="adk-example", user_id="bob", session_id="monday")
        if session is not None:
            await memory.add_session_to_memory(session)  # other sessions find it by the tool `load_memory`


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
