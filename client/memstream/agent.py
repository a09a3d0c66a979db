"""An agent's memory with DB-GPT's interface: a memory, its conversation, and prompt templates.

    async with memstream.connect("127.0.0.1:7700") as client:
        joy = await AgentMemory.open(client, "comedy/joy")
        prompt = await joy.prompt("What's my name?")              # recalled memories and the question
        await joy.write_memories("What's my name?", "You are Bob!")

As in DB-GPT, `AgentMemory` is the memory and the GptsMemory together. Its attribute `memory` is the handle of the
memory alone (a memstream.Memory); `conversation` is the handle of messages and plans.

To read or write differently, subclass it and override `read_memories`, `write_memories`, or their parts:
`memory_text`, `write_memory_template` (None writes a structured observation), `user_prompt_template`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self, TypedDict, Unpack

from memstream.answer_values import Answer
from memstream.argument_types import Count, Several
from memstream.arguments import check_constructor, check_fields, check_methods
from memstream.client import Client
from memstream.context import Context, ContextOptions, ContextText
from memstream.conversations import Conversation
from memstream.errors import MemoryExists
from memstream.memory import Memory
from memstream.policy import PolicyLike, Profile
from memstream.templates import render_template
from memstream.values import Fragment, MemoryKind, Observation, RecallOptions, Structured

SHORT_TERM_CAPACITY = 5
"""Capacity of DB-GPT's default memory."""

WRITE_MEMORY_TEMPLATE = """\
{% if question %}user: {{ question }}
{% endif %}{% if thought %}assistant: {{ thought }}
{% endif %}{% if observation %}outcome: {{ observation }}
{% endif %}"""

USER_PROMPT_TEMPLATE = """\
{% if most_recent_memories %}What was said and done before:
{{ most_recent_memories }}

{% endif %}{% if question %}Question: {{ question }}
{% endif %}"""


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOutput:
    """The result of an agent's action; empty fields were not given."""

    content: str = ""
    is_exe_success: bool = True
    thoughts: str = ""
    phase: str = ""
    action_intention: str = ""
    action_reason: str = ""
    action: str = ""
    action_input: str = ""
    observations: str = ""


class CreateOptions(TypedDict):
    """Arguments of `create_memory` for an agent's memory."""

    kind: MemoryKind
    policy: PolicyLike | None


def default_create_options(kind: MemoryKind | None, policy: PolicyLike | None) -> CreateOptions:
    """Kind and policy, with DB-GPT's defaults for those that are None."""
    kind = kind or MemoryKind.SHORT_TERM
    if policy is None and kind is MemoryKind.SHORT_TERM:
        policy = {"profile": Profile.DBGPT, "short_term": {"capacity": SHORT_TERM_CAPACITY}}
    return {"kind": kind, "policy": policy}


def context_options(own: RecallOptions, given: ContextOptions) -> ContextOptions:
    """Those that are given, and of an agent's own ones those that a context has."""
    shared: Any = {name: value for name, value in own.items() if name in ContextOptions.__annotations__}
    return {**shared, **given}


@check_methods
class AgentTemplates:
    """Renders observations from an agent's turn and prompts from memories; does not call the server."""

    write_memory_template: str | None = WRITE_MEMORY_TEMPLATE
    """Variables: question, thought, phase, action_intention, action_reason, action, action_input, observation,
    check_pass,
    check_fail_reason. None writes a structured observation of the first eight."""
    user_prompt_template: str = USER_PROMPT_TEMPLATE
    """Variables: most_recent_memories and question."""
    separator: ClassVar[str] = "\n"
    """Separates two memories in a prompt."""

    def memory_content(
        self,
        question: str,
        ai_message: str,
        action_output: ActionOutput | None = None,
        check_pass: bool = True,
        check_fail_reason: str | None = None,
    ) -> str | Structured:
        """The content that `write_memories` writes: rendered text, or a structured observation.

        The thought is the action's, else the model's reply; the observation is the reason of a failed check, else the
        action's. Raises InvalidRequest when the template cannot be used.
        """
        action = action_output or ActionOutput()
        failed = "" if check_pass else check_fail_reason or "it did not pass the check"
        step = Structured(
            question=question,
            thought=action.thoughts or ai_message,
            phase=action.phase,
            action_intention=action.action_intention,
            action_reason=action.action_reason,
            action=action.action,
            action_input=action.action_input,
            observation=failed or action.observations,
        )
        if self.write_memory_template is None:
            return step
        values = asdict(step) | {"check_pass": check_pass, "check_fail_reason": check_fail_reason or ""}
        return render_template("write_memory_template", self.write_memory_template, values).rstrip()

    def memories_text(self, answer: Answer) -> str:
        """The `most_recent_memories` of a prompt: recalled fragments with their replies, then short-term in order."""
        working_ids = {fragment.id for fragment in answer.working_memory}
        recalled = [one for hit in answer for one in hit.fragments if one.id not in working_ids]
        return self.separator.join(self.memory_text(each) for each in (*recalled, *answer.working_memory))

    def memory_text(self, fragment: Fragment) -> str:
        """One memory in a prompt: its content, or one line for each part of a structured one."""
        step = fragment.structured
        if step is None:
            return fragment.content
        parts = ((item.name.replace("_", " "), getattr(step, item.name)) for item in fields(Structured))
        return "\n".join(f"{name}: {value}" for name, value in parts if value)

    def prompt_text(self, question: str, most_recent_memories: str) -> str:
        """The rendered prompt. Raises InvalidRequest when the template cannot be used."""
        values = {"question": question, "most_recent_memories": most_recent_memories}
        return render_template("user_prompt_template", self.user_prompt_template, values)


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
    async def open(
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
            memory = await client.create_memory(path, **default_create_options(kind, policy))
        except MemoryExists:
            memory = await client.create_memory(path, kind=kind, policy=policy, exist_ok=True)
        return cls(memory, client.conversation(conversation or path))

    async def read_memories(self, question: str) -> str:
        """Recalls memories for a question, as text for the prompt."""
        return self.memories_text(await self.memory.recall_once(question, session=self.session, **self.options))

    async def prompt(self, question: str) -> str:
        """The question with its recalled memories, rendered by `user_prompt_template`."""
        return self.prompt_text(question, await self.read_memories(question))

    async def context(
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
        return await self.memory.context(
            question, conversation=talk, blocks=blocks, budget=budget, after=after, **asked
        )

    async def write_memories(
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
        await self.observe([content])

    async def observe(self, contents: Several[str | Structured]) -> None:
        """Observes texts or steps in order, once each; raises the error of the first one rejected."""
        observations = [Observation(content, session=self.session) for content in contents]
        result = await self.memory.observe_batch(observations)
        for rejected in result.rejected:
            raise rejected.error
