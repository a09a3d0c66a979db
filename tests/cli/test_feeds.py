"""Producers of input files, and positions of their lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memstream.values import Observation
from memstream_server.cli.feeds import (
    STDIN,
    LinePositions,
    Problem,
    ProducerFeed,
    hash_line,
    load_sent_lines,
    plan_feeds,
    producer_of_file,
    read_records,
    scan_feed,
)
from memstream_server.cli.records import Format


def written(directory: Path, name: str, text: str) -> str:
    (directory / name).write_text(text)
    return str(directory / name)


def test_growing_file_keeps_its_producer(tmp_path: Path) -> None:
    file = written(tmp_path, "notes.txt", "one\n")
    before = producer_of_file(file)
    written(tmp_path, "notes.txt", "one\ntwo\n")
    assert producer_of_file(file) == before
    assert before.startswith("cli-")
    assert before.endswith("-notes.txt")


def test_new_first_line_makes_another_producer(tmp_path: Path) -> None:
    file = written(tmp_path, "notes.txt", "one\n")
    before = producer_of_file(file)
    written(tmp_path, "notes.txt", "two\n")
    assert producer_of_file(file) != before


def test_files_of_one_name_in_two_directories_are_two_producers(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert producer_of_file(written(tmp_path, "a", "x")) != producer_of_file(written(tmp_path / "other", "a", "x"))


def test_producer_name_of_a_file_is_valid(tmp_path: Path) -> None:
    name = producer_of_file(written(tmp_path, "Ärger & " + "x" * 200 + ".txt", "x"))
    assert len(name) <= 128
    assert name.replace("-", "").replace("_", "").replace(".", "").isascii()


def test_record_of_sent_lines_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    record = load_sent_lines("uid", "p")
    assert (list(record.hashes), record.diverged, record.revision) == ([], False, 0)
    record.save(map(hash_line, [b"one\n", b"two"]), True, 7)
    again = load_sent_lines("uid", "p")
    assert (again.hashes, again.diverged, again.revision) == (record.hashes, True, 7)
    assert again.hashes[0] == hash_line(b"one\r\n")
    assert list(load_sent_lines("other", "p").hashes) == []
    for damaged in (b"", b"\2" + bytes(16), bytes(12)):
        again.file.write_bytes(damaged)
        assert list(load_sent_lines("uid", "p").hashes) == []


def test_each_file_has_a_producer_by_default(tmp_path: Path) -> None:
    files = [written(tmp_path, "a", "x"), written(tmp_path, "b", "y")]
    apart = plan_feeds(files, None, None)
    assert [(feed.files, feed.resume) for feed in apart] == [((files[0],), True), ((files[1],), True)]
    assert plan_feeds(files, "p", None) == [ProducerFeed("p", tuple(files), True)]
    assert not plan_feeds(files, None, False)[0].resume


def test_standard_input_is_a_new_producer_each_time() -> None:
    (one,), (other,) = plan_feeds([], None, None), plan_feeds([STDIN], None, None)
    assert one.files == other.files == (STDIN,)
    assert one.producer != other.producer
    assert not one.resume
    assert plan_feeds([], "p", None) == [ProducerFeed("p", (STDIN,), False)]
    assert plan_feeds([], "p", True) == [ProducerFeed("p", (STDIN,), True)]


@pytest.mark.parametrize(("files", "resume"), [(["-", "/dev/null"], None), (["-"], True), ([], True)])
def test_resume_of_a_pipe_is_rejected(files: list[str], resume: bool | None) -> None:
    with pytest.raises(ValueError, match=r"standard input|pipe"):
        plan_feeds(files, None, resume)


def test_contents_counts_and_names_malformed_lines(tmp_path: Path) -> None:
    file = written(tmp_path, "a.jsonl", '{"text": "a"}\n\n{"text": 1}\n{"text": "b"}\n')
    found = scan_feed(plan_feeds([file], None, None)[0], Format.AUTO, "")
    assert len(found.lines) == 2
    assert found.malformed == (Problem(file, 3, "text must be text, is a number"),)
    assert str(found.malformed[0]) == f"{file}:3: text must be text, is a number"


async def test_records_have_order_file_and_line(tmp_path: Path) -> None:
    long = "x" * 200_000
    first = written(tmp_path, "a", f"one\n\n{long}\nthree")
    second = written(tmp_path, "b", "")
    third = written(tmp_path, "c", "four\n")
    read = [each async for each in read_records(plan_feeds([first, second, third], "p", None)[0], Format.LINES, "")]
    assert read == [
        (first, 1, Observation("one")),
        (first, 3, Observation(long)),
        (first, 4, Observation("three")),
        (third, 1, Observation("four")),
    ]


async def test_pipe_with_many_lines_is_read_completely(tmp_path: Path) -> None:
    file = written(tmp_path, "a", "".join(f"line {number} {'x' * 100}\n" for number in range(20_000)))
    numbers = [number async for _, number, _ in read_records(plan_feeds([file], None, None)[0], Format.LINES, "")]
    assert numbers == list(range(1, 20_001))


async def test_open_pipe_delivers_lines_at_once(tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    feed = plan_feeds([pipe], None, None)[0]
    assert not feed.repeatable
    reading = read_records(feed, Format.LINES, "")
    keep_open = os.open(pipe, os.O_RDWR)
    try:
        os.write(keep_open, b"first\nhalf of")
        assert await anext(reading) == (pipe, 1, Observation("first"))
        os.write(keep_open, b" a line\n")
        assert await anext(reading) == (pipe, 2, Observation("half of a line"))
    finally:
        await reading.aclose()  # type: ignore[attr-defined]  # an async generator, declared as an iterator
        os.close(keep_open)


async def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await anext(read_records(ProducerFeed("p", (str(tmp_path / "gone"),), False), Format.LINES, ""))


def test_places_find_file_and_line() -> None:
    places = LinePositions()
    for file, line in (("a", 1), ("a", 3), ("b", 2)):
        places.add(file, line)
    assert [places.find(place) for place in range(-1, 4)] == [("", 0), ("a", 1), ("a", 3), ("b", 2), ("", 0)]
