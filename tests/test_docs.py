"""The documents are correct: their code runs with the documented output, links resolve, lists are complete."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
import yaml

from memstream import Capability, errors, status, sync
from memstream.v1 import error_pb2
from memstream_server.cli.group import root
from memstream_server.observability import Metrics
from memstream_server.rpc.access.policy import parse_policy
from memstream_server.rpc.errors import CODES
from memstream_server.settings import load
from scripts.site import named
from tests.support.forked import ForkedProgram
from tests.support.pages import LANGUAGES, PAGES, ROOT, Block, anchors, find_blocks, links, strip_blocks
from tests.support.server import ServerProcess

RUNNABLE = [
    page
    for page in PAGES
    if any(block.no_run is None for block in find_blocks(page.read_text("utf-8"), "python", "sh"))
]

SERVER = ROOT / "server/memstream_server"
MAPPED = [init for init in sorted(SERVER.rglob("__init__.py")) if init.parent not in (SERVER, SERVER / "cli")]
"""Packages whose docstring is their map."""


def _page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", RUNNABLE, ids=_page_name)
def test_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with ServerProcess(tmp_path / "data") as server:
        words = [str(page), server.address, str(folder), str(server.data_dir)]
        with ForkedProgram(words, os.environ, "tests.support.pages:main") as program:
            out, err = program.communicate()
            assert program.returncode == 0, f"{out}{err}\nserver:\n{server.log()}"


def test_main_pages_have_runnable_code() -> None:
    names = {_page_name(page) for page in RUNNABLE}
    assert {"README.md", "docs/getting-started.md", "docs/sdk.md", "docs/seeds.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=_page_name)
def test_blocks_have_a_tested_language_or_a_reason(page: Path) -> None:
    text = page.read_text("utf-8")
    for block in find_blocks(text):
        assert block.language in LANGUAGES, f"line {block.line}: no test for {block.language!r}"
        assert block.no_run is None or len(block.no_run) > 5, f"line {block.line}: no reason for not running"
    assert "```" not in strip_blocks(text), "an unclosed fence, or more than a language after it"
    assert not re.search(r"\n\n {4,}(?!<!-- )\S", strip_blocks(text)), "indented code has no language: fence it"


@pytest.mark.parametrize("page", PAGES, ids=_page_name)
def test_blocks_that_do_not_run_are_validated(page: Path) -> None:
    for block in find_blocks(page.read_text("utf-8"), "json", "toml", "yaml"):
        match block.language:
            case "json":
                _check_json(json.loads(block.code))
            case "toml":
                _check_toml(block)
            case "yaml":
                assert any(yaml.safe_load_all(block.code))


def _check_json(content: Any) -> None:
    """The only kind of JSON: how a host starts `memstream mcp`."""
    for entry in content["mcpServers"].values():
        assert entry["command"] == "memstream"
        _check_command(entry["args"])


def _check_toml(block: Block) -> None:
    match block.code.splitlines()[0]:
        case "# memstream.toml":
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(block.code)
                file.flush()
                load(Path(file.name))
        case "# policy.toml":
            assert parse_policy(block.code)
        case other:
            pytest.fail(f"unknown file {other}")


@functools.cache
def _anchors_of(page: Path) -> set[str]:
    return anchors(page.read_text("utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=_page_name)
def test_links_between_documents_resolve(page: Path) -> None:
    for link in links(page.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link} does not exist"
        assert not anchor or anchor in _anchors_of(target), f"no heading {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT / "docs"], ids=_page_name)
def test_index_links_every_page(page: Path) -> None:
    assert page.name == "index.md" or page.name in links((ROOT / "docs/index.md").read_text("utf-8"))


def test_site_has_every_page() -> None:
    nav = set(named(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    assert {_page_name(page) for page in ROOT.glob("docs/*.md")} <= nav
    assert nav <= {_page_name(page) for page in PAGES}


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


def test_architecture_names_existing_files() -> None:
    missing = {name for name in _files_in_architecture() if not (ROOT / name).exists() and not (SERVER / name).exists()}
    assert not missing


@pytest.mark.parametrize("init", MAPPED, ids=_page_name)
def test_package_map_names_every_module(init: Path) -> None:
    text = ast.get_docstring(ast.parse(init.read_text("utf-8"))) or ""
    entries = {entry.stem if entry.is_file() else entry.name for entry in init.parent.iterdir() if _is_module(entry)}
    unnamed = entries - set(re.findall(r"[a-z_0-9]+", text))
    assert not unnamed, f"the docstring of {_page_name(init)} must say what these modules hold"


def _is_module(entry: Path) -> bool:
    if entry.is_dir():
        return (entry / "__init__.py").exists() or entry.name == "migrations"
    return entry.suffix == ".py" and entry.name != "__init__.py"


def _files_in_architecture() -> set[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    return set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|proto|md|toml|txt)|(?:[\w-]+/)+)`", text))


def test_index_lists_the_available_capabilities(tmp_path: Path) -> None:
    rows = re.findall(
        r"^\| `([A-Z]+)` \| (yes|not yet|with an LLM) \|", (ROOT / "docs/index.md").read_text("utf-8"), re.M
    )
    assert {name for name, _ in rows} == {one.name for one in Capability} - {"UNKNOWN"}
    with ServerProcess(tmp_path / "data") as server, sync.connect(server.address) as client:
        there = {one.name for one in client.server_info().capabilities}
    assert {name for name, said in rows if said == "yes"} == there


@pytest.mark.parametrize("page", PAGES, ids=_page_name)
def test_commands_that_do_not_run_parse(page: Path) -> None:
    """Checks bash syntax, our own programs with their flags, make targets and pip extras; not other programs."""
    for block in find_blocks(page.read_text("utf-8"), "sh"):
        subprocess.run(["bash", "-n", "-c", block.code], check=True, timeout=60)
        for line in re.findall(r"^(?:[A-Z_]+=\S+ +)*(\S+ .*)$", block.code.replace("\\\n", " "), re.M):
            if not line.startswith(OURS):
                continue
            match shlex.split(line, comments=True):
                case ["memstream", *arguments]:
                    _check_command([word for word in arguments if word != "..."])
                case ["make", *targets]:
                    assert {word for word in targets if "=" not in word} <= _make_targets(), line
                case ["python" | ".venv/bin/python", str(script), *_] if script.endswith(".py"):
                    assert (ROOT / script).exists() or (page.parent / script).exists(), line
                case ["pip", "install", str(what)] if what.startswith(".["):
                    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
                    assert set(what[2:-1].split(",")) <= extras["optional-dependencies"].keys(), line


OURS = ("memstream ", "make ", "python ", ".venv/bin/python ", "pip install '.[")
_FROM_A_REGISTRY = re.compile(r"(?:pip install|npm install|uvx|pipx run)\b[^`\n]*\bmemstream\b(?!\.)")
"""Until a release the registries have nobody, or somebody else, under the name."""


def test_protoc_compiles_the_contract_as_documented(tmp_path: Path) -> None:
    (block,) = find_blocks((ROOT / "docs/api.md").read_text("utf-8"), "sh")
    words = shlex.split(block.code.replace("--python_out=.", f"--python_out={tmp_path}"))
    assert words.pop(0) == "protoc"
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(words.pop()))
    run = [sys.executable, "-m", "grpc_tools.protoc", *words, *files]
    subprocess.run(run, cwd=ROOT, check=True, timeout=60)
    assert len(list(tmp_path.glob("memstream/v1/*_pb2.py"))) == len(files)


def test_nothing_advises_to_install_from_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.py", "*.yaml", "*.js"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    texts = {name: (ROOT / name).read_text("utf-8") for name in listed.stdout.split() if name != "CHANGELOG.md"}
    found = {name: match.group(0) for name, text in texts.items() if (match := _FROM_A_REGISTRY.search(text))}
    assert found == {}


def _check_command(words: list[str]) -> None:
    name, *arguments = words
    command: click.Command | None = root.get_command(click.Context(root), name)
    while isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.get_command(click.Context(command), name)
    assert command is not None, f"no such command: {words}"
    command.make_context(name, arguments)  # raises UsageError for unknown options; runs nothing


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
