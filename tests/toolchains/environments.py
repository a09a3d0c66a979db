"""Separate Python environments for packages that conflict with, or are not needed by, the server and the tests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.toolchains.programs import CACHE, Absent, alone

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 900
RUN_S = 1_200
_VERSION = re.compile(r"^[\w.-]+==[^\\\n]*", re.MULTILINE)
"""A locked version with its marker, without hashes."""


def variables_for(home: Path) -> dict[str, str]:
    """The variables of a process that may write below `home`: none of memstream's, and not CI, which changes DB-GPT."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMSTREAM_", "OPENAI_"))}
    kept.pop("CI", None)
    return kept | {"HOME": str(home), "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True, slots=True)
class Environment:
    """The packages locked in FOLDER/NAME.txt, and memstream if set. `only` is the Python version that has wheels.

    With `plain` the file has versions without hashes, and uv installs them.
    With `extras` (such as "server,agent") it has what `pip install '.[EXTRAS]'` installs in a clone, nothing else;
    FOLDER/NAME.txt has the versions alone.
    """

    name: str
    only: str = ""
    folder: Path = ROOT / "requirements"
    memstream: bool = True
    extras: str = ""
    plain: bool = False

    @property
    def requirements(self) -> Path:
        """The locked packages."""
        return self.folder / f"{self.name}.txt"

    def python(self) -> Path:
        """Returns its interpreter; creates the environment if the requirements are new. Raises Absent."""
        asked = self.requirements.read_bytes()
        if self.extras:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
            asked += json.dumps([project["dependencies"], project["optional-dependencies"]]).encode()
        folder = CACHE / "-".join(filter(None, (self.name, self.extras, hashlib.sha256(asked).hexdigest()[:12])))
        with alone(folder.name):
            return self._find_in(folder)

    def _find_in(self, folder: Path) -> Path:
        found, done = folder / "bin" / "python", folder / "installed"
        if done.exists():
            return found
        shutil.rmtree(folder, ignore_errors=True)  # of an interrupted installation
        self._install([self._base(), "-m", "venv", str(folder)])
        pip = [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        if self.extras:
            versions = folder / "versions.txt"
            versions.write_text("\n".join(_VERSION.findall(self.requirements.read_text("utf-8"))), "utf-8")
            self._install([*pip, "--constraint", str(versions), "--editable", f"{ROOT}[{self.extras}]"])
            done.touch()
            return found
        if self.plain:
            pip = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(found)]
        self._install([*pip, *([] if self.plain else ["--require-hashes"]), "--requirement", str(self.requirements)])
        if self.memstream:
            self._install([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
        done.touch()
        return found

    def _base(self) -> str:
        if self.only in ("", ".".join(map(str, sys.version_info[:2]))):
            return sys.executable
        base = shutil.which(f"python{self.only}")
        if base is None:
            raise Absent(f"{self.name} has wheels only for Python {self.only}, which is not installed")
        return base

    def _install(self, command: list[str]) -> None:
        try:
            uv = {"UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(CACHE / "uv"))}
            done = subprocess.run(
                command, env=os.environ | uv, capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise Absent(f"installing {self.name} took longer than {INSTALL_S} s") from None
        if done.returncode:
            raise Absent(f"{self.name} cannot be installed: {done.stderr.strip()[-300:]}")

    def run(self, *command: str, home: Path, stdin: str = "", **variables: str) -> str:
        """Runs `python COMMAND` and returns its output; it may write below `home`. Raises AssertionError."""
        done = subprocess.run(
            [str(self.python()), *command],
            input=stdin,
            env=variables_for(home) | variables,
            cwd=home,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.returncode == 0, f"{command} failed:\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
        return done.stdout
