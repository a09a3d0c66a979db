"""examples/story: processes in four languages on one memory of a real server, and what each of them saw."""

from __future__ import annotations

import asyncio
import sys

import pytest

import memstream
from tests.server.conftest import MakeServer, make_server, started
from tests.support import pages
from tests.toolchains import languages
from tests.toolchains.languages import ROOT
from tests.toolchains.programs import Absent

__all__ = ["make_server"]  # a fixture

pytestmark = pytest.mark.toolchain

STORY = ROOT / "examples/story"
TALK = 4
"""Messages."""


def lines_by_language(text: str) -> dict[str, list[str]]:
    """What each language said, in its order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        language, _, said = line.partition(" ")
        found.setdefault(language, []).append(said.strip())
    return found


def run_story(address: str) -> dict[str, list[str]]:
    """Runs the story with toolchains and packages as the other tests have them."""
    try:
        go = languages.Go()
        assert languages.node().built
        languages.Java().runner()
    except Absent as absent:
        pytest.skip(str(absent))
    return lines_by_language(
        languages.run(str(STORY / "run"), address, env=go.environment | {"PYTHON": sys.executable})
    )


async def test_four_languages_on_one_memory(make_server: MakeServer) -> None:
    """As README.md says; a second time nothing is appended or observed again."""
    server = await started(make_server())
    first = await asyncio.to_thread(run_story, server.address)
    assert first == lines_by_language(next(pages.find_blocks((STORY / "README.md").read_text("utf-8"), "text")).code)

    async with memstream.connect(server.address) as client:
        messages = [message async for message in client.conversation("story/monday").messages()]
        kept = [fragment async for fragment in client.memory("story/joy").list_fragments()]
    assert [f"{message.number} {message.content}" for message in messages] == first["Java"]
    assert sorted((one.speaker, one.content) for one in kept) == sorted((one.sender, one.content) for one in messages)

    again = await asyncio.to_thread(run_story, server.address)
    assert again["Java"] == first["Java"]
    assert again["Python"] == [f"observing from message {TALK + 1} on", f"stored {TALK}"]
    assert again["TypeScript"][: len(first["TypeScript"])] == first["TypeScript"]
    assert again["Go"] == first["Go"]


def test_the_go_code_of_the_story_passes_lint() -> None:
    try:
        go = languages.Go()
    except Absent as absent:
        pytest.skip(str(absent))
    folder = STORY / "go"
    go.go("vet", "./...", cwd=folder)
    assert go.go("mod", "tidy", "-diff", cwd=folder) == ""
    assert languages.run(languages.find_program("gofmt"), "-l", *map(str, folder.glob("*.go"))) == ""
