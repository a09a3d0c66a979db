"""Debian's Chromium driven by Playwright, and axe-core, for the tests of the console."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import site
import subprocess
import tarfile
from functools import cache
from pathlib import Path

from tests.toolchains.environments import ROOT, Environment
from tests.toolchains.languages import fetch, find_program
from tests.toolchains.programs import CACHE, Absent, alone, install_packages

AXE = "axe-core@4.14.1"
AXE_SHA512 = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="


@cache
def find_chromium() -> Path:
    """Chromium, installed if it is missing and allowed; Playwright becomes importable. Raises Absent."""
    with alone("chromium"):
        if shutil.which("chromium") is None:
            install_packages("Chromium", "chromium")
    found = shutil.which("chromium")
    if found is None:
        raise Absent("Debian's package of Chromium has no program of that name")
    python = Environment("browser", memstream=False).python()
    code = "import site; print(site.getsitepackages()[0])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    site.addsitedir(done.stdout.strip())
    return Path(found)


def launch_options() -> dict[str, object]:
    """The arguments of Playwright's `chromium.launch`. Raises Absent."""
    # Chromium's sandbox refuses to run as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    return {"executable_path": str(find_chromium()), "args": [*arguments, "--disable-dev-shm-usage"]}


@cache
def read_axe() -> str:
    """The program of axe-core. Raises Absent."""
    archive = CACHE / f"{AXE.replace('@', '-')}.tgz"
    if not archive.exists():
        CACHE.mkdir(exist_ok=True)
        words = ("pack", AXE, "--silent", "--cache", str(CACHE / "npm"), "--pack-destination", str(CACHE))
        fetch(AXE, find_program("npm"), *words, cwd=ROOT)
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert digest == AXE_SHA512, f"{archive} is not the published {AXE}"
    with tarfile.open(archive) as packed:
        member = packed.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()
