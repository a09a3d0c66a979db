"""A strict type checker reports exactly the mistakes of a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.pages import ROOT

MISTAKES = ROOT / "tests" / "typing" / "mistakes.py"


def test_pyright_strict_finds_every_mistake() -> None:
    command = [str(Path(sys.executable).with_name("basedpyright")), "--outputjson", str(MISTAKES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = MISTAKES.read_text("utf-8").splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    said = {each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"}
    assert len(wrong) > 30
    assert said == wrong, [(number, lines[number - 1]) for number in sorted(said ^ wrong)]
