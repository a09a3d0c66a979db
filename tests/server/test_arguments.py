"""Any value for any argument of the Python SDK: success, or a MemstreamError; against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import memstream
import memstream.agent
import memstream.sync.agent
from memstream import public
from tests.support.arbitrary import wrong_values
from tests.support.seeds import rounds
from tests.support.server import ServerProcess

PATIENCE_S = 0.05
BASE: dict[str, Any] = {
    "path": "fuzz/joy",
    "new_path": "fuzz/clone",
    "namespace": "fuzz",
    "source": "/nonexistent",
    "id": "01K9ZQ4J3V6Y8M2N5P7R0S1T2W",
    "operation": "none",
    "producer": "p",
    "what": "x",
    "observations": ["x"],
    "sender": "a",
    "content": "x",
    "plans": (),
    "number": 1,
    "target": "127.0.0.1:1",
    "user_id": "bob",
    "name": "bob",
    "question": "x",
    "ai_message": "x",
    "contents": (),
    "answer": None,
    "fragment": None,
    "most_recent_memories": "x",
}
"""Values of required arguments while another argument is drawn."""
APPLIED = {"put_fragment": {"external_id": "key"}}
LEFT_ALONE = {
    *("close", "aclose", "start_reindex", "start_purge"),  # they would end or load what other examples use
    *("memory_text", "memories_text", "observe_step"),  # they take objects of the SDK
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a public call, and valid values of the others."""

    call: str
    name: str
    function: Callable[..., Any]
    others: dict[str, Any]


def arguments_of(owner: object, label: str = "") -> list[Argument]:
    """Of every public method of an object."""
    found: list[Argument] = []
    for name in dir(owner):
        if name.startswith("_") or name in LEFT_ALONE or isinstance(getattr(type(owner), name, None), property):
            continue
        function = getattr(owner, name)
        if callable(function) and not isinstance(function, type):
            found += arguments_to(function, f"{label or type(owner).__name__}.{name}", APPLIED.get(name, {}))
    return found


def arguments_to(function: Callable[..., Any], label: str, applied: dict[str, Any]) -> list[Argument]:
    """Of one function or class."""
    parameters = list(inspect.signature(function).parameters.values())
    required = {each.name: BASE[each.name] for each in parameters if each.default is each.empty and each.name in BASE}
    return [Argument(label, each.name, function, required | applied) for each in parameters] + [
        Argument(label, "no_such_argument", function, required | applied)
    ]


def made() -> list[Argument]:
    """Objects that a program creates from values only."""
    kinds = [getattr(memstream, name) for name in public.__all__]
    values = [kind for kind in kinds if getattr(kind, "__checks_its_fields__", False)]
    functions = [memstream.connect, memstream.sync.connect, memstream.memory_name, memstream.user_id_of]
    of_files = arguments_to(memstream.Tls.of_files, "Tls.of_files", {})
    needed = {"Observation": {"body": "x"}}
    return of_files + [
        each
        for made_of in (*values, *functions, memstream.agent.ActionOutput)
        for each in arguments_to(made_of, made_of.__name__, needed.get(made_of.__name__, {}))
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ServerProcess(tmp_path_factory.mktemp("arguments") / "data") as running:
        yield running.address


@contextlib.contextmanager
def only_memstream_errors() -> Iterator[None]:
    """Any other exception passes, and fails the test."""
    with contextlib.suppress(memstream.MemstreamError):
        yield


async def used(result: Any) -> None:
    """Uses the result of an asynchronous call: awaits, opens or iterates it."""
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "__aenter__") and not isinstance(result, memstream.Client):
        async with result:
            if hasattr(result, "__anext__"):
                await first(result)
    elif hasattr(result, "__anext__"):
        await first(result)


async def first(items: AsyncIterator[Any]) -> None:
    with contextlib.suppress(StopAsyncIteration, TimeoutError):
        await asyncio.wait_for(anext(items), PATIENCE_S)


WIDELY = settings(max_examples=rounds(400, 120), deadline=None, suppress_health_check=list(HealthCheck))


@WIDELY
@given(argument=st.sampled_from(made()), value=wrong_values)
def test_values_are_made_or_refused(argument: Argument, value: Any) -> None:
    with only_memstream_errors():
        argument.function(**argument.others | {argument.name: value})


def test_asynchronous_calls_succeed_or_are_refused(target: str) -> None:
    with asyncio.Runner() as runner:
        client = memstream.connect(target, timeout_s=1.0)
        stack = contextlib.AsyncExitStack()
        name = f"fuzz/{uuid.uuid4().hex}"  # a blocking call may have made "fuzz/joy"
        memory, conversation = client.memory(name), client.conversation("fuzz/talk")

        async def opened() -> list[Argument]:
            async with memstream.connect(target) as patient:
                await patient.create_memory(name)
            observing = await stack.enter_async_context(memory.observe("fuzz"))
            recalling = await stack.enter_async_context(memory.recall())
            agent = memstream.agent.AgentMemory(memory, conversation)
            return [
                *(each for owner in (client, memory, conversation, agent) for each in arguments_of(owner)),
                *(each for owner in (observing, recalling) for each in arguments_of(owner)),
                *arguments_to(memstream.agent.AgentMemory, "AgentMemory", {"memory": memory}),
            ]

        arguments = runner.run(opened())

        @WIDELY
        @given(argument=st.sampled_from(arguments), value=wrong_values)
        def call(argument: Argument, value: Any) -> None:
            async def called() -> None:
                with only_memstream_errors():
                    await used(argument.function(**argument.others | {argument.name: value}))

            runner.run(called())

        try:
            call()
        finally:
            with only_memstream_errors():
                runner.run(stack.aclose())
            runner.run(client.close())


ENTERED = (
    *(memstream.sync.ObserveStream, memstream.sync.RecallStream, memstream.sync.StandingQuery),
    *(memstream.sync.Watch, memstream.sync.ConversationWatch, memstream.sync.BlockWatch),
)


def test_blocking_calls_succeed_or_are_refused(target: str) -> None:
    name = f"fuzz/{uuid.uuid4().hex}"
    with memstream.sync.connect(target) as patient:
        patient.create_memory(name)
    with memstream.sync.connect(target, timeout_s=1.0) as client:
        memory = client.memory(name)
        talk = client.conversation(name)
        # A call may delete the memory, and then the end of its streams raises.
        with only_memstream_errors(), memory.observe("blocking") as observing, memory.recall() as recalling:
            agent = memstream.sync.agent.AgentMemory(memory, talk)
            owners = (client, memory, memory.blocks, talk, observing, recalling, agent)
            arguments = [each for owner in owners for each in arguments_of(owner)]

            @WIDELY
            @given(argument=st.sampled_from(arguments), value=wrong_values)
            def call(argument: Argument, value: Any) -> None:
                with only_memstream_errors():
                    result = argument.function(**argument.others | {argument.name: value})
                    if isinstance(result, ENTERED):
                        with result:
                            pass
                    elif isinstance(result, Iterator):
                        next(result, None)

            call()
