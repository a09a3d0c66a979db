"""Agent hosts, as npm has them, with memstream as their memory and a scripted model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memstream
from memstream.projects import project_name
from tests.cli.transcripts import Transcript, load, shape_of
from tests.support.host_model import Asked, Called, HostModel, Reply
from tests.support.server import ServerProcess
from tests.toolchains.hosts import PROGRAMS, Host, prepared, version_of
from tests.toolchains.programs import Absent

pytestmark = [pytest.mark.toolchain, pytest.mark.timeout(900)]

FACT = "Our releases leave on Tuesdays"
ASKED = "On which day do releases leave?"
NULLS = "The office is closed in August"
REFUSED = "must be "
"""What Gemini CLI answers the model that gives null, as it checks arguments by the schema."""
CALLS = 40


@pytest.fixture(scope="module", params=PROGRAMS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="host-", dir="/var/tmp") as home:  # Codex refuses a home below /tmp
        try:
            with prepared(request.param, Path(home)) as made:
                yield made
        except Absent as absent:
            pytest.skip(str(absent))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("hosts") / "data") as running:
        yield running


def answer(asked: Asked) -> Reply:
    """First session: 40 calls in one reply, as models write arguments. Second one: recalls, and what they found."""
    if asked.results:
        found = [FACT in one for one in asked.results if REFUSED not in one]
        return "Tuesdays, as memory says" if ASKED in asked.fresh and found and all(found) else "Noted"
    if ASKED in asked.fresh:
        return [Called("recall", {"query": ASKED, "speaker": ""}), Called("recall", {"query": ASKED, "limit": None})]
    odd = [Called("observe", {"content": "half an emoji \ud83d"}), Called("observe", {"content": FACT, "key": ""})]
    odd.append(Called("observe", {"content": NULLS, "session": None}))
    return [*odd, *(Called("observe", {"content": f"fact number {n}"}) for n in range(CALLS - len(odd)))]


async def contents(address: str, path: str) -> list[str]:
    async with memstream.connect(address) as client:
        return [one.content async for one in client.memory(path).list_fragments()]


async def turn_stored(prompt: str, host: Host, address: str, path: str) -> list[str]:
    """What is stored, once the hook of the turn's end, which stores after the turn, has stored the prompt alone."""
    held = await contents(address, path)
    while host.has_hooks and prompt not in held:
        held = await contents(address, path)
    return held


async def test_a_fact_of_one_session_is_known_in_the_next(host: Host, server: ServerProcess) -> None:
    path = f"{host.name}/{project_name(host.project)}"
    async with HostModel(answer) as model:
        host.use_model(model.address)
        shown = host.connect("--target", server.address, "--memory", f"{host.name}/{{project}}")
        assert "memstream" in shown
        host.give_time()
        await host.turn("Please keep some facts.", model.address)
        first = len(model.asked)
        await turn_stored("Please keep some facts.", host, server.address, path)
        said = await host.turn(ASKED, model.address)
        assert "Tuesdays, as memory says" in said
        second = [one for one in model.asked[first:] if one.tools]
        # The hook of the session's start has put it into the prompt before the model asks for it.
        shown = second[0].text.replace("&lt;", "<")  # as Gemini CLI writes it
        assert ("<memstream kind=" in shown, FACT in shown) == (host.has_hooks, host.has_hooks)
    held = await turn_stored(ASKED, host, server.address, path)
    assert {FACT, *(f"fact number {number}" for number in range(CALLS - 3))} <= set(held)
    assert ("half an emoji \ufffd" in held) == (host.name != "codex"), "Codex refuses the half before the call"
    assert (NULLS in held) == (host.name != "gemini-cli"), "Gemini CLI refuses null before the call"
    assert not [one for one in held if "memstream kind=" in one], "what hooks added is not observed"
    check_sent(load(host.name), host.records())


def check_sent(transcript: Transcript, records: list[dict[str, Any]]) -> None:
    """The messages of the host are those of its transcript, which tests/cli/test_mcp_hosts.py replays."""
    written = [json.loads(one["line"]) for one in records if one["sender"] == "host"]
    sent = {shape_of(one) for one in written if "method" in one}  # no answers, such as those to roots/list
    recorded = {shape_of(one): one["method"] for one in (*transcript.messages, transcript.cancel)}
    assert sent <= recorded.keys(), transcript.source
    # Claude Code sends `initialize` only if the start takes longer than it waits for the answer to `server/discover`.
    # OpenCode cancels calls that have been answered, if it still can when it ends.
    fallback = {"notifications/cancelled"} | ({"initialize"} if "server/discover" in recorded.values() else set())
    assert {recorded[shape] for shape in recorded.keys() - sent} <= fallback, transcript.source
    assert transcript.version == version_of(transcript.host)
    hooks = {one["command"][1]: json.loads(one["line"]) for one in records if one["sender"] == "hook"}
    assert {name: sorted(given) for name, given in hooks.items()} == {
        name: sorted(given) for name, given in transcript.hooks.items()
    }
