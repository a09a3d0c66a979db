"""Joy, a DB-GPT agent with its memory on a server. Start `memstream serve` first.

It needs `pip install '.[dbgpt]'` (Python 3.11) and a model with OpenAI's interface, configured by
OPENAI_API_BASE, OPENAI_API_KEY and OPENAI_MODEL. Each argument after the server's address is a question. Run it twice:
the second Joy remembers what the first one learned.
"""

from __future__ import annotations

import asyncio
import os
import sys

from dbgpt.agent import (
    ActionOutput,
    AgentContext,
    AgentMemory,
    AgentMemoryFragment,
    BlankAction,
    ConversableAgent,
    LLMConfig,
    ProfileConfig,
    UserProxyAgent,
)
from dbgpt.model.proxy import OpenAILLMClient

import memstream
from memstream.dbgpt import RemoteGptsMemory, RemoteHybridMemory

USER_PROMPT = """\
{% if most_recent_memories %}Most recent observations:
{{ most_recent_memories }}
{% endif %}{% if question %}Question: {{ question }}
{% endif %}"""

WRITE_MEMORY = """\
{% if question %}user: {{ question }} {% endif %}
{% if thought %}assistant: {{ thought }} {% endif %}
"""


class Joy(ConversableAgent):
    """Reads raw memories, and writes question and answer of every turn."""

    profile: ProfileConfig = ProfileConfig(
        name="Joy", role="Comedians", user_prompt_template=USER_PROMPT, write_memory_template=WRITE_MEMORY
    )

    def __init__(self, **given: object) -> None:
        super().__init__(**given)
        self._init_actions([BlankAction])

    async def read_memories(self, question: str) -> str:
        return "".join(fragment.raw_observation for fragment in await self.memory.read(question))

    async def write_memories(
        self,
        question: str,
        ai_message: str,
        action_output: ActionOutput | None = None,
        check_pass: bool = True,
        check_fail_reason: str | None = None,
        current_retry_counter: int | None = None,
    ) -> AgentMemoryFragment:
        assert action_output is not None
        said = {"question": question, "thought": action_output.thoughts or ai_message}
        fragment = AgentMemoryFragment(self._render_template(self.write_memory_template, **said))
        await self.memory.write(fragment)
        action_output.memory_fragments = {
            "memory": fragment.raw_observation,
            "id": fragment.id,
            "importance": fragment.importance,
        }
        return fragment


async def build(client: memstream.sync.Client, agent: ConversableAgent, conversation: str) -> ConversableAgent:
    """The agent with its memory, its messages and its model."""
    memory = AgentMemory(
        memory=RemoteHybridMemory(client, "comedy/joy"), gpts_memory=RemoteGptsMemory(client, "comedy")
    )
    memory.gpts_memory.init(conversation)
    context = AgentContext(conv_id=conversation, language="en", temperature=0.9, max_new_tokens=2048)
    model = OpenAILLMClient(
        model_alias=os.environ["OPENAI_MODEL"],
        api_base=os.environ["OPENAI_API_BASE"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    return await agent.bind(context).bind(LLMConfig(llm_client=model)).bind(memory).build()


async def ask(agent: ConversableAgent, question: str) -> str:
    """The agent's answer to a user of the same conversation."""
    user = await UserProxyAgent().bind(agent.memory).bind(agent.agent_context).build()
    await user.initiate_chat(recipient=agent, reviewer=user, message=question)
    return (await agent.memory.gpts_memory.get_messages(agent.agent_context.conv_id))[-1].content


async def main(target: str, questions: list[str]) -> None:
    with memstream.sync.connect(target) as client:
        joy = await build(client, Joy(), "monday")
        for question in questions:
            print(await ask(joy, question))


if __name__ == "__main__":
    asked = sys.argv[2:] or ["My name is Bob, please tell me a joke", "What's my name?"]
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7700", asked))
