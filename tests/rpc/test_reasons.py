"""The reasons of error.proto: which class has each, with exactly the metadata that its rule names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import memstream.errors
import memstream_server.rpc.errors as rpc_errors
from memstream.status import error_from_status
from memstream_server.engine.errors import EngineError
from memstream_server.rpc.errors import CODES, DOMAIN, RULES, status_of_any
from scripts.contract_page import reasons

SERVER = Path(__file__).resolve().parents[2] / "server" / "memstream_server"
NOT_METADATA = {"retry_after_s", "violations"}
COMMENTS = dict(reasons())
GIVEN_AS_MAPPING: set[tuple[str, str]] = set()
"""Keys that reach the error as a mapping, which the source does not show."""


def classes(base: type[EngineError] = EngineError) -> Iterator[type[EngineError]]:
    """Every error class of the server."""
    assert rpc_errors  # importing it defines its classes
    for one in base.__subclasses__():
        if one.__module__.startswith("memstream_server."):
            yield one
        yield from classes(one)


@pytest.mark.parametrize("reason", COMMENTS)
def test_every_reason_has_a_class_that_gives_it(reason: str) -> None:
    assert reason == "INTERNAL" or any(each.reason == reason for each in classes())


def test_defect_has_the_documented_keys() -> None:
    details = error_details_pb2.ErrorInfo()
    assert status_of_any(ValueError("x")).details[0].Unpack(details)
    assert set(details.metadata) == set(RULES["INTERNAL"].metadata)


def known_keys(reason: str) -> set[str]:
    """The keys that ErrorInfo.metadata may have with this reason."""
    return {*RULES[reason].metadata, *RULES[reason].optional_metadata}


def raised() -> list[tuple[str, type[EngineError], set[str | None]]]:
    """(place, class, keywords) of every error that the server's code raises."""
    known = {each.__name__: each for each in classes()}
    found = []
    for file in sorted(SERVER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                place = f"{file.relative_to(SERVER)}:{node.lineno}"
                found.append((place, known[node.func.id], {keyword.arg for keyword in node.keywords}))
    return found


def test_errors_are_raised_with_their_keys() -> None:
    places = raised()
    assert len(places) > 80
    wrong = [
        f"{place}: {kind.__name__} with {sorted(map(str, keys))}"
        for place, kind, given in places
        if not set(RULES[kind.reason].metadata) <= (keys := given - NOT_METADATA) <= known_keys(kind.reason)
    ]
    assert not wrong


def test_optional_keys_are_given_by_some_error() -> None:
    given = {(kind.reason, key) for _, kind, keys in raised() for key in keys}
    unused = {(reason, key) for reason, found in RULES.items() for key in found.optional_metadata} - given
    assert unused <= GIVEN_AS_MAPPING


def test_every_reason_has_a_code_and_a_comment() -> None:
    assert all(CODES[reason] is not grpc.StatusCode.OK and comment for reason, comment in COMMENTS.items())
    assert set(CODES) == set(COMMENTS)


def test_transient_reasons_are_transient_in_python() -> None:
    for reason, found in RULES.items():
        status = status_pb2.Status(code=CODES[reason].value[0], message="x")
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
        assert isinstance(error_from_status(status), memstream.errors.Transient) is found.transient, reason


STATE = {"MEMORY_NOT_FOUND", "ETAG_MISMATCH", "KIND_MISMATCH", "MODEL_MISMATCH", "PRODUCER_SUPERSEDED", "MEMORY_EXISTS"}
"""Reasons that depend on the server's state and not on the request alone."""


def test_state_is_no_invalid_argument() -> None:
    assert "INVALID_ARGUMENT" not in {CODES[reason].name for reason in STATE}
