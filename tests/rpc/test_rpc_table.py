"""The table of rpcs agrees with the contract: one line for each rpc, a right for every namespace field."""

from __future__ import annotations

import re

import pytest
from google.protobuf.descriptor import MethodDescriptor

from memstream.v1 import server_service_pb2 as pb
from memstream_server.rpc.rpc_table import RPC_RULES, VERB_OF_OPERATION, names_memory, path_of
from tests.access.calls import namespace_paths
from tests.support.contract import METHODS
from tests.support.pages import ROOT


def test_every_rpc_has_exactly_one_line() -> None:
    ours = {path for path in RPC_RULES if path.startswith("/memstream.")}
    assert ours == {path_of(method) for method in METHODS}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_namespace_field_is_authorized(method: MethodDescriptor) -> None:
    checked = {path for need in RPC_RULES[path_of(method)].needs for path in need.at}
    assert checked == set(namespace_paths(method.input_type))


def test_only_health_is_public() -> None:
    assert {path for path, rule in RPC_RULES.items() if rule.public} == {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
    }


def test_only_memory_rpcs_have_a_locality() -> None:
    anywhere = [method for method in METHODS if RPC_RULES[path_of(method)].served_anywhere]
    assert anywhere
    assert [method.name for method in anywhere if not names_memory(method)] == []


def test_every_capability_of_the_contract_has_an_rpc() -> None:
    capabilities = {f"CAPABILITY_{rule.capability}" for rule in RPC_RULES.values() if rule.capability}
    assert capabilities == set(pb.Capability.keys()) - {"CAPABILITY_UNSPECIFIED"}


def test_every_type_of_operation_has_a_verb() -> None:
    engine = ROOT / "server/memstream_server/engine"
    sources = [file.read_text("utf-8") for file in engine.rglob("*.py")]
    types = {
        name for text in sources for name in re.findall(r'(?:^TYPE = |register_type\()"(\w+)"', text, re.MULTILINE)
    }
    assert types == set(VERB_OF_OPERATION)
