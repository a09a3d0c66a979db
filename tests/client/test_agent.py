"""An agent's memory against a real server: DB-GPT's examples of reading and writing, and hostile templates."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memstream
import memstream.sync
from memstream import InvalidRequest, MemoryKind, Structured, templates
from memstream.agent import ActionOutput, AgentMemory, AgentTemplates
from memstream.sync.agent import AgentMemory as SyncAgentMemory
from tests.support.server import ServerProcess

JOKE = "Sure thing, Bob! Why don't scientists trust atoms?\n\nBecause they make up everything!"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("agents") / "data", disk_free_min_bytes=0) as server:
        yield server


@pytest.fixture
async def client(real: ServerProcess) -> Any:
    async with memstream.connect(real.address) as connected:
        yield connected


@pytest.fixture
def path() -> str:
    return f"t-{uuid.uuid4().hex[:12]}/joy"


async def test_second_prompt_contains_the_first_turn(client: memstream.Client, path: str) -> None:
    joy = await AgentMemory.open(client, path)
    assert await joy.prompt("My name is bob, please tell me a joke") == (
        "Question: My name is bob, please tell me a joke\n"
    )
    await joy.write_memories("My name is bob, please tell me a joke", JOKE)
    assert await joy.prompt("What's my name?") == (
        "What was said and done before:\n"
        "user: My name is bob, please tell me a joke\n"
        f"assistant: {JOKE}\n"
        "\n"
        "Question: What's my name?\n"
    )


async def test_default_memory_keeps_five_turns(client: memstream.Client, path: str) -> None:
    joy = await AgentMemory.open(client, path)
    for turn in range(1, 8):
        await joy.write_memories(f"question {turn}", f"answer {turn}")
    lines = (await joy.read_memories("anything")).splitlines()
    assert lines == [f"{who} {turn}" for turn in range(3, 8) for who in ("user: question", "assistant: answer")]
    described = await joy.memory.describe()
    assert described.kind is MemoryKind.SHORT_TERM


async def test_templates_of_the_example_render(client: memstream.Client, path: str) -> None:
    """Formats a text like DB-GPT's templates, in which `\\` joins lines."""

    class Joy(AgentMemory):
        write_memory_template = (
            "{% if question %}user: {{ question }} {% endif %}\n{% if thought %}assistant: {{ thought }} {% endif %}"
        )
        user_prompt_template = (
            "{% if most_recent_memories %}Most recent observations:\n{{ most_recent_memories }}\n{% endif %}\n"
            "{% if question %}Question: {{ question }}\n{% endif %}"
        )

    joy = await Joy.open(client, path)
    await joy.write_memories("My name is bob", "Hello, bob")
    assert await joy.prompt("What's my name?") == (
        "Most recent observations:\nuser: My name is bob \nassistant: Hello, bob\n\nQuestion: What's my name?\n"
    )


async def test_subclass_overrides_reading_and_writing(client: memstream.Client, path: str) -> None:
    class Joy(AgentMemory):
        async def read_memories(self, question: str) -> str:
            return "".join(hit.fragment.content for hit in await self.memory.recall_once(question))

        async def write_memories(
            self,
            question: str,
            ai_message: str,
            action_output: ActionOutput | None = None,
            check_pass: bool = True,
            check_fail_reason: str | None = None,
        ) -> None:
            if action_output is None:
                raise ValueError("there is no action to remember")
            await self.observe([f"[{question} -> {action_output.thoughts or ai_message}]"])

    joy = await Joy.open(client, path)
    with pytest.raises(ValueError, match="no action"):
        await joy.write_memories("q", "a")
    await joy.write_memories("q1", "a1", ActionOutput())
    await joy.write_memories("q2", "a2", ActionOutput(thoughts="t2"))
    assert await joy.read_memories("q") == "[q1 -> a1][q2 -> t2]"


async def test_steps_without_template_are_structured(client: memstream.Client, path: str) -> None:
    class Joy(AgentMemory):
        write_memory_template = None

    joy = await Joy.open(client, path)
    done = ActionOutput(
        thoughts="search the weather",
        phase="research",
        action_intention="know",
        action_reason="asked",
        action="search",
        action_input="Ulm",
        observations="it rains",
    )
    await joy.write_memories("How is the weather?", "raw", done)
    await joy.write_memories("And now?", "I do not know", check_pass=False, check_fail_reason="too vague")
    held = [fragment.structured async for fragment in joy.memory.list_fragments()]
    assert held == [
        Structured(
            question="How is the weather?",
            thought="search the weather",
            phase="research",
            action_intention="know",
            action_reason="asked",
            action="search",
            action_input="Ulm",
            observation="it rains",
        ),
        Structured(question="And now?", thought="I do not know", observation="too vague"),
    ]
    assert (await joy.read_memories("weather")).endswith(
        "question: And now?\nthought: I do not know\nobservation: too vague"
    )


