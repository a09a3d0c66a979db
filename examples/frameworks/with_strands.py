"""An agent of Strands whose session is on a memstream server. Run it twice: it knows your name.

pip install '.[strands]' 'strands-agents[openai]'
memstream serve                              # in another terminal
OPENAI_API_KEY=... python examples/frameworks/with_strands.py [ADDRESS]
"""

from __future__ import annotations

import sys

from strands import Agent
from strands.models.openai import OpenAIModel

import memstream
from memstream.strands import MemstreamSessionManager


def main(address: str) -> None:
    """Take two turns."""
    with memstream.sync.connect(address) as client:
        joy = Agent(
            OpenAIModel(model_id="gpt-5-mini"),
            agent_id="joy",
            system_prompt="Answer in one sentence.",
            session_manager=MemstreamSessionManager("bob-monday", client, "strands-example", user="bob"),
            callback_handler=None,
        )
        for text in ("What is my name?", "I am Bob"):
            print(text, joy(text))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700")
