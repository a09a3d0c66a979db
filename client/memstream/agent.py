"""An agent's memory as DB-GPT's agents use theirs: a memory, its conversation, and templates between words and both.

    async with memstream.connect("127.0.0.1:7700") as client:
        joy = await AgentMemory.open(client, "comedy/joy")
        prompt = await joy.prompt("What's my name?")              # what is remembered, and the question
        await joy.write_memories("What's my name?", "You are Bob!")

`AgentMemory` here is what DB-GPT calls so: the memory and the GptsMemory together. The handle of the memory alone is
`memory` (a memstream.Memory), that of messages and plans `conversation`.

To read or write differently, subclass it and override `read_memories`, `write_memories`, or what they are made of:
`memory_text`, `write_memory_template` (None writes a structured observation), `user_prompt_template`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Self, TypedDict

from memstream.argument_types import Several
from memstream.arguments import check_fields, check_made, check_methods
from memstream.client import Client
from memstream.conversations import Conversation
from memstream.errors import MemoryExists
from memstream.memory import Memory
from memstream.policy import PolicyLike, Profile
from memstream.templates import render
from memstream.values import Answer, Fragment, MemoryKind, Observation, RecallOptions, Structured

SHORT_TERM_CAPACITY = 5
"""What DB-GPT's default memory holds."""

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
    """What came of an agent's action; empty fields were not given."""

    content: str = ""
    is_exe_success: bool = True
    thoughts: str = ""
    phase: str = ""
    action_intention: str = ""
    action_reason: str = ""
    action: str = ""
    action_input: str = ""
    observations: str = ""


class MadeWith(TypedDict):
    """What an agent's memory is made with."""

    kind: MemoryKind
    policy: PolicyLike | None


def made_with(kind: MemoryKind | None, policy: PolicyLike | None) -> MadeWith:
    """DB-GPT's default where nothing else is given."""
    kind = kind or MemoryKind.SHORT_TERM
    if policy is None and kind is MemoryKind.SHORT_TERM:
        policy = {"profile": Profile.DBGPT, "short_term": {"capacity": SHORT_TERM_CAPACITY}}
    return {"kind": kind, "policy": policy}


@check_methods
class AgentTemplates:
    """From words to observations and from memories to a prompt: nothing here calls the server."""

    write_memory_template: str | None = WRITE_MEMORY_TEMPLATE
    """Sees question, thought, phase, action_intention, action_reason, action, action_input, observation, check_pass,
    check_fail_reason. None writes a structured observation of the first eight."""
    user_prompt_template: str = USER_PROMPT_TEMPLATE
    """Sees most_recent_memories and question."""
    separator: ClassVar[str] = "\n"
    """Between two memories of a prompt."""

    def memory_content(
        self,
        question: str,
        ai_message: str,
        action_output: ActionOutput | None = None,
        check_pass: bool = True,
        check_fail_reason: str | None = None,
    ) -> str | Structured:
        """What `write_memories` writes: text by the template, or a structured observation.

        The thought is the action's, or else what the model said; the observation is the action's, or else why it did
        not pass. Raises InvalidRequest when the template cannot be used.
        """
        done = action_output or ActionOutput()
        failed = "" if check_pass else check_fail_reason or "it did not pass the check"
        step = Structured(
            question=question,
            thought=done.thoughts or ai_message,
            phase=done.phase,
            action_intention=done.action_intention,
            action_reason=done.action_reason,
            action=done.action,
            action_input=done.action_input,
            observation=failed or done.observations,
        )
        if self.write_memory_template is None:
            return step
        values = asdict(step) | {"check_pass": check_pass, "check_fail_reason": check_fail_reason or ""}
        return render("write_memory_template", self.write_memory_template, values).rstrip()

    def memories_text(self, answer: Answer) -> str:
        """The `most_recent_memories` of a prompt: what was recalled from long-term, then all of short-term in order."""
        held = {fragment.id for fragment in answer.working_memory}
        recalled = [hit.fragment for hit in answer if hit.fragment.id not in held]
        return self.separator.join(self.memory_text(each) for each in (*recalled, *answer.working_memory))

    def memory_text(self, fragment: Fragment) -> str:
        """One memory in a prompt: its content; of a structured one a line for each part that was given."""
        step = fragment.structured
        if step is None:
            return fragment.content
        parts = ((item.name.replace("_", " "), getattr(step, item.name)) for item in fields(Structured))
        return "\n".join(f"{name}: {value}" for name, value in parts if value)

    def prompt_text(self, question: str, most_recent_memories: str) -> str:
        """What to ask the model. Raises InvalidRequest when the template cannot be used."""
        values = {"question": question, "most_recent_memories": most_recent_memories}
        return render("user_prompt_template", self.user_prompt_template, values)


@check_methods
@check_made
class AgentMemory(AgentTemplates):
    """A memory and its conversation. `options` are those of every recall; `session` (the conversation's name, unless
    given) is that of every observation. The methods raise a MemstreamError (see memstream.errors).
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
        """The memory `namespace/name`, made if it is not there, and the conversation of that path, unless given.

        By default as in DB-GPT: a short-term memory of five. Raises MemoryExists where a memory is there with another
        kind or policy than is given here.
        """
        try:
            memory = await client.create_memory(path, **made_with(kind, policy))
        except MemoryExists:
            memory = await client.create_memory(path, kind=kind, policy=policy, exist_ok=True)
        return cls(memory, client.conversation(conversation or path))

    async def read_memories(self, question: str) -> str:
        """What the memory has for a question, as a text for the prompt."""
        return self.memories_text(await self.memory.recall_once(question, session=self.session, **self.options))

    async def prompt(self, question: str) -> str:
        """The question with the memories it brings up, by `user_prompt_template`."""
        return self.prompt_text(question, await self.read_memories(question))

    async def write_memories(
        self,
        question: str,
        ai_message: str,
        action_output: ActionOutput | None = None,
        check_pass: bool = True,
        check_fail_reason: str | None = None,
    ) -> None:
        """Observes a turn; when this returns it is stored: every later read sees it.

        question: what was received. ai_message: what the model said. action_output: what came of its action.
        check_pass, check_fail_reason: whether the answer was accepted, and why not.
        """
        content = self.memory_content(question, ai_message, action_output, check_pass, check_fail_reason)
        await self.observe([content])

    async def observe(self, contents: Several[str | Structured]) -> None:
        """Observes texts or steps in order, once each; raises why one was refused."""
        observations = [Observation(content, session=self.session) for content in contents]
        result = await self.memory.observe_batch(observations)
        for rejected in result.rejected:
            raise rejected.error
