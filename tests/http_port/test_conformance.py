"""Cases of the contract that need no stream from the client, over the HTTP port."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.run import Wrong
from tests.conformance.world import CASES, content
from tests.http_port.cases import ENCODINGS, HttpCase, is_runnable
from tests.support.server import ServerProcess

RUNNABLE: dict[str, Any] = {
    case["name"]: case["steps"]
    for file in CASES
    if "server" not in content(file) and "level" not in content(file)
    for case in content(file)["cases"]
    if is_runnable(case)
}


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_cases_pass_over_http(encoding: str, http_server: tuple[ServerProcess, str]) -> None:
    failed: dict[str, str] = {}
    for name, steps in RUNNABLE.items():
        async with HttpCase(http_server[1], encoding) as case:
            try:
                await case.run(json.loads(json.dumps(steps)))
            except Wrong as wrong:
                failed[name] = str(wrong)
    assert failed == {}


def test_most_cases_need_no_stream_from_the_client() -> None:
    assert len(RUNNABLE) >= 15
