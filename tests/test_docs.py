"""The documents are true: their code runs and prints what they say, their links lead on, their lists are whole."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import grpc
import pytest

from memstream import Capability, errors, status, sync
from memstream.v1 import error_pb2
from memstream_server.cli.group import root
from memstream_server.observability import Metrics
from memstream_server.rpc.errors import CODES
from tests.support.pages import PAGES, ROOT, anchors, blocks, links
from tests.support.server import ServerProcess

RUNNABLE = [page for page in PAGES if any(block.no_run is None for block in blocks(page.read_text("utf-8")))]

SERVER = ROOT / "server/memstream_server"
FOLDERS = [
    *(SERVER / folder for folder in ("core", "ports", "engine", "rpc", "adapters", "diagnosis")),
    SERVER / "engine/transfer",
    SERVER / "rpc/access",
    *(SERVER / "adapters" / folder for folder in ("journal", "milvus", "models")),
    ROOT / "benchmarks/peers",
    ROOT / "client/memstream",
    ROOT / "protos/memstream/v1",
]
"""Where the sections of ARCHITECTURE.md look: they name files by their last part."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", RUNNABLE, ids=_name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        command = [sys.executable, "-m", "tests.support.pages", str(page), server.address]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}\nserver:\n{server.log()}"


def test_the_pages_that_matter_have_code_that_runs() -> None:
    names = {_name(page) for page in RUNNABLE}
    assert {"README.md", "docs/getting-started.md", "docs/sdk.md", "docs/seeds.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_code_that_is_not_run_says_why(page: Path) -> None:
    assert all(block.no_run is None or len(block.no_run) > 5 for block in blocks(page.read_text("utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target.read_text("utf-8")), f"there is no heading {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT / "docs"], ids=_name)
def test_every_page_is_reached_from_the_index(page: Path) -> None:
    assert page.name == "index.md" or page.name in links((ROOT / "docs/index.md").read_text("utf-8"))


def test_errors_page_has_every_reason_with_its_code_and_class() -> None:
    text = (ROOT / "docs/errors.md").read_text("utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| `(\w+)` \|", text, re.M)
    reasons = [name.removeprefix("ERROR_REASON_") for name, _ in error_pb2.ErrorReason.items()]
    assert [reason for reason, _, _ in rows] == reasons[1:]
    for reason, code, name in rows:
        assert grpc.StatusCode[code] is CODES[reason], reason
        assert getattr(errors, name) is status._BY_REASON[reason], reason


def test_operations_page_has_every_metric() -> None:
    text = (ROOT / "docs/operations.md").read_text("utf-8")
    families = {family.name: family.type for family in Metrics().registry.collect()}
    assert set(re.findall(r"^\| `(memstream_\w+)` \|", text, re.M)) == {
        f"{name}_total" if kind == "counter" else name for name, kind in families.items()
    }


def test_the_architecture_names_files_that_are_there() -> None:
    missing = {name for name in _named() if not any((root / name).exists() for root in (ROOT, SERVER, *FOLDERS))}
    assert not missing


def test_the_architecture_names_every_module_of_the_server() -> None:
    modules = {module.name for folder in FOLDERS if SERVER in folder.parents for module in folder.glob("*.py")}
    unnamed = modules - {"__init__.py", "env.py"} - {name.rpartition("/")[2] for name in _named()}
    assert not unnamed, f"say in the code map of ARCHITECTURE.md what these are for: {sorted(unnamed)}"


def _named() -> set[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    return set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|proto|md|toml|txt)|(?:[\w-]+/)+)`", text))


def test_the_index_says_which_capabilities_are_there(tmp_path: Path) -> None:
    rows = re.findall(
        r"^\| `([A-Z]+)` \| (yes|not yet|with an LLM) \|", (ROOT / "docs/index.md").read_text("utf-8"), re.M
    )
    assert {name for name, _ in rows} == {one.name for one in Capability} - {"UNKNOWN"}
    with ServerProcess(tmp_path / "data") as server, sync.connect(server.address) as client:
        there = {one.name for one in client.server_info().capabilities}
    assert {name for name, said in rows if said == "yes"} == there


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_in_the_documents_are_understood(page: Path) -> None:
    for line in re.findall(r"^ {4}(memstream .*)$", page.read_text("utf-8"), re.M):
        name, *arguments = shlex.split(line, comments=True)[1:]
        command = root.get_command(click.Context(root), name)
        assert command is not None, f"there is no such command: {line}"
        command.make_context(name, arguments)  # raises UsageError for what it does not know; runs nothing
