"""Adapters of agent frameworks where the framework is not installed, or in another version."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from memstream.frameworks import FRAMEWORKS
from memstream.importers import SHAPES
from tests.support.pages import ROOT

ADAPTERS = {
    "agent-framework-core": "agent_framework",
    "anthropic": "anthropic",
    "crewai": "crewai",
    "dbgpt": "dbgpt",
    "google-adk": "google_adk",
    "langgraph-checkpoint": "langgraph",
    "llama-index-core": "llama_index",
    "openai-agents": "openai_agents",
    "pydantic-ai-slim": "pydantic_ai",
    "strands-agents": "strands",
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


def bounds(package: str) -> str:
    lowest, below = (".".join(map(str, version)) for version in FRAMEWORKS[package])
    return f">={lowest},<{below}"


def import_error(package: str) -> str:
    name = f"memstream.{ADAPTERS[package]}"
    sys.modules.pop(name, None)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(name)
    return str(caught.value)


def test_every_framework_has_an_adapter() -> None:
    assert ADAPTERS.keys() == FRAMEWORKS.keys()


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_a_missing_framework_is_named_at_import(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(name: str) -> str:  # the tests themselves use some of the packages
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", find_none)
    wanted = f"{package}{bounds(package)}"
    assert import_error(package) == f"needs {wanted}, which is not installed: pip install '{wanted}'"


@pytest.mark.parametrize("package", FRAMEWORKS)
@pytest.mark.parametrize("version", ["0.0.1", "99.1rc2"])
def test_another_version_is_named_at_import(
    package: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = f"{package}{bounds(package)}"
    assert import_error(package) == f"needs {wanted}, and {version} is installed: pip install '{wanted}'"


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_the_extra_has_the_bounds_of_the_adapter(package: str) -> None:
    texts = [text for extra, each in EXTRAS.items() if extra != "dev" for text in each]
    found = [one for one in map(Requirement, texts) if one.name == package]
    assert [one.specifier for one in found] == [SpecifierSet(bounds(package))]


def row_of(module: str) -> list[str]:
    """The cells of an adapter in the table of docs/frameworks.md."""
    page = (ROOT / "docs/frameworks.md").read_text("utf-8")
    (row,) = re.findall(rf"^\| (.* \| `{module}` \| .*) \|$", page, re.M)
    return str(row).split(" | ")


def check_lines(named: str, files: Iterable[Path]) -> None:
    assert named == f"{sum(len(file.read_text('utf-8').splitlines()) for file in files):,}"


@pytest.mark.parametrize("package", [package for package in FRAMEWORKS if package != "dbgpt"])
def test_the_page_names_the_lines_of_an_adapter(package: str) -> None:
    client = ROOT / "client/memstream"
    files = [*client.glob(f"{ADAPTERS[package]}.py"), *(client / ADAPTERS[package]).glob("*.py")]
    check_lines(row_of(f"memstream.{ADAPTERS[package]}")[5], files)


def test_the_page_names_lines_and_version_of_the_ai_sdk() -> None:
    folder = ROOT / "client/typescript"
    row = row_of("@memstream/client/ai")
    check_lines(row[5], folder.glob("src/ai*.ts"))
    packages = json.loads((folder / "package-lock.json").read_text("utf-8"))["packages"]
    assert row[4] == packages["node_modules/ai"]["version"]


@pytest.mark.parametrize("package", [package for package in FRAMEWORKS if package != "dbgpt"])
def test_the_page_names_the_versions_that_are_tested(package: str) -> None:
    row = row_of(f"memstream.{ADAPTERS[package]}")
    files = [*(ROOT / "requirements/frameworks").glob("*.txt"), ROOT / "requirements/langgraph.txt"]
    locked = [line for file in files for line in file.read_text("utf-8").splitlines()]
    (version,) = {line.split()[0].partition("==")[2] for line in locked if line.startswith(f"{package}==")}
    assert row[4] == version


def test_the_page_of_importers_names_lines_and_versions() -> None:
    """Each shape of `--from` is in one row, with its module's lines, and the versions of stores that tests write."""
    page = (ROOT / "docs/importing.md").read_text("utf-8")
    rows = re.findall(r"^\| `importers\.(\w+)` \| (.*?) \| (.*?) \| ([\d,]+) \|$", page, re.M)
    assert sorted(name for row in rows for name in re.findall(r"`(.*?)`", row[1])) == sorted(
        shape.name for shape in SHAPES
    )
    for module, names, _, lines in rows:
        check_lines(lines, [ROOT / f"client/memstream/importers/{module}.py"])
        readers = [shape.read.__module__.rpartition(".")[2] for shape in SHAPES if f"`{shape.name}`" in names]
        assert set(readers) == {module}
    locked = (ROOT / "requirements/stores.txt").read_text("utf-8")
    named = re.findall(r"(chromadb|langgraph-checkpoint-\w+) ([\d.]+\d)", "".join(row[2] for row in rows))
    assert len(named) == 3
    for package, version in named:
        assert f"{package}=={version}\n" in locked
