"""Claude with its memory tool on a memstream server. Run it twice: it knows your name.

pip install '.[anthropic]'
memstream serve                              # in another terminal
ANTHROPIC_API_KEY=... python examples/frameworks/with_anthropic.py [ADDRESS]
"""

from __future__ import annotations

import sys

from anthropic import Anthropic

import memstream
from memstream.anthropic import MemstreamMemoryTool


def main(address: str, claude: Anthropic | None = None) -> None:
    """Take two turns."""
    with memstream.sync.connect(address) as client, claude or Anthropic() as claude:
        for text in ("What is my name?", "I am Bob"):
            runner = claude.beta.messages.tool_runner(
                model="claude-sonnet-5-5",
                max_tokens=1_000,
                tools=[MemstreamMemoryTool(client, "claude-example/bob")],
                messages=[{"role": "user", "content": text}],
            )
            answer = runner.until_done()
            print(text, "".join(part.text for part in answer.content if part.type == "text"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700")
