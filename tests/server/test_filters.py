"""Filters at every door: recall, lists, forget, restore, erase and export; conditions on metadata, and their text."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

import memstream
from memstream import Condition, Filter, InvalidRequest, Memory, Observation
from memstream.values import MetadataValue
from tests.server.conftest import client, shared

__all__ = ["client", "shared"]  # fixtures

METADATA: dict[str, dict[str, MetadataValue]] = {
    "a": {"n": 3, "due": "2026-05-08T01:00:00+02:00", "tags": ["red", "blue"], "who": {"team": "core", "level": 2}},
    "b": {"n": 10, "due": "2026-05-09", "tags": [], "who": {"team": "edge"}},
    "c": {"n": 2.5, "due": "soon", "tags": "red", "who": None},
    "d": {"n": "4", "paid": True, "path": "docs/filters.md"},
    "e": {},
}


@pytest.fixture
async def memory(client: memstream.Client, path: str) -> Memory:
    made = await client.create_memory(path, kind=memstream.MemoryKind.LONG_TERM)
    await made.observe_batch(
        [
            Observation(
                f"tea {key}", metadata=metadata, external_id=f"note/{key}", speaker="Ann" if key < "c" else "Bob"
            )
            for key, metadata in METADATA.items()
        ]
    )
    return made


def where(key: str, **tests: object) -> Filter:
    return Filter(metadata={key: Condition(**tests)})  # type: ignore[arg-type]  # the tests name real fields


TIME = datetime(2026, 5, 8, tzinfo=UTC)
CASES: list[tuple[Filter, str, str]] = [
    (where("n", at_least=3), "metadata.n >= 3", "ab"),
    (where("n", above=2.5, below=10), "metadata.n > 2.5 and metadata.n < 10", "a"),
    (where("n", at_most="5"), 'metadata.n <= "5"', "d"),
    (where("n", values=[3, "4"]), 'metadata.n in (3.0, "4")', "ad"),
    (where("due", time_min=TIME), 'metadata.due >= time("2026-05-08")', "b"),
    (where("due", time_max=TIME), 'metadata.due < time("2026-05-08T00:00:00Z")', "a"),
    (where("tags", any=True, values=["red"]), 'any metadata.tags = "red"', "a"),
    (where("tags", values=["red"]), 'metadata.tags = "red"', "c"),
    (where("tags", values=[[]]), "", "b"),
    (where("who", path=["team"], prefix="co"), 'metadata.who.team ^= "co"', "a"),
    (where("who", path=["level"], exists=False), "not exists metadata.who.level", "bcde"),
    (where("who", exists=True), "exists metadata.who", "abc"),
    (Filter(metadata={"who": None}), "metadata.who = null", "c"),
    (Filter(metadata={"paid": True}), "metadata.paid = true", "d"),
    (~Filter(metadata={"paid": True}), "metadata.paid != true", "abce"),
    (Filter(external_id_prefixes=["note/a", "note/e"]), 'external_id ^= "note/a" or external_id ^= "note/e"', "ae"),
    (
        (where("n", at_least=3) | Filter(metadata={"paid": [True]})) & ~Filter(speakers=["bob"]),
        '(metadata.n >= 3 or metadata.paid in (true)) and not speaker = "bob"',
        "ab",
    ),
]


async def test_conditions_and_their_text_select_the_same(memory: Memory) -> None:
    for chosen, text, expected in CASES:
        for each in (chosen, Filter(expression=text))[: 1 + bool(text)]:
            assert "".join([one.content[-1] async for one in memory.list_fragments(each)]) == expected, each
            answer = await memory.recall_once("tea", filter=each, explain=True)
            assert sorted(one.fragment.content[-1] for one in answer) == list(expected)
            assert answer.eligible == len(expected)


async def test_nested_metadata_returns_as_it_was(memory: Memory) -> None:
    assert [dict(one.metadata) async for one in memory.list_fragments()] == list(METADATA.values())


async def test_a_filter_bounds_what_is_changed(memory: Memory, client: memstream.Client, tmp_path: Path) -> None:
    chosen = where("n", at_least=3)
    namespace = str(memory.namespace)
    await memory.observe_batch([Observation("tea f", supersedes=["note/a"])])
    parts = [part.lines async for part in client.export(namespace, memory.name, filter=chosen)]
    lines = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert [line["content"] for line in lines if line["type"] == "fragment"] == ["tea a", "tea b"]
    assert lines[1]["fragments"] == lines[-1]["fragments"] == 2
    (tmp_path / "some.jsonl").write_bytes(b"".join(parts))
    operation = await client.import_(namespace, tmp_path / "some.jsonl", memory=f"{memory.name}-2")
    imported = await client.finished(operation)
    assert (imported.state, imported.done) == (memstream.OperationState.SUCCEEDED, 2)
    assert await memory.forget_fragments(filter=Filter(expression="metadata.n > 3")) == 1
    assert [one.content async for one in memory.list_fragments(chosen)] == ["tea a"]
    assert await memory.restore_fragments(filter=chosen) == 1
    ended = await client.finished(await memory.erase_fragments(filter=Filter(expression='any metadata.tags = "red"')))
    assert (ended.done, [one.content[-1] async for one in memory.list_fragments()]) == (1, list("bcdef"))


NESTED: MetadataValue = [[[[[[[[[1]]]]]]]]]
WRONG: list[tuple[Filter, str]] = [
    (where("n"), "needs at least one value, or another test"),
    (where("n", exists=False, prefix="a"), "is false beside other tests"),
    (where("n", time_min=TIME, time_max=TIME.replace(year=2025)), "is below the lower bound"),
    (Filter(expression="(" * 40), "too many parentheses"),
    (Filter(expression="metadata.n >="), "has its end at character 14"),
    (Filter(expression='x = "1"'), "not a field"),
    (Filter(expression="metadata.n = 1 " * 400), "has more than 4096 bytes"),
    (Filter(expression=" or ".join(["exists metadata.n"] * 17)), "one more than the 16 tests"),
    (Filter(any_of=[Filter(any_of=[Filter(speakers=["x"])] * 31)] * 9), "one filter more than the 256"),
]


async def test_wrong_filters_are_refused_everywhere(memory: Memory, client: memstream.Client) -> None:
    for chosen, problem in WRONG:
        calls = (
            memory.recall_once("tea", filter=chosen),
            anext(memory.list_fragments(chosen)),
            memory.forget_fragments(filter=chosen),
            memory.erase_fragments(filter=chosen),
            anext(client.export(str(memory.namespace), filter=chosen)),
        )
        for call in calls:
            with pytest.raises(InvalidRequest, match=problem):
                await call
    assert len([one async for one in memory.list_fragments()]) == len(METADATA)


async def test_metadata_nested_too_deeply_is_refused(memory: Memory) -> None:
    with pytest.raises(memstream.InvalidArgument, match="nested more than 8 deep"):
        await memory.observe_batch([Observation("x", metadata={"deep": NESTED})])
