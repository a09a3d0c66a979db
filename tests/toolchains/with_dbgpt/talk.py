"""Runs in DB-GPT's environment: an agent that answers one question per line of input with one line of JSON.

Arguments: the server's address, the agent's name and role, the conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from dbgpt.agent import ProfileConfig

import memstream
from examples.dbgpt_joy import USER_PROMPT, WRITE_MEMORY, Joy, ask, build


async def main(address: str, name: str, role: str, conversation: str) -> None:
    profile = ProfileConfig(name=name, role=role, user_prompt_template=USER_PROMPT, write_memory_template=WRITE_MEMORY)
    with memstream.sync.connect(address) as client:
        with contextlib.redirect_stdout(sys.stderr):
            agent = await build(client, Joy(profile=profile), conversation)
        print(json.dumps({"session": agent.memory.memory.session_id}), flush=True)
        while question := (await asyncio.to_thread(sys.stdin.readline)).strip():
            with contextlib.redirect_stdout(sys.stderr):
                answer = await ask(agent, question)
            print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
