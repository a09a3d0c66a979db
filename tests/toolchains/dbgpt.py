"""DB-GPT in an environment of its own: its pins contradict those of the server and of the tests."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.toolchains.programs import Absent

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements" / "dbgpt.txt"
INSTALL_S = 900
RUN_S = 300


def python() -> Path:
    """The interpreter of the environment, made when it is not there or the requirements have changed. Raises Absent."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = ROOT / ".cache" / f"dbgpt-{digest}"
    found, done = folder / "bin" / "python", folder / "installed"
    if done.exists():
        return found
    base = sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")
    if base is None:
        raise Absent("DB-GPT's pins have wheels for Python 3.11 only, which is not here")
    shutil.rmtree(folder, ignore_errors=True)  # of an installation that was broken off
    _install([base, "-m", "venv", str(folder)])
    pip = [str(found), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    _install([*pip, "--require-hashes", "--requirement", str(REQUIREMENTS)])
    _install([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])
    done.touch()
    return found


def _install(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise Absent(f"installing DB-GPT took longer than {INSTALL_S} s") from None
    if done.returncode:
        raise Absent(f"DB-GPT cannot be installed: {done.stderr.strip()[-300:]}")


def run(script: Path, *arguments: str, home: Path, stdin: str = "") -> str:
    """What a script prints there. `home` is where DB-GPT may write. Raises AssertionError with what went wrong."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMSTREAM_", "OPENAI_"))}
    done = subprocess.run(
        [str(python()), str(script), *arguments],
        input=stdin,
        env=kept | {"DBGPT_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(ROOT)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, f"{script.name} failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def ask(script: Path, *arguments: str, home: Path, question: object = None) -> Any:
    """The JSON on the last line of what a script prints, given `question` as JSON."""
    return json.loads(run(script, *arguments, home=home, stdin=json.dumps(question)).splitlines()[-1])
