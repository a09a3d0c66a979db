"""Texts of refusals: no repetition, the value as given, and the offending character."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memstream_server.engine.errors import InvalidField
from memstream_server.rpc import validation
from memstream_server.rpc.errors import status_of, violations_in
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.validation import Violations
from tests.rpc.wire import unpacked

LIMITS = RequestLimits()


def told(check: Callable[[Violations], object]) -> str:
    """The message of a status with the violations of `check`; empty without any."""
    found = Violations()
    check(found)
    try:
        found.check()
    except InvalidField as error:
        status = unpacked(status_of(error))
        assert status.message == "; ".join(f"{field}: {text}" for field, text in status.fields.items())
        return status.message
    return ""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("user bob", "' ' (U+0020) as character 5"),
        ("user/bob", "'/' (U+002F) as character 5"),
        ("-bob", "'-' (U+002D) as character 1"),
        (".", "'.' (U+002E) as character 1"),
        ("bob\n", "'\\n' (U+000A) as character 4"),
        ("\x00", "'\\x00' (U+0000) as character 1"),
        ("a\x1b[2J", "'\\x1b' (U+001B) as character 2"),
        ("jos\u00e9", "'\\xe9' (U+00E9) as character 4"),
        ("a\u202eb", "'\\u202e' (U+202E) as character 2"),
        ("ok\U0001f600", "'\\U0001f600' (U+1F600) as character 3"),
        ("\u0660", "'\\u0660' (U+0660) as character 1"),
        ("x" * 129, "has 129 characters, at most 128 are allowed"),
        ("", "is required"),
    ],
)
def test_names_say_which_character_does_not_fit(name: str, said: str) -> None:
    message = told(lambda found: validation.check_name(found, "memory", name, LIMITS))
    assert said in message
    assert message.isprintable()


@pytest.mark.parametrize("name", ["a", "0", "user~bob.2026_x-y", "x" * 128])
def test_names_that_fit_are_taken(name: str) -> None:
    assert told(lambda found: validation.check_name(found, "memory", name, LIMITS)) == ""


def test_identifier_error_names_the_character() -> None:
    message = told(lambda found: validation.check_identifier(found, "session", "mon\x07day", LIMITS))
    assert (
        message == "session: is 'mon\\x07day', with '\\x07' (U+0007) as character 4: control characters are not allowed"
    )
    assert "has 130 bytes" in told(lambda found: validation.check_identifier(found, "speaker", "é" * 65, LIMITS))


@pytest.mark.parametrize(
    ("value", "low", "high", "said"),
    [
        (1_000_001, 1, 1_000_000, "must be between 1 and 1000000, is 1000001"),
        (2**40, 0, 2**31 - 1, "must be between 0 and 2147483647, is 1099511627776"),
        (1.0000001, 0, 1, "must be between 0 and 1, is 1.0000001"),
        (-0.1, 0.5, 1, "must be between 0.5 and 1, is -0.1"),
        (float("nan"), 0, 1, "must be between 0 and 1, is nan"),
        (float("-inf"), 0, 1, "must be between 0 and 1, is -inf"),
    ],
)
def test_numbers_are_repeated_as_given(value: float, low: float, high: float, said: str) -> None:
    assert told(lambda found: validation.check_bounds(found, "limit", value, low, high)) == f"limit: {said}"


def test_many_findings_are_counted() -> None:
    found = Violations()
    for number in range(8):
        found.add(f"ids[{number}]", "is empty")
    with pytest.raises(InvalidField) as refused:
        found.check()
    assert refused.value.message.endswith("ids[4]: is empty; and 3 more")
    assert len(violations_in(refused.value.message)) == 5
    assert len(unpacked(status_of(refused.value)).fields) == 8
