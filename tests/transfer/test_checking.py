"""Hostile and broken exports: each is rejected with its line and the reason, in bounded memory."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.core.policy import DBGPT, DEFAULT, Policy
from memstream_server.core.values import Fragment
from memstream_server.engine.operations.transfer import lines
from memstream_server.engine.operations.transfer.check_lines import Checker, ImportTerms, MalformedExport, Summary
from memstream_server.ports.conversations import Message, Plan
from tests.transfer.exports import (
    HEADER,
    block,
    changed,
    conversation,
    ended,
    fragment,
    memory,
    message,
    raw_lines,
    ulid,
    whole,
)

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "export.schema.json"


def speaks(language: str) -> bool:
    try:
        SnowballAnalyzer().terms("", language)
    except (KeyError, ValueError):
        return False
    return True


def terms(rename: str = "") -> ImportTerms:
    return ImportTerms(dimension=4, model="tiny", name_bytes_max=128, has_stemmer=speaks, rename=rename)


def checked(said: list[bytes], rename: str = "") -> Summary:
    checker = Checker(terms(rename))
    for line in said:
        checker.check_line(line.removesuffix(b"\n"))
    return checker.summarize_export()


def packed(*numbers: float) -> str:
    return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()


def with_line(place: int, line: dict[str, Any] | bytes) -> Callable[[], list[bytes]]:
    made: list[Any] = whole()
    made.insert(place, line)
    return lambda: ended(made)


def with_blocks(*blocks: dict[str, Any]) -> list[Any]:
    """An export whose first memory announces two blocks, and has these."""
    made: list[Any] = whole()
    made[1] |= {"blocks": 2, "block_version": 99}
    return [*made[:5], *blocks, *made[5:]]


def policy_with(**said: Any) -> dict[str, Any]:
    return memory()["policy"] | said


REFUSED: dict[str, tuple[Callable[[], list[bytes]], int, str]] = {
    "nothing": (list, 1, "incomplete"),
    "not an export": (lambda: [b"hello\n"], 1, "first line"),
    "an array": (lambda: [b"[1]\n"], 1, "first line"),
    "another format": (changed(0, format="other"), 1, "first line"),
    "a later version": (changed(0, version=2, news="x"), 1, "is 2"),
    "an unknown header field": (changed(0, news="x"), 1, "news"),
    "a second header": (with_line(3, dict(HEADER)), 4, "second"),
    "a blank line": (with_line(2, b"\n"), 3, "not JSON"),
    "deep nesting": (with_line(2, b"[" * 100_000 + b"\n"), 3, "object"),
    "deep nesting in a field": (with_line(2, b'{"type":"fragment","metadata":' + b'{"a":' * 90_000 + b"\n"), 3, ""),
    "bytes that are not UTF-8": (with_line(2, b'{"type":"fragment","id":"\xff"}\n'), 3, ""),
    "no object": (with_line(2, b"17\n"), 3, "object"),
    "no type": (with_line(2, b"{}\n"), 3, "type"),
    "an unknown type": (changed(2, type="frog"), 3, "frog"),
    "an unknown field": (changed(2, colour="red"), 3, "colour"),
    "a field missing": (changed(2, content=None), 3, "content"),
    "empty content": (changed(2, content=""), 3, "content"),
    "NaN": (with_line(2, b'{"type":"fragment","importance":NaN}\n'), 3, "not JSON"),
    "an infinite number": (with_line(2, b'{"type":"fragment","importance":1e999}\n'), 3, "importance"),
    "an importance above 1": (changed(2, importance=1.5), 3, "importance"),
    "a lone surrogate": (with_line(2, b'{"type":"fragment","content":"\\ud800x"}\n'), 3, "not JSON"),
    "a lone low surrogate": (with_line(2, b'{"type":"fragment","content":"\\udc00x"}\n'), 3, "surrogate"),
    "NUL in a session": (changed(2, session="a\0b"), 3, "session"),
    "a line break after an id": (changed(2, id=ulid(1) + "\n"), 3, "id"),
    "no id": (changed(2, id="joy"), 3, "id"),
    "a long external id": (changed(2, external_id="x" * 129), 3, "external_id"),
    "a time out of range": (changed(2, create_time_us=2**62), 3, "create_time_us"),
    "a huge integer": (changed(2, access_count=10**30), 3, "access_count"),
    "a huge integer in metadata": (changed(2, metadata={"n": 2**63}), 3, "metadata.n"),
    "metadata that is too deep": (changed(2, metadata={"n": [[[[[[[[[1]]]]]]]]]}), 3, "metadata.n"),
    "a large number in metadata": (changed(2, metadata={"n": {"a": 1 << 63}}), 3, "metadata.n"),
    "a repeated position": (changed(3, position=1), 4, "position"),
    "a lower position": (changed(3, position=0), 4, "position"),
    "a position that does not fit": (changed(4, position=2**32), 5, "position"),
    "a repeated id": (changed(3, id=ulid(1)), 4, "id"),
    "a repeated external id": (changed(4, external_id="a"), 5, "external_id"),
    "a source that is no id": (changed(2, sources=["x"]), 3, "sources"),
    "itself as a source": (changed(2, sources=[ulid(1)]), 3, "sources"),
    "superseded by one that is not there": (changed(2, superseded_by=ulid(9)), 6, "superseded_by"),
    "superseded by one that does not name it": (changed(2, superseded_by=ulid(2)), 6, "do not name each other"),
    "superseding one that does not name it": (changed(2, supersedes=[ulid(2)]), 6, "do not name each other"),
    "a chain that closes": (changed(2, superseded_by=ulid(1), supersedes=[ulid(1)]), 6, "back to itself"),
    "a validity that ends as it begins": (changed(2, valid_from_us=5, valid_until_us=5), 3, "valid_until_us"),
    "a tier that the kind lacks": (changed(1, kind="short_term"), 3, "tier"),
    "an unknown kind": (changed(1, kind="huge"), 2, "kind"),
    "enhancements in long-term": (changed(2, enhancements=[{"id": ulid(9), "text": ""}]), 3, "enhancements"),
    "a count that does not add up": (changed(3, enhancement_count=2), 4, "enhancement_count"),
    "an enhancement whose parts differ from its text": (
        changed(3, enhancements=[{"id": ulid(9), "text": "again", "structured": {"thought": "once"}}]),
        4,
        "enhancements",
    ),
    "more repeats than hits": (changed(2, duplicate_count=1), 3, "duplicate_count"),
    "content that differs from its parts": (changed(6, content="it snows"), 7, "content"),
    "a vector without a model": (changed(2, vector=packed(1, 0, 0, 0)), 3, "vector"),
    "a vector of another dimension": (changed(2, model="tiny", vector=packed(1, 0, 0)), 3, "vector"),
    "a vector that is not finite": (changed(2, model="tiny", vector=packed(1, np.nan, 0, 0)), 3, "finite"),
    "a vector that is too long": (changed(2, model="tiny", vector=packed(1, 1, 0, 0)), 3, "unit length"),
    "half a number": (changed(2, model="tiny", vector="AAA="), 3, "float32"),
    "no base64": (changed(2, model="tiny", vector="!"), 3, "vector"),
    "a missing own vector": (changed(2, model="tiny", own_vector=True), 3, "vector"),
    "a name with invalid characters": (changed(1, name="../etc"), 2, "name"),
    "a long name": (changed(1, name="x" * 129), 2, "name"),
    "a repeated name": (changed(5, name="joy"), 6, "came before"),
    "an empty seed": (changed(1, seed=""), 2, "seed"),
    "an unknown language": (changed(1, policy=policy_with(language="klingon")), 2, "language"),
    "a policy out of bounds": (changed(1, policy=policy_with(importance_default=7)), 2, "importance_default"),
    "an unknown policy field": (changed(1, policy=policy_with(colour=7)), 2, "colour"),
    "a policy without a profile": (changed(1, policy={"language": "english"}), 2, "policy"),
    "fewer fragments than announced": (changed(1, fragments=4), 6, "announces"),
    "a fragment without a memory": (with_line(8, fragment(1)), 9, "fragment"),
    "a block without a memory": (with_line(8, block(1)), 9, "block"),
    "a block above the last version": (with_line(5, block(1)), 6, "version"),
    "a block in the wrong order": (lambda: ended(with_blocks(block(2), block(1))), 7, "version"),
    "fewer blocks than announced": (lambda: ended(with_blocks(block(2))), 7, "announces 2 blocks, but 1 follow"),
    "a fragment after the blocks": (lambda: ended(with_blocks(block(1), fragment(6))), 7, "fragment"),
    "too many blocks": (lambda: ended(with_blocks(*(block(n, f"b{n}") for n in range(1, 66)))), 70, "one block more"),
    "a message without a conversation": (with_line(2, message(1)), 3, "message"),
    "a message after the plans": (with_line(11, message(3)), 12, "message"),
    "a repeated message": (changed(9, number=1), 10, "number"),
    "a message above the last number": (changed(9, number=3), 10, "number"),
    "a plan in an unknown state": (changed(10, state="lost"), 11, "state"),
    "fewer messages than announced": (changed(7, messages=3, last_number=3), 12, "announces"),
    "a message with a body that is no JSON": (changed(9, body="{"), 10, "body"),
    "completed before its last message": (changed(7, completed=True, completions=1), 8, "completed_number"),
    "a repeated conversation": (with_line(11, conversation("talk")), 12, "name"),
    "another count at the end": (lambda: ended(whole(), fragments=9), 12, "fragments"),
    "another checksum": (lambda: ended(whole(), sha256="0" * 64), 12, "sha256"),
    "a line lost": (lambda: [*raw_lines(whole())[:10], ended(whole())[-1]], 11, ""),
    "a word changed": (lambda: [line.replace(b"hello", b"hallo") for line in ended(whole())], 12, "sha256"),
    "a line after the end": (lambda: [*ended(whole()), b"{}\n"], 13, "after the end"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_line_is_rejected_with_its_number(name: str) -> None:
    make, line, told = REFUSED[name]
    with pytest.raises(MalformedExport) as refused:
        checked(make())
    assert refused.value.line == line, str(refused.value)
    assert told in str(refused.value)
    assert len(str(refused.value)) < 2_000


def test_a_complete_export_matches_its_counts() -> None:
    found = checked(ended(whole()))
    assert [name for name, _ in found.memories] == ["joy", "sam"]
    assert (found.conversations, found.fragments, found.messages, found.plans) == (["talk"], 4, 2, 1)


@pytest.mark.parametrize("kept", range(12))
def test_an_export_truncated_at_any_line_is_rejected(kept: int) -> None:
    said = ended(whole())
    assert len(said) == 12
    with pytest.raises(MalformedExport, match="incomplete"):
        checked(said[:kept])


def test_only_an_export_of_one_memory_can_be_renamed() -> None:
    with pytest.raises(MalformedExport, match="second memory"):
        checked(ended(whole()), rename="sue")
    assert checked(ended(whole()[:5]), rename="sue").fragments == 3


def test_checking_keeps_a_few_bytes_per_fragment() -> None:
    """A checker does not keep lines: 4,000 fragments of 2 KB need less than a twentieth of their size."""
    checker = Checker(terms())
    count, text = 4_000, "x" * 2_000
    checker.check_line(raw_lines([HEADER])[0])
    checker.check_line(raw_lines([memory(fragments=count)])[0])
    tracemalloc.start()
    try:
        for number in range(count):
            checker.check_line(raw_lines([fragment(number, content=text, external_id=f"k{number}")])[0])
        assert tracemalloc.get_traced_memory()[1] < count * 100
    finally:
        tracemalloc.stop()


def test_policies_round_trip_unchanged() -> None:
    for policy in (DEFAULT, DBGPT):
        assert lines.policy_of(lines.policy_line(policy)) == policy


@pytest.mark.parametrize("profile", [DEFAULT, DBGPT], ids=lambda policy: policy.profile)
def test_missing_policy_fields_take_the_profiles_default(profile: Policy) -> None:
    policy = replace(profile, language="german", recall=replace(profile.recall, limit=7, fold=False))
    line = memory() | {"policy": json.loads(lines.encode_line(lines.policy_line(policy)))}
    del line["policy"]["recall"]["fold"]  # an export from before folding existed
    del line["policy"]["wait_for_models"]
    del line["policy"]["retention"]
    found = lines.decode_line(raw_lines([line])[0])
    assert isinstance(found, lines.MemoryLine)
    assert lines.policy_of(found.policy) == replace(policy, recall=replace(policy.recall, fold=profile.recall.fold))


def test_the_schema_accepts_good_lines_and_rejects_bad_ones() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    validator.check_schema(validator.schema)
    for line in ended(whole()):
        validator.validate(json.loads(line))
    for bad in (fragment(1, colour="red"), fragment(1, importance=2), {"type": "frog"}, fragment(1, id="x\n")):
        assert not validator.is_valid(bad)


def test_every_stored_field_has_a_place_in_a_line() -> None:
    """A new field of these types needs a place in the export, or an exception here."""
    for kept, line in ((Message, lines.MessageLine), (Plan, lines.PlanLine)):
        # An import computes the bytes of a body.
        assert {item.name for item in fields(kept)} - {"body_size_bytes"} <= set(line.__struct_fields__), kept
    kept, held = set(Fragment.__struct_fields__), set(lines.FragmentLine.__struct_fields__)
    assert kept <= held
    assert held - kept == {"vector", "content_vector", "enhancements", "conflicts"}


def test_messages_may_have_gaps() -> None:
    """Messages are deleted by number, and from the end."""
    said = ended([HEADER, conversation("talk", 9) | {"messages": 2}, message(2), message(4)])
    assert checked(said).messages == 2


def test_renaming_to_a_name_of_the_file_is_rejected() -> None:
    said = ended([HEADER, memory("joy"), conversation("joy", 1), message(1), conversation("sam", 1), message(1)])
    with pytest.raises(MalformedExport, match="two conversations"):
        checked(said, rename="sam")
    for name in ("", "joy", "lea"):
        assert checked(said, rename=name).conversations == ["joy", "sam"]
    alone = ended([HEADER, memory("joy"), conversation("sam")])
    assert checked(alone, rename="sam").conversations == ["sam"]
