"""Observe each message of a conversation once, until the conversation is completed.

A message's number is its sequence number: after a restart, this continues with the first message that the memory lacks.
"""

from __future__ import annotations

import asyncio
import sys

import memstream


async def main(target: str) -> None:
    async with memstream.connect(target) as client:
        joy = await client.create_memory("story/joy", exist_ok=True)
        async with joy.observe(producer="observe.py", session="monday") as stream:
            print(f"observing from message {stream.expected_sequence} on", flush=True)
            async for message in client.conversation("story/monday").watch(after_number=stream.expected_sequence - 1):
                await stream.send(message.content, speaker=message.sender)
                print(f"{message.sender}: {message.content}", flush=True)
            await stream.flush()  # stored: every later recall, of any process, sees it
            print(f"stored {stream.stored}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700"))
