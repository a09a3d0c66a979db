"""Runs the message cases and the golden bytes with Python; tests/toolchains/ runs the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conformance import golden
from tests.conformance import run as runner
from tests.conformance.world import GOLDEN, Runner, cases_for, names, run
from tests.server.conftest import MakeServer, check_log, make_server, started
from tests.support.server import free_address

__all__ = ["make_server"]  # a fixture

PYTHON = Runner("Python", [sys.executable, "-m", "tests.conformance.run"], client=False)
RELEASES = [file for file in GOLDEN if file.stem != "future"]


async def test_cases(make_server: MakeServer) -> None:
    server = await started(make_server(listen=free_address()))
    found = await run(PYTHON, cases_for(PYTHON), server)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert list(found) == names(cases_for(PYTHON))
    check_log(server)


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_golden_bytes_decode_to_their_meaning(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner.golden(file)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one for one in said if one["wrong"]] == []
    assert len(said) == len(json.loads(file.read_text("utf-8"))["messages"])


def test_newest_golden_bytes_cover_the_contract() -> None:
    """If this fails after a contract change, run `make generate`."""
    newest = json.loads(max(RELEASES, key=lambda file: [int(part) for part in file.stem.split(".")]).read_text("utf-8"))
    assert newest["messages"] == list(golden.entries())
