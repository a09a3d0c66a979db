"""Conversion of a collection's rows to lines of an export: fields, defaults and rejected rows."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from memstream_server.cli.rows import Adoption, Columns, InvalidRow, fragment_id, fragment_line, header_lines
from memstream_server.core.policy import DBGPT
from memstream_server.core.values import MemoryKind
from memstream_server.engine.operations.transfer.check_lines import Checker, Terms
from memstream_server.engine.operations.transfer.lines import End, FragmentLine, decode_line, encode_line

NOW_US = 1_700_000_000_000_000
COLUMNS = Columns(
    key="pk",
    text="text",
    speaker="author",
    session="thread",
    time="written",
    importance="weight",
    metadata=("topic", "pages", "tags"),
)
PLAIN = Adoption("notes", "demo", "joy", COLUMNS, importance=0.5, time_us=NOW_US)
ROW: dict[str, Any] = {
    "pk": 7,
    "text": "I keep bees",
    "author": "bob",
    "thread": 12,
    "written": "2023-05-08T12:00:00Z",
    "weight": 0.9,
    "topic": "bees",
    "pages": 3,
    "tags": ["a", "ü"],
}


def line(row: dict[str, Any], adoption: Adoption = PLAIN, position: int = 0) -> FragmentLine:
    raw = fragment_line(row, position, adoption)
    assert raw is not None
    found = decode_line(raw)
    assert isinstance(found, FragmentLine)
    return found


def test_every_named_field_is_adopted() -> None:
    found = line(ROW, position=4)
    assert (found.content, found.speaker, found.session, found.importance) == ("I keep bees", "bob", "12", 0.9)
    assert found.metadata == {"topic": "bees", "pages": 3, "tags": ["a", "ü"]}
    assert (found.external_id, found.position, found.tier.value) == ("notes:7", 4, "long_term")
    assert (found.observe_time_us, found.create_time_us) == (1_683_547_200_000_000, NOW_US)
    assert (found.vector, found.model, found.own_vector) == (None, "", False)


def test_missing_fields_of_a_row_have_defaults() -> None:
    found = line({"pk": "a", "text": "hello", "author": None, "written": 0})
    assert (found.speaker, found.session, found.importance, found.metadata) == ("", "", 0.5, {})
    assert (
        line({"pk": "a", "text": "hello"}, replace(PLAIN, columns=replace(COLUMNS, time=""))).observe_time_us == NOW_US
    )
    other = replace(PLAIN, columns=replace(COLUMNS, id="isbn"))
    assert line(ROW | {"isbn": "x-1"}, other).external_id == "notes:x-1"


def test_null_time_is_the_given_one_and_never_now() -> None:
    assert line({"pk": 1, "text": "x", "written": None}, replace(PLAIN, missing_time_us=5)).observe_time_us == 5
    assert line(ROW, replace(PLAIN, missing_time_us=5)).observe_time_us == 1_683_547_200_000_000


@pytest.mark.parametrize("text", [None, "", " \n\t"])
def test_row_without_text_is_none(text: str | None) -> None:
    assert fragment_line({"pk": 1, "text": text}, 0, PLAIN) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1_683_547_200, 1_683_547_200),
        (1_683_547_200.5, 1_683_547_200.5),
        (1_683_547_200_500, 1_683_547_200.5),
        (1_683_547_200_500_000, 1_683_547_200.5),
        (-86_400, -86_400),
        ("2023-05-08T14:00:00+02:00", 1_683_547_200),
        ("2023-05-08", 1_683_504_000),
    ],
)
def test_times(value: object, seconds: float) -> None:
    assert line(ROW | {"written": value}).observe_time_us == round(seconds * 1_000_000)


def test_id_depends_on_row_collection_and_memory() -> None:
    assert line(ROW).id == line(ROW | {"text": "something else"}, position=9).id
    others = [
        fragment_id(PLAIN, 8),
        fragment_id(PLAIN, "7"),
        fragment_id(replace(PLAIN, collection="letters"), 7),
        fragment_id(replace(PLAIN, memory="sue"), 7),
    ]
    assert len({fragment_id(PLAIN, 7), *others}) == 5


def test_vectors_are_adopted_at_unit_length() -> None:
    adoption = replace(PLAIN, model="tiny", columns=replace(COLUMNS, vector="vec"))
    found = line(ROW | {"vec": [3.0, 0.0, 4.0]}, adoption)
    assert found.model == "tiny"
    assert found.vector is not None
    assert np.frombuffer(found.vector, "<f4") == pytest.approx([0.6, 0, 0.8])
    nothing = line(ROW | {"vec": [0.0, 0.0, 0.0]}, adoption)
    assert (nothing.model, nothing.vector) == ("", None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text": 5}, "text is not text but 5"),
        ({"text": "ü" * 51}, "text has 102 bytes, the server accepts at most 100"),
        ({"written": None}, "written is null, which is no time: pass --time for such rows"),
        ({"written": "noon"}, "written: 'noon' is no time: give a date"),
        ({"written": 10**18}, "written: 1000000000000000000 is no time"),
        ({"written": float("nan")}, "written: nan is no time"),
        ({"written": [5]}, "written must be a time, is [5]"),
        ({"weight": 5}, "weight must be a number from 0 to 1, is 5"),
        ({"author": "bob\n"}, "its speaker: expected `str` matching"),
        ({"author": "b" * 41}, "its speaker has 41 bytes, the server allows 40"),
        ({"vec": [1.0, float("inf")]}, "vec has a number that is not finite"),
    ],
)
def test_invalid_row_is_named_with_its_reason(change: dict[str, Any], said: str) -> None:
    columns = replace(COLUMNS, vector="vec")
    strict = replace(PLAIN, content_bytes_max=100, name_bytes_max=40, model="tiny", columns=columns)
    with pytest.raises(InvalidRow) as raised:
        fragment_line(ROW | change, 0, strict)
    assert str(raised.value).startswith(f"the row of pk 7: {said}")


def test_rows_become_a_deterministic_export() -> None:
    def whole() -> list[bytes]:
        head = header_lines(PLAIN, "0.0", MemoryKind.HYBRID, DBGPT, 2)
        body = [fragment_line(ROW | {"pk": key}, place, PLAIN) or b"" for place, key in enumerate((1, 2))]
        digest = sha256(head + b"".join(body)).hexdigest()
        end = End(memories=1, fragments=2, conversations=0, messages=0, plans=0, sha256=digest)
        return (head + b"".join(body) + encode_line(end)).splitlines()

    checker = Checker(Terms(dimension=3, model="tiny", name_bytes_max=100, has_stemmer=lambda _: True))
    for raw in whole():
        checker.check_line(raw)
    assert checker.summarize_export().fragments == 2
    assert whole() == whole()
    memory = json.loads(whole()[1])
    assert (memory["kind"], memory["policy"]["profile"], memory["namespace"], memory["name"]) == (
        "hybrid",
        "dbgpt",
        "demo",
        "joy",
    )
