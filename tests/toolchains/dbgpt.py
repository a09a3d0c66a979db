"""DB-GPT in an environment of its own: its pins contradict those of the server and of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.toolchains.environments import ROOT, RUN_S, Environment

__all__ = ["ROOT", "RUN_S", "ask", "python", "run"]

DBGPT = Environment("dbgpt", only="3.11")
python = DBGPT.python


def run(script: Path, *arguments: str, home: Path, stdin: str = "") -> str:
    """What a script prints there. `home` is where DB-GPT may write. Raises AssertionError with what went wrong."""
    return DBGPT.run(str(script), *arguments, home=home, stdin=stdin, DBGPT_HOME=str(home))


def ask(script: Path, *arguments: str, home: Path, question: object = None) -> Any:
    """The JSON on the last line of what a script prints, given `question` as JSON."""
    return json.loads(run(script, *arguments, home=home, stdin=json.dumps(question)).splitlines()[-1])
