"""The packages of all languages are of one version and one licence, and the contract names them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conformance.golden import CONTRACT

ROOT = Path(__file__).resolve().parent.parent
PYTHON = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NPM = json.loads((ROOT / "client/typescript/package.json").read_text("utf-8"))
MAVEN = {
    element.tag.rpartition("}")[2]: element for element in ElementTree.parse(ROOT / "client/java/pom.xml").getroot()
}
GO = re.findall(r"^module (\S+)$", (ROOT / "client/go/go.mod").read_text("utf-8"), re.M)


def test_versions_are_one() -> None:
    """Each registry writes what is not released in its own way."""
    base, _, development = PYTHON["version"].partition(".dev")
    if not development:
        assert NPM["version"] == MAVEN["version"].text == base
    else:
        assert (NPM["version"], MAVEN["version"].text) == (f"{base}-dev.{development}", f"{base}-SNAPSHOT")


def test_licences_are_one() -> None:
    assert PYTHON["license"] == NPM["license"] == MAVEN["licenses"][0][0].text == "Apache-2.0"
    for folder in ("client/go", "client/typescript"):  # what is taken from there has nothing of what lies above
        assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_each_says_what_it_is() -> None:
    assert all("memory server for agents" in said for said in (NPM["description"], MAVEN["description"].text or ""))
    assert "memory server for agents" in PYTHON["description"]


@pytest.mark.parametrize("file", CONTRACT, ids=lambda file: file.name)
def test_a_file_of_the_contract_names_its_packages(file: object) -> None:
    """Whoever generates by himself gets the packages that our clients have. Their names cannot change any more."""
    options = file.GetOptions()  # type: ignore[attr-defined]  # a FileDescriptor, which has no public type
    assert options.go_package == f"{GO[0]}/memstream/v1;memstreamv1"
    assert options.java_package == f"{MAVEN['groupId'].text}.v1"
    assert options.java_multiple_files
    assert options.java_outer_classname.endswith("Proto")
