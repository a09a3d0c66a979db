"""CrewAI with its memory on a server: an agent to be driven, and tests of the memory.

The model is scripted in this process: CrewAI's own models would see what was said in the question's memories, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

os.environ |= {"OTEL_SDK_DISABLED": "true", "CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import Agent, Crew, Task
from crewai.events.utils.console_formatter import set_suppress_console_output
from crewai.llms.base_llm import BaseLLM
from crewai.memory.storage.backend import StorageBackend
from crewai.memory.types import MemoryRecord
from crewai.tools import tool

import memstream
from memstream.crewai import MemstreamMemory, MemstreamStorage
from tests.toolchains.with_frameworks import driver


class Scripted(BaseLLM):
    """A model that calls tools by text, and knows the messages of its request alone."""

    def call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        said = [str(one["content"]) for one in messages]
        if "You extract discrete" in said[0]:
            facts = ["The user said: I am Bob"] if "Input: I am Bob" in said[1] else []
            return json.dumps({"memories": facts})
        asked = next(text for text in said if "Current Task: " in text).partition("Current Task: ")[2]
        known, asked = "\n".join(said), asked.partition("\n")[0]
        name = asked.partition("Please ")[2]
        if name and "I do it" not in known:
            return f"Thought: I do it.\nAction: {name}\nAction Input: {{}}"
        if name and "I keep it" not in known and "is swordfish" in known:
            return (
                'Thought: I keep it.\nAction: Save to memory\nAction Input: {"contents": ["The password is swordfish"]}'
            )
        text = "Hello."
        if "name" in asked:
            text = f"Your name is {'Bob' if 'I am Bob' in known else 'not known'}."
        elif "password" in asked:
            text = f"The password is {'swordfish' if 'is swordfish' in known else 'not known'}."
        return f"Thought: I now know the final answer.\nFinal Answer: {text}"


def agent_with(memory: MemstreamMemory | None, *tools: Any) -> Agent:
    model = Scripted(model="scripted")
    return Agent(role="joy", goal="Help", backstory="Kind.", llm=model, memory=memory, tools=list(tools))


async def main() -> None:
    set_suppress_console_output(True)  # standard output has the answers

    @tool("read_log")
    def read_log() -> str:
        """Reads the log."""
        return driver.read_log()

    @tool("crash")
    def crash() -> str:
        """Ends the process."""
        return driver.crash()

    with memstream.sync.connect(driver.TARGET) as client:

        async def answer(session: str, text: str) -> str:
            memory = MemstreamMemory(client, f"{driver.NAMESPACE}/{session}", llm=Scripted(model="scripted"))
            done = await asyncio.to_thread(agent_with(memory, read_log, crash).kickoff, text)
            return str(done.raw)

        await driver.take_turns(answer)


@pytest.fixture(scope="module")
def client() -> Iterator[memstream.sync.Client]:
    with memstream.sync.connect(driver.TARGET) as connected:
        yield connected


@pytest.fixture
def path() -> str:
    return f"cr-{uuid.uuid4().hex[:12]}/crew"


@pytest.fixture
def memory(client: memstream.sync.Client, path: str) -> MemstreamMemory:
    return MemstreamMemory(client, path, llm=Scripted(model="scripted"))


def contents(found: Any) -> list[str]:
    return [one.record.content for one in found]


def test_storage_has_every_method_but_a_search_by_vector(client: memstream.sync.Client, path: str) -> None:
    storage = MemstreamStorage(client, path)
    methods = {name for name in vars(StorageBackend) if not name.startswith("_")}
    assert methods - set(dir(storage)) == {"asave", "asearch", "adelete"}, "which CrewAI does not call"
    with pytest.raises(NotImplementedError, match="MemstreamMemory"):
        storage.search([0.0] * 3)


def test_an_empty_memory_answers_all_that_reads(memory: MemstreamMemory) -> None:
    assert memory.recall("What?") == memory.list_records() == memory.list_scopes() == []
    assert memory.list_categories() == {}
    assert (memory.info().record_count, memory.forget(), memory.tree()) == (0, 0, "/ (0 records)")
    memory.reset()
    with pytest.raises(ValueError, match="not found"):
        memory.update("gone", content="x")


def test_a_record_is_returned_unchanged(memory: MemstreamMemory) -> None:
    metadata = {"a": [None, {"b": 1.5}], "t": "x"}
    made = memory.remember(
        "Bob likes trains", scope="/people/bob", categories=["likes"], metadata=metadata, importance=0.7, source="s"
    )
    assert made is not None
    (found,) = memory.recall("What does Bob like?")
    kept = found.record
    assert (kept.id, kept.scope, kept.categories, kept.metadata, kept.importance, kept.source, kept.private) == (
        *(made.id, "/people/bob", ["likes"], metadata, 0.7, "s", False),
    )
    assert kept.created_at == made.created_at
    assert 0 < found.score <= 1
    (listed,) = memory.list_records()  # the server records the access of the recall after its answer
    assert listed == kept.model_copy(update={"last_accessed": listed.last_accessed})


def test_scopes_and_categories_restrict_what_is_found(memory: MemstreamMemory) -> None:
    memory.remember("Bob likes trains", scope="/people/bob", categories=["likes", "rail"])
    memory.remember("Ann likes trains", scope="/people/ann", categories=["likes"])
    memory.remember("Trains are fast", scope="/peoples", categories=["fact"])
    assert set(contents(memory.recall("trains", scope="/people"))) == {"Bob likes trains", "Ann likes trains"}
    assert contents(memory.recall("trains", categories=["rail", "fact"], scope="/people")) == ["Bob likes trains"]
    assert set(contents(memory.recall("trains", limit=2))) < {"Bob likes trains", "Ann likes trains", "Trains are fast"}
    assert memory.list_scopes() == ["/people", "/peoples"]
    assert memory.list_scopes("/people") == ["/people/ann", "/people/bob"]
    assert memory.list_categories("/people") == {"likes": 2, "rail": 1}
    assert (memory.info("/people").record_count, memory.info().record_count) == (2, 3)
    assert memory.tree().splitlines()[:2] == ["/ (3 records)", "  /people (2 records)"]
    view = memory.scope("/people/bob")
    view.remember("Bob is 40")
    assert set(contents(view.recall("Bob"))) == {"Bob likes trains", "Bob is 40"}
    assert "Ann likes trains" in contents(memory.slice(["/people/ann", "/peoples"]).recall("Who likes trains?"))
    assert [one.content for one in memory.list_records(limit=2, offset=1)] == ["Trains are fast", "Ann likes trains"]


def test_root_scope_holds_for_all_that_is_done(client: memstream.sync.Client, path: str) -> None:
    mine, other = (MemstreamMemory(client, path, root_scope=f"/crew/{name}") for name in ("a", "b"))
    mine.remember("The plan is red", scope="/plans")
    other.remember("The plan is blue")
    assert contents(mine.recall("plan")) == ["The plan is red"]
    assert mine.forget() == 1
    assert contents(other.recall("plan")) == ["The plan is blue"]
    other.reset_all()
    assert other.list_records() == []


def test_private_records_are_seen_by_their_source_alone(memory: MemstreamMemory) -> None:
    memory.remember("Bob's code is 7", source="bob", private=True)
    memory.remember("Nobody's code is 8", private=True)
    memory.remember("The code has one digit")
    public, own = ["The code has one digit"], ["Bob's code is 7", "The code has one digit"]
    assert contents(memory.recall("code")) == public
    assert sorted(contents(memory.recall("code", source="bob"))) == own
    assert contents(memory.recall("code", source="ann")) == public
    assert len(memory.recall("code", include_private=True)) == 3


def test_records_are_changed_and_forgotten(memory: MemstreamMemory) -> None:
    made = [memory.remember(f"Note {n}", categories=[f"c{n % 2}"], metadata={"n": n}) for n in range(4)]
    first = made[0]
    assert first is not None
    changed = memory.update(first.id, content="Note zero", importance=0.9)
    assert (changed.content, changed.categories) == ("Note zero", ["c0"])
    assert memory.list_records()[-1].content == "Note zero"
    assert memory.forget(record_ids=[first.id]) == 1
    assert memory.forget(metadata_filter={"n": 1}) == 1
    assert memory.forget(categories=["c0"]) == 1
    assert memory.forget(older_than=datetime.now(UTC).replace(tzinfo=None) - timedelta(days=1)) == 0
    assert memory.forget(older_than=datetime.now(UTC) + timedelta(days=1)) == 1
    assert memory.list_records() == []


def test_a_memory_that_is_only_read_is_not_changed(client: memstream.sync.Client, path: str) -> None:
    writer, reader = MemstreamMemory(client, path), MemstreamMemory(client, path, read_only=True)
    made = writer.remember("Bob likes trains")
    assert made is not None
    assert reader.remember("x") is None
    assert reader.remember_many(["x"]) == []
    assert reader.update(made.id, content="x").content == "Bob likes trains"
    before = client.memory(path).describe().revision
    assert contents(reader.recall("trains")) == ["Bob likes trains"]
    assert client.memory(path).describe().revision == before


def test_a_text_of_1_mb_becomes_several_records(memory: MemstreamMemory) -> None:
    memory.remember(driver.LOG)
    assert len(memory.list_records()) > 10
    assert "the password is swordfish" in contents(memory.recall("What is the password?", limit=1))[0]


def test_saves_are_durable_when_they_return(client: memstream.sync.Client, memory: MemstreamMemory, path: str) -> None:
    memory.remember_many(["one", "two"])
    assert len(list(client.memory(path).list_fragments())) == 2


@pytest.mark.parametrize("odd", [np.zeros(2), datetime.now(UTC), b"x", {1, 2}, object()], ids=type)
def test_odd_metadata_raises_and_stores_nothing(memory: MemstreamMemory, odd: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        memory.remember("a", metadata={"odd": odd})
    assert memory.list_records() == []


def test_a_fragment_of_another_program_is_a_record(client: memstream.sync.Client, path: str) -> None:
    client.create_memory(path).observe_batch(["Bob likes trains"])
    memory = MemstreamMemory(client, path)
    memory.remember("Ann likes ships")
    assert set(contents(memory.recall("Who likes what?"))) == {"Bob likes trains", "Ann likes ships"}
    assert [one.scope for one in memory.list_records()] == ["/", "/"]


def test_a_crew_has_the_memory_of_an_earlier_one(client: memstream.sync.Client, path: str) -> None:
    for description, said in (("I am Bob", "Hello."), ("What is my name?", "Your name is Bob.")):
        memory = MemstreamMemory(client, path, llm=Scripted(model="scripted"))
        memory.remember("The user said: I am Bob") if said == "Hello." else None
        joy = agent_with(None)
        task = Task(description=description, expected_output="Words", agent=joy)
        crew = Crew(agents=[joy], tasks=[task], memory=memory)
        assert crew.kickoff().raw == said
        assert contents(crew.copy().memory.recall("What is my name?")) == contents(memory.recall("What is my name?"))


def test_a_record_with_the_same_id_replaces_it(client: memstream.sync.Client, path: str) -> None:
    storage = MemstreamStorage(client, path)
    storage.save([MemoryRecord(id="a", content="one"), MemoryRecord(id="b", content="two")])
    storage.save([MemoryRecord(id="a", content="three")])
    found = storage.get_record("a")
    assert found is not None
    assert (found.content, storage.count(), storage.get_record("c")) == ("three", 2, None)


if __name__ == "__main__":
    asyncio.run(main())
