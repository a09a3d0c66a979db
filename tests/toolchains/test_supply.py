"""The server's dependencies: its software bill of materials, and known vulnerabilities."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.toolchains.environments import INSTALL_S, ROOT

pytestmark = pytest.mark.toolchain


def make(target: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_S, check=False)


def test_the_sbom_names_every_package_with_its_hashes() -> None:
    done = make("sbom")
    assert done.returncode == 0, done.stderr
    bill = json.loads((ROOT / "dist" / "sbom.json").read_text("utf-8"))
    assert bill["metadata"]["component"]["name"] == "memstream"
    named = {f"{one['name']}=={one['version']}" for one in bill["components"]}
    locked = (ROOT / "requirements" / "server.txt").read_text("utf-8")
    assert named == set(re.findall(r"^([\w.-]+(?:\[[\w,-]+\])?==[^ ]+)", re.sub(r"\[.*?\]", "", locked), re.MULTILINE))
    assert all(one["externalReferences"][0]["hashes"] for one in bill["components"])


def test_no_dependency_has_a_known_vulnerability() -> None:
    done = make("audit")
    if "could not be audited" in done.stderr:
        pytest.skip(f"the package index knows no vulnerabilities here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stdout + done.stderr
