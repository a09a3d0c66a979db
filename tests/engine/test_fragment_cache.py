"""The fragment cache: has the latest fragments within its bounds, and never an older state than the journal."""

from __future__ import annotations

from memstream_server.core.values import Fragment
from memstream_server.engine.memory.fragment_cache import BYTES_MAX, FragmentCache

LONG = "x" * 65_536
FULL = BYTES_MAX // (2 * len(LONG) + 600)
"""Long fragments that fill the cache."""


def fragment(number: int, content: str = "words", **fields: int) -> Fragment:
    return Fragment(f"f{number:05}", content).but(**fields)


def test_least_recently_used_leave_first() -> None:
    contents = FragmentCache()
    contents.put(fragment(number, LONG) for number in range(FULL))
    assert contents.get_many(["f00000"]), "asked for, so it is the latest now"
    assert not contents.removals
    contents.put([fragment(FULL, LONG)])
    assert not contents.get_many(["f00001"])
    assert set(contents.get_many(["f00000", f"f{FULL:05}"])) == {"f00000", f"f{FULL:05}"}
    assert contents.removals == 1


def test_long_contents_are_bounded_in_bytes() -> None:
    contents = FragmentCache()
    contents.put(fragment(number, LONG) for number in range(2 * FULL))
    assert 0 < contents.bytes <= BYTES_MAX
    assert contents.removals > 0
    for number in range(2 * FULL):
        contents.remove(f"f{number:05}")
    assert contents.bytes == 0


def test_journal_read_never_replaces_a_newer_commit() -> None:
    contents = FragmentCache()
    asked = contents.removals
    contents.put([fragment(1, "new")])
    contents.put_read([fragment(1, "old"), fragment(2, "read")], asked)
    assert contents.get_many(["f00001"])["f00001"].content == "new"
    assert contents.get_many(["f00002"])["f00002"].content == "read"


def test_journal_read_is_dropped_after_a_removal_meanwhile() -> None:
    contents = FragmentCache()
    asked = contents.removals
    contents.put([fragment(1, "new")])
    contents.put(fragment(number, LONG) for number in range(10, 10 + FULL + 1))
    contents.put_read([fragment(1, "old")], asked)
    assert not contents.get_many(["f00001"])


def test_access_time_never_goes_back() -> None:
    contents = FragmentCache()
    contents.put([fragment(1, access_count=4, access_time_us=70)])
    contents.count_access(["f00001"], 90)
    contents.count_access(["f00001"], 80)
    contents.count_access(["f00099"], 80)
    found = contents.get_many(["f00001", "f00099"])
    assert list(found) == ["f00001"]
    assert (found["f00001"].access_count, found["f00001"].access_time_us) == (6, 90)


def test_fragment_removed_during_a_read_stays_removed() -> None:
    contents = FragmentCache()
    asked = contents.removals
    contents.remove("f00001")
    contents.put_read([fragment(1)], asked)
    assert not contents.get_many(["f00001"])
