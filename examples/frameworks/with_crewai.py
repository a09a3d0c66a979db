"""An agent of CrewAI whose memory is on a memstream server. Run it twice: it knows your name.

pip install '.[crewai]'
memstream serve                              # in another terminal
OPENAI_API_KEY=... python examples/frameworks/with_crewai.py [ADDRESS]
"""

from __future__ import annotations

import os
import sys

from crewai import LLM, Agent

import memstream
from memstream.crewai import MemstreamMemory


def main(address: str) -> None:
    """Take two turns."""
    url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    model = LLM(model="openai/gpt-5-mini", base_url=url, api_key=os.environ["OPENAI_API_KEY"])
    with memstream.sync.connect(address) as client:
        memory = MemstreamMemory(client, "crewai-example/bob", llm=model)
        joy = Agent(role="Joy", goal="Answer in one sentence.", backstory="You are kind.", llm=model, memory=memory)
        for text in ("What is my name?", "I am Bob"):
            print(text, joy.kickoff(text).raw)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700")
