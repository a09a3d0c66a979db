"""The table of rights and the contract: every rpc has its line, every namespace a request may name is asked about."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import MethodDescriptor

from memstream_server.rpc.access.rules import RULES, VERB_OF_OPERATION
from tests.access.calls import METHODS, namespace_paths, path_of
from tests.support.pages import ROOT


def test_every_rpc_has_its_line_and_no_line_is_left_over() -> None:
    ours = {path for path in RULES if path.startswith("/memstream.")}
    assert ours == {path_of(method) for method in METHODS}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_namespace_that_a_request_can_name_is_asked_about(method: MethodDescriptor) -> None:
    asked = {path for need in RULES[path_of(method)].needs for path in need.at}
    assert asked == set(namespace_paths(method.input_type))


def test_only_health_is_for_everybody() -> None:
    assert {path for path, rule in RULES.items() if rule.open} == {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    }


def test_every_type_of_operation_has_a_verb() -> None:
    engine = ROOT / "server/memstream_server/engine"
    types = {
        line.split('"')[1]
        for file in engine.glob("*.py")
        for line in file.read_text("utf-8").splitlines()
        if line.startswith('TYPE = "')
    } | {"import"}
    assert types == set(VERB_OF_OPERATION)
