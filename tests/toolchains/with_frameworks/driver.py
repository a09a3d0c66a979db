"""Runs an agent in a process of its own: a line of JSON with `session` and `text` is a turn, a line is its answer.

An agent has two tools: `read_log` returns LOG, `crash` ends the process at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable

LOG = "nothing happened\n" * 60_000 + "the password is swordfish"
"""1 MB."""
TARGET = os.environ.get("MEMSTREAM_TARGET", "")
MODEL = os.environ.get("OPENAI_BASE_URL", "")
NAMESPACE = os.environ.get("MEMSTREAM_TEST_NAMESPACE", "")


def read_log() -> str:
    """Reads the log."""
    return LOG


def crash() -> str:
    """Ends the process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


async def take_turns(answer: Callable[[str, str], Awaitable[str]]) -> None:
    """Answers each line of standard input."""
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        given = json.loads(line)
        try:
            said = {"reply": await answer(given["session"], given["text"])}
        except Exception as error:  # the test that asked asserts it
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
