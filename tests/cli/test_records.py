"""Parsing of input lines."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from memstream.values import Observation, Structured
from memstream_server.cli.records import Format, MalformedLine, RecordReader, parse_record


def test_plain_lines_lose_their_line_ends() -> None:
    reader = RecordReader(Format.AUTO)
    read = [reader.read_line(line) for line in (b"\xef\xbb\xbfMy name is Bob\r\n", b"  \n", b'{"text": "x"}\n')]
    assert read == [Observation("My name is Bob"), None, Observation('{"text": "x"}')]


def test_first_line_with_object_selects_jsonl() -> None:
    reader = RecordReader(Format.AUTO)
    assert reader.read_line(b'{"text": "Hi", "speaker": "Bob"}\n') == Observation("Hi", speaker="Bob")
    assert isinstance(reader.read_line(b"plain words\n"), MalformedLine)


def test_text_is_stored_as_it_is() -> None:
    reader = RecordReader(Format.AUTO)
    read = [reader.read_line(line) for line in (b"def f():\n", b"    return 1  \r\n", b"\t \n", b"\tx")]
    assert read == [Observation("def f():"), Observation("    return 1  "), None, Observation("\tx")]


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("[08.05.26, 12:00:01] Ann: hello", "WhatsApp"),
        ("\u200e[08/05/2026, 12:00:01 PM] Ann: hello", "WhatsApp"),
        ("5/8/26, 12:00\u202fPM - Ann: hello", "WhatsApp"),
        ("2026-05-08, 12:00 - Messages are end-to-end encrypted", "WhatsApp"),
        ("time,speaker,text", "CSV"),
        ('"id";"content";"who"', "CSV"),
        ("message\tdate", "CSV"),
        ("<!DOCTYPE html>", "HTML"),
        ('<?xml version="1.0"?>', "XML"),
        ("WEBVTT", "subtitles"),
        ("From ann@example.org Fri May  8 12:00:00 2026", "mbox"),
        ("%PDF-1.7", "PDF"),
        ("PK\x03\x04...", "ZIP"),
        ("SQLite format 3\x00", "memstream import reads"),
        ('{"type":"export","format":"memstream-export","version":1}', "memstream import"),
        ("\udc1f\udc8b", "gzip"),
    ],
)
def test_file_of_something_else_is_rejected_as_a_whole(first: str, said: str) -> None:
    line = b"\x1f\x8b\x08" if said == "gzip" else first.encode()
    reader = RecordReader(Format.AUTO)
    problem = reader.read_line(line)
    assert isinstance(problem, MalformedLine)
    assert said in problem.problem
    if said != "gzip":
        assert reader.read_line(b"Bob: and more") == problem
        assert RecordReader(Format.LINES).read_line(line) == Observation(first)


@pytest.mark.parametrize(
    "line",
    [
        *("Bob, Ann and the time, as always", "text", "hello, text", "time: noon", "message; date with Ann"),
        *("2026-05-08 12:00 Ann: hello", "[12:03] joy: hi", "<b>bold</b>", "From Ann, with love 2026", "12. 5. 2026"),
        *("08.05.2026: Bob moves in", "[note] the text,date problem", "webvttx"),
    ],
)
def test_text_that_looks_like_a_file_is_text(line: str) -> None:
    assert RecordReader(Format.AUTO).read_line(line.encode()) == Observation(line)


@pytest.mark.parametrize(
    "line", [b"{not json", b"[1]", b'"text"', b"[" * 100_000, b"[12:03] joy: hi", b"{braces} are text", b"[] is empty"]
)
def test_non_object_json_is_text(line: bytes) -> None:
    assert RecordReader(Format.AUTO).read_line(line) == Observation(line.decode())


@pytest.mark.parametrize(
    "first",
    [
        b"[\n",
        b"[ {\n",
        b'[{"text": "x"},\n',
        b'[{"text": "x"}]\n',
        b"{\n",
        b'{"text":\n',
        b'{ "text": "x",\n',
        b'{"text"',
    ],
)
def test_json_document_is_rejected_as_a_whole(first: bytes) -> None:
    reader = RecordReader(Format.AUTO)
    read = [reader.read_line(line) for line in (b"\n", first, b'  {"text": "x"},\n', b"]\n")]
    assert read[0] is None
    assert all(isinstance(each, MalformedLine) for each in read[1:])
    assert "one JSON object per line" in str(read[1])


def test_lines_format_sends_a_json_document_as_text() -> None:
    assert RecordReader(Format.LINES).read_line(b"[\n") == Observation("[")


def test_lines_format_reads_objects_as_text() -> None:
    assert RecordReader(Format.LINES).read_line(b'{"text": "x"}') == Observation('{"text": "x"}')


def test_every_field_of_a_record() -> None:
    read = parse_record(
        '{"text": "Hi", "speaker": "Bob", "session": "monday", "time": "2026-05-08T12:00:00", "importance": 1,'
        ' "metadata": {"page": 5, "draft": false}, "external_id": "m1", "embedding": [1, 0.5], "ttl": 60,'
        ' "token_count": 3, "expire_time": null}'
    )
    assert read == Observation(
        "Hi",
        speaker="Bob",
        session="monday",
        observe_time=datetime(2026, 5, 8, 12, tzinfo=UTC),
        importance=1.0,
        metadata={"page": 5, "draft": False},
        external_id="m1",
        ttl=timedelta(minutes=1),
        token_count=3,
    )
    assert isinstance(read, Observation)
    assert list(read.embedding if read.embedding is not None else []) == [1.0, 0.5]


def test_structured_record_and_unix_seconds() -> None:
    for time in ("2026-05-08", "1778198400", "2026-05-07t24:00z"):
        read = parse_record(json.dumps({"text": "Hi", "time": time}))
        assert read == Observation("Hi", observe_time=datetime(2026, 5, 8, tzinfo=UTC))
    read = parse_record('{"structured": {"thought": "go", "action": "walk"}, "observe_time": 0}')
    assert read == Observation(Structured(thought="go", action="walk"), observe_time=datetime(1970, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("7", "a number, not a JSON object"),
        ("{}", "exactly one of text, content, structured; has none"),
        ('{"text": "a", "content": "b"}', "has text and content"),
        ('{"text": 5}', "text must be text, is a number"),
        ('{"text": "a", "speakr": "Bob"}', "'speakr' is not a field"),
        ('{"text": "a", "speaker": "Bob", "speaker": "Ann"}', "'speaker' is given twice"),
        ('{"text": "a", "metadata": {"k": 1, "k": 2}}', "'k' is given twice"),
        ('{"text": "a", "metadata": {"k": NaN}}', "metadata.k"),
        ('{"text": "a", "importance": NaN}', "importance"),
        ('{"text": "a", "embedding": [true]}', "embedding must be a number, is true or false"),
        ('{"text": "a", "time": "noon"}', "time: 'noon' is no time: give a date"),
        ('{"text": "a", "time": 1e300}', "time: 1e+300 is no time"),
        ('{"text": "a", "time": null}', "time is null: leave it out for now"),
        ('{"text": "a", "observe_time": null}', "observe_time is null"),
        ('{"text": "a", "time": 1, "observe_time": 2}', "observe_time is given twice"),
        ('{"text": "a", "importance": true}', "importance must be a number, is true or false"),
        ('{"text": "a", "importance": 1' + "0" * 400 + "}", "importance"),
        ('{"text": "a", "metadata": {"k": 1' + "0" * 30 + "}}", "metadata.k"),
        ('{"text": "a", "embedding": "x"}', "embedding must be a list of numbers, is text"),
        ('{"text": "a", "embedding": [1, NaN]}', "finite"),
        ('{"text": "a", "ttl": 1e300}', "ttl"),
        ('{"text": "a", "ttl": 5, "expire_time": 5}', "not both"),
        ('{"text": "a", "token_count": 1.5}', "token_count must be a whole number"),
        ('{"text": "\\ud800"}', "has a lone surrogate"),
        ('{"structured": {"mood": "good"}}', "structured must be an object of action"),
    ],
)
def test_malformed_record_is_explained(text: str, said: str) -> None:
    read = parse_record(text)
    assert isinstance(read, MalformedLine)
    assert said in read.problem


def test_invalid_utf8_is_malformed() -> None:
    assert RecordReader(Format.AUTO).read_line(b"caf\xe9") == MalformedLine("is not UTF-8 at byte 4")
