"""Blocks that ask several memories: with the present rights of who asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import memstream
from memstream.errors import PermissionDenied
from tests.access.conftest import POLICY, guarded_files
from tests.server.conftest import MakeServer, started
from tests.server.test_standing_blocks import AT_ONCE, QUESTION, TOMORROW, block_with, observe
from tests.support.server import ServerProcess

OWN, OTHER = "Bob likes to drink tea", "Bob likes to drink coffee"
RECALLS = '\n[[grant]]\nwho = ["key:bob"]\nnamespaces = ["a"]\nverbs = ["recall"]\n'
"""Who may write in b, and recall a."""
BY_LABEL = f'{RECALLS}labels = {{ team = "core" }}\n'


class World:
    """A server on which bob's block b/agent#drinks asks b/own and a/other."""

    def __init__(self, server: ServerProcess, policy_file: Path, keys: dict[str, str]) -> None:
        self.server, self.policy_file, self.keys = server, policy_file, keys

    def connect(self, key: str) -> memstream.Client:
        return memstream.connect(self.server.address, token=self.keys[key])

    def write_policy(self, more: str = "") -> None:
        """In one step: a policy that is read half written grants less."""
        written = self.policy_file.with_suffix(".new")
        written.write_text(POLICY + more)
        written.replace(self.policy_file)

    async def begin(self) -> None:
        async with self.connect("root") as root, self.connect("bob") as bob:
            for path, labels, said in (("b/own", {}, OWN), ("a/other", {"team": "core"}, OTHER)):
                await observe(await root.create_memory(path, kind="long_term", labels=labels), said)
            agent = await root.create_memory("b/agent")
            asking = bob.memory(agent.path).blocks
            await asking.keep("drinks", QUESTION, scopes=["b/own", "a/other"], min_interval=TOMORROW)
            block = await block_with(agent, lambda one: OTHER in one.text)
            assert OWN in block.text
            assert (block.principal, block.standing and block.standing.problem) == ("key:bob", "")

    async def check_withdrawn(self) -> None:
        async with self.connect("root") as root:
            block = await block_with(root.memory("b/agent"), lambda one: OTHER not in one.text and one.text)
            assert OWN in block.text
            assert block.standing is not None
            assert "a/other" in block.standing.problem
            assert "key:bob" in block.standing.problem


@pytest.fixture
def make_world(tmp_path: Path, make_server: MakeServer) -> Callable[[str], Awaitable[World]]:
    async def make(more: str) -> World:
        keys_file, policy_file, keys = guarded_files(tmp_path / "access")
        policy_file.write_text(POLICY + more)
        settings = {"api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
        world = World(await started(make_server(**settings)), policy_file, keys)
        await world.begin()
        return world

    return make


async def test_right_that_is_withdrawn_takes_its_words_along(make_world: Callable[[str], Awaitable[World]]) -> None:
    world = await make_world(RECALLS)
    world.write_policy()
    await world.check_withdrawn()
    world.write_policy(RECALLS)
    async with world.connect("root") as root:
        again = root.memory("b/agent")
        await block_with(again, lambda one: one.standing and not one.standing.problem)


async def test_right_that_is_withdrawn_while_no_server_runs(make_world: Callable[[str], Awaitable[World]]) -> None:
    world = await make_world(RECALLS)
    await asyncio.to_thread(world.server.kill)
    world.write_policy()
    await asyncio.to_thread(world.server.start)
    await world.check_withdrawn()


async def test_label_that_is_taken_away_ends_the_right_by_it(make_world: Callable[[str], Awaitable[World]]) -> None:
    world = await make_world(BY_LABEL)
    async with world.connect("root") as root:
        await root.memory("a/other").update(labels={"team": "none"})
    await world.check_withdrawn()


async def test_only_what_may_be_recalled_is_asked(make_world: Callable[[str], Awaitable[World]]) -> None:
    world = await make_world(RECALLS)
    world.write_policy()
    await world.check_withdrawn()  # the server has read the file
    async with world.connect("bob") as bob:
        for path in ("a/other", "a/nowhere"):
            with pytest.raises(PermissionDenied, match=path):
                await bob.memory("b/agent").blocks.keep("more", QUESTION, scopes=[path], min_interval=AT_ONCE)
