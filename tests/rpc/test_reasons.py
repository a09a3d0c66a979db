"""The reasons of error.proto: which class has each, with exactly the metadata that its comment documents."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.rpc import error_details_pb2

import memstream_server.rpc.errors as rpc_errors
from memstream_server.engine.errors import EngineError
from memstream_server.rpc.errors import CODES, status_of_any
from scripts.contract_page import reasons
from scripts.document import metadata_keys

SERVER = Path(__file__).resolve().parents[2] / "server" / "memstream_server"
NOT_METADATA = {"retry_after_s", "violations"}
COMMENTS = dict(reasons())


def classes(base: type[EngineError] = EngineError) -> Iterator[type[EngineError]]:
    """Every error class of the server."""
    assert rpc_errors  # importing it defines its classes
    for one in base.__subclasses__():
        if one.__module__.startswith("memstream_server."):
            yield one
        yield from classes(one)


def documented(reason: str) -> tuple[set[str], set[str]]:
    """(keys that are always present, keys that are sometimes present) of a reason."""
    listed = metadata_keys(COMMENTS[reason])
    return {key for key in listed if not key.endswith("?")}, {key[:-1] for key in listed if key.endswith("?")}


@pytest.mark.parametrize("reason", COMMENTS)
def test_classes_have_the_documented_keys(reason: str) -> None:
    always, sometimes = documented(reason)
    if reason == "INTERNAL":
        details = error_details_pb2.ErrorInfo()
        assert status_of_any(ValueError("x")).details[0].Unpack(details)
        assert (set(details.metadata), sometimes) == (always, set())
        return
    of_reason = [each for each in classes() if each.reason == reason]
    assert of_reason, "no class gives this reason"
    for each in of_reason:
        assert set(each.keys) == always, each.__name__
        assert set(each.optional_keys) <= sometimes, each.__name__
    assert {key for each in of_reason for key in each.optional_keys} == sometimes


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
        if not set(kind.keys) <= (keys := given - NOT_METADATA) <= {*kind.keys, *kind.optional_keys}
    ]
    assert not wrong


def test_every_reason_has_a_code_and_a_comment() -> None:
    assert set(CODES) == set(COMMENTS)
    for reason, comment in COMMENTS.items():
        assert comment.partition(".")[0].partition(",")[0] == CODES[reason].name, reason


STATE = {"MEMORY_NOT_FOUND", "ETAG_MISMATCH", "KIND_MISMATCH", "MODEL_MISMATCH", "PRODUCER_SUPERSEDED", "MEMORY_EXISTS"}
"""Reasons that depend on the server's state and not on the request alone."""


def test_state_is_no_invalid_argument() -> None:
    assert "INVALID_ARGUMENT" not in {CODES[reason].name for reason in STATE}
