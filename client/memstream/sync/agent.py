"""The blocking memstream.agent.AgentMemory.

Written by scripts/sync_sdk.py: change the asynchronous class, then run `make generate`.
"""

from __future__ import annotations

from typing import Self, Unpack

from memstream.agent import ActionOutput, AgentTemplates, context_options, default_create_options
from memstream.argument_types import Count, Several
from memstream.arguments import check_constructor, check_methods
from memstream.context import ContextOptions, ContextText
from memstream.errors import MemoryExists
from memstream.policy import PolicyLike
from memstream.sync.bases import Context
from memstream.sync.client import Client
from memstream.sync.conversations import Conversation
from memstream.sync.memory import Memory
from memstream.values import MemoryKind, Observation, RecallOptions, Structured


@check_methods
@check_constructor
class AgentMemory(AgentTemplates):
    """A memory and its conversation.

    `options` apply to every recall; `session` (default: the conversation's name) applies to every observation. The
    methods raise a MemstreamError (see memstream.errors).
    """

    def __init__(
        self,
        memory: Memory,
        conversation: Conversation | None = None,
        *,
        session: str | None = None,
        options: RecallOptions | None = None,
    ) -> None:
        self.memory = memory
        self.conversation = conversation
        self.session = session if session is not None else conversation.name if conversation is not None else ""
        self.options: RecallOptions = options or {}

    @classmethod
    def open(
        cls,
        client: Client,
        path: str,
        *,
        conversation: str | None = None,
        kind: MemoryKind | None = None,
        policy: PolicyLike | None = None,
    ) -> Self:
        """Opens the memory `namespace/name`, creating it if needed, and a conversation (default: of the same path).

        The default is DB-GPT's: a short-term memory of five. Raises MemoryExists if the memory exists with another kind
        or policy than the ones passed.
        """
        try:
            memory = client.create_memory(path, **default_create_options(kind, policy))
        except MemoryExists:
            memory = client.create_memory(path, kind=kind, policy=policy, exist_ok=True)
        return cls(memory, client.conversation(conversation or path))

    def read_memories(self, question: str) -> str:
        """Recalls memories for a question, as text for the prompt."""
        return self.memories_text(self.memory.recall_once(question, session=self.session, **self.options))

    def prompt(self, question: str) -> str:
        """The question with its recalled memories, rendered by `user_prompt_template`."""
        return self.prompt_text(question, self.read_memories(question))

    def context(
        self,
        question: str,
        *,
        blocks: Several[str] = (),
        budget: Count = 0,
        after: ContextText | bytes | None = None,
        **options: Unpack[ContextOptions],
    ) -> Context:
        """The context of a turn from the memory and its conversation, in place of `prompt`: each turn's text begins
        with that of the turn before. `record` of the result takes the place of `write_memories`. See Memory.context.
        Of the agent's own options it takes those that a context has.
        """
        talk = "" if self.conversation is None else self.conversation.path
        asked = context_options(self.options, options)
        return self.memory.context(question, conversation=talk, blocks=blocks, budget=budget, after=after, **asked)

    def write_memories(
        self,
        question: str,
        ai_message: str,
        action_output: ActionOutput | None = None,
        check_pass: bool = True,
        check_fail_reason: str | None = None,
    ) -> None:
        """Observes a turn; it is stored when this returns, so every later read sees it.

        question: the message received. ai_message: the model's reply. action_output: the result of its action.
        check_pass, check_fail_reason: whether the answer was accepted, and why not.
        """
        content = self.memory_content(question, ai_message, action_output, check_pass, check_fail_reason)
        self.observe([content])

    def observe(self, contents: Several[str | Structured]) -> None:
        """Observes texts or steps in order, once each; raises the error of the first one rejected."""
        observations = [Observation(content, session=self.session) for content in contents]
        result = self.memory.observe_batch(observations)
        for rejected in result.rejected:
            raise rejected.error