async def test_hybrid_memory_lists_recalled_before_recent(client: memstream.Client, path: str) -> None:
    joy = await AgentMemory.open(
        client, path, kind=MemoryKind.HYBRID, policy={"short_term": {"capacity": 2}, "recall": {"limit": 1}}
    )
    for question, answer in (
        ("I bake bread on Sundays", "How nice"),
        ("Lena plays the cello", "Lovely"),
        ("It rains in Ulm", "A pity"),
        ("The train is late", "Again"),
    ):
        await joy.write_memories(question, answer)
    text = await joy.read_memories("What do I bake?")
    assert text.splitlines()[::2] == [
        "user: I bake bread on Sundays",
        "user: It rains in Ulm",
        "user: The train is late",
    ]


async def test_agent_memory_has_a_conversation(client: memstream.Client, path: str) -> None:
    joy = await AgentMemory.open(client, path)
    assert joy.conversation is not None
    await joy.conversation.append("user", "My name is bob", receiver="joy")
    await joy.conversation.save_plans([memstream.Plan(number=1, title="tell a joke")])
    assert [plan.title async for plan in joy.conversation.plans(to_do=True)] == ["tell a joke"]
    await joy.write_memories("q", "a")
    (fragment,) = [fragment async for fragment in joy.memory.list_fragments()]
    assert fragment.session == joy.conversation.name == "joy"


async def test_rejected_turn_raises(client: memstream.Client, path: str) -> None:
    joy = await AgentMemory.open(client, path)
    with pytest.raises(InvalidRequest):
        await joy.write_memories("", "")
    assert await joy.read_memories("anything") == ""


async def test_failing_template_writes_nothing(client: memstream.Client, path: str) -> None:
    joy = await AgentMemory.open(client, path)
    await joy.write_memories("q", "a")
    sound = joy.write_memory_template
    for broken in ("{{ question.__class__ }}", "{{ no_such_name }}"):
        joy.write_memory_template = broken
        with pytest.raises(InvalidRequest, match="write_memory_template"):
            await joy.write_memories("lost", "lost")
        assert await joy.read_memories("anything") == "user: q\nassistant: a"
    joy.write_memory_template = sound
    joy.user_prompt_template = "{{ ''.__class__ }}"
    with pytest.raises(InvalidRequest, match="user_prompt_template"):
        await joy.prompt("again")
    await joy.write_memories("q2", "a2")
    assert await joy.read_memories("anything") == "user: q\nassistant: a\nuser: q2\nassistant: a2"


def test_the_blocking_facade(real: ServerProcess, path: str) -> None:
    with memstream.sync.connect(real.address) as client:
        joy = SyncAgentMemory.open(client, path)
        joy.write_memories("My name is bob", JOKE)
        assert "user: My name is bob" in joy.prompt("What's my name?")
        assert joy.conversation is not None
        assert joy.conversation.append("user", "hi").number == 1


