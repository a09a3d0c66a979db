"""Starts runners against a real server behind a relay, cuts and kills it on request, and collects results."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.conformance.newer import Newer
from tests.conformance.older import Older
from tests.support.passing import PassingOn
from tests.support.relay import Relay
from tests.support.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
CASES = sorted((HERE / "cases").glob("*.json"))
GOLDEN = sorted((HERE / "golden").glob("*.json"))
RUN_S = 1_200
AWAY_S = 3.0
"""Outage of a server in seconds: longer than five attempts of gRPC's own retry policy."""
Disturb = Callable[[str], Awaitable[None]]
OTHERS: dict[str, type[PassingOn]] = {"newer": Newer, "older": Older}


@dataclass(frozen=True, slots=True)
class Runner:
    """A language's runner: its command before `golden|cases ADDRESS FILE...`, and whether the language has a client."""

    language: str
    command: Sequence[str]
    client: bool = True
    environment: Mapping[str, str] | None = None


async def run(runner: Runner, files: Sequence[Path], server: ServerProcess) -> dict[str, str]:
    """Returns the failure of each case, in order; empty text is a success.

    `server` of a file selects the server: one that is cut and killed on request (none), one with a later or earlier
    contract (newer, older), or one that accepts only the file's `key` (guarded).
    """
    found: dict[str, str] = {}
    for kind, some in groupby(files, lambda file: content(file).get("server", "")):
        if kind in OTHERS:
            async with OTHERS[kind](server.address) as other:
                found |= await said(runner, "cases", other.address, list(some))
        elif kind == "guarded":
            for file in some:
                keys = [content(file)["key"], *content(file).get("later_keys", [])]
                async with _guarded(server.data_dir.parent / file.stem, keys) as (address, revoke):
                    found |= await said(runner, "cases", address, [file], revoke)
        else:
            found |= await _disturbed(runner, list(some), server)
    return found


@asynccontextmanager
async def _guarded(folder: Path, keys: list[str]) -> AsyncIterator[tuple[str, Disturb]]:
    """The address of a server on which every key has all rights in the cases' namespaces c-*; and a function that
    revokes the oldest key."""
    keys_file, policy = folder / "keys.json", folder / "policy.toml"
    _write_access(folder, keys_file, policy, keys)
    server = ServerProcess(folder / "data", api_keys_file=str(keys_file), access_policy_file=str(policy))

    async def revoke(what: str) -> None:
        assert what == "revoke", f"a runner asked for {what!r}"
        keys.pop(0)
        _write_keys(keys_file, keys)

    await asyncio.to_thread(server.start)
    try:
        yield server.address, revoke
    finally:
        await asyncio.to_thread(server.kill)


def _write_access(folder: Path, keys_file: Path, policy: Path, keys: Sequence[str]) -> None:
    folder.mkdir(exist_ok=True)
    policy.write_text('[[grant]]\nwho = ["key:c"]\nnamespaces = ["c-*"]\nverbs = ["*"]\n', "utf-8")
    _write_keys(keys_file, keys)


def _write_keys(file: Path, keys: Sequence[str]) -> None:
    known = [
        {"id": key.split("_")[1], "name": "c", "sha256": hashlib.sha256(key.encode()).hexdigest(), "created": ""}
        for key in keys
    ]
    whole = file.with_suffix(".new")
    whole.write_text(json.dumps({"keys": known}), "utf-8")
    whole.replace(file)


async def _disturbed(runner: Runner, files: Sequence[Path], server: ServerProcess) -> dict[str, str]:
    async with Relay(server.address) as relay:
        coming_back: list[asyncio.Task[None]] = []

        async def come_back() -> None:
            await asyncio.sleep(AWAY_S)
            await relay.up()

        async def disturb(what: str) -> None:
            match what:
                case "cut":
                    relay.cut()
                case "kill":
                    await asyncio.to_thread(server.kill)
                    await relay.down()
                    await asyncio.to_thread(server.start)
                    await relay.up()
                case "stop":
                    assert await asyncio.to_thread(server.stop) == 0
                    await asyncio.to_thread(server.start)
                case "down":
                    await relay.down()
                case "up":
                    await relay.up()
                case "away":
                    await relay.down()
                    coming_back.append(asyncio.create_task(come_back()))
                case _:
                    raise AssertionError(f"a runner asked for {what!r}")

        try:
            return await said(runner, "cases", relay.address, files, disturb)
        finally:
            await asyncio.gather(*coming_back)


async def said(
    runner: Runner,
    what: str,
    address: str,
    files: Sequence[Path],
    disturb: Disturb | None = None,
) -> dict[str, str]:
    """Returns a runner's result of each case; `disturb` performs the actions it asks for."""
    process = await asyncio.create_subprocess_exec(
        *(*runner.command, what, address, *map(str, files)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=dict(runner.environment or os.environ),
        limit=1 << 24,
    )
    try:
        async with asyncio.timeout(RUN_S):
            found = await _listen(process, disturb)
            ended = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert ended == 0, f"the runner of {runner.language} ended with {ended}; what went wrong is above"
    return found


async def _listen(process: asyncio.subprocess.Process, disturb: Disturb | None) -> dict[str, str]:
    assert process.stdin is not None
    assert process.stdout is not None
    found: dict[str, str] = {}
    async for line in process.stdout:
        told = json.loads(line)
        if "case" in told:
            assert told["case"] not in found, f"two cases are named {told['case']!r}"
            found[told["case"]] = told["wrong"]
            continue
        assert disturb is not None, f"a runner asked for {line!r}"
        await disturb(told["ask"])
        process.stdin.write(b"{}\n")
        await process.stdin.drain()
    return found


def content(file: Path) -> Any:
    """Reads a file of cases."""
    return json.loads(file.read_text("utf-8"))


def names(files: Sequence[Path]) -> list[str]:
    """The names of the cases in files, in order."""
    return [case["name"] for file in files for case in content(file)["cases"]]


def cases_for(runner: Runner) -> list[Path]:
    """The files of cases; client cases only for a language with a client."""
    return [file for file in CASES if runner.client or "level" not in content(file)]
