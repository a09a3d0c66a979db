"""Joy, a comedian with a memory: DB-GPT's memory introduction on this server. Start `memstream serve` first.

Two scripted lines stand in for the model; call yours in `answer`.
"""

from __future__ import annotations

import asyncio
import sys
import uuid

import memstream
from memstream.agent import AgentMemory

SCRIPT = {
    "My name is Bob, please tell me a joke": "Sure, Bob! Parallel lines have so much in common. Pity they never meet.",
    "What's my name?": "Your name is Bob!",
}
SYSTEM = "You are Joy, a comedian."


def answer(prompt: str, question: str) -> str:
    """The model's reply to the prompt."""
    return SCRIPT[question] if "Bob" in prompt else "We have not met."


async def turn(joy: AgentMemory, question: str) -> None:
    assert joy.conversation is not None
    await joy.conversation.append("user", question, receiver="joy", role="human")
    prompt = await joy.prompt(question)
    said = answer(prompt, question)
    await joy.conversation.append("joy", said, receiver="user", role="assistant", model_name="script")
    await joy.write_memories(question, said)
    print(f"--- the prompt\n{SYSTEM}\n\n{prompt}--- joy\n{said}\n")


async def main(target: str) -> None:
    async with memstream.connect(target) as client:
        joy = await AgentMemory.open(client, f"comedy/joy-{uuid.uuid4().hex[:8]}")
        for question in SCRIPT:
            await turn(joy, question)
        assert joy.conversation is not None
        await joy.conversation.complete()
        print("--- the conversation")
        async for message in joy.conversation.watch():
            print(f"{message.number}  {message.sender} to {message.receiver}: {message.content}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
