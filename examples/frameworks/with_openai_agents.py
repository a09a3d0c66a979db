"""An agent of the OpenAI Agents SDK whose session is on a memstream server. Run it twice: it knows your name.

pip install '.[openai-agents]'
memstream serve                              # in another terminal
OPENAI_API_KEY=... python examples/frameworks/with_openai_agents.py [ADDRESS]
"""

from __future__ import annotations

import sys

from agents import Agent, Runner, set_default_openai_api, set_tracing_disabled

import memstream
from memstream.openai_agents import MemstreamSession


def main(address: str) -> None:
    """Take two turns."""
    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)
    joy = Agent("joy", instructions="Answer in one sentence.")
    with memstream.sync.connect(address) as client:
        session = MemstreamSession("bob-monday", client, user="bob")
        for text in ("What is my name?", "I am Bob"):
            print(text, Runner.run_sync(joy, text, session=session).final_output)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700")
