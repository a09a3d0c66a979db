"""Operations on the command line, against a real server."""

from __future__ import annotations

import asyncio
import json

import pytest

from memstream.resources import Operation
from memstream.values import OperationState
from memstream_server.cli.long_work import continuing_operation
from tests.cli.commands import call
from tests.support.server import ServerProcess


def test_erase_selects_fragments_and_prints_operation(server: ServerProcess) -> None:
    target = server.address
    call("observe", "--create", "erasing/joy", "-", stdin="Bob likes tea\nBob likes rain\n", target=target)
    listed = [json.loads(line) for line in call("list", "erasing/joy", "--json", target=target).stdout.splitlines()]
    refused = call("erase", "erasing/joy", listed[0]["id"], stdin="n\n", target=target)
    assert refused.returncode == 1
    assert call("erase", "erasing/joy", "--yes", target=target).returncode == 2
    done = call("erase", "erasing/joy", listed[0]["id"], "--yes", "--wait", "--json", target=target)
    assert done.returncode == 0, done.stderr
    operation = json.loads(done.stdout)
    assert (operation["type"], operation["state"], operation["done"]) == ("erase", "succeeded", 1)
    left = [
        json.loads(line)["content"] for line in call("list", "erasing/joy", "--json", target=target).stdout.splitlines()
    ]
    assert left == ["Bob likes rain"]
    shown = call("operations", "get", operation["id"], target=target).stdout
    assert "succeeded" in shown
    assert "1 of 1 fragments" in shown
    assert operation["id"] in call("operations", "list", "erasing", target=target).stdout


async def test_interrupted_wait_says_how_to_wait_again(capsys: pytest.CaptureFixture[str]) -> None:
    id, state = "01KAB3XJ8Q6C0V7T2N4M5P9RSW", OperationState.RUNNING
    operation = Operation(id, "", "", "reindex", state, 0, 0, "", create_time=None, end_time=None, error=None)
    with pytest.raises(asyncio.CancelledError), continuing_operation(operation):
        raise asyncio.CancelledError
    assert f"memstream operations wait {id}" in capsys.readouterr().err


def test_purge_and_reindex_can_be_awaited(server: ServerProcess) -> None:
    target = server.address
    begun = call("purge", "nobody", target=target)
    assert begun.returncode == 0, begun.stderr
    id = begun.stderr.split()[-1]
    waited = call("operations", "wait", id, target=target)
    assert waited.returncode == 0
    assert "succeeded" in waited.stdout
    assert json.loads(call("operations", "cancel", id, "--json", target=target).stdout)["state"] == "succeeded"
    reindexed = call("reindex", "--wait", target=target)
    assert reindexed.returncode == 0, reindexed.stderr
    assert "reindex" in reindexed.stdout
    unknown = call("operations", "get", "01J00000000000000000000000", target=target)
    assert unknown.returncode == 4
