"""A server with authentication, and its callers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from memstream_server.rpc.access import keys
from memstream_server.rpc.access.caller import Verb
from tests.server.conftest import QUICK, check_log, make_server  # noqa: F401  # a fixture
from tests.support.server import ServerProcess, free_address

POLICY = """
[[grant]]
who = ["key:alice"]
namespaces = ["a", "a-*"]
verbs = ["*"]

[[grant]]
who = ["key:bob"]
namespaces = ["b"]
verbs = ["*"]

[[grant]]
who = ["key:root"]
namespaces = ["*"]
verbs = ["*"]
""" + "".join(
    f'[[grant]]\nwho = ["key:only-{verb.value}"]\nnamespaces = ["v"]\nverbs = ["{verb.value}"]\n' for verb in Verb
)
POLICY += """
[[grant]]
who = ["key:core"]
namespaces = ["a", "b"]
verbs = ["recall"]
labels = { team = "core" }
"""
NAMES = ("alice", "bob", "root", "nobody", "core", *(f"only-{verb.value}" for verb in Verb))


@dataclass(frozen=True)
class Guarded:
    """A running server, its files, and a key by name."""

    server: ServerProcess
    keys_file: Path
    policy_file: Path
    keys: Mapping[str, str]
    http: str = ""
    """host:port of its HTTP port, if it has one."""


def guarded_files(directory: Path) -> tuple[Path, Path, dict[str, str]]:
    """The key file, the policy file, and every key by name."""
    directory.mkdir(parents=True, exist_ok=True)
    keys_file, policy_file = directory / "keys.json", directory / "policy.toml"
    policy_file.write_text(POLICY)
    return keys_file, policy_file, {name: keys.create_key(keys_file, name)[1] for name in NAMES}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("guarded")
    keys_file, policy_file, made = guarded_files(directory / "access")
    http = free_address()
    settings = {**QUICK, "api_keys_file": str(keys_file), "access_policy_file": str(policy_file), "http_listen": http}
    with ServerProcess(directory / "data").configure(**settings) as server:
        yield Guarded(server, keys_file, policy_file, made, http)
        assert server.stop() == 0
    check_log(server)
    assert not any(key in server.log() for key in made.values())
