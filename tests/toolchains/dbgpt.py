"""DB-GPT in a separate environment: its pinned versions conflict with those of the server and of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.toolchains.environments import ROOT, RUN_S, Environment

__all__ = ["ROOT", "RUN_S", "ask", "python", "run"]

DBGPT = Environment("dbgpt", only="3.11")
python = DBGPT.python


def run(script: Path, *arguments: str, home: Path, stdin: str = "") -> str:
    """Runs a script there and returns its output. DB-GPT writes only below `home`. Raises AssertionError."""
    return DBGPT.run(str(script), *arguments, home=home, stdin=stdin, DBGPT_HOME=str(home))


def ask(script: Path, *arguments: str, home: Path, question: object = None) -> Any:
    """Runs a script with `question` as JSON and returns the JSON of its last line of output."""
    return json.loads(run(script, *arguments, home=home, stdin=json.dumps(question)).splitlines()[-1])