def test_example_runs(real: ServerProcess) -> None:
    example = Path(__file__).parents[2] / "examples" / "joy.py"
    ended = subprocess.run([sys.executable, str(example), real.address], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Question: What's my name?\n--- joy\nYour name is Bob!\n" in ended.stdout
    assert ended.stdout.endswith("4  joy to user: Your name is Bob!\n")


HOSTILE = [
    "{{ question.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ question|attr('__class__') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ 'x' * 1000000000 }}",
    "{{ 2 ** 1000000000 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ question|center(1000000000) }}",
    "{{ question|indent(1000000000) }}",
    "{{ [1]|tojson(indent=1000000000) }}",
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{% for i in range(1000) %}{% for j in range(1000) %}xx{% endfor %}{% endfor %}",
    "{% for i in [1] %}{% for j in [1] %}{% for k in [1] %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "{% set x = 'xxxxxxxx' %}" + "{% set x = x ~ x %}" * 16 + "{{ x|length }}",
    "{% set x = 'xxxxxxxx' %}" + "{% set x = [x, x]|join %}" * 16 + "{{ x|length }}",
    "{% set x = [1] %}" + "{% set x = [x, x]|sum(start=[]) %}" * 17 + "{{ x|length }}",
    "{% set x = [1] %}" + "{% set x = [x, x] %}" * 17 + "{{ x|string|length }}",
    "{% set x = [1] %}" + "{% set x = (x, x) %}" * 17 + "{{ x|string|length }}",
    "{% set x = [1] %}" + "{% set x = {1: x, 2: x} %}" * 17 + "{{ x|string|length }}",
    "{% set x = ['x'] %}" + "{% set x = x + x %}" * 17 + "{{ x|join|length }}",
    "{% set x = 'x' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 17 + "{{ x|length }}",
    "{% filter length %}{{ 'x' }}{% endfilter %}",
    "{% set x = '%%%%%%%%%%%%%%%%%%%%%%%%' %}" + "{% set x = x|urlencode %}" * 2_000 + "{{ x|length }}",
    "{% set x = 10 %}" + "{% set x = x * x %}" * 17 + "{{ x == 1 }}",
    "{{ range(1000)|join(range(1000)|join)|length }}",
    "{{ 1 / 0 }}",
    "{{ no_such_name }}",
    "{% if question %}",
    "{{ question",
    "x" * 65_537,
    "(" * 3_000 + "{{ " + "(" * 3_000,
]


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_unsafe_or_failing_template_is_rejected(template: str) -> None:
    class Joy(AgentTemplates):
        write_memory_template = template

    with pytest.raises(InvalidRequest) as caught:
        Joy().memory_content("q", "a")
    assert caught.value.violations[0].field == "write_memory_template"


def test_template_values_are_not_rendered() -> None:
    text = "{{ 1 + 1 }} {% for %} <b>&"
    assert AgentTemplates().memory_content(text, "") == f"user: {text}"


def test_templates_can_do_what_prompts_need() -> None:
    made = templates.render_template(
        "t",
        "{% for word in words %}{{ loop.index }}. {{ word|upper }}{% if not loop.last %}, {% endif %}{% endfor %}",
        {"words": ["a", "b"]},
    )
    assert made == "1. A, 2. B"
    assert (
        templates.render_template("t", "{% set x, y = 1, {2: [3]} %}{{ x }}{{ y }}{{ [1, 2]|sum }}", {}) == "1{2: [3]}3"
    )
    assert templates.render_template("t", "{% for k, v in [('a', 1)] %}{{ k }}={{ v }}{% endfor %}", {}) == "a=1"
    assert (
        templates.render_template("t", "{{ range(3)|join('-') }} {{ 2 * 3 }} {{ 'a' + 'b' }} {{ 'a' ~ 1 }}", {})
        == "0-1-2 6 ab a1"
    )


def test_missing_jinja_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jinja2").mkdir()
    (tmp_path / "jinja2" / "__init__.py").write_text("raise ImportError('not installed')\n")
    monkeypatch.delitem(__import__("sys").modules, "jinja2", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"\.\[agent\]"):
        templates.render_template("t", "x", {})


async def test_turns_of_an_agent_keep_their_beginning(client: memstream.Client, path: str) -> None:
    joy = await AgentMemory.open(client, path, kind=MemoryKind.HYBRID)
    await joy.memory.blocks.put("persona", "You are Joy.")
    await joy.observe(["Bob is allergic to nuts"])
    turn = await joy.context("What is Bob allergic to?", blocks=["persona"], budget=900)
    assert turn.text.startswith('<memstream kind="block"')
    assert "Bob is allergic to nuts" in turn.text
    await turn.record("What is Bob allergic to?", "Nuts.")
    later = await joy.context("Since when?", blocks=[f"{path}#persona"], budget=900, after=turn.position)
    assert later.text.startswith(turn.text)
    assert "assistant: Nuts." in later.text


async def test_a_context_takes_the_options_of_the_agent(real: ServerProcess, path: str) -> None:
    async with memstream.connect(real.address) as client:
        joy = await AgentMemory.open(client, path)
        said = [memstream.Observation(f"the {one} key is red", speaker=one) for one in ("Ann", "Bob")]
        await joy.memory.observe_batch(said)
        joy.options = {"filter": memstream.Filter(speakers=["Ann"]), "omit_working_memory": True}
        asked = "Which key is red?"
        assert "Bob" not in await joy.prompt(asked)
        turn = await joy.context(asked)
        assert "the Ann key" in turn.text
        assert "the Bob key" not in turn.text
        assert "the Bob key" in (await joy.context(asked, filter=memstream.Filter(speakers=["Bob"]))).text


def test_the_blocking_agent_has_contexts_too(real: ServerProcess, path: str) -> None:
    with memstream.sync.connect(real.address) as client:
        joy = SyncAgentMemory.open(client, path)
        joy.observe(["Bob likes trains"])
        turn = joy.context("What does Bob like?")
        turn.record("What does Bob like?", "Trains.")
        assert joy.context("Which ones?", after=turn).text.startswith(turn.text)
